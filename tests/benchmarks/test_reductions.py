"""The benchmark of reductions measures what links that sleep add to a step."""

import pytest

from benchmarks.pipelines.sleeping_reductions import Setting, compare


@pytest.mark.exhaustive
def test_communication_that_no_pass_hides_is_measured() -> None:
    """Most of a reduction of four backward passes, and of a gathering, is exposed."""
    setting = Setting(micro_batches=4, forward=0.02, layers=2, reductions=(4.0,), rounds=2)
    rows = compare(setting)
    assert [row["way"] for row in rows] == [way.name for way in setting.ways()]
    for row in rows:
        least_exposed = 2 * 4.0 * 0.04 - 0.04 - 0.02  # a reduction and a gathering minus two passes
        assert row["measured_over_step"] * row["step_seconds"] > 0.7 * least_exposed
        assert row["predicted_over_step"] <= row["all_over_step"]
    by_way = {row["way"]: row["measured_over_step"] for row in rows}
    # Three reductions more; a loaded machine lengthens both shares by the same time.
    assert by_way["1f1b, ZeRO-2, reduce_every = 1"] > 1.4 * by_way["1f1b, ZeRO-1"]


@pytest.mark.parametrize("reduction", [0.5, 1.5])
def test_the_predicted_exposure_is_below_the_total_communication(reduction: float) -> None:
    setting = Setting()
    for way in setting.ways():
        traffic = setting.traffic(way, reduction)
        exposed = traffic.exposed_reductions(2 * setting.forward)
        assert 0 < exposed < traffic.reductions
