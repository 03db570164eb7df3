"""Reports of a hang: the activity of each rank, its collective, and the ranks that are behind.

The ranks of a hanging run cannot communicate; they exchange files in the run folder.
"""

import contextlib
import errno
import functools
import json
import math
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import TypeAdapter

from models.errors import a_few
from models.experts.overlap import running_helper
from threefold.config.loading import REPOSITORY

# Torch's flight recorder: the collective that each rank waits in, and the missing ranks.
#
# torch keeps the last collectives of every process group in a ring buffer, with sizes and sequence
# numbers (torch/csrc/distributed/c10d/FlightRecorder.hpp). Ranks launch the collectives of a group
# in the same order. A rank whose newest sequence number is lower than that of a collective has
# therefore not joined the collective yet.

MAX_PENDING = 4  # operations of a group that a report keeps, oldest first
MAX_STATEMENTS = 4  # in a message
MAX_RANKS_OF_A_COLLECTIVE = 8
MAX_RUNS_OF_A_GROUP = 4


@dataclass(frozen=True)
class LaunchedOperation:
    """A collective, a send or a receive that has been launched and has not ended.

    Attributes:
        name: name without the backend, such as "all_reduce" or "send 0->1"
        sequence: number within the group; collectives and transfers are counted separately
        sizes: sizes of the inputs, or of the outputs if there are no inputs
    """

    name: str
    sequence: int
    is_transfer: bool
    sizes: list[list[int]]
    dtypes: list[str]

    @property
    def text(self) -> str:
        """Return a description, such as "all_reduce, number 17, of [4, 1024] BFloat16"."""
        tensors = ", ".join(
            f"{size} {kind}" for size, kind in zip(self.sizes, self.dtypes, strict=False)
        )
        return f"{self.name}, number {self.sequence}" + (f", of {tensors}" if tensors else "")


@dataclass(frozen=True)
class Launched:
    """The operations that one rank has launched on one process group.

    Attributes:
        runs: the group's global ranks as progressions (first, last, stride), because all groups of
            all ranks would be a gigabyte of numbers with 8,192 ranks; empty if they are unknown
        collectives: the newest sequence number of a collective
        transfers: the newest sequence number of a transfer
        pending: the oldest operations that have not ended
    """

    group: str
    description: str
    runs: list[tuple[int, int, int]]
    collectives: int
    transfers: int
    pending: list[LaunchedOperation]

    @property
    def ranks(self) -> list[int]:
        """The group's global ranks, in order."""
        runs = (range(first, last + 1, stride) for first, last, stride in self.runs)
        return list(chain.from_iterable(runs))

    def has_launched(self, operation: LaunchedOperation) -> bool:
        """Return True if this rank has launched an operation of the group."""
        newest = self.transfers if operation.is_transfer else self.collectives
        return newest >= operation.sequence


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ranks as progressions: first, last, stride."""
    runs: list[tuple[int, int, int]] = []
    for rank in ranks:
        first, last, stride = runs[-1] if runs else (rank, rank, 0)
        if runs and (first == last or rank - last == stride):
            runs[-1] = first, rank, rank - last
        else:
            runs.append((rank, rank, 1))
    return runs


def read_dump(
    dump: Mapping[str, Any], members: Mapping[str, Sequence[int]] | None = None
) -> list[Launched]:
    """Summarise a dump by process group.

    Args:
        dump: parsed result of `_dump_nccl_trace_json` or `_dump_fr_trace_json`
        members: global ranks by group name, for backends that do not record them
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in dump.get("entries", ()):
        groups.setdefault(entry["process_group"][0], []).append(entry)
    found = []
    for name, entries in groups.items():
        recorded = json.loads(dump.get("pg_config", {}).get(name, {}).get("ranks", "[]"))
        description = entries[-1]["process_group"][1]
        found.append(
            Launched(
                group=name,
                description="" if description == "undefined" else description,
                runs=runs_of(recorded or (members or {}).get(name, ())),
                collectives=max(entry["collective_seq_id"] for entry in entries),
                transfers=max(entry["p2p_seq_id"] for entry in entries),
                pending=[operation_of(entry) for entry in entries if is_pending(entry)][
                    :MAX_PENDING
                ],
            )
        )
    return found


