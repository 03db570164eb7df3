"""The current branch of a run, derived from events.jsonl alone.

A run abandons completed steps when it rolls back, when it resumes from an earlier checkpoint, and
when a user resumes it from a chosen checkpoint. The records of the abandoned steps then no longer
apply. Otherwise a rollback on an abandoned branch would also apply to the checkpoint of the same
step on the next branch, and the samples that the rollback skipped would never be read.

Only the order of the events counts, not their times. A checkpoint is published only after all
earlier events are on the disk, so the order is known even if the event of the save itself is lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from threefold.run_folder.checkpoint_folders import stamp_of
from threefold.run_folder.json_lines import MAX_INTEGER_IN_LINE
from threefold.run_folder.progress import Progress, Read, read_from

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
        reads: (step, samples) -> the parts of the data that the run had left (`Progress.read`), for
            the steps of `rolled_back` and `resumed` of any branch
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
    reads: dict[tuple[int, int], Read] = field(default_factory=dict)
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
        return Progress(step, samples, self.reads.get((step, samples), ()))

    def first_samples(self) -> dict[int, int]:
        """Return step -> first sample read next, for steps after which the data position jumped."""
        return self.resumed | self.rolled_back

    def apply(self, event: dict[str, Any]) -> None:
        """Update the history with the next event."""
        kind, step = event["event"], event["step"]
        if "read_parts" in event:
            at = event["to"] if kind == "rollback" else step
            self.reads[at, event.get("samples", 0)] = read_from(event["read_parts"])
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
            saved = {each for each in self.saved if each <= step} if is_here else set()
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
