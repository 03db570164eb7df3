"""What a rank's memory is for, seen from outside while it trains."""

from collections.abc import Iterator

import torch

from models.layer_specs import logical_parameters
from recipes.tracing.allocation_counter import AllocationCounter
from recipes.tracing.collective_counter import CollectiveCounter
from recipes.training.engine.engine import Engine
from recipes.training.supervision.breadcrumb import Breadcrumb


class Observer(Breadcrumb):
    """Told by the engine what it is doing; sees in between which memory is a weight, a gradient...

    roles: allocation -> category, of all that were seen as something other than an activation
    """

    def __init__(self, counter: AllocationCounter, collectives: CollectiveCounter):
        self.counter, self.collectives = counter, collectives
        self.roles: dict[int, str] = {}
        self.engine: Engine | None = None

    def watch(self, engine: Engine) -> None:
        """Look at this engine's tensors from now on."""
        self.engine = engine
        step = engine.wrapped.optimizer.step

        def noted_step(*arguments, **settings):
            self.note("optimizer step")
            step(*arguments, **settings)

        engine.wrapped.optimizer.step = noted_step

    def note(self, doing: str, *, micro_batch: int | None = None, step: int | None = None) -> None:
        """A phase begins."""
        if self.engine is not None:
            for tensor, role in roles_of(self.engine):
                number = self.counter.number(tensor)
                if number is not None:
                    self.roles.setdefault(number, role)
        of = "" if micro_batch is None else f" of micro-batch {micro_batch}"
        self.counter.phase, self.collectives.phase = f"{doing}{of}", doing


def roles_of(engine: Engine) -> Iterator[tuple[torch.Tensor, str]]:
    """The tensors that are known to be more than an activation, and what they are."""
    optimizer = engine.wrapped.optimizer
    for state in optimizer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value, "optimizer"
    parameters = [p for _, p in logical_parameters(engine.wrapped.module, engine.recipe.model)]
    for parameter in parameters:  # in fp32 the optimizer may have no others
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
    """All in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)
