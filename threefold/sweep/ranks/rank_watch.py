"""A thread that ends its rank if the scheduler is gone or the trial is overdue."""

import os
import threading
import time

from threefold.sweep.ranks.protocol import START, WorldFiles

SECONDS_WITHOUT_HEARTBEAT = 30.0
SECONDS_AFTER_LIMIT = 10.0  # a live scheduler ends a trial at its limit
WATCH_SECONDS = 0.5
ABANDONED = 75  # exit code of a rank that has ended itself


class RankWatch(threading.Thread):
    """Ends this process when its scheduler is gone or its trial takes too long.

    The clocks of different nodes may disagree, so the watch only checks that the heartbeat's
    modification time changes. It opens the file each time, because a network file system may
    otherwise return an outdated time.
    """

    def __init__(self, files: WorldFiles):
        super().__init__(name="rank watch", daemon=True)
        self.files = files
        self.number = START
        self._deadline: float | None = None

    def begin(self, number: int, seconds: float) -> None:
        """Record the start of a trial with a time limit."""
        self.number, self._deadline = number, time.monotonic() + seconds + SECONDS_AFTER_LIMIT

    def end(self) -> None:
        """Record the end of the trial."""
        self._deadline = None

    def run(self) -> None:
        """Watch until the process ends."""
        seen, seen_at = None, time.monotonic()
        while True:
            time.sleep(WATCH_SECONDS)
            now = time.monotonic()
            deadline = self._deadline
            if (beat := self._beat()) not in (seen, None):
                seen, seen_at = beat, now
            is_late = deadline is not None and now > deadline
            if is_late or now - seen_at > SECONDS_WITHOUT_HEARTBEAT or self._is_over():
                os._exit(ABANDONED)

    def _beat(self) -> int | None:
        try:
            with self.files.heartbeat.open(encoding="utf-8") as stream:
                return os.fstat(stream.fileno()).st_mtime_ns
        except OSError:
            return None

    def _is_over(self) -> bool:
        """Return True if the scheduler has removed the world."""
        try:
            self.files.settings.open("rb").close()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False
