"""The formula of goodput, against simulated failures."""

import itertools
import math
import random

import pytest

from threefold.plan.goodput import (
    SECONDS_PER_DAY,
    FaultCosts,
    best_interval,
    goodput,
)

DAYS = 300


def young_interval(pause: float, failures_per_day: float) -> float:
    """Return Young's first-order optimum of the time between blocking saves, in seconds."""
    return math.sqrt(2 * pause * SECONDS_PER_DAY / failures_per_day)


def simulated(interval: float, costs: FaultCosts, failures_per_day: float, seed: int = 0) -> float:
    """Return the share of DAYS days that ends in kept steps, with random failures."""
    chance = random.Random(seed)
    now, kept, end = 0.0, 0.0, DAYS * SECONDS_PER_DAY
    failure = chance.expovariate(failures_per_day / SECONDS_PER_DAY)
    while now < end:
        while failure < now + costs.restart_seconds:  # a restart fails
            now = failure
            failure += chance.expovariate(failures_per_day / SECONDS_PER_DAY)
        start = now + costs.restart_seconds
        for number in itertools.count(1):
            period = max(interval + costs.pause_seconds, costs.write_seconds)
            complete = start + number * period + costs.write_seconds
            if complete > failure:
                break
            kept += interval
        now = failure
        failure += chance.expovariate(failures_per_day / SECONDS_PER_DAY)
    return kept / now


@pytest.mark.parametrize("failures", [1, 8, 60])
@pytest.mark.parametrize("interval", [60, 900, 7200])
@pytest.mark.parametrize(
    "costs",
    [FaultCosts(1, 30, 60), FaultCosts(30, 0, 600), FaultCosts(0.1, 300, 120)],
    ids=["background", "blocking", "slow disk"],
)
def test_the_formula_agrees_with_simulated_failures(
    interval: float, failures: float, costs: FaultCosts
) -> None:
    expected = goodput(interval, costs, failures)
    assert expected.kept == pytest.approx(simulated(interval, costs, failures), abs=0.01)
    shares = (expected.kept, expected.repeated, expected.saving, expected.restarting)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0


def test_almost_without_failures_only_saves_cost_time() -> None:
    found = goodput(99, FaultCosts(1, 30, 60), 1e-6)
    assert (found.kept, found.repeated, found.restarting) == pytest.approx((0.99, 0, 0), abs=1e-6)


def test_many_failures_leave_nothing() -> None:
    assert goodput(3600, FaultCosts(1, 30, 600), 1e6).kept == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("failures", [0.1, 3, 24])
def test_the_best_interval_is_better_than_any_other(failures: float) -> None:
    costs, step = FaultCosts(2, 0, 60), 4.0
    best = best_interval(step, costs, failures, max_steps=10**5)
    kept = goodput(best * step, costs, failures).kept
    assert kept >= max(goodput(n * step, costs, failures).kept for n in range(1, 20_000))
    # Young's formula is its first-order approximation.
    assert best * step == pytest.approx(young_interval(costs.pause_seconds, failures), rel=0.1)


def test_a_save_ends_before_the_next_one() -> None:
    assert best_interval(1.0, FaultCosts(0, 500, 60), 1000, max_steps=10**5) == 500
    assert best_interval(1.0, FaultCosts(0, 500, 60), 1000, max_steps=20) == 20
    assert best_interval(1.0, FaultCosts(5, 0, 0), 1, max_steps=1) == 1


def test_very_frequent_failures_need_frequent_saves() -> None:
    costs = FaultCosts(0.33, 4, 74)
    for failures in (60, 200, 1e5):
        assert best_interval(12.58, costs, failures, max_steps=476_838) == 1 + (failures < 100)


def test_saves_do_not_overlap() -> None:
    slow = FaultCosts(1, 105, 60)
    assert goodput(10, slow, 1e-6).kept == pytest.approx(10 / 105)
    assert goodput(10, slow, 1).kept < 10 / 105
