"""The progress of a run: its steps, and what it has read of the data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from threefold.config.phases import PhasePlan
from threefold.run_folder.json_lines import MAX_INTEGER_IN_LINE


class LeftPart(NamedTuple):
    """A part of the data that a run has left.

    Attributes:
        samples: number of samples that the run had read when it left the part
    """

    part: int
    samples: int


LeftParts = tuple[LeftPart, ...]


class ConsumedRange(NamedTuple):
    """Successive samples that belong to one part of the data.

    Attributes:
        first, stop: the run's samples first .. stop - 1
    """

    part: int
    first: int
    stop: int


@dataclass(frozen=True)
class Progress:
    """The number of steps that a run has completed, and the samples that it has read.

    The steps do not determine the samples, because the batch may have changed, and a rollback skips
    samples.

    Attributes:
        step: number of completed steps
        left_parts: the parts that the run has left, in the order of their samples; the samples
            after the last entry belong to the part of the last completed step. A part may occur
            twice if the run has rolled back to an earlier phase.
    """

    step: int = 0
    samples: int = 0
    left_parts: LeftParts = ()

    def after(self, step: int, plan: PhasePlan) -> "Progress":
        """Return the progress after a later step, which may lie beyond the last step of the run."""
        samples, left, part = self.samples, self.left_parts, plan.at(self.step).part
        for segment in plan.segments:
            first = max(segment.first, self.step + 1)
            last = step if segment is plan.segments[-1] else min(segment.last, step)
            if first > last:
                continue
            if segment.part != part:
                left, part = _left(left, part, samples), segment.part
            samples += (last - first + 1) * segment.recipe.batch.global_sequences
        return Progress(max(step, self.step), samples, left)

    def left(self, plan: PhasePlan) -> "Progress":
        """Return the progress of a run that leaves the present part of the data."""
        part = plan.at(self.step).part
        return replace(self, left_parts=_left(self.left_parts, part, self.samples))

    def moved_to(self, step: int, plan: PhasePlan) -> "Progress":
        """Return the progress of a run that rolls back to a step, and reads the next samples."""
        here, there = plan.at(self.step).part, plan.at(step).part
        left = self.left_parts
        if here != there:
            left = _left(left, here, self.samples)
        return Progress(step, self.samples, left)

    def consumed_ranges(self, plan: PhasePlan) -> Iterator[ConsumedRange]:
        """Yield the samples read so far, part by part."""
        begin = 0
        for part, end in _left(self.left_parts, plan.at(self.step).part, self.samples):
            yield ConsumedRange(part, begin, end)
            begin = end

    def tokens(self, plan: PhasePlan) -> int:
        """Return the number of tokens read."""
        return sum(
            (consumed.stop - consumed.first) * plan.length_of_part(consumed.part)
            for consumed in self.consumed_ranges(plan)
        )

    def record(self) -> dict[str, Any]:
        """Return the fields of an event: the samples, and the parts that the run has left."""
        left = {"read_parts": [list(part) for part in self.left_parts]} if self.left_parts else {}
        return {"samples": self.samples} | left


def left_parts_from(record: Any) -> LeftParts:
    """Return `Progress.left_parts` from its record in JSON; empty if it is missing or damaged."""
    parts = record if isinstance(record, list) else []
    is_sound = all(
        isinstance(part, list | tuple)
        and len(part) == 2
        and all(type(count) is int and 0 <= count <= MAX_INTEGER_IN_LINE for count in part)
        for part in parts
    )
    return tuple(LeftPart(*part) for part in parts) if is_sound else ()


def _left(parts: LeftParts, part: int, samples: int) -> LeftParts:
    """Return `parts` with the part that the run leaves, if the run has read samples of it.

    Args:
        parts: the parts that the run has left before
        part: number of the part that the run leaves
        samples: number of samples read so far
    """
    is_empty = samples == (parts[-1].samples if parts else 0)
    return parts if is_empty else (*parts, LeftPart(part, samples))
