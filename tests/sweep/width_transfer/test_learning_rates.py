"""The best learning rate of each curve, automatic grids, and the comparisons of curves."""

from pathlib import Path

import pytest

from tests.conftest import small_recipe
from threefold.config.loading import parse_recipe
from threefold.sweep.trial import Result
from threefold.sweep.width_transfer.learning_rates import (
    RateResult,
    Sweep,
    comparisons,
    outcome_of,
    verdicts,
)
from threefold.sweep.width_transfer.models import Curve, at_width, loss_trials
from threefold.sweep.width_transfer.report import (
    comparison_line,
    edge_lines,
    failure_lines,
    loss_table,
    verdict_line,
)

RATES = [1e-3, 2e-3, 4e-3, 8e-3]


def trained(loss: float | None, *, outcome: str = "ok") -> Result:
    """Return the result of a training of 20 steps; None: it diverged."""
    if outcome != "ok":
        return Result(outcome=outcome, reason="as injected")
    if loss is None:
        return Result(outcome="ok", training={"losses": [1.0], "validation": [], "diverged": 2})
    points = [[step, loss + (20 - step) / 10] for step in (5, 10, 15, 20)]
    return Result(
        outcome="ok", training={"losses": [loss] * 20, "validation": points, "diverged": None}
    )


def curve(width: int = 64, family: str = "") -> Curve:
    recipe = parse_recipe(small_recipe(Path("absent")), "small")
    return Curve("small.toml", family, at_width(recipe, width, name="small"))


def outcome(losses: list[float | None], *, width: int = 64, family: str = "") -> RateResult:
    found = {rate: [trained(loss)] for rate, loss in zip(RATES, losses, strict=True)}
    return RateResult(curve(width, family), found)


def test_the_best_rate_has_the_lowest_mean_loss_of_its_seeds() -> None:
    found = RateResult(
        curve(), {1e-3: [trained(2.0), trained(2.6)], 2e-3: [trained(2.2), trained(2.2)]}
    )
    assert found.losses == {1e-3: pytest.approx(2.3), 2e-3: pytest.approx(2.2)}
    assert found.best == 2e-3 and found.best_loss == pytest.approx(2.2)
    assert found.validation == [(5, 3.7), (10, 3.2), (15, 2.7), (20, 2.2)]


def test_a_rate_at_which_one_seed_diverged_or_failed_has_no_loss() -> None:
    found = RateResult(
        curve(),
        {
            1e-3: [trained(2.0), trained(2.0)],
            2e-3: [trained(1.0), trained(None)],
            4e-3: [trained(1.0), trained(0, outcome="crashed")],
        },
    )
    assert found.losses == {1e-3: 2.0, 2e-3: None, 4e-3: None} and found.best == 1e-3
    rows = list(loss_table([found]))
    assert [row.split()[-1] for row in rows[1:]] == ["2.0000*", "diverged", "failed"]


@pytest.mark.parametrize(
    ("small", "large", "transfers", "ratio"),
    [
        ([3, 2, 3, 4], [3, 2, 3, 4], True, 1),
        ([3, 2, 3, 4], [3, 3, 2, 4], True, 2),
        ([3, 3, 2, 4], [3, 2, 3, 4], True, 1 / 2),
        ([3, 2, 3, 4], [3, 3, 3, 2], False, 4),
        ([3, 3, 3, 2], [3, 2, 3, None], False, 1 / 4),
    ],
)
def test_the_best_rates_of_the_ends_of_a_family_are_compared(
    small: list, large: list, transfers: bool, ratio: float
) -> None:
    outcomes = [outcome(small), outcome([2, 3, 3, 3], width=96), outcome(large, width=128)]
    (verdict,) = verdicts(outcomes)
    assert verdict.ratio == pytest.approx(ratio) and verdict.transfers is transfers
    assert verdict_line(verdict).startswith("pass" if transfers else "FAIL")


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ([2, 3, 3, 4], [2, 3, 3, 4]),
        ([3, 4, 3, 2], [3, 3, 2, 4]),
        ([3, 2, 3, 4], [2, 3, 3, 4]),
    ],
)
def test_rates_at_the_end_of_the_grid_do_not_show_that_they_transfer(
    small: list, large: list
) -> None:
    (verdict,) = verdicts([outcome(small), outcome(large, width=128)])
    assert verdict.transfers and not verdict.passes
    assert verdict_line(verdict).startswith("undecided  best learning rate")


