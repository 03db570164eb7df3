"""The coordinate check: are the sizes of activations independent of the width? (arXiv 2203.03466)

If a parametrization transfers learning rates, neither the sizes of activations in the first steps
nor the decrease of the loss depend on the width.

Some sizes are shown without being judged, because narrow models differ in them by design or by
chance. At the start, muP makes the logits smaller in wider models, and their random part remains
afterwards: its size falls with the square root of the width. The changes of the other activations
have a random part, too, which is significant in models of less than about 256 columns. The decrease
of the loss contains only the systematic part of the changes of the logits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from threefold.sweep.scheduler import Scheduler, measure_all
from threefold.sweep.trial import Result, Trial
from threefold.sweep.width_transfer.models import Curve, TrainingTrial, by_family, coordinate_trials

LOGITS, LOSS = "logits", "loss"
MAX_SPREAD = 1.1  # largest size relative to the smallest one over the widths
MAX_LOSS_SPREAD = 1.25  # of the decrease of the loss, which varies more in narrow models
Moment = Literal["start", "end", "change"]
MOMENTS: dict[Moment, tuple[str, int]] = {  # moment -> list in a result, and index in the list
    "start": ("sizes", 0),
    "end": ("sizes", -1),
    "change": ("changes", -1),
}


@dataclass(frozen=True)
class Sizes:
    """The sizes of an activation over the widths of a family.

    Attributes:
        place: "embedding", "blocks.0", "blocks.0.attention", ..., "logits", or "loss"
        moment: "start", "end" (after the last step), or "change" (from the start to the end; of the
            loss, its decrease)
        by_width: width -> size, averaged over the seeds
    """

    place: str
    moment: Moment
    by_width: dict[int, float]

    @property
    def spread(self) -> float:
        """The largest size relative to the smallest one."""
        sizes = self.by_width.values()
        if not all(math.isfinite(size) for size in sizes) or min(sizes) <= 0:
            return math.inf
        return max(sizes) / min(sizes)

    @property
    def limit(self) -> float:
        """The largest spread of sizes that are flat."""
        return MAX_LOSS_SPREAD if self.place == LOSS else MAX_SPREAD

    @property
    def is_flat(self) -> bool:
        """True if the sizes differ little: by 10 %, or the decrease of the loss by 25 %."""
        return self.spread <= self.limit


@dataclass(frozen=True)
class CoordinateCheck:
    """The coordinate check of a family.

    Attributes:
        sizes: the sizes of all places and moments
        faults: trials without a result, as "width 64, seed 1: reason"
    """

    family: str
    sizes: list[Sizes]
    faults: list[str]

    @property
    def judged(self) -> list[Sizes]:
        """The sizes that decide the verdict."""
        return [size for size in self.sizes if is_judged(size.place, size.moment)]

    @property
    def passes(self) -> bool:
        """True if all judged sizes are flat."""
        return not self.faults and all(size.is_flat for size in self.judged)


def is_judged(place: str, moment: Moment) -> bool:
    """Return True if a size decides the verdict."""
    return place == LOSS if moment == "change" else place not in (LOGITS, LOSS)


@dataclass
class Check:
    """The coordinate checks of all families.

    Attributes:
        seeds: number of seeds, from the recipe's
    """

    curves: Sequence[Curve]
    steps: int
    seeds: int

    def trials(self) -> list[TrainingTrial]:
        """Return the trials.

        Raises:
            UserError: a recipe is not valid in one process.
        """
        return [
            trial
            for curve in self.curves
            for trial in coordinate_trials(curve, self.steps, self.seeds)
        ]

    def run(self, scheduler: Scheduler, begin_round: Callable) -> Iterator[tuple[Trial, Result]]:
        """Measure the trials without a result, as `Sweep.run` does."""
        yield from measure_all(scheduler, self.trials(), begin_round)

    def outcomes(self, result: Callable[[str], Result | None]) -> list[CoordinateCheck]:
        """Return the check of each family with several widths.

        Args:
            result: returns the result of a trial by its key
        """
        return [
            self._outcome(family, curves, result)
            for family, curves in by_family(self.curves, lambda curve: curve).items()
            if len(curves) > 1
        ]

    def _outcome(
        self, family: str, curves: Sequence[Curve], result: Callable[[str], Result | None]
    ) -> CoordinateCheck:
        by_width: dict[int, list[Result]] = {}
        faults = []
        for curve in curves:
            for trial in coordinate_trials(curve, self.steps, self.seeds):
                measured = result(trial.key)
                if measured is not None and measured.training is not None:
                    by_width.setdefault(curve.width, []).append(measured)
                else:
                    reason = measured.reason if measured else "not measured"
                    faults.append(f"{curve.label}, seed {trial.recipe.seed}: {reason}")
        return CoordinateCheck(family, list(sizes_over_widths(by_width)), faults)


def sizes_over_widths(results: dict[int, list[Result]]) -> Iterator[Sizes]:
    """Yield the sizes of each place that all widths have, at each moment, averaged over seeds."""
    tables = {
        width: [result.training or {} for result in found] for width, found in results.items()
    }
    if not tables:
        return

    def over_widths(kind: str, place: str, index: int) -> dict[int, float]:
        return {
            w: mean(table[kind][place][index] for table in found) for w, found in tables.items()
        }

    places = [list(found[0]["sizes"]) for found in tables.values()]
    for place in [each for each in places[0] if all(each in others for others in places)]:
        for moment, (kind, index) in MOMENTS.items():
            yield Sizes(place, moment, over_widths(kind, place, index))
    decreases = {
        width: mean(table["losses"][0] - table["losses"][-1] for table in found)
        for width, found in tables.items()
    }
    yield Sizes(LOSS, "change", decreases)
