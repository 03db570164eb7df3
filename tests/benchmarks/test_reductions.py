"""The benchmark of reductions measures what links that sleep add to a step."""

import pytest

from benchmarks.pipelines.sleeping_reductions import Setting, compare


@pytest.mark.long
def test_communication_that_no_pass_hides_is_measured() -> None:
    """One bucket is summed after the backward pass, and gathered before the forward pass."""
    setting = Setting(micro_batches=4, forward=0.02, layers=2, reductions=(4.0,), rounds=2)
    rows = compare(setting)
    assert [row["way"] for row in rows] == [way.name for way in setting.ways()]
    for row in rows:
        hidden_least = 2 * 4.0 * 0.04 - 0.04 - 0.02  # a reduction and a gathering minus two passes
        assert row["measured_over_step"] * row["step_seconds"] > 0.7 * hidden_least
        assert row["predicted_over_step"] <= row["all_over_step"]
    by_way = {row["way"]: row["measured_over_step"] for row in rows}
    assert by_way["1f1b, ZeRO-2, reduce_every = 1"] > 2 * by_way["1f1b, ZeRO-1"]


@pytest.mark.parametrize("reduction", [0.5, 1.5])
def test_less_is_predicted_to_be_exposed_than_there_is(reduction: float) -> None:
    setting = Setting()
    for way in setting.ways():
        traffic = setting.traffic(way, reduction)
        exposed = traffic.exposed_reductions(2 * setting.forward)
        assert 0 < exposed < traffic.reductions
