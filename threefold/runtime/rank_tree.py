"""Gather small objects on rank 0 and broadcast them, with few connections in host memory.

gloo connects all ranks of a group with each other: in a group of 1,024 ranks, each would hold 1,023
connections. Here the ranks form a tree, and on each level of the tree a rank belongs to at most one
group of at most FAN_OUT ranks.
"""

from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from models.parallel.process_groups import create_host_groups

FAN_OUT = 32  # maximum number of ranks in a group

T = TypeVar("T")


def levels(ranks: int, fan_out: int) -> list[list[list[int]]]:
    """Return the groups of each level of the tree, from the leaves to the root.

    The first rank of a group also belongs to a group of the next level. The last level is a single
    group whose first rank is 0.
    """
    found: list[list[list[int]]] = []
    left = list(range(ranks))
    while not found or len(left) > 1:
        found.append([left[first : first + fan_out] for first in range(0, len(left), fan_out)])
        left = [group[0] for group in found[-1]]
    return found


class RankTree:
    """The groups of this rank, from the leaves to the root; the constructor is collective.

    Args:
        timeout: time limit of each exchange within a group
        fan_out: maximum number of ranks in a group
    """

    def __init__(self, timeout: timedelta, *, fan_out: int = FAN_OUT):
        self.rank = dist.get_rank()
        self.groups: list[tuple[dist.ProcessGroup, list[int]]] = []
        for partition in levels(dist.get_world_size(), fan_out):
            group = create_host_groups(partition, timeout)
            if group is not None:
                members = next(ranks for ranks in partition if self.rank in ranks)
                self.groups.append((group, members))

    def gather(self, value: T) -> dict[int, T]:
        """Return the values of all ranks by rank on rank 0, and an empty dict on the others."""
        found = {self.rank: value}
        for group, members in self.groups:
            leader = members[0]
            parts: list[Any] | None = [None] * len(members) if self.rank == leader else None
            dist.gather_object(found, parts, dst=leader, group=group)
            found = {rank: each for part in parts or [] for rank, each in part.items()}
        return dict(sorted(found.items()))

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        values = [value]
        for group, members in reversed(self.groups):
            dist.broadcast_object_list(values, src=members[0], group=group)
        return values[0]
