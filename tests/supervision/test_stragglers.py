import pytest

from threefold.config.parallel_dims import ParallelDims
from threefold.supervision.step_watch import (
    StragglerHistory,
    describe,
    relative_times,
    slow_groups,
)

HOSTS = [f"node{1 + rank // 4}" for rank in range(8)]


@pytest.mark.parametrize(
    ("dims", "slow", "said"),
    [
        (ParallelDims(data=8), {5: 3.0},
         ["rank 5 (node2) took 3.0 times as long as similar ranks"]),
        (ParallelDims(pipeline=2, data=4), {5: 3.0, 1: 1.2},
         ["rank 5 (node2) took 3.0 times as long as similar ranks"]),
        (ParallelDims(pipeline=2, data=2, tensor=2), {6: 2.0, 7: 2.0},
         ["ranks 6 .. 7 (node2) took 2.0 times as long as similar ranks"]),
        (ParallelDims(data=2, tensor=2, context=2), dict.fromkeys(range(4, 8), 2.0),
         ["ranks 4 .. 7 (node2) took 2.0 times as long as similar ranks"]),
        (ParallelDims(context=8), {5: 3.0}, []),  # context ranks wait for each other
        (ParallelDims(pipeline=2, data=4), dict.fromkeys(range(4), 3.0), []),  # more work
        (ParallelDims(pipeline=8), {5: 3.0}, []),  # no ranks to compare with
    ],
)  # fmt: skip
def test_slow_ranks_are_named(dims: ParallelDims, slow: dict[int, float], said: list[str]) -> None:
    seconds = [slow.get(rank, 1.0) for rank in range(8)]
    relative = relative_times(seconds, dims)
    groups = slow_groups(relative, dims, limit=1.5)
    assert [describe(group, relative, HOSTS) for group in groups] == said


def test_a_group_is_slow_for_good_after_successive_comparisons() -> None:
    streaks, one, two = StragglerHistory(), range(0, 1), range(4, 6)
    comparisons = [[one], [one, two], [one], [one, two], [two], [two], [], [two], [two], [two]]
    found = [streaks.update(slow, 3) for slow in comparisons]
    assert found == [[], [], [one], [], [], [two], [], [], [], [two]]


def test_a_group_that_stays_slow_is_reported_again() -> None:
    streaks = StragglerHistory()
    found = [bool(streaks.update([range(1)], 3)) for _ in range(9)]
    assert found == [False, False, True] * 3
    assert StragglerHistory().update([range(1)], 1) == [range(1)]
