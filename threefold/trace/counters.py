"""Counters of allocated memory and of communication, operation by operation."""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Allocation:
    """A storage that an operation has allocated.

    shape, dtype: shape and type of the first tensor that uses the storage
    phase: the rank's activity at that time
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    memory_bytes: int
    phase: str


@dataclass
class AllocationCounter(TorchDispatchMode):
    """Count the bytes of all live storages that operations have allocated, and their peak.

    granularity: sizes are rounded up to a multiple; 512 bytes in CUDA's caching allocator
    known: live storages (`_cdata`), with None for storages that are not counted
    phase: the rank's current activity
    """

    granularity: int = 1
    live: int = 0
    peak: int = 0
    known: dict[int, int | None] = field(default_factory=dict)  # storage -> index in `made`
    made: list[Allocation] = field(default_factory=list)
    phase: str = ""
    peaks: dict[str, int] = field(default_factory=dict)  # phase -> peak
    _events: list[int] = field(default_factory=list)  # n: allocation n was made; ~n: it was freed
    _peak_event: int = 0
    _peak_phase: str = ""

    def __post_init__(self):
        super().__init__()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the storages of these tensors."""
        self.known |= {tensor.untyped_storage()._cdata: None for tensor in tensors}

    def restart(self) -> None:
        """Restart the search for the peak."""
        self.peak, self._peak_event, self._peak_phase = self.live, len(self._events), self.phase
        self.peaks.clear()

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the index in `made` of a tensor's storage; None if it is not counted."""
        return self.known.get(tensor.untyped_storage()._cdata)

    def alive(self) -> set[int]:
        """Return the live allocations."""
        return self._alive_after(len(self._events))

    def alive_at_peak(self) -> tuple[set[int], str]:
        """Return the allocations that were live at the peak, and its phase."""
        return self._alive_after(self._peak_event), self._peak_phase

    def _alive_after(self, events: int) -> set[int]:
        alive: set[int] = set()
        for event in self._events[:events]:
            alive.add(event) if event >= 0 else alive.remove(~event)
        return alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count the storages that the operation has allocated."""
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # half of all operations; other modes would answer it slowly
        result = function(*args, **(kwargs or {}))
        leaves = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        for tensor in leaves:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, function)
        return result

    def _count(self, tensor: torch.Tensor, function: object) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or tensor.device.type == "meta":
            return
        number = len(self.made)
        size = -(-storage.nbytes() // self.granularity) * self.granularity
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.made.append(Allocation(str(function), tuple(tensor.shape), dtype, size, self.phase))
        self.known[key] = number
        self._events.append(number)
        self.live += size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)
        if self.live > self.peak:
            self.peak, self._peak_event = self.live, len(self._events)
            self._peak_phase = self.phase
        weakref.finalize(storage, self._freed, key, number)

    def _freed(self, key: int, number: int) -> None:
        del self.known[key]
        self._events.append(~number)
        self.live -= self.made[number].memory_bytes


# Counter of a rank's communication by axis and kind of collective.

# Operator of torch.distributed -> its kind, and the index of the argument with the whole data, the
# output of an all-gather and the input of a reduce-scatter.
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
POINT_TO_POINT = ("send", "recv")  # only stages use these, in the group of all ranks


@dataclass(frozen=True)
class Traffic:
    """Communication of one kind on one axis.

    axis: "tensor", "context", "expert" (x tensor), "data" (all replicas, or those with the same
        experts), "pipeline", "model" (tensor x pipeline) or "world"
    memory_bytes: size of the whole tensors: all parts of a gather or scatter, otherwise the tensor
        that is reduced, sent or received
    """

    axis: str
    kind: str
    count: int
    memory_bytes: int


@dataclass
class CollectiveCounter(TorchDispatchMode):
    """Count collectives, except those in groups of one rank, which transfer nothing.

    axes: axis by the ranks of its group
    named: axis by the name of its group, if another group may have the same ranks
    """

    axes: Mapping[frozenset[int], str]
    named: dict[str, str] = field(default_factory=dict)
    phase: str = ""
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # phase, axis, kind
    totals: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def __post_init__(self):
        super().__init__()

    def restart(self) -> None:
        """Restart the counts."""
        self.counts.clear()
        self.totals.clear()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count the data that the operation transfers."""
        if function.namespace == "c10d":
            self._count(function._schema.name.removeprefix("c10d::"), args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, arguments: tuple) -> None:
        if name in ("barrier", "monitored_barrier_"):
            return
        kind, argument = COLLECTIVES[name]
        if kind in POINT_TO_POINT:
            axis = "pipeline"
        else:
            scripted = next(a for a in arguments if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(scripted)
            ranks = frozenset(dist.get_process_group_ranks(group))
            if len(ranks) == 1:
                return
            axis = self.named.get(group.group_name) or self.axes[ranks]
        tensors = (t for t in tree_leaves(arguments[argument]) if isinstance(t, torch.Tensor))
        key = (self.phase, axis, kind)
        self.counts[key] += 1
        self.totals[key] += sum(t.numel() * t.element_size() for t in tensors)
