"""A step is timed from the end of the previous step, without validation."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from recipes.pretrain import train_step
from threefold.engine.engine import StepResult
from threefold.tracking.clocks import StepClock, StepSeconds


class Time:
    """A clock that advances only when the test changes it."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time() -> Iterator[Time]:
    time = Time()
    with mock.patch("threefold.tracking.clocks.time", time):
        yield time


def run_step(clock: StepClock, time: Time, seconds: float) -> StepSeconds:
    clock.begin()
    time.now += seconds
    return clock.end()


def test_the_first_step_is_timed_from_its_own_beginning(time: Time) -> None:
    clock = StepClock()
    time.now += 50
    assert run_step(clock, time, 2.0) == StepSeconds(total=2.0, between=0.0)


def test_the_time_between_two_steps_belongs_to_the_second(time: Time) -> None:
    clock = StepClock()
    run_step(clock, time, 2.0)
    time.now += 0.5  # garbage, agreement, a save
    assert run_step(clock, time, 1.0) == StepSeconds(total=1.5, between=0.5)
    assert run_step(clock, time, 1.0) == StepSeconds(total=1.0, between=0.0)


def test_no_step_includes_validation(time: Time) -> None:
    clock = StepClock()
    run_step(clock, time, 2.0)
    with clock.left_out() as spent:
        time.now += 30
    time.now += 0.25
    assert spent == [30.0]
    assert run_step(clock, time, 1.0) == StepSeconds(total=1.25, between=0.25)
    assert run_step(clock, time, 1.0).total == 1.0


def test_no_step_includes_a_rollback(time: Time) -> None:
    clock = StepClock()
    run_step(clock, time, 2.0)
    with clock.left_out():
        time.now += 30
    time.now += 10
    clock.restart()
    time.now += 10
    assert run_step(clock, time, 1.0) == StepSeconds(total=1.0, between=0.0)
    assert run_step(clock, time, 1.0).total == 1.0


class FakeRun(SimpleNamespace):
    """A run whose steps take 2 seconds, whose validations take 30, and whose tasks take 7."""

    def __init__(self, time: Time):
        def spend(seconds: float, result: Any) -> Any:
            time.now += seconds
            return result

        supervision = SimpleNamespace(compare_speed_every=0)
        training = SimpleNamespace(steps=8, evaluate_every=3)
        done = StepResult(loss=1.0, grad_norm=1.0)
        super().__init__(
            clock=StepClock(),
            recipe=SimpleNamespace(
                training=training,
                supervision=supervision,
                optimizer=None,
                evaluate_tasks_every=4,
            ),
            last_step=training.steps,
            supervisor=SimpleNamespace(crumb=mock.MagicMock()),
            prefetcher=SimpleNamespace(next=lambda step: spend(0.5, ([], 0.5))),
            timeline=SimpleNamespace(recorded=lambda step: contextlib.nullcontext()),
            profiler=SimpleNamespace(recorded=lambda step: contextlib.nullcontext()),
            engine=SimpleNamespace(train_step=lambda *_: spend(1.5, done)),
            evaluator=SimpleNamespace(
                validate=lambda: spend(30.0, {"validation_loss": 2.0}),
                score_tasks=lambda: spend(7.0, {"tasks/a/accuracy": 0.5}),
            ),
            data=mock.Mock(),
            phase_plan=mock.Mock(),
            meter=SimpleNamespace(line=lambda *_, seconds, **more: {"step_seconds": seconds}),
        )


def test_a_run_includes_the_time_between_steps_but_not_validation(time: Time) -> None:
    run = FakeRun(time)
    lines = []
    for step in range(1, 6):
        lines.append(train_step(run, step))
        time.now += 0.25  # a save
    assert [line["step_seconds"] for line in lines] == [2.0, 2.25, 2.25, 2.25, 2.25]
    assert [line["between_seconds"] for line in lines] == [0.0, 0.25, 0.25, 0.25, 0.25]
    assert [line.get("validation_seconds") for line in lines] == [None, None, 30.0, None, None]
    assert [line.get("task_seconds") for line in lines] == [None, None, None, 7.0, None]
    assert [line.get("tasks/a/accuracy") for line in lines] == [None, None, None, 0.5, None]
    assert {line["data_seconds"] for line in lines} == {0.5}
