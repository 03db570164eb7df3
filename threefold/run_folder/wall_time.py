"""Wall time of a run by cause: kept steps, repeated steps, starts, and waiting.

The share of kept steps is the run's goodput. Everything is derived from metrics.jsonl, which holds
the kept steps, and from events.jsonl, which records the starts and the repeated steps. A pause
between an orderly end of the run and its next start by a command is not part of the wall time: it
says nothing about the run, and can be a night.
"""

import math
from collections.abc import Iterable
from typing import Any

from threefold.run_folder.json_lines import number
from threefold.runtime.exits import INTERRUPTED

FIRST_STEP = "first step"  # part of a start-up that metrics.jsonl also counts as a step


class WallTime:
    """The wall time of a run since its first start, by cause; times in seconds.

    Args:
        events: all events of the run, oldest first
        metrics: the lines of the steps that were kept

    Attributes:
        paused: the time between orderly ends of the run and the commands that continued it
    """

    def __init__(
        self, events: Iterable[dict[str, Any]] = (), metrics: Iterable[dict[str, Any]] = ()
    ):
        self.began: float | None = None
        self.starts = 0
        self.kept = self.between = self.validating = self.starting = self.repeated = 0.0
        self.paused = 0.0
        self._ended: float | None = None  # time of an orderly end, until the next start
        self._gap = 0.0  # between an orderly end and the end of the start-up that followed it
        for event in events:
            self._note(event)
        for line in metrics:
            self.add(line)

    def add(self, line: dict[str, Any]) -> None:
        """Add the metrics of a step."""
        between = _number(line.get("between_seconds"))
        self.kept += _number(line.get("step_seconds")) - between
        self.between += between
        self.validating += _evaluation_seconds(line)

    def started(self, seconds: dict[str, Any]) -> None:
        """Add the parts of a start-up."""
        starting = sum(_number(s) for part, s in seconds.items() if part != FIRST_STEP)
        self.starting += starting
        self.paused += max(0.0, self._gap - starting)
        self._gap = 0.0

    def shares(self, now: float) -> dict[str, float]:
        """Return the shares of the time until `now` by cause; they add up to 1.

        `waiting` is the rest: the time between a failure and the next start.

        Args:
            now: seconds since the epoch, as in events.jsonl
        """
        known = {
            "kept": self.kept,
            "between": self.between,
            "validating": self.validating,
            "starting": self.starting,
            "repeated": self.repeated,
        }
        spent = sum(known.values())
        total = max(self.seconds(now), spent, 1e-9)
        known["waiting"] = total - spent
        return {name: seconds / total for name, seconds in known.items()}

    def seconds(self, now: float) -> float:
        """Return the seconds since the first start, without the pauses."""
        return now - self.began - self.paused if self.began is not None else 0.0

    def hours(self, now: float) -> float:
        """Return the hours since the first start, without the pauses."""
        return self.seconds(now) / 3600

    def _note(self, event: dict[str, Any]) -> None:
        kind, time = event.get("event"), event.get("time")
        if kind in ("attempt", "start", "resume") and self.began is None:
            self.began = _number(time) or None
        if kind in ("attempt", "start", "resume"):
            self._note_start(event)
        if kind in ("start", "resume"):
            self.starts += 1
        elif kind == "end" or (kind == "stop" and event.get("exit_code") == INTERRUPTED):
            self._ended = _number(time) or None
        elif kind == "first_step" and isinstance(event.get("seconds"), dict):
            self.started(event["seconds"])
        elif kind == "repeat":
            self.repeated += _number(event.get("seconds"))

    def _note_start(self, event: dict[str, Any]) -> None:
        """Add the pause before a start.

        The event `attempt` is written before a start-up, the events `start` and `resume` after it.
        A later attempt of the same launch.py continues without a command, so it ends no pause.
        """
        self.paused += self._gap  # the start before this one has not come to its first step
        self._gap, ended, self._ended = 0.0, self._ended, None
        gap = max(0.0, _number(event.get("time")) - ended) if ended else 0.0
        if event.get("event") != "attempt":
            self._gap = gap
        elif event.get("number") == 1:
            self.paused += gap


def seconds_of(lines: Iterable[dict[str, Any]]) -> float:
    """Return the time that some steps and their evaluations took."""
    return sum(_number(line.get("step_seconds")) + _evaluation_seconds(line) for line in lines)


def _evaluation_seconds(line: dict[str, Any]) -> float:
    """Return the time of the validation and the tasks after a step."""
    return _number(line.get("validation_seconds")) + _number(line.get("task_seconds"))


def shares_text(shares: dict[str, float]) -> str:
    """Return the shares above a thousandth for a message, the largest losses first."""
    losses = {name: share for name, share in shares.items() if name != "kept" and share >= 1e-3}
    ordered = sorted(losses.items(), key=lambda each: -each[1])
    return ", ".join(f"{CAUSE_TEXTS[name]} {share:.1%}" for name, share in ordered)


CAUSE_TEXTS = {
    "between": "between steps",
    "validating": "validation",
    "starting": "starts",
    "repeated": "repeated steps",
    "waiting": "waiting",
}


def _number(value: Any) -> float:
    """Return a number of a file that a user may have edited; 0 for anything else."""
    seconds = number(value)
    return seconds if seconds is not None and math.isfinite(seconds) else 0.0
