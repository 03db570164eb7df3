"""Collectives that count to the part of the step to which their process group belongs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from threefold.engine.engine import Engine, PipelinedEngine
from threefold.pipeline.stage import replaced
from threefold.sweep.part_clock import PartClock

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

    Args:
        engine: the engine whose groups are counted
        clock: counts the time
    """

    def __init__(self, engine: Engine, clock: PartClock):
        self.engine, self.clock = engine, clock
        self.stage_ranks = ranks_of_stage(engine)
        self.axes_by_group = engine.axes_by_group  # some groups have the ranks of other ones
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
            is_async = any(getattr(each, "asyncOp", False) for each in options)
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
        tensor_group = self.engine.axis.group
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
    if isinstance(engine, PipelinedEngine):
        grid = engine.wrapped.grid
        return set(grid.topology().filter_match(pipe=grid.get_stage_id()))
    return set(range(dist.get_world_size()))