def is_pending(entry: Mapping[str, Any]) -> bool:
    """Return True if an operation has not ended.

    torch's watchdog retires operations that have ended. Operations of gloo are retired without ever
    being marked as completed.
    """
    return not entry["retired"] and entry["state"] != "completed"


def operation_of(entry: Mapping[str, Any]) -> LaunchedOperation:
    """Turn an entry of a dump into an operation."""
    is_transfer = entry["is_p2p"]
    of = "input" if entry["input_sizes"] else "output"
    return LaunchedOperation(
        name=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        sequence=entry["p2p_seq_id" if is_transfer else "collective_seq_id"],
        is_transfer=is_transfer,
        sizes=entry[f"{of}_sizes"],
        dtypes=entry[f"{of}_dtypes"],
    )


def describe_waiting(launched: Mapping[int, Sequence[Launched]], names: Sequence[str]) -> str:
    """Describe the operations that ranks wait in, and the ranks that have not joined them.

    Args:
        launched: the operations of each rank that has written a report
        names: the names of all ranks, by rank

    Returns:
        The description, or an empty string if no rank waits in an operation.
    """
    waiting: dict[tuple[str, bool, int], list[int]] = {}
    for rank, groups in launched.items():
        for group in groups:
            for operation in group.pending[:1]:
                key = group.group, operation.is_transfer, operation.sequence
                waiting.setdefault(key, []).append(rank)
    by_group = {(rank, group.group): group for rank, groups in launched.items() for group in groups}
    told = []
    for (name, is_transfer, _), ranks in waiting.items():
        missing, text = _describe_operation(name, sorted(ranks), by_group, names)
        # Transfers come last: receives are posted ahead of time, so some of them are pending in
        # every healthy pipeline.
        told.append((not missing, is_transfer, text))
    told.sort(key=lambda each: each[:2])
    more = len(told) - MAX_STATEMENTS
    shown = "; ".join(text for _, _, text in told[:MAX_STATEMENTS])
    return shown + (f"; and {more} more operations" if more > 0 else "")


def _describe_operation(
    group_name: str,
    ranks: list[int],
    by_group: Mapping[tuple[int, str], Launched],
    names: Sequence[str],
) -> tuple[bool, str]:
    """Describe the operation that some ranks wait in.

    Returns:
        True if other ranks are missing, and the description.
    """
    group = by_group[ranks[0], group_name]
    operation = group.pending[0]
    called = f"group {group_name}" + (f" ({group.description})" if group.description else "")
    verb = "waits" if len(ranks) == 1 else "wait"
    text = f"{_list(ranks, names)} {verb} in {operation.text}, on {called}"
    if group.runs:
        text += f" of ranks {a_few(list(map(_numbers, group.runs)), most=MAX_RUNS_OF_A_GROUP)}"
    others = {rank: by_group[rank, group_name].pending[0] for rank in ranks[1:]}
    unlike = [rank for rank, other in others.items() if not _match(operation, other)]
    if unlike:
        return True, f"{text}, while {names[unlike[0]]} is in {others[unlike[0]].text}"
    expected = _expected(operation, group)
    known = {rank: by_group.get((rank, group_name)) for rank in expected}
    missing = [r for r, launch in known.items() if not launch or not launch.has_launched(operation)]
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        return True, f"{text}; {_list(missing, names)} {verb} not joined"
    if expected:
        return False, f"{text}, which all of its ranks have joined"
    return False, text


def _expected(operation: LaunchedOperation, group: Launched) -> list[int]:
    """Return the ranks that an operation needs and whose sequence numbers can be compared.

    Each rank counts only the transfers that it takes part in. Two ranks count the same transfers
    only if the group has no third rank.
    """
    return [] if operation.is_transfer and len(group.ranks) > 2 else group.ranks


def _match(one: LaunchedOperation, other: LaunchedOperation) -> bool:
    """Return True if two ranks are in the same collective; sizes of an all-reduce must be equal."""
    if one.is_transfer:
        return True
    return one.name == other.name and (one.name != "all_reduce" or one.sizes == other.sizes)


def _list(ranks: Sequence[int], names: Sequence[str]) -> str:
    return a_few([names[rank] for rank in ranks], most=MAX_RANKS_OF_A_COLLECTIVE)


def _numbers(run: tuple[int, int, int]) -> str:
    """Format a progression, such as "0 to 7" or "0 to 56 in steps of 8"; up to two ranks singly."""
    first, last, stride = run
    if last - first <= stride:
        return ", ".join(map(str, sorted({first, last})))
    return f"{first} to {last}" + (f" in steps of {stride}" if stride > 1 else "")


