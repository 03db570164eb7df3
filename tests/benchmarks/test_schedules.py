"""The benchmark of the schedules measures all of them."""

import pytest

from benchmarks.pipelines import real_contestants, real_layers
from benchmarks.pipelines.sleeping_stages import CONTESTANTS, Setting, time_all


@pytest.mark.long
def test_every_schedule_is_measured() -> None:
    setting = Setting(stages=2, micro_batches=4, forward=0.01, steps=2)
    found = {name: each.ratios(setting) for name, each in time_all(setting).items()}
    assert list(found) == list(CONTESTANTS)
    for row in found.values():
        assert row["over_simulated"] >= 1 - 1e-6  # no pass ends before the passes it depends on
        assert 0.95 < row["over_theory"] < 5


@pytest.mark.long
@pytest.mark.parametrize("name", real_contestants.OURS)
def test_real_contestants_compute_the_same(name: str) -> None:
    """`match` compares the losses of every contestant with those of one process."""
    setting = real_contestants.Setting(
        layers=4, hidden_size=64, ffn_hidden_size=128, sequence_length=32, micro_batches=4, rounds=2
    )
    found = real_layers.match(setting, name)
    assert set(found["over"]) == set(real_contestants.RIVALS[name])
    assert found["of_bound"] > 0 and all(ratio > 0 for ratio in found["over"].values())
