"""The progress of a run: its steps, and what it has read of the data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from threefold.config.phases import PhasePlan
from threefold.run_folder.json_lines import MAX_INTEGER_IN_LINE

Read = tuple[tuple[int, int], ...]


class Reading(NamedTuple):
    """Successive samples that belong to one part of the data.

    Attributes:
        part: number of the part
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
        samples: number of samples read
        read: (part of the data, number of samples read when the run left it), for each part that
            the run has left; the samples after the last entry belong to the part of the last
            completed step. A part may occur twice if the run has rolled back to an earlier phase.
    """

    step: int = 0
    samples: int = 0
    read: Read = ()

    def after(self, step: int, plan: PhasePlan) -> "Progress":
        """Return the progress after a later step, which may lie beyond the last step of the run."""
        samples, read, part = self.samples, self.read, plan.at(self.step).part
        for segment in plan.segments:
            first = max(segment.first, self.step + 1)
            last = step if segment is plan.segments[-1] else min(segment.last, step)
            if first > last:
                continue
            if segment.part != part:
                read, part = _left(read, part, samples), segment.part
            samples += (last - first + 1) * segment.recipe.batch.global_sequences
        return Progress(max(step, self.step), samples, read)

    def left(self, plan: PhasePlan) -> "Progress":
        """Return the progress of a run that leaves the present part of the data."""
        return replace(self, read=_left(self.read, plan.at(self.step).part, self.samples))

    def moved_to(self, step: int, plan: PhasePlan) -> "Progress":
        """Return the progress of a run that rolls back to a step, and reads the next samples."""
        here, there = plan.at(self.step).part, plan.at(step).part
        read = self.read if here == there else _left(self.read, here, self.samples)
        return Progress(step, self.samples, read)

    def readings(self, plan: PhasePlan) -> Iterator[Reading]:
        """Yield the samples read so far, part by part."""
        begin = 0
        for part, end in _left(self.read, plan.at(self.step).part, self.samples):
            yield Reading(part, begin, end)
            begin = end

    def tokens(self, plan: PhasePlan) -> int:
        """Return the number of tokens read."""
        return sum(
            (reading.stop - reading.first) * plan.length_of_part(reading.part)
            for reading in self.readings(plan)
        )

    def record(self) -> dict[str, Any]:
        """Return the fields of an event: the samples, and the parts that the run has left."""
        read = {"read_parts": [list(each) for each in self.read]} if self.read else {}
        return {"samples": self.samples} | read


def read_from(record: Any) -> Read:
    """Return `Progress.read` from its record in JSON; empty if there is none, or it is damaged."""
    parts = record if isinstance(record, list) else []
    is_sound = all(
        isinstance(part, list | tuple)
        and len(part) == 2
        and all(type(count) is int and 0 <= count <= MAX_INTEGER_IN_LINE for count in part)
        for part in parts
    )
    return tuple((part, end) for part, end in parts) if is_sound else ()


def _left(read: Read, part: int, samples: int) -> Read:
    """Return `read` with the part that the run leaves, if the run has read samples of it.

    Args:
        read: the parts that the run has left before
        part: number of the part that the run leaves
        samples: number of samples read so far
    """
    is_empty = samples == (read[-1][1] if read else 0)
    return read if is_empty else (*read, (part, samples))
