"""Process groups: all groups of an axis at once, with the NCCL settings that fit their traffic.

`torch.distributed.new_group` is called by all ranks once per group, and with NCCL each call splits
the communicator of the whole world: thousands of calls take minutes on 1,000 ranks. `split_group`
creates all groups of a partition with one split.

In each call of the functions below, every rank creates exactly one group, with itself as the only
member if no list holds it. The reason is that torch derives the name of a group from its ranks and
from the number of groups that the rank has created before, and all members must agree on the name.
"""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class NcclSettings:
    """Settings of a group's NCCL communicator; other backends have none.

    high_priority: run on a high-priority stream, for collectives that the next operation needs
    max_ctas: thread blocks that one operation occupies at most, for operations that run in parallel
        with computation; None: NCCL's choice
    """

    high_priority: bool = False
    max_ctas: int | None = None


def create_groups(
    partition: Sequence[Collection[int]], settings: NcclSettings | None = None
) -> dist.ProcessGroup | None:
    """Create the groups of disjoint lists of global ranks; collective over the world.

    Returns:
        This rank's group, or None if no list holds this rank.
    """
    device = _world().bound_device_id
    if device is None:
        return _create_among_members(partition)
    lists = [sorted(ranks) for ranks in partition]
    members = {rank for ranks in lists for rank in ranks}
    alone = [[rank] for rank in range(dist.get_world_size()) if rank not in members]
    settings = settings or NcclSettings()
    options: Any = copy.deepcopy(_world()._get_backend(device).options)  # ProcessGroupNCCL.Options
    options.is_high_priority_stream = settings.high_priority
    if settings.max_ctas is not None:
        options.config.max_ctas = settings.max_ctas
    group = dist.split_group(split_ranks=lists + alone, pg_options=options)
    return group if dist.get_rank() in members else None


def create_host_groups(
    partition: Sequence[Collection[int]], timeout: timedelta
) -> dist.ProcessGroup | None:
    """Create groups as `create_groups` does, but with gloo, which communicates through host memory.

    Only the members call `new_group`. If a device is bound to the world and all ranks called it, it
    would hang: torch lets ranks outside the group split the world's NCCL communicator, and the
    members of a gloo group do not join that split.
    """
    return _create_among_members(partition, backend="gloo", timeout=timeout)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialized"
    return world


def _create_among_members(
    partition: Sequence[Collection[int]],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup | None:
    """Create this rank's group with one call per rank, in which only its members communicate."""
    rank = dist.get_rank()
    own = next((sorted(ranks) for ranks in partition if rank in ranks), None)
    group = dist.new_group(
        own or [rank], timeout=timeout, backend=backend, use_local_synchronization=True
    )
    return group if own else None


def matches_by_order() -> bool:
    """Return True if the backend matches sends to receives by posting order, as NCCL does.

    gloo matches them by tag and connects all ranks before the first message; torch's fake backend
    sends nothing.
    """
    return dist.get_backend() not in ("gloo", "fake")
