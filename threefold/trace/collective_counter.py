"""Counter of a rank's communication by axis and kind of collective."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
