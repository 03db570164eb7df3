"""The benchmark of the schedules measures all of them."""

from benchmarks.pipelines.sleeping_stages import CONTESTANTS, Setting, time_all


def test_every_schedule_is_measured() -> None:
    setting = Setting(stages=2, micro_batches=4, forward=0.01, steps=2)
    found = {name: each.ratios(setting) for name, each in time_all(setting).items()}
    assert list(found) == list(CONTESTANTS)
    for row in found.values():
        assert row["over_simulated"] >= 1 - 1e-6  # no pass ends before the passes it depends on
        assert 0.95 < row["over_theory"] < 5
