"""Detection of slow ranks by their time in forward passes, relative to ranks with equal layers."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from threefold.config.parallel_dims import ParallelDims


def relative_times(seconds: Sequence[float], dims: ParallelDims) -> dict[int, float]:
    """Return the time of each group relative to the other groups of its stage.

    A group consists of all tensor and context ranks that work on the same sequences, and of all
    expert ranks that exchange their tokens. They wait for each other in every layer, so they count
    as one. A stage with a single group has no entry.

    Args:
        seconds: time in forward passes, by rank

    Returns:
        The relative times, by the first rank of each group.
    """
    slow = {}
    size = dims.lockstep_size
    for ranks in dims.groups("data", "context", "tensor"):
        group_seconds = {
            first: median(seconds[first : first + size])
            for first in range(ranks[0], ranks[-1] + 1, size)
        }
        usual = median(group_seconds.values())
        for first, own in group_seconds.items():
            if len(group_seconds) == 2:
                usual = next(other for rank, other in group_seconds.items() if rank != first)
            if len(group_seconds) > 1:
                slow[first] = own / usual
    return slow


def slow_groups(relative: Mapping[int, float], dims: ParallelDims, limit: float) -> list[range]:
    """Return the ranks of each group that took more than `limit` times the usual time.

    Args:
        relative: the result of `relative_times`
        limit: the relative time above which a group is slow
    """
    size = dims.lockstep_size
    return [range(first, first + size) for first, ratio in relative.items() if ratio > limit]


def describe(group: range, relative: Mapping[int, float], hosts: Sequence[str]) -> str:
    """Return a sentence about a slow group."""
    first, last = group[0], group[-1]
    who = f"rank {first}" if last == first else f"ranks {first} .. {last}"
    where = ", ".join(dict.fromkeys(hosts[first : last + 1]))
    return f"{who} ({where}) took {relative[first]:.1f} times as long as similar ranks"


class StragglerHistory:
    """Counts the successive comparisons in which groups were slow.

    A group is slow for good after `comparisons` of them, and again after as many more.
    """

    def __init__(self) -> None:
        self._streaks: dict[range, int] = {}

    def update(self, slow: Iterable[range], comparisons: int) -> list[range]:
        """Add a comparison, and return the groups that are slow for good.

        Args:
            slow: the groups that were slow in the comparison
            comparisons: `supervision.slow_comparisons`
        """
        self._streaks = {group: self._streaks.get(group, 0) + 1 for group in slow}
        return [group for group, streak in self._streaks.items() if streak % comparisons == 0]
