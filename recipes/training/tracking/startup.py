"""Where the time goes between a command and the end of its first step."""

import os
import time

from recipes.training.runtime.launchers import age_seconds, launchers_of


class Startup:
    """A stopwatch that runs since the launcher has started, lap by lap."""

    def __init__(self):
        self.running = True
        self.seconds: dict[str, float] = {}  # by part, in the order of the first laps
        here = age_seconds(os.getpid())
        self._last = time.monotonic() - here
        launcher = launcher_age_seconds()
        if launcher is not None:
            self.seconds["launcher"] = launcher - here

    def lap(self, part: str) -> None:
        """What was done since the last lap was this; a part may have several laps."""
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def stop(self, part: str) -> "Startup":
        """The last lap."""
        self.lap(part)
        self.running = False
        return self

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"started in {sum(self.seconds.values()):.1f} s: {parts}"


def launcher_age_seconds() -> float | None:
    """Since when the launcher of this process runs on this node; None where that is not known.

    `torchrun` may start ranks again hours after itself.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return None
    try:
        launchers = launchers_of(os.getpid())
        return age_seconds(launchers[-1]) if launchers else None
    except OSError:  # one has just ended
        return None