def test_the_loss_of_the_transferred_rate_is_shown() -> None:
    (verdict,) = verdicts([outcome([3, 2, 3, 4]), outcome([3, 2.5, 2.25, 3], width=128)])
    assert verdict.excess == pytest.approx(0.25)
    assert "costs the largest one 0.2500 in loss" in verdict_line(verdict)


def test_a_width_that_always_diverges_fails() -> None:
    (verdict,) = verdicts([outcome([3, 2, 3, 4]), outcome([None] * 4, width=128)])
    assert not verdict.transfers and verdict.ratio is None
    assert verdict_line(verdict) == "FAIL  width 128 has no final loss"
    (line,) = edge_lines([verdict.largest])
    assert line.endswith("lower ones, such as --rates 0.00025,0.0005")
    assert verdict.largest.next_rate == 0.0005


def test_a_width_whose_trials_all_fail_asks_for_their_reasons() -> None:
    crashed = RateResult(curve(128), {rate: [trained(0, outcome="crashed")] for rate in RATES})
    (verdict,) = verdicts([outcome([3, 2, 3, 4]), crashed])
    assert verdict_line(verdict).startswith("FAIL  width 128 has no final loss")
    (line,) = edge_lines([crashed])
    assert line.endswith("every trial failed, for the reasons above")
    assert crashed.next_rate is None, "another rate would fail, too"
    *lines, last = failure_lines([crashed])
    assert len(lines) == len(RATES) and last.endswith("rerun with --retry")
    assert lines[0].startswith("no result: width 128, learning rate 0.001: crashed")


def test_a_family_of_one_width_has_no_verdict() -> None:
    outcomes = [outcome([3, 2, 3, 4], family="a"), outcome([3, 2, 3, 4], family="b")]
    assert verdicts(outcomes) == []


def test_steps_to_the_final_loss_of_the_first_family() -> None:
    first, second = outcome([3, 2, 3, 4], family="adamw"), outcome([3, 3, 1.5, 4], family="muon")
    (comparison,) = comparisons([first, second])  # 1.5 + 0.5 at step 15, 2 at step 20
    assert comparison.step == 15 and comparison.share == 0.75
    assert "at step 15 of 20 (75%)" in comparison_line(comparison)
    (worse,) = comparisons([first, outcome([3, 3, 2.5, 4], family="muon")])
    assert worse.step is None and "does not reach" in comparison_line(worse)


def test_a_best_rate_at_the_end_of_the_grid_is_reported() -> None:
    assert list(edge_lines([outcome([3, 2, 3, 4])])) == []
    (line,) = edge_lines([outcome([3, 3, 3, 2])])
    assert line.endswith("add 0.016, rerun with --rates 0.001,0.002,0.004,0.008,0.016")
    (line,) = edge_lines([outcome([1, 2, 3, None])])
    assert "add 0.0005" in line


def test_an_automatic_grid_grows_until_the_best_rate_is_inside() -> None:
    """`outcomes` reads the same rates as `run` measures, from the results alone."""
    sweep = Sweep([curve()], None, 1)
    (first,) = sweep.curves
    rate = first.recipe.optimizer.learning_rate
    grid = [rate * 2.0**power for power in range(-2, 6)]
    results = {
        trial.key: trained(2 + abs(n - 6)) for n, trial in enumerate(loss_trials(first, grid, 1))
    }
    (found,) = sweep.outcomes(results.get)
    assert found.best == grid[6] and found.next_rate is None
    assert sorted(found.losses) == grid
    unmeasured = dict(list(results.items())[:5])
    (early,) = sweep.outcomes(unmeasured.get)
    assert early.next_rate == grid[5]


def test_given_rates_do_not_grow() -> None:
    sweep = Sweep([curve()], RATES, 1)
    trials = loss_trials(sweep.curves[0], RATES, 1)
    results = {trial.key: trained(5.0 - n) for n, trial in enumerate(trials)}
    (found,) = sweep.outcomes(results.get)
    assert sorted(found.losses) == RATES and found.next_rate == 2 * RATES[-1]


def test_a_missing_result_is_not_a_loss() -> None:
    trials = loss_trials(curve(), RATES, 1)
    found = outcome_of(curve(), trials, {trials[1].key: trained(2.0)}.get)
    assert found.losses == {2e-3: 2.0}
