"""Lines and JSON of a transfer check."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from typing_extensions import override

from models.errors import counted
from threefold.sweep.report import MAX_REASON_CHARACTERS, SweepProgress
from threefold.sweep.trial import Result, Trial
from threefold.sweep.width_transfer.coordinates import CoordinateCheck, Sizes
from threefold.sweep.width_transfer.learning_rates import (
    FACTOR,
    Comparison,
    RateResult,
    Verdict,
    comparisons,
    verdicts,
)
from threefold.sweep.width_transfer.models import TrainingTrial, final_loss


class TrainingProgress(SweepProgress):
    """The progress of the trials of a transfer check."""

    @override
    def describe(self, trial: Trial, result: Result) -> str:
        assert isinstance(trial, TrainingTrial)
        return (
            f"{found(result):12} {trial.curve}, learning rate {trial.learning_rate:g}, "
            f"seed {trial.recipe.seed}"
        )


def found(result: Result) -> str:
    """Return the result of a trial in a few words."""
    if result.training is None:
        return result.outcome
    if "sizes" in result.training:
        return "ok"
    loss = final_loss(result)
    return f"diverged at step {result.training['diverged']}" if loss is None else f"loss {loss:.4f}"


def loss_table(outcomes: Sequence[RateResult]) -> Iterator[str]:
    """Yield a table of the final losses: a row for each learning rate, a column for each curve."""
    labels = [outcome.curve.label for outcome in outcomes]
    widths = [max(9, len(label)) for label in labels]
    heads = [f"{label:>{width}}" for label, width in zip(labels, widths, strict=True)]
    yield "  ".join(["learning rate", *heads])
    for rate in sorted({rate for outcome in outcomes for rate in outcome.losses}):
        cells = [
            f"{loss_cell(outcome, rate):>{n}}" for outcome, n in zip(outcomes, widths, strict=True)
        ]
        yield "  ".join([f"{rate:13g}", *cells])


def loss_cell(outcome: RateResult, rate: float) -> str:
    """Return the final loss of a curve at a learning rate; the best one has a star."""
    if rate not in outcome.losses:
        return ""
    loss = outcome.losses[rate]
    if loss is None:
        return "diverged" if all(result.training for result in outcome.results[rate]) else "failed"
    return f"{loss:.4f}{'*' if rate == outcome.best else ' '}"


def failure_lines(outcomes: Sequence[RateResult]) -> Iterator[str]:
    """Yield a line with the reason for each failed trial, and a line about --retry."""
    failures = [(outcome, *failure) for outcome in outcomes for failure in outcome.failures]
    for outcome, rate, result in failures:
        reason = f": {result.reason[:MAX_REASON_CHARACTERS]}" if result.reason else ""
        yield f"no result: {outcome.curve.label}, learning rate {rate:g}: {result.outcome}{reason}"
    if failures:
        yield "to repeat failed trials, correct the cause and rerun with --retry"


def edge_lines(outcomes: Sequence[RateResult]) -> Iterator[str]:
    """Yield a line for each curve whose best learning rate is missing or at an end of the grid."""
    for outcome in outcomes:
        if outcome.best is None:
            yield f"{outcome.curve.label}: no final loss: {without_loss(outcome)}"
        elif outcome.next_rate is not None:
            rates = ",".join(f"{rate:g}" for rate in sorted([*outcome.losses, outcome.next_rate]))
            yield (
                f"{outcome.curve.label}: the best learning rate {outcome.best:g} is at the end of "
                f"the grid; to add {outcome.next_rate:g}, rerun with --rates {rates}"
            )


def verdict_line(verdict: Verdict) -> str:
    """Return the comparison of the best learning rates of the smallest and the largest width."""
    name = f"{verdict.family}: " if verdict.family else ""
    small, large = verdict.smallest, verdict.largest
    if verdict.ratio is None:
        lost = small if small.best is None else large
        return f"FAIL  {name}width {lost.curve.width} has no final loss"
    result = "pass" if verdict.passes else "FAIL" if verdict.is_decided else "undecided"
    line = (
        f"{result:4}  {name}best learning rate {small.best:g} at "
        f"width {small.curve.width} and {large.best:g} at width {large.curve.width}: "
        f"{'within' if verdict.transfers else 'more than'} a factor of 2"
    )
    if not verdict.is_decided:
        line += ", but one of them is at the end of its grid"
    if verdict.excess is not None and verdict.ratio != 1:
        line += (
            f"; the learning rate of the smallest width costs the largest one "
            f"{verdict.excess:.4f} in loss"
        )
    return line


def without_loss(outcome: RateResult) -> str:
    """Return why a curve has no final loss at any learning rate, and what to do about it."""
    if not any(result.training for results in outcome.results.values() for result in results):
        return "every trial failed, for the reasons above"
    lowest = min(outcome.results)
    return (
        f"every learning rate from {lowest:g} up diverged or failed; rerun with lower ones, such "
        f"as --rates {lowest / FACTOR**2:g},{lowest / FACTOR:g}"
    )


def comparison_line(comparison: Comparison) -> str:
    """Return the step at which a curve reaches the final loss of the first family."""
    reference, other = comparison.reference, comparison.other
    if reference.best_loss is None or other.best_loss is None:
        return f"{other.curve.label}: no final loss to compare with {reference.curve.label}"
    goal = f"the final loss {reference.best_loss:.4f} of {reference.curve.label}"
    if comparison.step is None or comparison.share is None:
        return f"{other.curve.label} does not reach {goal}; its own is {other.best_loss:.4f}"
    return (
        f"{other.curve.label} reaches {goal} at step {comparison.step} of "
        f"{reference.validation[-1][0]} ({comparison.share:.0%}); its own final loss is "
        f"{other.best_loss:.4f}"
    )


def coordinate_lines(check: CoordinateCheck) -> Iterator[str]:
    """Yield a table of the sizes over widths, and the verdict."""
    yield f"Sizes of the activations{f' of {check.family}' if check.family else ''} (RMS):"
    widths = list(check.sizes[0].by_width) if check.sizes else []
    yield f"{'':28}" + "".join(f"{width:>10}" for width in widths) + "  largest / smallest"
    judged = check.judged
    for each in check.sizes:
        cells = "".join(f"{size:10.4g}" for size in each.by_width.values())
        mark = "" if each not in judged else "  flat" if each.is_flat else "  NOT FLAT"
        yield f"{each.place:20}{each.moment:8}{cells}{each.spread:10.3f}{mark}"
    for fault in check.faults:
        yield f"no result: {fault}"
    yield check_line(check)


def check_line(check: CoordinateCheck) -> str:
    """Return the verdict of a coordinate check."""
    name = f"{check.family}: " if check.family else ""
    judged = check.judged
    if not judged or check.faults:
        return (
            f"FAIL  {name}no activations of {counted(len(check.faults), 'trial')}, for the reasons "
            f"above; correct the cause and rerun with --retry"
        )
    worst = max(judged, key=lambda size: size.spread / size.limit)
    flat = sum(size.is_flat for size in judged)
    return (
        f"{'pass' if check.passes else 'FAIL'}  {name}{flat} of {len(judged)} sizes are flat over "
        f"the widths; the worst ratio of largest to smallest is {worst.spread:.3f} "
        f"({worst.place}, {worst.moment}; flat: at most {worst.limit:g})"
    )


def learning_rate_table(outcomes: Sequence[RateResult]) -> dict[str, Any]:
    """Return the table of a learning-rate sweep for --json."""
    return {
        "curves": [curve_json(outcome) for outcome in outcomes],
        "transfers": [
            {
                "family": verdict.family,
                "ratio": verdict.ratio,
                "excess_loss": verdict.excess,
                "decided": verdict.is_decided,
                "passes": verdict.passes,
            }
            for verdict in verdicts(outcomes)
        ],
        "comparisons": [
            {
                "reference": comparison.reference.curve.label,
                "curve": comparison.other.curve.label,
                "step": comparison.step,
                "share": comparison.share,
            }
            for comparison in comparisons(outcomes)
        ],
    }


def coordinate_table(checks: Sequence[CoordinateCheck]) -> dict[str, Any]:
    """Return the table of a coordinate check for --json."""
    return {
        "coordinate_checks": [
            {
                "family": check.family,
                "passes": check.passes,
                "sizes": [size_json(sizes, judged=sizes in check.judged) for sizes in check.sizes],
            }
            for check in checks
        ]
    }


def curve_json(outcome: RateResult) -> dict[str, Any]:
    """Return the JSON of a curve."""
    return {
        "curve": outcome.curve.label,
        "recipe": outcome.curve.source,
        "hidden_size": outcome.curve.width,
        "final_losses": [[rate, loss] for rate, loss in outcome.losses.items()],
        "best_learning_rate": outcome.best,
        "validation": outcome.validation,
    }


def size_json(sizes: Sizes, *, judged: bool) -> dict[str, Any]:
    """Return the JSON of an activation's sizes."""
    return {
        "place": sizes.place,
        "moment": sizes.moment,
        "sizes": [[width, finite(size)] for width, size in sizes.by_width.items()],
        "spread": finite(sizes.spread),
        "judged": judged,
    }


def finite(value: float) -> float | None:
    """Return a number for JSON, which has neither NaN nor infinity: None stands for them."""
    return value if math.isfinite(value) else None