# The current activity of a rank, which the training loop records and the supervisor reads.


@dataclass
class Breadcrumb:
    """The current activity of a rank.

    Attributes:
        step: the current step; 0 during start-up
        micro_batch: the micro-batch that the activity works on, if any
        count: number of activities so far
        patient: True while the rank waits for a disk, however long that takes; the rank does not
            end itself during this time
        waits_for_room: True while all ranks wait together for space on a full disk; the run has
            announced and limits this wait, so it is not a hang
    """

    step: int = 0
    doing: str = "starting"
    micro_batch: int | None = None
    count: int = 0
    patient: bool = False
    waits_for_room: bool = False

    def note(self, doing: str, *, micro_batch: int | None = None, step: int | None = None) -> None:
        """Record the start of another activity."""
        self.doing, self.micro_batch = doing, micro_batch
        self.step = self.step if step is None else step
        self.count += 1

    def wait_for_room(self, waits: bool) -> None:
        """Record the beginning or the end of the ranks' wait for space on a full disk."""
        self.waits_for_room = waits

    @contextlib.contextmanager
    def waiting_for_disk(self, doing: str, *, micro_batch: int | None = None) -> Iterator[None]:
        """Do not end this rank during this activity, however long it takes.

        Ranks that wait for this rank in a collective do end; their message names this activity.
        """
        before = self.patient
        self.note(doing, micro_batch=micro_batch)
        self.patient = True
        try:
            yield
        finally:
            self.patient = before
        self.note(doing, micro_batch=micro_batch)

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        when = f"step {self.step}" if self.step else "start-up"
        return f"{when}, {self.doing}{of}"


TORCH_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))
WAIT_FOR = "wait_for", str(REPOSITORY / "models" / "parallel" / "collectives.py")
MAX_RANKS_IN_MESSAGE = 8


@dataclass(frozen=True)
class RankStatus:
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
    def from_json(cls, text: str) -> "RankStatus":
        """Restore a status from the first line of a rank's file."""
        return _status_adapter().validate_json(text)

    def __str__(self) -> str:
        waiting = f"waits in {self.waits_in}" if self.waits_in else "waits in no collective"
        return f"{self.activity}; it {waiting}, at {self.at}"


@functools.cache
def _status_adapter() -> TypeAdapter[RankStatus]:
    return TypeAdapter(RankStatus)  # takes 2 ms, and a report has thousands of files


class HangReport:
    """A folder with a file for each rank that has noticed the hang.

    Every method may fail or block, because the file system may be the cause of the hang.

    Args:
        names: names of all ranks, for messages
        fresh_seconds: a file more than this many seconds older than the newest one is from an
            earlier hang
    """

    def __init__(self, folder: Path, names: Sequence[str], *, fresh_seconds: float = math.inf):
        self.folder, self.names, self.fresh_seconds = folder, names, fresh_seconds
        self._has_written = False

    def write(self, status: tuple[RankStatus, str]) -> None:
        """Write the activity of a rank and its stack; a later call replaces the file."""
        about, stack = status
        self.folder.mkdir(exist_ok=True)
        if not self._has_written:
            self._has_written = True
            self._described.unlink(missing_ok=True)  # left by an earlier hang
        file = self._file(about.rank)
        temporary = file.with_suffix(".writing")
        temporary.write_text(
            f"{json.dumps(asdict(about))}\n{stack}", encoding="utf-8", errors="backslashreplace"
        )
        os.rename(temporary, file)

    def take_back(self, rank: int) -> None:
        """Remove the file of a rank that makes progress again."""
        self._has_written = False
        self._file(rank).unlink(missing_ok=True)

    def verdict(self, own: RankStatus) -> tuple[str, list[int]]:
        """Return the description of the hang, and the ranks that are behind.

        The first rank that asks returns a description; others return an empty one, without reading
        the files of all ranks. A rank that could not write a file also returns a description, which
        includes its own activity.

        Returns:
            The description, and the ranks that are behind.

        Raises:
            OSError: no rank has written, or the files cannot be read.
        """
        if not self._is_first(own.rank):
            return "", []
        statuses = self._read()
        stacks = f"{self.folder} has the stacks of {len(statuses)} of the {len(self.names)} ranks"
        statuses.setdefault(own.rank, own)
        launched = {rank: status.launched for rank, status in statuses.items()}
        waiting = describe_waiting(launched, self.names)
        parts = [describe_hang(statuses, self.names), stacks]
        if waiting:
            parts.insert(1, f"by torch's flight recorder {waiting}")
        return "; ".join(parts), ranks_behind(statuses, len(self.names))

    def _is_first(self, rank: int) -> bool:
        """Return True if no other rank has described this hang, or if this rank has no file."""
        try:
            self._described.touch(exist_ok=False)
        except FileExistsError:
            return not self._file(rank).exists()
        except OSError:
            pass
        return True

    def _read(self) -> dict[int, RankStatus]:
        """Return the reports of all ranks about this hang, by rank."""
        changed = {file: file.stat().st_mtime for file in sorted(self.folder.glob("rank-*.txt"))}
        if not changed:
            raise FileNotFoundError(errno.ENOENT, "no rank could write there", str(self.folder))
        oldest = max(changed.values()) - self.fresh_seconds
        statuses = {}
        for file in (file for file, when in changed.items() if when >= oldest):
            status = RankStatus.from_json(file.read_text(encoding="utf-8").partition("\n")[0])
            if status.rank < len(self.names):
                statuses[status.rank] = status
        return statuses

    @property
    def _described(self) -> Path:
        """The file of the first rank that describes the hang, without content."""
        return self.folder / "described"

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.txt"


