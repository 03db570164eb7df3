"""The progress of a run, its current branch, its checkpoint folders, and its wall time by cause.

A run abandons completed steps when it rolls back, when it resumes from an earlier checkpoint, and
when a user resumes it from a chosen checkpoint. The records of the abandoned steps then no longer
apply. Otherwise a rollback on an abandoned branch would also apply to the checkpoint of the same
step on the next branch, and the samples that the rollback skipped would never be read.

Only the order of the events counts, not their times. A checkpoint is published only after all
earlier events are on the disk, so the order is known even if the event of the save itself is lost.
"""

import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from models.errors import a_few, suggestion, why_no_folder
from threefold.config.phases import PhasePlan
from threefold.config.sections import FORMER_NAMES, REPOSITORY, short, with_current_keys
from threefold.run_folder.json_lines import MAX_INTEGER_IN_LINE, flush, number
from threefold.runtime.exits import INTERRUPTED

# The progress: the steps of a run, and what it has read of the data.


class LeftPart(NamedTuple):
    """A part of the data that a run has left.

    Attributes:
        samples: number of samples that the run had read when it left the part
    """

    part: int
    samples: int


LeftParts = tuple[LeftPart, ...]


class ConsumedRange(NamedTuple):
    """Successive samples that belong to one part of the data.

    Attributes:
        first, stop: the run's samples first .. stop - 1
    """

    part: int
    first: int
    stop: int


@dataclass(frozen=True)
class Progress:
    """The number of steps that a run has completed, and the samples that it has read.

    The steps do not determine the samples, because the batch may have changed, and a rollback skips
    samples.

    Attributes:
        step: number of completed steps
        left_parts: the parts that the run has left, in the order of their samples; the samples
            after the last entry belong to the part of the last completed step. A part may occur
            twice if the run has rolled back to an earlier phase.
    """

    step: int = 0
    samples: int = 0
    left_parts: LeftParts = ()

    def after(self, step: int, plan: PhasePlan) -> "Progress":
        """Return the progress after a later step, which may lie beyond the last step of the run."""
        samples, left, part = self.samples, self.left_parts, plan.at(self.step).part
        for segment in plan.segments:
            first = max(segment.first, self.step + 1)
            last = step if segment is plan.segments[-1] else min(segment.last, step)
            if first > last:
                continue
            if segment.part != part:
                left, part = _left(left, part, samples), segment.part
            samples += (last - first + 1) * segment.recipe.batch.global_sequences
        return Progress(max(step, self.step), samples, left)

    def left(self, plan: PhasePlan) -> "Progress":
        """Return the progress of a run that leaves the present part of the data."""
        part = plan.at(self.step).part
        return replace(self, left_parts=_left(self.left_parts, part, self.samples))

    def moved_to(self, step: int, plan: PhasePlan) -> "Progress":
        """Return the progress of a run that rolls back to a step, and reads the next samples."""
        here, there = plan.at(self.step).part, plan.at(step).part
        left = self.left_parts
        if here != there:
            left = _left(left, here, self.samples)
        return Progress(step, self.samples, left)

    def consumed_ranges(self, plan: PhasePlan) -> Iterator[ConsumedRange]:
        """Yield the samples read so far, part by part."""
        begin = 0
        for part, end in _left(self.left_parts, plan.at(self.step).part, self.samples):
            yield ConsumedRange(part, begin, end)
            begin = end

    def tokens(self, plan: PhasePlan) -> int:
        """Return the number of tokens read."""
        return sum(
            (consumed.stop - consumed.first) * plan.length_of_part(consumed.part)
            for consumed in self.consumed_ranges(plan)
        )

    def record(self) -> dict[str, Any]:
        """Return the fields of an event: the samples, and the parts that the run has left."""
        left = {"read_parts": [list(part) for part in self.left_parts]} if self.left_parts else {}
        return {"samples": self.samples} | left


def left_parts_from(record: Any) -> LeftParts:
    """Return `Progress.left_parts` from its record in JSON; empty if it is missing or damaged."""
    parts = record if isinstance(record, list) else []
    is_sound = all(
        isinstance(part, list | tuple)
        and len(part) == 2
        and all(type(count) is int and 0 <= count <= MAX_INTEGER_IN_LINE for count in part)
        for part in parts
    )
    return tuple(LeftPart(*part) for part in parts) if is_sound else ()


