"""The time of a step, from the end of the previous step to its own end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StepSeconds:
    """The duration of a step, in seconds.

    total: from the end of the previous step to the end of this one, without validation
    between: the part of `total` before the step began: garbage collection, agreement on signals and
        bad steps, comparison of replicas, beginning of a save
    """

    total: float
    between: float


class StepClock:
    """A clock whose step times add up to the time of the run without validation.

    A step ends when the host has its loss. On a GPU the update is still running at that moment,
    which is another reason to measure from end to end.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Measure the next step from its own beginning, at the start or after a rollback."""
        self._ended: float | None = None
        self._left_out = 0.0

    def begin(self) -> None:
        """Mark the beginning of a step."""
        self._began = time.perf_counter()

    def end(self) -> StepSeconds:
        """Mark the end of a step, and return its duration."""
        now = time.perf_counter()
        between = 0.0 if self._ended is None else self._began - self._ended - self._left_out
        seconds = StepSeconds(now - self._began + between, between)
        self._ended, self._left_out = now, 0.0
        return seconds

    @contextmanager
    def left_out(self) -> Iterator[list[float]]:
        """Exclude the time within this context from all steps; the yielded list receives it."""
        began = time.perf_counter()
        spent: list[float] = []
        yield spent
        spent.append(time.perf_counter() - began)
        self._left_out += spent[0]
