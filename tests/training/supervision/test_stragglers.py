import pytest

from recipes.training.recipe.topology import Topology
from recipes.training.supervision.stragglers import describe_slow_ranks, relative_times

HOSTS = [f"node{1 + rank // 4}" for rank in range(8)]


@pytest.mark.parametrize(
    ("topology", "slow", "said"),
    [
        (Topology(1, 8, 1), {5: 3.0}, ["rank 5 (node2) took 3.0 times as long as similar ranks"]),
        (Topology(2, 4, 1), {5: 3.0, 1: 1.2},
         ["rank 5 (node2) took 3.0 times as long as similar ranks"]),
        (Topology(2, 2, 2), {6: 2.0, 7: 2.0},
         ["ranks 6 .. 7 (node2) took 2.0 times as long as similar ranks"]),
        (Topology(1, 2, 2, 2), dict.fromkeys(range(4, 8), 2.0),
         ["ranks 4 .. 7 (node2) took 2.0 times as long as similar ranks"]),
        (Topology(1, 1, 1, 8), {5: 3.0}, []),  # context ranks wait for each other
        (Topology(2, 4, 1), dict.fromkeys(range(4), 3.0), []),  # a stage with more work
        (Topology(8, 1, 1), {5: 3.0}, []),  # no ranks to compare with
    ],
)  # fmt: skip
def test_slow_ranks_are_named(topology: Topology, slow: dict[int, float], said: list[str]) -> None:
    seconds = [slow.get(rank, 1.0) for rank in range(8)]
    relative = relative_times(seconds, topology)
    assert describe_slow_ranks(relative, topology, HOSTS, limit=1.5) == said
