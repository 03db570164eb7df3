"""Detection of slow ranks by their time in forward passes, relative to ranks with equal layers."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from recipes.training.recipe.topology import Topology


def group_size(topology: Topology) -> int:
    """Return the number of neighbouring ranks that wait for each other in every layer."""
    return math.lcm(topology.context, topology.expert) * topology.tensor


def relative_times(seconds: Sequence[float], topology: Topology) -> dict[int, float]:
    """Return the time of each group relative to the other groups of its stage.

    A group consists of all tensor and context ranks that work on the same sequences, and of all
    expert ranks that exchange their tokens. They wait for each other in every layer, so they count
    as one. A stage with a single group has no entry.

    Args:
        seconds: time in forward passes, by rank
        topology: the layout of the ranks

    Returns:
        The relative times, by the first rank of each group.
    """
    found = {}
    size = group_size(topology)
    for ranks in topology.stage_groups():
        group_seconds = {
            first: median(seconds[first : first + size])
            for first in range(ranks[0], ranks[-1] + 1, size)
        }
        usual = median(group_seconds.values())
        for first, own in group_seconds.items():
            if len(group_seconds) == 2:
                usual = next(other for rank, other in group_seconds.items() if rank != first)
            if len(group_seconds) > 1:
                found[first] = own / usual
    return found


def describe_slow_ranks(
    relative: Mapping[int, float], topology: Topology, hosts: Sequence[str], limit: float
) -> list[str]:
    """Return a sentence for each group that took more than `limit` times the usual time.

    Args:
        relative: the result of `relative_times`
        topology: the layout of the ranks
        hosts: names of the nodes, by rank
        limit: the relative time above which a group is slow
    """
    slow = []
    for first, ratio in relative.items():
        if ratio > limit:
            last = first + group_size(topology) - 1
            who = f"rank {first}" if last == first else f"ranks {first} .. {last}"
            where = ", ".join(dict.fromkeys(hosts[first : last + 1]))
            slow.append(f"{who} ({where}) took {ratio:.1f} times as long as similar ranks")
    return slow
