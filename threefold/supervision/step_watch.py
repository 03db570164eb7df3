"""Detection of bad steps by loss and gradient norm, and of slow ranks by their forward passes."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from statistics import median

from threefold.config.parallel_dims import ParallelDims
from threefold.config.sections import Supervision

USUAL_LOSSES = 64  # the usual loss is the median of at most this many of the newest losses
LOSSES_NEEDED = 16  # before a spike can be told from the usual loss
STEPS_REMEMBERED = 100_000  # more than a rollback removes


class Severity(IntEnum):
    """The consequence of a step's numbers; the ranks agree on the largest.

    GOOD: none.
    SKIPPED: the optimizer has skipped the step, and training continues.
    UNSAFE: as SKIPPED, but the weights may be damaged, so they are not saved.
    ROLL_BACK: the run rolls back to the last checkpoint.
    """

    GOOD = 0
    SKIPPED = 1
    UNSAFE = 2
    ROLL_BACK = 3


@dataclass(frozen=True)
class BadStep:
    """The judgement of a step with bad numbers."""

    reason: str
    severity: Severity


class LossWatch:
    """Judges the loss and the gradient norm of each step, which are the same on all ranks.

    Args:
        limits: the recipe's `[supervision]`
        fp16: True if infinite gradients are part of the search for a loss scale, and not a reason
            to roll back
        losses: (step, loss) of the previous steps, if the run is resumed
    """

    def __init__(
        self, limits: Supervision, *, fp16: bool, losses: Iterable[tuple[int, float]] = ()
    ):
        self.limits, self.fp16 = limits, fp16
        self.bad_steps = 0  # in a row
        finite = ((step, loss) for step, loss in losses if math.isfinite(loss))
        self._losses = deque(finite, maxlen=STEPS_REMEMBERED)

    def judge(self, step: int, loss: float, grad_norm: float) -> BadStep | None:
        """Judge the newest step.

        Args:
            loss: in nats per token
            grad_norm: before clipping

        Returns:
            The judgement of a bad step, or None if the step is good.
        """
        newest = [loss for _, loss in islice(reversed(self._losses), USUAL_LOSSES)]
        usual = median(newest) if len(newest) >= LOSSES_NEEDED else math.inf
        if math.isfinite(loss):
            self._losses.append((step, loss))
        if math.isfinite(loss) and not math.isfinite(grad_norm) and self.fp16:
            return BadStep(f"the gradient norm is {grad_norm}", Severity.SKIPPED)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            name, value = ("gradient norm", grad_norm) if math.isfinite(loss) else ("loss", loss)
            self.bad_steps += 1
            reason = f"the {name} is {value}"
            if self.bad_steps < self.limits.bad_steps:
                return BadStep(reason, Severity.UNSAFE)
            row = f", {self.bad_steps} steps in a row" if self.bad_steps > 1 else ""
            return BadStep(f"{reason}{row}", Severity.ROLL_BACK)
        self.bad_steps = 0
        if self.limits.loss_spike and loss > usual + self.limits.loss_spike:
            return BadStep(
                f"the loss is {loss:.4f}, more than {self.limits.loss_spike} nats above the "
                f"{usual:.4f} of the steps before",
                Severity.ROLL_BACK,
            )
        return None

    def rolled_back(self, step: int) -> None:
        """Remove the losses after a step, so that the usual loss is that of a run resumed there."""
        self.bad_steps = 0
        while self._losses and self._losses[-1][0] > step:
            self._losses.pop()


def relative_times(seconds: Sequence[float], dims: ParallelDims) -> dict[int, float]:
    """Return the time of each group relative to the other groups of its stage.

    A group consists of all tensor and context ranks that work on the same sequences, and of all
    expert ranks that exchange their tokens. They wait for each other in every layer, so they count
    as one. A stage with a single group has no entry.

    Args:
        seconds: time in forward passes, by rank

    Returns:
        The relative times, by the first rank of each group.
    """
    slow = {}
    size = dims.lockstep_size
    for ranks in dims.stages():
        group_seconds = {
            first: median(seconds[first : first + size])
            for first in range(ranks[0], ranks[-1] + 1, size)
        }
        usual = median(group_seconds.values())
        for first, own in group_seconds.items():
            if len(group_seconds) == 2:
                usual = next(other for rank, other in group_seconds.items() if rank != first)
            if len(group_seconds) > 1:
                slow[first] = own / usual
    return slow


def slow_groups(relative: Mapping[int, float], dims: ParallelDims, limit: float) -> list[range]:
    """Return the ranks of each group that took more than `limit` times the usual time.

    Args:
        relative: the result of `relative_times`
        limit: the relative time above which a group is slow
    """
    size = dims.lockstep_size
    return [range(first, first + size) for first, ratio in relative.items() if ratio > limit]


def describe(group: range, relative: Mapping[int, float], hosts: Sequence[str]) -> str:
    """Return a sentence about a slow group."""
    first, last = group[0], group[-1]
    who = f"rank {first}" if last == first else f"ranks {first} .. {last}"
    where = ", ".join(dict.fromkeys(hosts[first : last + 1]))
    return f"{who} ({where}) took {relative[first]:.1f} times as long as similar ranks"


class StragglerHistory:
    """Counts the successive comparisons in which groups were slow.

    A group is slow for good after `comparisons` of them, and again after as many more.
    """

    def __init__(self) -> None:
        self._streaks: dict[range, int] = {}

    def update(self, slow: Iterable[range], comparisons: int) -> list[range]:
        """Add a comparison, and return the groups that are slow for good.

        Args:
            slow: the groups that were slow in the comparison
            comparisons: `supervision.slow_comparisons`
        """
        self._streaks = {group: self._streaks.get(group, 0) + 1 for group in slow}
        return [group for group, streak in self._streaks.items() if streak % comparisons == 0]
