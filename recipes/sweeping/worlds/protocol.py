"""Files through which a scheduler and the ranks of a world talk, on any launcher.

All files exist before the ranks start and are replaced as a whole: a network file system shows a
new content at the next opening, but may hide a new file for half a minute. A message has the number
of its trial; number 0 is the start of the world.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

START = 0


class WorldFiles:
    """The files of a world, in a folder that scheduler and ranks see.

    The ranks end when the folder disappears.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings = folder / "settings.json"  # of the scheduler, for all trials
        self.request = folder / "request.json"  # of the scheduler: the next trial
        self.result = folder / "result.json"  # of rank 0: the result of a trial
        self.failed = folder / "failed.json"  # of any rank: a trial has failed
        self.launcher_log = folder / "launcher.log"
        self.heartbeat = folder.parent / "heartbeat"

    def failure(self, rank: int) -> Path:
        """Return the file in which a rank describes its failure."""
        return self.folder / f"failure-{rank}.json"

    def log(self, rank: int) -> Path:
        """Return the file with the output of a rank."""
        return self.folder / f"rank{rank}.log"

    def create(self, settings: dict[str, Any], size: int) -> None:
        """Create the folder and its files for a world of `size` ranks."""
        self.folder.mkdir()
        for rank in range(size):
            write_message(self.failure(rank), {})
        for file in (self.request, self.result, self.failed):
            write_message(file, {})
        write_message(self.settings, settings | {"number": START})


def write_message(file: Path, message: dict[str, Any]) -> None:
    """Replace a file by a message."""
    fresh = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}")
    fresh.write_text(json.dumps(message))
    fresh.rename(file)


def read_message(file: Path, number: int) -> dict[str, Any] | None:
    """Return the message of a file if it belongs to a trial, otherwise None."""
    try:
        message = json.loads(file.read_text())
    except (OSError, ValueError):  # replaced at this moment, on a network file system
        return None
    return message if message.get("number") == number else None
