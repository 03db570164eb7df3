"""Breakdown of a step on this rank: instrumented steps, collectives and a clock per part."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

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
from threefold.engine.engine import Engine, StageEngine
from threefold.pipeline.engine import WeightPass
from threefold.pipeline.stage import replaced
from threefold.sweep.trial import PARTS, SPLIT_STEPS

# A clock that divides the time of a rank among the parts of a step.


class PartClock:
    """Divides a rank's time among parts: every moment belongs to the innermost open region.

    On a GPU, the host waits for the stream of the passes at both ends of a region. Work on other
    streams, such as overlapped collectives, counts only if the stream of the passes waits for it.

    Attributes:
        seconds: part -> seconds since the beginning of the step
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step, outside of all regions; its time counts as "other"."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open = ["other"]
        self._since = self._now()

    def end_step(self) -> dict[str, float]:
        """End the step, and return the seconds of each part."""
        assert len(self._open) == 1
        self._count()
        return self.seconds

    @property
    def current(self) -> str:
        """The part to which the time counts now."""
        return self._open[-1]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Open a region whose time counts to a part."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        now = self._now()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def _now(self) -> float:
        if self._stream is not None:
            # Synchronizing the whole device would wait for receives that were posted ahead, whose
            # messages may depend on later work of this rank.
            self._stream.synchronize()
        return time.perf_counter()


# Collectives that count to the part of the step to which their process group belongs.

# The functions of `torch.distributed` call these methods of a group, under which name ever the
# caller has imported the function. Older versions of torch lack some of them.
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter",
    "allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced",
    "all_gather_single", "all_gather_single_coalesced",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "_end_coalescing",
)  # fmt: skip

GroupKind = Literal["tensor", "context", "expert", "data", "optimizer", "stages", "other"]


class CountedCollectives:
    """Counts collectives to parts of the step.

    A collective is counted when it starts, and again while the caller waits for it, so that an
    asynchronous collective counts only as far as it is exposed.
    """

    def __init__(self, engine: Engine, clock: PartClock):
        self.engine, self.clock = engine, clock
        self.stage_ranks = ranks_of_stage(engine)
        self.axes_by_group = engine.axes.axis_of_group  # some groups have the ranks of other ones
        self._kinds: dict[dist.ProcessGroup, GroupKind] = {}
        self._running: WeakKeyDictionary[dist.Work, GroupKind] = WeakKeyDictionary()
        self._all_reduce = dist.ProcessGroup.allreduce
        self._wait = dist.Work.wait

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Replace the methods of process groups for the duration of the context."""
        with ExitStack() as stack:
            for name in COLLECTIVES:
                if name in vars(dist.ProcessGroup):
                    method = getattr(dist.ProcessGroup, name)
                    stack.enter_context(replaced(dist.ProcessGroup, name, self._starting(method)))
            stack.enter_context(replaced(dist.Work, "wait", self._waiting()))
            yield

    def _starting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that counts the start of a collective."""

        def start(group: dist.ProcessGroup, *arguments: Any, **settings: Any) -> Any:
            kind = self._kind_of(group)
            options = [*arguments, *settings.values()]
            is_async = any(getattr(option, "asyncOp", False) for option in options)
            if kind == "stages" and not is_async:
                self._wait_for_stages(group)
            with self._region(kind):
                work = method(group, *arguments, **settings)
            if work is not None:
                self._running[work] = kind
            return work

        return start

    def _waiting(self) -> Callable[..., Any]:
        """Return a method that counts the wait for a collective."""

        def wait(work: dist.Work, *arguments: Any, **settings: Any) -> Any:
            with self._region(self._running.get(work, "other")):
                return self._wait(work, *arguments, **settings)

        return wait

    def _wait_for_stages(self, group: dist.ProcessGroup) -> None:
        """Count the time until all stages have reached a collective as bubble.

        The stages of a pipeline end their passes at different times.
        """
        with self.clock.part("bubble"):
            kinds = {device.type for device in group._device_types}
            device = self.engine.device if self.engine.device.type in kinds else "cpu"
            work = self._all_reduce(group, [torch.zeros(1, device=device)])
            if work is not None:
                self._wait(work)

    def _region(self, kind: GroupKind) -> AbstractContextManager[None]:
        part = part_of_collective(kind, self.clock.current)
        return nullcontext() if part == self.clock.current else self.clock.part(part)

    def _kind_of(self, group: dist.ProcessGroup) -> GroupKind:
        if group not in self._kinds:
            ranks = set(dist.get_process_group_ranks(group))
            axis = self.axes_by_group.get(group.group_name)
            self._kinds[group] = cast(GroupKind, axis) if axis else self._kind_of_ranks(ranks)
        return self._kinds[group]

    def _kind_of_ranks(self, ranks: set[int]) -> GroupKind:
        if len(ranks) == 1:
            return "other"
        if not ranks <= self.stage_ranks:
            return "stages"
        if ranks == set(dist.get_process_group_ranks(self.engine.data_group)):
            return "data"
        tensor_group = self.engine.axes.tensor.group
        if tensor_group and ranks == set(dist.get_process_group_ranks(tensor_group)):
            return "tensor"
        return "other"


def part_of_collective(kind: GroupKind, current: str) -> str:
    """Return the part to which a collective counts.

    The plan counts the same way: a message between stages is gathered over the tensor ranks as a
    part of its transfer, and the sum of tied gradients over the stages belongs to the optimizer.

    Args:
        kind: the axis of the group
        current: the part in which the collective is called
    """
    if kind == "data":
        return "data"
    if kind in ("context", "expert"):
        return kind
    if kind == "tensor":
        return {"compute": "tensor", "bubble": "pipeline"}.get(current, current)
    if kind == "stages" and current == "data":
        return "optimizer"
    return current


def ranks_of_stage(engine: Engine) -> set[int]:
    """Return the ranks of this rank's stage, over all data and tensor ranks."""
    if isinstance(engine, StageEngine):
        grid = engine.wrapped.grid
        return set(grid.topology().filter_match(pipe=grid.get_stage_id()))
    return set(range(dist.get_world_size()))


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
        if isinstance(engine, StageEngine):
            stack.enter_context(observed(engine, clock))
        else:
            stack.enter_context(counted_methods(engine, clock))
        yield


@contextmanager
def observed(engine: StageEngine, clock: PartClock) -> Iterator[None]:
    """Count the instructions of a StageEngine."""
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
    """Count the passes and the optimizer of a Zero3Engine, and ZeRO's waits for data ranks.

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
