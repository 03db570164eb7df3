"""A step's time is from the end of the step before, without validation."""

from collections.abc import Iterator
from unittest import mock

import pytest

from recipes.training.step_clock import StepClock, StepSeconds


class Time:
    """Stands still unless it is told to go on."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time() -> Iterator[Time]:
    time = Time()
    with mock.patch("recipes.training.step_clock.time", time):
        yield time


def run_step(clock: StepClock, time: Time, seconds: float) -> StepSeconds:
    clock.begin()
    time.now += seconds
    return clock.end()


def test_the_first_step_is_timed_from_its_own_beginning(time: Time) -> None:
    clock = StepClock()
    time.now += 50
    assert run_step(clock, time, 2.0) == StepSeconds(total=2.0, between=0.0)


def test_the_time_between_two_steps_counts_to_the_second(time: Time) -> None:
    clock = StepClock()
    run_step(clock, time, 2.0)
    time.now += 0.5  # garbage, agreement, a save
    assert run_step(clock, time, 1.0) == StepSeconds(total=1.5, between=0.5)
    assert run_step(clock, time, 1.0) == StepSeconds(total=1.0, between=0.0)


def test_validation_counts_to_no_step(time: Time) -> None:
    clock = StepClock()
    run_step(clock, time, 2.0)
    with clock.left_out() as spent:
        time.now += 30
    time.now += 0.25
    assert spent == [30.0]
    assert run_step(clock, time, 1.0) == StepSeconds(total=1.25, between=0.25)
    assert run_step(clock, time, 1.0).total == 1.0


def test_a_rollback_counts_to_no_step(time: Time) -> None:
    clock = StepClock()
    run_step(clock, time, 2.0)
    with clock.left_out():
        time.now += 30
    time.now += 10
    clock.restart()
    time.now += 10
    assert run_step(clock, time, 1.0) == StepSeconds(total=1.0, between=0.0)
    assert run_step(clock, time, 1.0).total == 1.0
