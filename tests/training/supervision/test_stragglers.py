import time

import pytest
import torch

from recipes.training.recipe.topology import Topology
from recipes.training.supervision.stragglers import Stopwatch, find_slow, ratios

HOSTS = [f"node{1 + rank // 4}" for rank in range(8)]


@pytest.mark.parametrize(
    ("topology", "slow", "said"),
    [
        (Topology(1, 8, 1), {5: 3.0}, ["rank 5 (node2) took 3.0 times as long as usual there"]),
        (Topology(2, 4, 1), {5: 3.0, 1: 1.2},
         ["rank 5 (node2) took 3.0 times as long as usual there"]),
        (Topology(2, 2, 2), {6: 2.0, 7: 2.0},
         ["ranks 6 .. 7 (node2) took 2.0 times as long as usual there"]),
        (Topology(2, 4, 1), dict.fromkeys(range(4), 3.0), []),  # a stage with more work
        (Topology(8, 1, 1), {5: 3.0}, []),  # nobody to compare with
    ],
)  # fmt: skip
def test_slow_ranks_are_named(topology: Topology, slow: dict[int, float], said: list[str]) -> None:
    seconds = [slow.get(rank, 1.0) for rank in range(8)]
    assert find_slow(ratios(seconds, topology), topology, HOSTS, limit=1.5) == said


def test_nothing_is_counted_when_it_is_off() -> None:
    watch = Stopwatch(torch.device("cpu"), off=True)
    with watch.running():
        time.sleep(0.01)
    assert watch.take() == 0.0


def test_a_stopwatch_counts_what_is_inside() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(3):
        with watch.running():
            time.sleep(0.05)
        time.sleep(0.1)
    assert 0.15 <= watch.take() < 0.3
    assert watch.take() == 0.0