def _left(parts: LeftParts, part: int, samples: int) -> LeftParts:
    """Return `parts` with the part that the run leaves, if the run has read samples of it.

    Args:
        parts: the parts that the run has left before
        part: number of the part that the run leaves
        samples: number of samples read so far
    """
    is_empty = samples == (parts[-1].samples if parts else 0)
    return parts if is_empty else (*parts, LeftPart(part, samples))


# The checkpoint folders of a run: naming, publishing and setting aside.
#
# A folder named `step-0000100` is a complete checkpoint: it was written as
# `step-0000100.incomplete` and then renamed. A folder whose name begins with `abandoned-` belongs
# to an abandoned branch.

NAME = re.compile(r"step-\d{7,}")
INCOMPLETE = "step-*.incomplete"
ABANDONED_PREFIX = "abandoned-"
ABANDONED = ABANDONED_PREFIX + "*"


def publish(workspace: Path, checkpoint: Path) -> None:
    """Publish a complete checkpoint with one rename."""
    if checkpoint.exists():  # a damaged checkpoint, which the run has skipped
        set_aside(checkpoint)
    os.rename(workspace, checkpoint)
    flush(checkpoint.parent)


def remove_debris(folder: Path) -> None:
    """Delete the folders of unfinished saves."""
    for debris in folder.glob(INCOMPLETE):
        shutil.rmtree(debris, ignore_errors=True)


def set_aside(checkpoint: Path, stamp: str | None = None) -> Path:
    """Rename a checkpoint so that it is kept, but no longer found by a resuming run.

    Returns its new path.

    Args:
        stamp: part of the new name, shared by all checkpoints and the metrics of a branch; None for
            the current time
    """
    name = f"{ABANDONED_PREFIX}{stamp or time_stamp()}-{checkpoint.name}"
    os.rename(checkpoint, checkpoint.with_name(name))
    return checkpoint.with_name(name)


def stamp_of(abandoned: Path) -> str | None:
    """Return the stamp in an abandoned checkpoint's name; None if it is not abandoned."""
    match = re.fullmatch(rf"{ABANDONED_PREFIX}(.+)-{NAME.pattern}", abandoned.name)
    return match[1] if match else None


def time_stamp() -> str:
    """Return the time and a random number, as part of a unique file name."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}.{secrets.token_hex(4)}"


def published(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=step_of)


def newest_abandoned(folder: Path) -> Path | None:
    """Return the newest checkpoint of the branch that was abandoned last, if there is one."""
    paths = [path for path in folder.glob(ABANDONED) if stamp_of(path) and path.is_dir()]
    return max(
        paths,
        key=lambda path: (str(stamp_of(path)), int(path.name.rpartition("-")[2])),
        default=None,
    )


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint of a folder; 0 if there is none."""
    return max(map(step_of, published(folder)), default=0)


def no_checkpoint(path: Path) -> str:
    """Say that a path has no checkpoint: what was looked for, where, and what exists there."""
    if not path.exists():
        problem = f"{path} {why_no_folder(path)}"
    elif abandoned := newest_abandoned(path / "checkpoints") or newest_abandoned(path):
        return (
            f"the current branch of {path} has not saved a checkpoint yet; use one of an earlier "
            f"branch, for example {abandoned}"
        )
    elif path.is_dir():
        problem = f"{path} has no checkpoint: neither manifest.json nor checkpoints/step-..."
    else:
        problem = f"{path} is a file, not a run folder or a checkpoint"
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    for folder in (parent, parent / "checkpoints"):
        if saves := published(folder):
            newest_first = [save.name for save in reversed(saves)]
            return f"{problem}; {short(folder)} has {a_few(newest_first)}"
    for folder in (path, parent / "runs", parent, REPOSITORY / "runs"):
        runs = [run for run in sorted(folder.glob("*")) if published(run / "checkpoints")]
        if runs:
            wanted = "" if path.exists() else str(path)
            return f"{problem}; {suggestion(wanted, [str(short(run)) for run in runs])}"
    return (
        f"{problem}; train a run first, for example with deepspeed --num_gpus 2 recipes/pretrain.py"
    )


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:07d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


# The events of a run, and its current branch.

