"""The learning-rate sweep: the best learning rate of each curve, and what it shows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean

from threefold.sweep.scheduler import Scheduler, measure_all
from threefold.sweep.trial import Result, Trial
from threefold.sweep.width_transfer.models import (
    Curve,
    TrainingTrial,
    by_family,
    final_loss,
    loss_trials,
)

FACTOR = 2.0  # between neighbouring learning rates of the automatic grid
FIRST_POWERS = range(-2, 3)  # of FACTOR: the first grid, relative to the recipe's learning rate
MAX_EXTENSIONS = 5  # learning rates that are added to the automatic grid of a curve
WITHIN = FACTOR * (1 + 1e-9)  # a grid step, in spite of rounding


@dataclass
class Sweep:
    """The learning-rate sweep of all curves.

    Attributes:
        rates: the learning rates; None for an automatic grid, in factors of two around the rate of
            each recipe, which grows until the best rate is inside
        seeds: number of consecutive seeds, starting with the recipe's
    """

    curves: Sequence[Curve]
    rates: Sequence[float] | None
    seeds: int

    def trials(self) -> list[TrainingTrial]:
        """Return the first trials: all of them, unless the grid is automatic."""
        return [trial for curve in self.curves for trial in self._trials(curve, self.grid(curve))]

    def grid(self, curve: Curve) -> list[float]:
        """Return the first learning rates of a curve."""
        if self.rates is not None:
            return sorted(self.rates)
        return [curve.recipe.optimizer.learning_rate * FACTOR**power for power in FIRST_POWERS]

    def run(self, scheduler: Scheduler, begin_round: Callable) -> Iterator[tuple[Trial, Result]]:
        """Measure the trials without a result, and yield each as soon as it is recorded.

        Args:
            begin_round: called as in `measure_all` with the trials known so far
        """
        every = {curve.label: self._trials(curve, self.grid(curve)) for curve in self.curves}
        trials = self.trials()
        for extension in range(MAX_EXTENSIONS + 1):
            yield from measure_all(scheduler, trials, begin_round)
            if self.rates is not None or extension == MAX_EXTENSIONS:
                return
            trials = []
            for curve in self.curves:
                outcome = outcome_of(curve, every[curve.label], scheduler.folder.result)
                if (rate := outcome.next_rate) is not None:
                    trials += self._trials(curve, [rate])
            if not trials:
                return
            for trial in trials:
                every[trial.curve].append(trial)

    def outcomes(self, result: Callable[[str], Result | None]) -> list["RateResult"]:
        """Return the outcome of each curve."""
        found = []
        for curve in self.curves:
            rates = self.grid(curve)
            outcome = outcome_of(curve, self._trials(curve, rates), result)
            while self.rates is None and (rate := outcome.next_rate) is not None:
                trials = self._trials(curve, [rate])
                if any(result(trial.key) is None for trial in trials):
                    break
                rates.append(rate)
                outcome = outcome_of(curve, self._trials(curve, rates), result)
            found.append(outcome)
        return found

    def _trials(self, curve: Curve, rates: Sequence[float]) -> list[TrainingTrial]:
        return loss_trials(curve, rates, self.seeds)


@dataclass(frozen=True)
class RateResult:
    """The results of a curve.

    Attributes:
        results: learning rate -> results of its seeds, from the lowest rate to the highest
    """

    curve: Curve
    results: dict[float, list[Result]]

    @cached_property
    def losses(self) -> dict[float, float | None]:
        """Learning rate -> final loss, averaged over the seeds; None if one diverged or failed."""
        return {
            rate: mean_or_none(map(final_loss, results)) for rate, results in self.results.items()
        }

    @cached_property
    def best(self) -> float | None:
        """The learning rate with the lowest final loss; None if no trial has one."""
        finite = {rate: loss for rate, loss in self.losses.items() if loss is not None}
        return min(finite, key=lambda rate: finite[rate]) if finite else None

    @property
    def best_loss(self) -> float | None:
        """The final loss at the best learning rate."""
        return None if self.best is None else self.losses[self.best]

    @property
    def failures(self) -> list[tuple[float, Result]]:
        """The learning rates and results of the trials that did not train, such as by a crash."""
        return [
            (rate, result)
            for rate, results in self.results.items()
            for result in results
            if result.training is None
        ]

    @property
    def next_rate(self) -> float | None:
        """The next rate beyond the end of the grid, if the best rate is at that end; else None.

        If no rate has a final loss, it is the next lower one, or None if trials failed.
        """
        rates = sorted(self.losses)
        if self.best is None:
            return None if self.failures or not rates else rates[0] / FACTOR
        if self.best == rates[0]:
            return rates[0] / FACTOR
        return rates[-1] * FACTOR if self.best == rates[-1] else None

    @property
    def validation(self) -> list[tuple[int, float]]:
        """Pairs of a step and the validation loss after it, at the best learning rate."""
        if self.best is None:
            return []
        tables = [
            result.training["validation"] for result in self.results[self.best] if result.training
        ]
        return [
            (column[0][0], mean(loss for _, loss in column)) for column in zip(*tables, strict=True)
        ]


def outcome_of(
    curve: Curve, trials: Sequence[TrainingTrial], result: Callable[[str], Result | None]
) -> RateResult:
    """Return the outcome of a curve from the results of its trials."""
    results: dict[float, list[Result]] = {}
    for trial in sorted(trials, key=lambda trial: trial.learning_rate):
        trained = result(trial.key)
        if trained is not None:
            results.setdefault(trial.learning_rate, []).append(trained)
    return RateResult(curve, results)


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of numbers; None if one of them is None."""
    losses = list(values)
    finite = [loss for loss in losses if loss is not None]
    return mean(finite) if finite and len(finite) == len(losses) else None


