"""Files of JSON lines that survive full disks and power losses, and files replaced as a whole."""

import contextlib
import errno
import json
import math
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import FULL_DISK_ERRORS

MAX_INTEGER_IN_LINE = 2**53  # of steps, samples and tokens in a line


class LineFile:
    """A file of JSON objects, one per line, that any thread may append to.

    A power loss can leave half a line or a block of NUL bytes. Readers skip such lines, and the
    next write starts on a new line. Lines that cannot be written to a full disk are kept in memory
    and written together with the next line. They are lost if the process ends first.

    Args:
        path: the file, which need not exist
        keys: the keys that every line has, with the types of their values; other lines are skipped
    """

    def __init__(self, path: Path, *, keys: Mapping[str, tuple[type, ...]]):
        self.path, self.keys = path, keys
        self._waiting: list[str] = []
        self._has_told = False  # True after the message that lines are waiting
        self._lock = threading.Lock()

    def append(self, line: dict[str, Any]) -> None:
        """Write the waiting lines and this one; print a message if the disk is full."""
        with self._lock:
            self._waiting.append(json.dumps(line) + "\n")
            try:
                self._write_waiting()
            except OSError as error:
                if not self._has_told:  # only for the first of several failures in a row
                    self._has_told = True
                    since = f" from step {line['step']} on" if line.get("step") else ""
                    print(f"warning: {_problem(self.path, error)}; the lines{since} stay in "
                          f"memory until they can be written", file=sys.stderr)  # fmt: skip

    def append_durably(self, line: dict[str, Any]) -> None:
        """Write a line, and wait until it is on the disk.

        Raises:
            OSError: the line could not be written, or could not be flushed to the disk.
        """
        with self._lock:
            self._waiting.append(json.dumps(line) + "\n")
            try:
                self._write_waiting()
            except OSError:
                self._waiting.pop()
                raise
            flush(self.path)
        flush(self.path.parent)

    def flush(self) -> None:
        """Wait until every appended line is on the disk.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock:
            if self._waiting:
                self._write_waiting()
            if self.path.exists():
                flush(self.path)

    def write_waiting(self) -> list[dict[str, Any]]:
        """Try to write the waiting lines; return those that cannot be written."""
        with self._lock:
            if self._waiting:
                with contextlib.suppress(OSError):
                    self._write_waiting()
            return [json.loads(line) for line in self._waiting]

    @property
    def is_written(self) -> bool:
        """True if the file has lines, and no line waits in memory for room on the disk."""
        with self._lock:
            return not self._waiting and self.path.is_file() and self.path.stat().st_size > 0

    def read(self) -> list[dict[str, Any]]:
        """Return the lines of the file that can be parsed, followed by the waiting lines.

        Raises:
            OSError: the file exists and cannot be read.
        """
        return self.parse(self.content())

    def parse(self, content: bytes) -> list[dict[str, Any]]:
        """Return the lines of a content of the file that can be parsed."""
        lines = map(self._parse, content.split(b"\n"))
        return [line for line in lines if line is not None]

    def cut(self, content: bytes, step: int) -> tuple[bytes, list[dict[str, Any]]]:
        """Split the bytes of a file whose lines have a key `step`, which never decreases.

        Only the end of the file is parsed: a million lines take 15 seconds.

        Returns:
            The bytes up to a step, and the later lines that can be parsed.
        """
        later: list[dict[str, Any]] = []
        end = len(content)
        while end:
            begin = content.rfind(b"\n", 0, end - 1) + 1
            line = self._parse(content[begin:end].rstrip(b"\n"))
            if line is not None and line["step"] <= step:
                return content[:end].removesuffix(b"\n") + b"\n", later[::-1]
            later += [line] if line is not None else []
            end = begin
        return b"", later[::-1]

    def content(self) -> bytes:
        """Return the bytes of the file, followed by the waiting lines.

        Raises:
            OSError: the file exists and cannot be read.
        """
        with self._lock:
            written = self.path.read_bytes() if self.path.exists() else b""
            waiting = "".join(self._waiting).encode()
        torn = waiting and written and not written.endswith(b"\n")
        return written + (b"\n" if torn else b"") + waiting

    def replace(self, text: str) -> None:
        """Replace the whole file, and drop the waiting lines.

        Raises:
            OSError: the file cannot be written; its content is unchanged.
        """
        with self._lock:
            write_whole(self.path, text)
            self._waiting.clear()
            self._has_told = False

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            content = json.loads(line.strip(b"\0"))
        except (ValueError, RecursionError):  # includes UnicodeDecodeError; deep nesting
            return None
        if not isinstance(content, dict):
            return None
        fits = all(type(content.get(key)) in types for key, types in self.keys.items())
        if not fits or any(too_large(content[key]) for key in self.keys):
            return None
        return content

    def _write_waiting(self) -> None:
        self._write("".join(self._waiting).encode())
        self._waiting.clear()
        if self._has_told:
            self._has_told = False
            with contextlib.suppress(OSError):  # stderr may be a file on a full disk
                print(f"{self.path} can be written again; the lines that stayed in memory are in "
                      f"it", file=sys.stderr)  # fmt: skip

    def _write(self, content: bytes) -> None:
        with self.path.open("a+b", buffering=0) as stream:
            before = stream.seek(0, os.SEEK_END)
            if before:
                stream.seek(before - 1)
                if stream.read(1) != b"\n":  # a torn line, which this line must not extend
                    content = b"\n" + content
            try:
                written = stream.write(content)
            except OSError:
                stream.truncate(before)
                raise
            if written < len(content):
                stream.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def _problem(path: Path, error: OSError) -> str:
    if error.errno in FULL_DISK_ERRORS:
        return f"the disk is full ({path})"
    return f"{path} cannot be written ({error.strerror})"


def number(value: Any) -> float | None:
    """Return a number of a file that a user may have edited; None for any other value.

    Integers beyond MAX_INTEGER_IN_LINE, which numpy and floats cannot hold exactly, count as
    damage.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if too_large(value) else float(value)


