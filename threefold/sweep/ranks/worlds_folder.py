"""The folder of the worlds that one command starts, with the heartbeat that their ranks watch."""

import contextlib
import os
import re
import secrets
import shutil
import threading
from pathlib import Path

from threefold.run_folder.lock import is_running, machine_id
from threefold.runtime.environment import start_ticks

HEARTBEAT_SECONDS = 2.0
ABANDONED_SECONDS = 60.0  # without a heartbeat; ranks exit after 30 (rank_watch.py)


class WorldsFolder:
    """A folder of one command's worlds, next to those of other commands.

    Its name identifies the process that owns it, so that other commands can remove it even if the
    owner was killed before it wrote the first file.

    Args:
        parent: the folder of all commands; all ranks can access it
    """

    def __init__(self, parent: Path):
        self.parent = parent
        process = os.getpid()
        owner = f"{_machine()}-{process}-{start_ticks(process)}"
        self.path = parent / f"{owner}-{secrets.token_hex(4)}"
        self.heartbeat = self.path / "heartbeat"
        self._closed = threading.Event()

    def create(self) -> None:
        """Create the folder.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(parents=True)
        self.heartbeat.touch()

    def start_heartbeat(self) -> None:
        """Remove the folders that dead commands left behind, and start the heartbeat."""
        self._remove_abandoned()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Remove the folder, and those that dead commands left behind."""
        self._closed.set()
        self._remove_abandoned()
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another command uses it
            self.parent.rmdir()

    def _remove_abandoned(self) -> None:
        """Remove the folders of commands that no longer run.

        Their heartbeats are compared with this command's own, because the clocks of different
        nodes may disagree.
        """
        now = self.heartbeat.stat().st_mtime if self.heartbeat.exists() else 0.0
        for folder in self.parent.iterdir() if self.parent.exists() else ():
            if folder != self.path and _is_abandoned(folder, now):
                shutil.rmtree(folder, ignore_errors=True)

    def _beat(self) -> None:
        """Touch the heartbeat, which the ranks of this command watch."""
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.heartbeat)


def _machine() -> str:
    """Return the identifier of this machine, without characters that are unusual in file names."""
    return re.sub(r"\W+", "_", machine_id())


def _is_abandoned(folder: Path, now: float) -> bool:
    """Return True if the command that a folder belongs to appears to be dead.

    Args:
        folder: the command's folder
        now: time of the newest heartbeat of this command
    """
    owner = re.fullmatch(r"(\w+)-(\d+)-(\d+)-\w+", folder.name)
    if owner and owner[1] == _machine():
        return not is_running({"process": int(owner[2]), "started": int(owner[3])})
    with contextlib.suppress(OSError):
        heartbeat = folder / "heartbeat"
        newest = heartbeat if heartbeat.exists() else folder
        return now - newest.stat().st_mtime > ABANDONED_SECONDS
    return False