# By event, in addition to the step.
REQUIRED_FIELDS = {"rollback": {"to", "samples"}, "branch": {"checkpoint", "stamp"}}
FIELDS: dict[str, tuple[type, ...]] = {  # of any event that has them
    "step": (int,),
    "to": (int,),
    "samples": (int,),
    "checkpoint": (str,),
    "stamp": (str,),
    "once": (str, type(None)),
    "resume": (str, type(None)),
    "parent": (dict, type(None)),
    "data_parts": (list, type(None)),
}


@dataclass(frozen=True)
class Branch:
    """A user's request to continue from a chosen checkpoint, or to start again.

    Attributes:
        step: step of the checkpoint; 0 if the run starts again
        checkpoint: name of the checkpoint in the run's folder, its absolute path if it is
            elsewhere, or empty if the run starts again
        stamp: part of the names of the checkpoints and metrics that were set aside for the branch
        pending: True until a process starts to train on the branch
    """

    step: int
    checkpoint: str
    stamp: str
    pending: bool = True


@dataclass
class History:
    """The events that apply to the current branch of a run.

    Attributes:
        rolled_back: checkpoints that the run has rolled back to since saving them, as step -> first
            sample to read next
        resumed: steps after which the run was resumed, as step -> first sample read next
        branch: the newest request to continue from a chosen checkpoint
        requests: (name, value) of each `--resume` option that was applied with `--resume-once`
        saved: steps of the branch whose checkpoints were published; retention may have deleted the
            older ones
        left_parts: (step, samples) -> `Progress.left_parts`, for the steps of `rolled_back` and
            `resumed` of any branch
        data_parts: (step, samples) -> fingerprints of the parts of the data at a rollback, from the
            second part on
        parent: the checkpoint of another run, or of an abandoned branch, at which the newest branch
            begins
        turns: for each event after which the run continued from another step than the one before,
            the last step that it kept; -1 if it kept none
    """

    rolled_back: dict[int, int] = field(default_factory=dict)
    resumed: dict[int, int] = field(default_factory=dict)
    branch: Branch | None = None
    requests: set[tuple[str, str]] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    turns: list[int] = field(default_factory=list)
    left_parts: dict[tuple[int, int], LeftParts] = field(default_factory=dict)
    data_parts: dict[tuple[int, int], list[dict[str, Any]]] = field(default_factory=dict)
    parent: dict[str, Any] | None = None
    _targets: list[int] = field(default_factory=list)
    _left: dict[str, tuple[dict[int, int], dict[int, int]]] = field(default_factory=dict)

    def rollbacks(self, step: int) -> int:
        """Return the number of rollbacks since the run saved the checkpoint of a step.

        Rollbacks to earlier checkpoints do not count, because the run has since trained past the
        steps that caused them.
        """
        return sum(target >= step for target in self._targets)

    def reaches(self, step: int, *, turns: int) -> bool:
        """Return True if the current branch has passed through a state of the run.

        Args:
            step: number of completed steps of the state
            turns: number of `turns` when the state existed
        """
        return all(step <= last for last in self.turns[turns:])

    def progress_at(self, step: int, samples: int) -> Progress:
        """Return the progress of a run that continues after a step with the next sample."""
        return Progress(step, samples, self.left_parts.get((step, samples), ()))

    def first_samples(self) -> dict[int, int]:
        """Return step -> first sample read next, for steps after which the data position jumped."""
        return self.resumed | self.rolled_back

    def apply(self, event: dict[str, Any]) -> None:
        """Update the history with the next event."""
        kind, step = event["event"], event["step"]
        if "read_parts" in event:
            at = event["to"] if kind == "rollback" else step
            self.left_parts[at, event.get("samples", 0)] = left_parts_from(event["read_parts"])
            if "data_parts" in event:
                self.data_parts[at, event.get("samples", 0)] = event["data_parts"]
        if kind == "start":
            self.turns.append(-1)
            self._forget(after=-1)
            self._train()
        elif kind == "branch":
            self.turns.append(-1)
            chosen = event["checkpoint"]
            is_here = bool(chosen) and not Path(chosen).is_absolute()
            saved = {number for number in self.saved if number <= step} if is_here else set()
            self._begin_at(Path(chosen), stamp=event["stamp"])
            self._forget(after=step - 1)
            self.saved = saved
            self._targets.clear()
            self.branch = Branch(step, event["checkpoint"], event["stamp"])
            if event.get("once"):
                self.requests.add((event["once"], event.get("resume", "")))
            if "samples" in event:
                self.resumed[step] = event["samples"]
            self.parent = event.get("parent")
        elif kind == "resume":
            self.turns.append(step)
            self._forget(after=step)
            self._train()
            if "samples" in event:  # older versions did not record it
                self.resumed[step] = event["samples"]
        elif kind == "rollback":
            self.turns.append(event["to"])
            self._forget(after=event["to"])
            self.rolled_back[event["to"]] = event["samples"]
            self._targets.append(event["to"])
        elif kind == "save":
            self.rolled_back.pop(step, None)
            self.resumed.pop(step, None)
            self._targets.clear()
            self.saved.add(step)

    def _forget(self, *, after: int) -> None:
        """Drop the records of later steps, because the run is about to repeat these steps."""
        for known in (self.rolled_back, self.resumed):
            for step in [step for step in known if step > after]:
                del known[step]
        self.saved = {step for step in self.saved if step <= after}
        if after < 0:
            self._targets.clear()

    def _begin_at(self, checkpoint: Path, *, stamp: str) -> None:
        """Replace the records of all steps if the checkpoint belongs to another branch.

        The records of the current branch are kept under the stamp of its checkpoints, in case the
        run later resumes from one of these checkpoints.
        """
        self._left.setdefault(stamp, (self.rolled_back, self.resumed))
        rolled_back, resumed = self.rolled_back, self.resumed
        if checkpoint.is_absolute():  # another run, whose jumps in the data are not recorded here
            rolled_back, resumed = {}, {}
        elif abandoned := stamp_of(checkpoint):
            rolled_back, resumed = self._left.get(abandoned, (rolled_back, resumed))
        self.rolled_back, self.resumed = dict(rolled_back), dict(resumed)

    def _train(self) -> None:
        if self.branch is not None and self.branch.pending:
            self.branch = replace(self.branch, pending=False)