def too_large(value: Any) -> bool:
    """Return True for an integer above the limit, which only a damaged line contains."""
    return isinstance(value, int) and abs(value) > MAX_INTEGER_IN_LINE


def write_whole(file: Path, text: str, *, fresh: Path | None = None) -> None:
    """Write a file atomically: after a failure the previous file still exists, unchanged.

    Args:
        fresh: file on the same file system that is written first and then renamed; the default is
            the file's name with ".incomplete", which suits files with a single writer

    Raises:
        OSError: the file cannot be written; the error names `file`.
    """
    fresh = fresh or file.with_name(file.name + ".incomplete")
    try:
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(fresh, file)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a read-only disk, there is none
            fresh.unlink()
        raise OSError(error.errno, error.strerror, str(file)) from error


def flush(path: Path) -> None:
    """Wait until the content of a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The names of the metrics of validation sets and tasks in metrics.jsonl.

AVERAGED = "averaged_"  # before those of the average of the weights
POSITION_LOSSES = "position_losses"  # the end of the name of a list of losses
LOSS_OF_SET = re.compile(r"validation/(?P<name>[^/]+)/loss")
ACCURACY_OF_TASK = re.compile(r"tasks/(?P<name>[^/]+)/accuracy")


def with_metric_per_position(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics with one per part of the sequence, .../1 to .../N, in place of their lists."""
    lists = {
        name: value
        for name, value in metrics.items()
        if name.endswith(POSITION_LOSSES) and isinstance(value, list)
    }
    if not lists:
        return metrics
    expanded = {name: value for name, value in metrics.items() if name not in lists}
    for name, losses in lists.items():
        expanded |= {f"{name}/{number}": loss for number, loss in enumerate(losses, start=1)}
    return expanded


def validation_losses(metrics: Mapping[str, Any], *, averaged: bool = False) -> dict[str, float]:
    """Return the loss of each validation set by name, in nats per token; "" names a single set.

    averaged: the losses of the average of the weights
    """
    if averaged:
        of_average = (key for key in metrics if key.startswith(AVERAGED))
        metrics = {key.removeprefix(AVERAGED): metrics[key] for key in of_average}
    losses = _named(metrics, LOSS_OF_SET)
    if "validation_loss" in metrics:
        losses[""] = metrics["validation_loss"]
    return losses


def mean_validation_loss(metrics: Mapping[str, Any]) -> float | None:
    """Return the mean loss of the validation sets; None if there is none, or one is not finite."""
    losses = validation_losses(metrics).values()
    return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else None


def task_accuracies(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracy of each task by name."""
    return _named(metrics, ACCURACY_OF_TASK)


def _named(metrics: Mapping[str, Any], pattern: re.Pattern) -> dict[str, float]:
    """Return the values of the keys that match a pattern, by the pattern's group "name"."""
    matches = ((pattern.fullmatch(key), value) for key, value in metrics.items())
    return {match["name"]: value for match, value in matches if match}
