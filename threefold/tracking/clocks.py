"""Times of the start-up, from the start of the launcher to the end of the first step."""

import os
import time

from threefold.runtime.environment import age_seconds, is_node_agent, launchers_of


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

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part of the start-up."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def stop(self, part: str) -> "Startup":
        """Record the last lap."""
        self.lap(part)
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
