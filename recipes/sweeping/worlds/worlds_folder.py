"""The folder of the worlds that one command starts, with the heartbeat that their ranks watch."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

from recipes.training.run_folder.lock import is_running, machine_id
from recipes.training.runtime.launchers import start_ticks

HEARTBEAT_SECONDS = 2.0
ABANDONED_SECONDS = 60.0  # without a heartbeat; ranks exit after 30 (rank_watch.py)


class WorldsFolder:
    """A folder of one command's worlds, next to those of other commands.

    Args:
        parent: the folder of all commands; all ranks can access it
    """

    def __init__(self, parent: Path):
        self.parent = parent
        self.path = parent / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.heartbeat = self.path / "heartbeat"
        self._closed = threading.Event()

    def create(self) -> None:
        """Create the folder.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(parents=True)
        self.heartbeat.touch()
        (self.path / "owner.json").write_text(json.dumps(_identity()))

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


def _identity() -> dict[str, Any]:
    """Return the identity of this process, for `is_running`."""
    process = os.getpid()
    return {"machine": machine_id(), "process": process, "started": start_ticks(process)}


def _is_abandoned(folder: Path, now: float) -> bool:
    """Return True if the command that a folder belongs to appears to be dead.

    Args:
        folder: the command's folder
        now: time of the newest heartbeat of this command
    """
    owner = _read_owner(folder / "owner.json")
    with contextlib.suppress(OSError):
        if owner.get("machine") == machine_id():
            return not is_running(owner)
        return now - (folder / "heartbeat").stat().st_mtime > ABANDONED_SECONDS
    return False


def _read_owner(file: Path) -> dict[str, Any]:
    """Return the identity in a file; empty if the file does not exist or is damaged."""
    try:
        content = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
