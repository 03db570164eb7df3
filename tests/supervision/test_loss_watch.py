import itertools
import math
from collections.abc import Callable

import pytest

from threefold.config.sections import Supervision
from threefold.supervision.step_watch import LOSSES_NEEDED, BadStep, LossWatch, Severity

NAN, INF = math.nan, math.inf
SKIPPED, UNSAFE, ROLL_BACK = Severity.SKIPPED, Severity.UNSAFE, Severity.ROLL_BACK


def judging(watch: LossWatch) -> Callable[[float, float], BadStep | None]:
    """Return a function that judges successive steps, from step 1 on."""
    steps = itertools.count(1)
    return lambda loss, grad_norm: watch.judge(next(steps), loss, grad_norm)


def watch(*, fp16: bool = False, **limits: object) -> LossWatch:
    return LossWatch(Supervision(**limits), fp16=fp16)


def test_bad_steps_are_skipped_until_there_are_too_many_in_a_row() -> None:
    judge = judging(watch(bad_steps=3))
    assert judge(2.0, 1.0) is None
    assert [judge(NAN, NAN).severity, judge(2.0, INF).severity] == [UNSAFE, UNSAFE]
    assert judge(2.0, 1.0) is None  # not in a row
    found = [judge(2.0, NAN), judge(NAN, 1.0), judge(2.0, INF)]
    assert [bad.severity for bad in found] == [UNSAFE, UNSAFE, ROLL_BACK]
    assert found[1].reason == "the loss is nan"
    assert found[2].reason == "the gradient norm is inf, 3 steps in a row"


def test_infinite_gradients_are_normal_in_fp16_and_losses_are_not() -> None:
    judge = judging(watch(fp16=True, bad_steps=2))
    assert {judge(2.0, INF).severity for _ in range(20)} == {SKIPPED}
    assert [judge(NAN, INF).severity for _ in range(2)] == [UNSAFE, ROLL_BACK]


@pytest.mark.parametrize(("limit", "roll_back"), [(1.0, True), (3.0, False), (0.0, False)])
def test_a_loss_far_above_the_usual_is_a_spike(limit: float, roll_back: bool) -> None:
    judge = judging(watch(loss_spike=limit))
    for step in range(LOSSES_NEEDED):
        assert judge(5.0 - 0.01 * step, 1.0) is None
    bad = judge(6.95, 1.0)
    assert bool(bad) is roll_back
    if bad:
        assert bad.severity == ROLL_BACK and "more than 1.0 nats above the 4.9250" in bad.reason


def test_a_new_run_has_no_usual_loss() -> None:
    judge = judging(watch(loss_spike=1.0))
    assert judge(5.0, 1.0) is None and judge(50.0, 1.0) is None


def test_after_a_rollback_the_usual_loss_is_that_of_a_resumed_run() -> None:
    kept = {step: 5.0 - 0.01 * step for step in range(1, 81)}
    seen = watch(loss_spike=1.0)
    for step, loss in kept.items():
        assert seen.judge(step, loss, 1.0) is None
    for step in range(81, 120):
        assert seen.judge(step, 4.0, 1.0) is None
    assert seen.judge(120, 50.0, 1.0).severity == ROLL_BACK
    seen.rolled_back(80)
    resumed = LossWatch(Supervision(loss_spike=1.0), fp16=False, losses=kept.items())
    reason = seen.judge(81, 50.0, 1.0).reason
    assert reason == resumed.judge(81, 50.0, 1.0).reason
    assert "above the 4.5150" in reason


def test_a_resumed_run_knows_the_usual_loss() -> None:
    losses = [*((step, 5.0) for step in range(LOSSES_NEEDED)), (LOSSES_NEEDED, NAN)]
    seen = LossWatch(Supervision(loss_spike=1.0), fp16=False, losses=losses)
    assert seen.judge(LOSSES_NEEDED + 1, 50.0, 1.0).severity == ROLL_BACK
