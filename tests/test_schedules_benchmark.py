"""The benchmark of the schedules measures all of them."""

import math

from tests.benchmarks.sleeping_stages import CONTESTANTS, Setting, time_all


def test_every_schedule_is_measured() -> None:
    setting = Setting(stages=2, micro_batches=4, forward=0.001, steps=1)
    found = {name: each.ratios(setting) for name, each in time_all(setting).items()}
    assert list(found) == list(CONTESTANTS)
    for row in found.values():
        assert all(math.isfinite(ratio) and ratio > 0 for ratio in row.values())
