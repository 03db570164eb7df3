"""The benchmark of snapshots: its ranks end together, and its medians."""

import subprocess
from typing import Any

import pytest

from benchmarks.snapshots import Block, medians, wait_for_all


class Rank:
    """A process that ends with a code after a number of polls, or never."""

    def __init__(self, code: int, polls: float):
        self.code, self.polls = code, polls
        self.killed = False

    def poll(self) -> int | None:
        self.polls -= 1
        return self.code if self.polls <= 0 else None

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> None:
        if self.polls > 0 and not self.killed:
            raise subprocess.TimeoutExpired("rank", 0)


def test_a_rank_that_fails_ends_the_ranks_that_wait_for_it() -> None:
    ranks: Any = [Rank(0, float("inf")), Rank(1, 2)]
    with pytest.raises(SystemExit):
        wait_for_all(ranks)
    assert ranks[0].killed


def test_ranks_that_finish_are_waited_for() -> None:
    ranks: Any = [Rank(0, 1), Rank(0, 3)]
    wait_for_all(ranks)
    assert not any(rank.killed for rank in ranks)
    assert all(rank.polls <= 0 for rank in ranks)


def test_the_cost_of_a_snapshot_is_the_difference_of_neighbouring_blocks() -> None:
    blocks = [
        Block(1.0, 0.5), Block(1.2, 0.5, 0.1, 0.9),
        Block(5.0, 0.7), Block(5.3, 0.7, 0.1, 0.7),
        Block(1.0, 0.5), Block(1.4, 0.5, 0.2, 0.8),
    ]  # fmt: skip
    found = medians(blocks)
    assert found["cost_seconds"] == pytest.approx(0.3)
    assert (found["pause_seconds"], found["write_seconds"]) == (0.1, 0.8)