def replay(events: Iterable[dict[str, Any]]) -> History:
    """Derive the history of a run from its events, oldest first.

    Events that lack a required field, or have one of another type, are skipped, like lines that
    cannot be parsed.
    """
    history = History()
    for event in events:
        required = {"step"} | REQUIRED_FIELDS.get(event["event"], set())
        if event.keys() >= required and _is_sound(event):
            history.apply(event)
    return history


def current_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event that an earlier version may have recorded, with the current names."""
    event = with_current_keys(event)
    event["event"] = FORMER_NAMES.get(event["event"], event["event"])
    parts = event.get("data_parts")
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        event["data_parts"] = [with_current_keys(part) for part in parts]
    return event


def _is_sound(event: dict[str, Any]) -> bool:
    """Return True if the fields of an event that this module reads have the right types."""
    values = {key: event[key] for key in FIELDS if key in event}
    if any(type(value) not in FIELDS[key] for key, value in values.items()):
        return False
    counts = (value for value in values.values() if isinstance(value, int))
    names = (value for value in values.values() if isinstance(value, str))
    parts = event.get("data_parts") or []
    return (
        all(0 <= count <= MAX_INTEGER_IN_LINE for count in counts)
        and not any("\0" in name for name in names)
        and all(isinstance(part, dict) for part in parts)
    )


# Wall time of a run by cause: kept steps, repeated steps, starts, and waiting.
#
# The share of kept steps is the run's goodput. Everything is derived from metrics.jsonl, which
# holds the kept steps, and from events.jsonl, which records the starts and the repeated steps. A
# pause between an orderly end of the run and its next start by a command is not part of the wall
# time: it says nothing about the run, and can be a night.

FIRST_STEP = "first step"  # part of a start-up that metrics.jsonl also counts as a step


class WallTime:
    """The wall time of a run since the beginning of its first start-up, by cause; in seconds.

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
        # The first event was written at the end of the first start-up, so `began` is too late by
        # its duration.
        self._began_late = False
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
        if self._began_late and self.began is not None:
            self.began -= starting
        self._began_late = False
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
        if kind in ("attempt", "start", "resume"):
            self._began_late = self.began is None and kind != "attempt"
            if self.began is None:
                self.began = _number(time) or None
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
    ordered = sorted(losses.items(), key=lambda item: -item[1])
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
