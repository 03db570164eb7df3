"""The coordinate check: are the sizes of activations independent of the width? (arXiv 2203.03466)

A parametrization that transfers learning rates keeps the sizes of all activations, and of their
changes by the first steps, as the width grows. The logits are compared by their change only: at the
start, muP makes them smaller in wider models, by design.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from recipes.sweeping.transfer.curves import Curve
from recipes.sweeping.transfer.trials import TrainingTrial, coordinate_trials
from recipes.sweeping.trial import Result

LOGITS = "logits"
MAX_SPREAD = 1.1  # largest size relative to the smallest one over the widths
Moment = Literal["start", "end", "change"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of an activation over the widths of a family.

    Attributes:
        place: "embedding", "blocks.0", "blocks.0.attention", ..., or "logits"
        moment: "start", "end" (after the last step), or "change" (from the start to the end)
        by_width: width -> size, the mean of the seeds
    """

    place: str
    moment: Moment
    by_width: dict[int, float]

    @property
    def spread(self) -> float:
        """The largest size relative to the smallest one."""
        smallest = min(self.by_width.values())
        return max(self.by_width.values()) / smallest if smallest else float("inf")

    @property
    def is_flat(self) -> bool:
        """True if the spread is at most 10 %."""
        return self.spread <= MAX_SPREAD
