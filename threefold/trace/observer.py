"""Observation of the purpose of a rank's memory while it trains."""

from collections.abc import Iterator

import torch

from models.layer_specs import logical_parameters
from threefold.engine.engine import Engine
from threefold.supervision.hang_report import Breadcrumb
from threefold.trace.collective_counter import CollectiveCounter
from threefold.trace.counters import AllocationCounter


class Observer(Breadcrumb):
    """A breadcrumb that, at each activity, notes which allocations are weights, gradients, ...

    roles: category by allocation, for all allocations that are not activations
    """

    def __init__(self, counter: AllocationCounter, collectives: CollectiveCounter):
        self.counter, self.collectives = counter, collectives
        self.roles: dict[int, str] = {}
        self.engine: Engine | None = None

    def watch(self, engine: Engine) -> None:
        """Observe the tensors of an engine from now on."""
        self.engine = engine
        step = engine.wrapped.optimizer.step

        def noted_step(*arguments, **settings):
            self.note("optimizer step")
            step(*arguments, **settings)

        engine.wrapped.optimizer.step = noted_step

    def note(self, doing: str, *, micro_batch: int | None = None, step: int | None = None) -> None:
        """Begin a phase."""
        if self.engine is not None:
            for tensor, role in roles_of(self.engine):
                number = self.counter.number(tensor)
                if number is not None:
                    self.roles.setdefault(number, role)
        of = "" if micro_batch is None else f" of micro-batch {micro_batch}"
        self.counter.phase, self.collectives.phase = f"{doing}{of}", doing


def roles_of(engine: Engine) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the tensors of an engine that are not activations, with their roles."""
    optimizer = engine.wrapped.optimizer
    for state in optimizer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value, "optimizer"
    parameters = [p for _, p in logical_parameters(engine.wrapped.module, engine.recipe.model)]
    for parameter in parameters:  # before the optimizer's, which in fp32 may be the same tensors
        yield parameter.data, "weights"
    for flat in engine.state.weights:
        yield flat, "optimizer"
        if flat.grad is not None:
            yield flat.grad, "gradients"
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor, "weights"
        for name in ("grad", "grad_accum", "_hp_grad"):
            gradient = getattr(parameter, name, None)
            if gradient is not None:
                yield gradient, "gradients"
    for name, value in vars(optimizer).items():
        if "grad" in name:
            for tensor in tensors_in(value):
                yield tensor, "gradients"


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)
