"""The folder of one run: who holds it, its recipe, its metrics and its events."""

import errno
import fcntl
import json
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from models.errors import UserError
from recipes.training.recipe import Recipe


class RunFolder:
    """`runs/<name>/`: recipe.toml, metrics.jsonl, events.jsonl, checkpoints/, wandb/."""

    def __init__(self, path: Path):
        path = path.resolve()  # where a link points: there the next run goes too
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self._metric_lines, self._event_lines = LineFile(self.metrics), LineFile(self.events)
        self._lock = None

    def hold(self) -> None:
        """Create the folder and lock it until this process ends.

        Raises:
            UserError: another process holds it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a+")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); use --run-dir with a folder "
                f"that can"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"{self.path} is in use by {lock.read().strip() or 'another process'}; wait for "
                f"it, or use --run-dir for a second run"
            ) from None
        try:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror}); make room, or use --run-dir "
                f"with another folder"
            ) from None
        self._lock = lock

    def prepare(self, recipe: Recipe, done: int, *, fresh: bool, branching: bool = False) -> None:
        """Make the folder ready to go on after step `done`.

        fresh: what an earlier run left here is moved beside it, so that nothing is lost
        branching: the steps after `done` will be others; the lines of those that were are kept

        Raises:
            UserError: the folder cannot be written, or a line of metrics.jsonl is no JSON.
        """
        try:
            if fresh and any(entry.name != "lock" for entry in self.path.iterdir()):
                aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%dT%H%M%S')}")
                os.rename(self.path, aside)
                self.hold()
                print(f"the run that was there is now {aside}")
            write_whole(self.path / "recipe.toml", recipe.toml())
            lines = self.read_metrics()
            kept = [line for line in lines if line["step"] <= done]
            if branching and len(kept) < len(lines):
                stamp = f"{time.strftime('%Y%m%dT%H%M%S')}.{time.time_ns() % 10**9:09d}"
                shutil.copyfile(self.metrics, self.path / f"metrics.{stamp}.jsonl")
            write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        except OSError as error:
            raise UserError(
                f"{error.filename or self.path} cannot be written ({error.strerror}); make room, "
                f"or use --run-dir with another folder"
            ) from None

    def event(self, event: str, step: int, **facts: Any) -> None:
        """Append to events.jsonl: start, resume, first_step, skip, save, ..."""
        self._event_lines.append({"event": event, "step": step, "time": time.time()} | facts)

    def metric(self, line: dict[str, Any]) -> None:
        """Append a step's line to metrics.jsonl; floats keep all their digits."""
        self._metric_lines.append(line)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl.

        Raises:
            UserError: a line that ends is no JSON.
        """
        return _read_lines(self.metrics)

    def read_events(self) -> list[dict[str, Any]]:
        """The complete lines of events.jsonl.

        Raises:
            UserError: a line that ends is no JSON.
        """
        return _read_lines(self.events)


def _read_lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8", errors="replace")
    lines = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            if line.endswith("\n"):
                lines.append(json.loads(line))
        except json.JSONDecodeError:
            raise UserError(
                f"{file}, line {number}, is no JSON; remove the line to go on"
            ) from None
    return lines


class LineFile:
    """A file of JSON lines that is appended to, whole lines only, from any thread.

    What a full disk does not take is kept and written with the next line.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting: list[str] = []
        self._lock = threading.Lock()

    def append(self, line: dict[str, Any]) -> None:
        """Write a line, and those that are waiting."""
        with self._lock:
            self._waiting.append(json.dumps(line) + "\n")
            try:
                self._write("".join(self._waiting))
            except OSError as error:
                if len(self._waiting) == 1:  # the first of a row
                    print(f"{self.path} cannot be written ({error.strerror}); its lines are kept "
                          f"and written as soon as they can be", file=sys.stderr)  # fmt: skip
                return
            self._waiting.clear()

    def _write(self, text: str) -> None:
        with self.path.open("ab", buffering=0) as stream:
            before, content = stream.tell(), text.encode()
            try:
                written = stream.write(content)
            except OSError:
                stream.truncate(before)
                raise
            if written < len(content):
                stream.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def write_whole(file: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    fresh = file.with_name(file.name + ".incomplete")
    try:
        with fresh.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(fresh, file)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
