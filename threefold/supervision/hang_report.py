"""Reports of a hang: each rank writes its activity, and one rank names the ranks that are behind.

The ranks of a hanging run cannot communicate; they exchange files in the run folder.
"""

import errno
import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from models.experts.overlap import running_helper
from threefold.config.loading import REPOSITORY
from threefold.supervision.breadcrumb import Breadcrumb
from threefold.supervision.flight_recorder import Launched, describe_waiting

TORCH_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))
OWN_COLLECTIVES = str(REPOSITORY / "models" / "parallel" / "collectives.py")  # has `wait_for`
MAX_RANKS_IN_MESSAGE = 8


@dataclass(frozen=True)
class Sighting:
    """The activity of a rank in a hanging run.

    Attributes:
        activity: the rank's breadcrumb, as text
        waits_in: the collective that the main thread was in; empty if it was in none
        at: the innermost line of this project or DeepSpeed
        launched: the operations launched on each process group; empty if the flight recorder is off
    """

    rank: int
    step: int
    activity: str
    waits_in: str
    at: str
    launched: list[Launched] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> "Sighting":
        """Restore a sighting from the first line of a rank's file."""
        table: dict[str, Any] = json.loads(text)
        launched = [Launched.from_json(each) for each in table["launched"]]
        return cls(**{**table, "launched": launched})

    def __str__(self) -> str:
        waiting = f"waits in {self.waits_in}" if self.waits_in else "waits in no collective"
        return f"{self.activity}; it {waiting}, at {self.at}"


class HangReport:
    """A folder with a file for each rank that has noticed the hang.

    Every method may fail or block, because the file system may be the cause of the hang.

    Args:
        folder: the folder
        names: names of all ranks, for messages
        fresh_seconds: a file more than this many seconds older than the newest one is from an
            earlier hang
    """

    def __init__(self, folder: Path, names: Sequence[str], *, fresh_seconds: float = math.inf):
        self.folder, self.names, self.fresh_seconds = folder, names, fresh_seconds

    def write(self, sighting: tuple[Sighting, str]) -> None:
        """Write the activity of a rank and its stack; a later call replaces the file."""
        about, stack = sighting
        self.folder.mkdir(exist_ok=True)
        file = self._file(about.rank)
        temporary = file.with_suffix(".writing")
        temporary.write_text(
            f"{json.dumps(asdict(about))}\n{stack}", encoding="utf-8", errors="backslashreplace"
        )
        os.rename(temporary, file)

    def take_back(self, rank: int) -> None:
        """Remove the file of a rank that makes progress again."""
        self._file(rank).unlink(missing_ok=True)

    def verdict(self, own: Sighting) -> tuple[str, list[int]]:
        """Return the description of the hang, and the ranks that are behind.

        Only the lowest rank that wrote a file returns a description; others return an empty one.

        A rank that could not write a file also returns a description, which includes its own
        activity.

        Returns:
            The description, and the ranks that are behind.

        Raises:
            OSError: no rank has written, or the files cannot be read.
        """
        sightings = self._read()
        if own.rank in sightings and own.rank != min(sightings):
            return "", []
        sightings.setdefault(own.rank, own)
        launched = {rank: sighting.launched for rank, sighting in sightings.items()}
        waiting = describe_waiting(launched, self.names)
        parts = [describe_hang(sightings, self.names), f"the stacks of all are in {self.folder}"]
        if waiting:
            parts.insert(1, f"by torch's flight recorder {waiting}")
        return "; ".join(parts), ranks_behind(sightings, len(self.names))

    def _read(self) -> dict[int, Sighting]:
        """Return the reports of all ranks about this hang, by rank."""
        changed = {file: file.stat().st_mtime for file in sorted(self.folder.glob("rank-*.txt"))}
        if not changed:
            raise FileNotFoundError(errno.ENOENT, "no rank could write there", str(self.folder))
        oldest = max(changed.values()) - self.fresh_seconds
        sightings = {}
        for file in (file for file, when in changed.items() if when >= oldest):
            sighting = Sighting.from_json(file.read_text(encoding="utf-8").partition("\n")[0])
            if sighting.rank < len(self.names):
                sightings[sighting.rank] = sighting
        return sightings

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.txt"


def take_sighting(rank: int, crumb: Breadcrumb) -> tuple[Sighting, str]:
    """Return the activity of this rank's main thread, and its stack.

    While a paired forward pass runs, its thread takes the place of the main one, which waits.
    """
    frame = running_helper() or sys._current_frames()[threading.main_thread().ident or 0]
    about = Sighting(
        rank=rank,
        step=crumb.step,
        activity=str(crumb),
        waits_in=collective_of(frame),
        at=innermost_line(frame),
    )
    return about, "".join(traceback.format_stack(frame))


def ranks_behind(sightings: dict[int, Sighting], size: int) -> list[int]:
    """Return the ranks that are behind: silent, in an earlier step, or outside of collectives.

    The list is empty if no rank is behind the others.
    """
    silent = [rank for rank in range(size) if rank not in sightings]
    if silent:
        return silent
    earliest = min(each.step for each in sightings.values())
    behind = [rank for rank, each in sightings.items() if each.step == earliest]
    if len(behind) == size:
        behind = [rank for rank in behind if not sightings[rank].waits_in]
    return [] if len(behind) == size else behind


def describe_hang(sightings: dict[int, Sighting], names: Sequence[str]) -> str:
    """Name the ranks that are behind, and describe what they do."""
    first = sightings[min(sightings)]
    ranks = ranks_behind(sightings, len(names))
    silent = [names[rank] for rank in ranks if rank not in sightings]
    if silent:
        more = len(silent) - MAX_RANKS_IN_MESSAGE
        shown = ", ".join(silent[:MAX_RANKS_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
        verb = "does" if len(silent) == 1 else "do"
        who = f"{shown} {verb} not answer: stopped, dead or cut off"
        return f"{who}. {names[first.rank]}: {first}"
    if not ranks:
        waiting = all(each.waits_in for each in sightings.values())
        where = "in a collective" if waiting else "for the device, or compute"
        when = f"in step {first.step}" if first.step else "in start-up"
        return f"all ranks are {when} and wait {where}. {names[first.rank]}: {first}"
    shown = "; ".join(
        f"{names[rank]} is behind: {sightings[rank]}" for rank in ranks[:MAX_RANKS_IN_MESSAGE]
    )
    return f"{shown}. {names[first.rank]}: {first}"


def collective_of(frame: FrameType | None) -> str:
    """Return the function in a stack that waits for a collective, or "" if there is none.

    It is a function of torch.distributed, or a function of this project that calls `wait_for`.
    """
    name = ""
    while frame:
        if frame.f_code.co_filename.endswith(TORCH_COLLECTIVES):
            name = frame.f_code.co_name
        elif is_wait_for(frame) and frame.f_back:
            name = frame.f_back.f_code.co_name
        frame = frame.f_back
    return name


def is_wait_for(frame: FrameType) -> bool:
    """Return True for a frame of models.parallel.collectives.wait_for."""
    return frame.f_code.co_name == "wait_for" and frame.f_code.co_filename == OWN_COLLECTIVES


def innermost_line(frame: FrameType | None) -> str:
    """Return the innermost line of a stack that belongs to this project or DeepSpeed."""
    while frame:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(REPOSITORY / "models") or file.is_relative_to(
            REPOSITORY / "recipes"
        ):
            return f"{file.relative_to(REPOSITORY)}:{frame.f_lineno} {frame.f_code.co_name}"
        if "deepspeed" in file.parts and "comm" not in file.parts:
            return f"deepspeed {file.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"
