"""The time of a step, from the end of the step before to its own end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step.

    total: from the end of the step before, without validation
    between: the part of it before the step began: garbage collection, agreeing on signals and bad
        steps, comparing replicas, waiting for a save to begin
    """

    total: float
    between: float


class StepClock:
    """Measures steps so that their times add up to the run's, apart from validation.

    The end of a step is when the host has its loss. On a GPU the update still runs then, which is
    another reason to measure from end to end.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Measure the next step from its own beginning: the first one, and after a rollback."""
        self._ended: float | None = None
        self._left_out = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.perf_counter()

    def end(self) -> StepSeconds:
        """End a step."""
        now = time.perf_counter()
        between = 0.0 if self._ended is None else self._began - self._ended - self._left_out
        seconds = StepSeconds(now - self._began + between, between)
        self._ended, self._left_out = now, 0.0
        return seconds

    @contextmanager
    def left_out(self) -> Iterator[list[float]]:
        """Count what runs within it to no step; the list that it yields then has its seconds."""
        began, found = time.perf_counter(), []
        yield found
        found.append(time.perf_counter() - began)
        self._left_out += found[0]
