"""The folder of one run: who holds it, its recipe, its metrics and its events."""

import fcntl
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from recipes.training.recipe import REPOSITORY, Recipe


class RunFolder:
    """`runs/<name>/`: recipe.toml, metrics.jsonl, events.jsonl, checkpoints/, wandb/."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self._lock = None

    def hold(self) -> None:
        """Create the folder and lock it until this process ends.

        Raises:
            ValueError: another process holds it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a+")
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be written ({error.strerror}); use --run-dir with a folder "
                f"that can"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ValueError(
                f"{self.path} is in use by {lock.read().strip() or 'another process'}; wait for "
                f"it, or use --run-dir for a second run"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._lock = lock

    def prepare(self, recipe: Recipe, done: int, *, fresh: bool) -> None:
        """Make the folder ready to go on after step `done`.

        fresh: what an earlier run left here is moved beside it, so that nothing is lost
        """
        if fresh and any(entry.name != "lock" for entry in self.path.iterdir()):
            aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%dT%H%M%S')}")
            os.rename(self.path, aside)
            self.hold()
            print(f"the run that was there is now {aside}")
        _replace(self.path / "recipe.toml", recipe.toml())
        kept = [line for line in self.read_metrics() if line["step"] <= done]
        _replace(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def event(self, event: str, step: int, **facts: Any) -> None:
        """Append to events.jsonl: start, resume, save, warning, stop or end."""
        _append(self.events, {"event": event, "step": step, "time": time.time()} | facts)

    def metric(self, line: dict[str, Any]) -> None:
        """Append a step's line to metrics.jsonl; floats keep all their digits."""
        _append(self.metrics, line)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl.

        Raises:
            ValueError: a line that ends is no JSON.
        """
        if not self.metrics.exists():
            return []
        text = self.metrics.read_text(encoding="utf-8", errors="replace")
        lines = []
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            try:
                if line.endswith("\n"):
                    lines.append(json.loads(line))
            except json.JSONDecodeError:
                raise ValueError(
                    f"{self.metrics}, line {number}, is no JSON; remove the line to go on"
                ) from None
        return lines


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def _replace(file: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    fresh = file.with_name(file.name + ".incomplete")
    with fresh.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(fresh, file)


def code_version() -> str | None:
    """The repository's commit, "-dirty" with changes; None outside git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
