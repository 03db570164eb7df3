"""Times of the start-up and of each step."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from threefold.runtime.launchers import age_seconds, is_node_agent, launchers_of


class Startup:
    """A stopwatch with laps, started when the launcher started.

    Args:
        started: time.monotonic() at which a standby process of launch.py became this rank; None in
            a newly started process
    """

    def __init__(self, started: float | None = None):
        self.running = True
        self.seconds: dict[str, float] = {}  # by part, in the order of the first laps
        if started is not None:
            self._last = started
            return
        here = age_seconds(os.getpid())
        self._last = time.monotonic() - here
        launcher = launcher_age_seconds()
        if launcher is not None:
            self.seconds["launcher"] = launcher - here

    def mark(self, part: str) -> None:
        """Add the time since the last mark to a part of the start-up."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def stop(self, part: str) -> "Startup":
        """Record the last mark."""
        self.mark(part)
        self.running = False
        return self

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"started in {sum(self.seconds.values()):.1f} s: {parts}"


def launcher_age_seconds() -> float | None:
    """Return the age of the launcher of this process on this node; None if it is unknown.

    A `torchrun` that has restarted its ranks may be hours old, so its age is not used. The same
    applies to an agent of launch.py.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return None
    try:
        launchers = [pid for pid in launchers_of(os.getpid()) if not is_node_agent(pid)]
        return age_seconds(launchers[-1]) if launchers else None
    except OSError:  # a launcher has just ended
        return None


# The time of a step, from the end of the previous step to its own end.


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
