"""Steps with instrumentation, which measure the parts of a step on this rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    CommitP2P,
    ForwardPass,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from threefold.data.dataset import MicroBatch
from threefold.engine.engine import Engine, PipelinedEngine
from threefold.pipeline.engine import WeightPass
from threefold.pipeline.stage import replaced
from threefold.sweep.breakdown_parts import PARTS, SPLIT_STEPS
from threefold.sweep.collectives import CountedCollectives
from threefold.sweep.part_clock import PartClock

PART_OF_INSTRUCTION: dict[type[PipeInstruction], str] = {
    ForwardPass: "compute",
    BackwardPass: "compute",
    WeightPass: "compute",
    RecvActivation: "pipeline",
    RecvGrad: "pipeline",
    SendActivation: "pipeline",
    SendGrad: "pipeline",
    CommitP2P: "bubble",
    ReduceGrads: "data",
    OptimizerStep: "optimizer",
}


def split_of_rank(
    engine: Engine, batch: Sequence[MicroBatch], learning_rate: float
) -> dict[str, float]:
    """Return the median seconds of each part of a step on this rank; collective.

    The arguments are those of `instrumented_steps`.
    """
    steps = instrumented_steps(engine, batch, learning_rate)
    return {part: median(step[part] for step in steps) for part in PARTS}


def instrumented_steps(
    engine: Engine, batch: Sequence[MicroBatch], learning_rate: float
) -> list[dict[str, float]]:
    """Train for a few steps, and return the seconds of each part of each step; collective.

    Args:
        engine: an engine after its first steps
        batch: this rank's micro-batches of a step, which all steps use
        learning_rate: learning rate of the steps
    """
    clock, steps = PartClock(engine.device), []
    with instrumented(engine, clock):
        for _ in range(SPLIT_STEPS):
            clock.begin_step()
            engine.train_step(batch, learning_rate)
            if engine.on_gpu:  # weights are still gathered on other streams
                torch.cuda.current_stream(engine.device).synchronize()
            steps.append(clock.end_step())
    return steps


@contextmanager
def instrumented(engine: Engine, clock: PartClock) -> Iterator[None]:
    """Count the passes, the optimizer and the collectives of an engine within this context."""
    with ExitStack() as stack:
        stack.enter_context(CountedCollectives(engine, clock).counted())
        if isinstance(engine, PipelinedEngine):
            stack.enter_context(observed(engine, clock))
        else:
            stack.enter_context(counted_methods(engine, clock))
        yield


@contextmanager
def observed(engine: PipelinedEngine, clock: PartClock) -> Iterator[None]:
    """Count the instructions of a pipeline's engine."""
    parts: dict[type[PipeInstruction], str] = dict(PART_OF_INSTRUCTION)
    if engine.wrapped.pipeline.stages == 1:
        parts[CommitP2P] = "other"  # a single stage sends no messages
    if dist.get_world_size(engine.data_group) == 1:
        parts[ReduceGrads] = "optimizer"  # sums tied gradients only

    def observe(instruction: PipeInstruction) -> AbstractContextManager[None]:
        part = parts.get(type(instruction))
        return clock.part(part) if part else nullcontext()

    engine.wrapped.observers.append(observe)
    try:
        yield
    finally:
        engine.wrapped.observers.remove(observe)


@contextmanager
def counted_methods(engine: Engine, clock: PartClock) -> Iterator[None]:
    """Count the passes and the optimizer of a sequential engine, and ZeRO's waits for data ranks.

    ZeRO reduces gradients and gathers weights on streams of its own, and waits for them in the two
    methods that are counted as data.
    """
    wrapped, optimizer = engine.wrapped, engine.wrapped.optimizer
    targets: list[tuple[object, str, str]] = [
        (wrapped, "forward", "compute"),
        (wrapped, "backward", "compute"),
        (wrapped, "step", "optimizer"),
    ]
    if dist.get_world_size(engine.data_group) > 1:
        targets += [
            (optimizer, "independent_gradient_partition_epilogue", "data"),
            (PartitionedParameterCoordinator, "fetch_sub_module", "data"),
        ]
    with ExitStack() as stack:
        for owner, name, part in targets:
            method = counted_as(part, getattr(owner, name), clock)
            stack.enter_context(replaced(owner, name, method))
        yield


def counted_as(part: str, method: Callable[..., Any], clock: PartClock) -> Callable[..., Any]:
    """Return a function that calls a method and counts its time to a part."""

    def call(*arguments: Any, **settings: Any) -> Any:
        with clock.part(part):
            return method(*arguments, **settings)

    return call
