"""The benchmark of snapshots: its medians."""

import pytest

from benchmarks.snapshots import Block, medians


def test_the_cost_of_a_snapshot_is_the_difference_of_neighbouring_blocks() -> None:
    blocks = [
        Block(1.0, 0.5), Block(1.2, 0.5, 0.1, 0.9),
        Block(5.0, 0.7), Block(5.3, 0.7, 0.1, 0.7),
        Block(1.0, 0.5), Block(1.4, 0.5, 0.2, 0.8),
    ]  # fmt: skip
    found = medians(blocks)
    assert found["cost_seconds"] == pytest.approx(0.3)
    assert (found["pause_seconds"], found["write_seconds"]) == (0.1, 0.8)
