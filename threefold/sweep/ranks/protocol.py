"""Files through which a scheduler and its ranks communicate, and the end of ranks without one.

All files exist before the ranks start, and are later replaced as a whole. A network file system
shows new content the next time a file is opened, but it may hide a new file for half a minute. Each
message contains the number of its trial; number 0 stands for the start of the workers.
"""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

START = 0


class WorkerFiles:
    """The files of workers, in a folder that the scheduler and all ranks can access.

    The ranks exit when the folder disappears.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings = folder / "settings.json"  # from the scheduler, for all trials
        self.request = folder / "request.json"  # from the scheduler: the next trial
        self.result = folder / "result.json"  # from rank 0: the result of a trial
        self.failed = folder / "failed.json"  # from any rank: a trial has failed
        self.launcher_log = folder / "launcher.log"
        self.heartbeat = folder.parent / "heartbeat"

    def failure(self, rank: int) -> Path:
        """Return the file in which a rank describes its failure."""
        return self.folder / f"failure-{rank}.json"

    def create(self, settings: dict[str, Any], size: int) -> None:
        """Create the folder and its files for `size` workers."""
        self.folder.mkdir()
        for rank in range(size):
            write_message(self.failure(rank), {})
        for file in (self.request, self.result, self.failed):
            write_message(file, {})
        write_message(self.settings, settings | {"number": START})


def write_message(file: Path, message: dict[str, Any]) -> None:
    """Replace the content of a file with a message."""
    fresh = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}")
    fresh.write_text(json.dumps(message), encoding="utf-8")
    fresh.rename(file)


def read_message(file: Path, number: int) -> dict[str, Any] | None:
    """Return the message of a file if it belongs to a trial, otherwise None."""
    try:
        message = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # being replaced, on a network file system
        return None
    is_message = isinstance(message, dict) and message.get("number") == number
    return message if is_message else None


# A thread that ends its rank if the scheduler is gone or the trial is overdue.

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

    def __init__(self, files: WorkerFiles):
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
        """Return True if the scheduler has removed the folder."""
        try:
            self.files.settings.open("rb").close()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False