@dataclass(frozen=True)
class Verdict:
    """The comparison of the best learning rates of the widths of a family."""

    family: str
    smallest: RateResult
    largest: RateResult

    @property
    def ratio(self) -> float | None:
        """The best learning rate of the largest width relative to that of the smallest."""
        if self.smallest.best is None or self.largest.best is None:
            return None
        return self.largest.best / self.smallest.best

    @property
    def is_decided(self) -> bool:
        """False if the rates are close, but a larger grid may show a better one for a width."""
        return not self.transfers or not (self.smallest.next_rate or self.largest.next_rate)

    @property
    def transfers(self) -> bool:
        """True if the two learning rates are at most a grid step (a factor of two) apart."""
        return self.ratio is not None and 1 / WITHIN <= self.ratio <= WITHIN

    @property
    def passes(self) -> bool:
        """True if the rates are close, and both are inside of their grids."""
        return self.transfers and self.is_decided

    @property
    def excess(self) -> float | None:
        """The rise of the largest width's loss at the best learning rate of the smallest width."""
        if self.smallest.best is None or self.largest.best_loss is None:
            return None
        loss = self.largest.losses.get(self.smallest.best)
        return None if loss is None else loss - self.largest.best_loss


def verdicts(outcomes: Sequence[RateResult]) -> list[Verdict]:
    """Return the verdict of each family with several widths."""
    return [
        Verdict(family, members[0], members[-1])
        for family, members in by_family(outcomes, lambda outcome: outcome.curve).items()
        if members[0].curve.width < members[-1].curve.width
    ]


@dataclass(frozen=True)
class Comparison:
    """The step at which a curve reaches the final loss of the first family at the same width.

    Attributes:
        reference: outcome of the first family
        other: outcome of another family
    """

    reference: RateResult
    other: RateResult

    @property
    def step(self) -> int | None:
        """The first validated step with at most the reference's final loss; None if none has."""
        goal = self.reference.best_loss
        if goal is None:
            return None
        return next((step for step, loss in self.other.validation if loss <= goal), None)

    @property
    def share(self) -> float | None:
        """The step relative to the number of steps of the reference."""
        return None if self.step is None else self.step / self.reference.validation[-1][0]


def comparisons(outcomes: Sequence[RateResult]) -> list[Comparison]:
    """Return the comparison of each curve with that of the first family of the same width."""
    if not outcomes:
        return []
    first = outcomes[0].curve.family
    references = {
        outcome.curve.width: outcome for outcome in outcomes if outcome.curve.family == first
    }
    return [
        Comparison(references[outcome.curve.width], outcome)
        for outcome in outcomes
        if outcome.curve.family != first and outcome.curve.width in references
    ]
