"""Long curves are reduced without losing a spike of a single step."""

import numpy as np
import pytest

from threefold.report.summaries import reduced, trend


@pytest.mark.parametrize("height", [9.0, -9.0])
def test_a_spike_of_one_step_is_kept_wherever_it_is(height: float) -> None:
    noise = np.random.default_rng(0).normal(size=10_000)
    for place in range(0, 10_000, 37):
        values = noise.copy()
        values[place] = height
        assert place in reduced(values, 50)


def test_each_bucket_keeps_its_minimum_and_its_maximum() -> None:
    values = np.random.default_rng(1).normal(size=1_000)
    chosen = reduced(values, 10)
    assert (np.diff(chosen) > 0).all()
    for start in range(0, 1_000, 100):
        bucket = values[start : start + 100]
        assert start + bucket.argmin() in chosen
        assert start + bucket.argmax() in chosen
    assert chosen[0] == 0 and chosen[-1] == 999
    assert len(chosen) <= 2 * 10 + 2


def test_points_that_are_not_finite_are_left_out() -> None:
    values = np.array([1.0, np.nan, np.inf, 2.0, -np.inf, 3.0])
    assert reduced(values, 100).tolist() == [0, 3, 5]
    assert reduced(np.full(10, np.nan), 2).tolist() == []
    many = np.tile([np.nan, 1.0], 500)
    assert np.isfinite(many[reduced(many, 7)]).all()


def test_a_short_curve_keeps_every_point() -> None:
    assert reduced(np.arange(20.0), 10).tolist() == list(range(20))


def test_the_trend_is_the_mean_of_each_bucket() -> None:
    values = np.arange(100.0)
    values[7] = np.nan
    middles, means = trend(values, 9)
    assert len(middles) == len(means) == 9
    assert means[0] == pytest.approx(np.delete(np.arange(12.0), 7).mean())
    assert (np.diff(middles) > 0).all() and np.isfinite(values[middles]).all()