def rank_status(rank: int, crumb: Breadcrumb) -> tuple[RankStatus, str]:
    """Return the activity of this rank's main thread, and its stack.

    While a paired forward pass runs, its thread takes the place of the main one, which waits.
    """
    frame = running_helper() or sys._current_frames()[threading.main_thread().ident or 0]
    about = RankStatus(
        rank=rank,
        step=crumb.step,
        activity=str(crumb),
        waits_in=collective_of(frame),
        at=innermost_line(frame),
    )
    return about, "".join(traceback.format_stack(frame))


def ranks_behind(statuses: dict[int, RankStatus], size: int) -> list[int]:
    """Return the ranks that are behind: silent, in an earlier step, or outside of collectives.

    The list is empty if no rank is behind the others.
    """
    silent = [rank for rank in range(size) if rank not in statuses]
    if silent:
        return silent
    earliest = min(status.step for status in statuses.values())
    behind = [rank for rank, status in statuses.items() if status.step == earliest]
    if len(behind) == size:
        behind = [rank for rank in behind if not statuses[rank].waits_in]
    return [] if len(behind) == size else behind


def describe_hang(statuses: dict[int, RankStatus], names: Sequence[str]) -> str:
    """Name the ranks that are behind, and describe what they do."""
    first = statuses[min(statuses)]
    ranks = ranks_behind(statuses, len(names))
    silent = [names[rank] for rank in ranks if rank not in statuses]
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        shown = a_few(silent, most=MAX_RANKS_IN_MESSAGE)
        who = f"{shown} {verb} not answer: stopped, dead or cut off"
        return f"{who}. {names[first.rank]}: {first}"
    if not ranks:
        waiting = all(status.waits_in for status in statuses.values())
        where = "in a collective" if waiting else "for the device, or compute"
        when = f"in step {first.step}" if first.step else "in start-up"
        return f"all ranks are {when} and wait {where}. {names[first.rank]}: {first}"
    shown = "; ".join(
        f"{names[rank]} is behind: {statuses[rank]}" for rank in ranks[:MAX_RANKS_IN_MESSAGE]
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
        elif (frame.f_code.co_name, frame.f_code.co_filename) == WAIT_FOR and frame.f_back:
            name = frame.f_back.f_code.co_name
        frame = frame.f_back
    return name


OWN_CODE = ("models", "recipes", "threefold")


def innermost_line(frame: FrameType | None) -> str:
    """Return the innermost line of a stack that belongs to this project or DeepSpeed."""
    while frame:
        file = Path(frame.f_code.co_filename)
        if any(file.is_relative_to(REPOSITORY / folder) for folder in OWN_CODE):
            return f"{file.relative_to(REPOSITORY)}:{frame.f_lineno} {frame.f_code.co_name}"
        if "deepspeed" in file.parts and "comm" not in file.parts:
            return f"deepspeed {file.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"
