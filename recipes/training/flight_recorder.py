"""Read torch's flight recorder: which collective each rank waits in, and who has not joined it.

torch keeps the last collectives of every process group in a ring buffer, with sizes and sequence
numbers (torch/csrc/distributed/c10d/FlightRecorder.hpp). Ranks launch the collectives of a group in
the same order, so that a rank whose newest sequence number is lower has not joined yet.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_PENDING = 4  # operations of a group that a report keeps, oldest first
MAX_STATEMENTS = 4  # in a message
MAX_RANKS_IN_MESSAGE = 8
TRANSFER = re.compile(r"(?:send|recv) (\d+)(?:->|<-)(\d+)")  # "send 0->1", "recv 1<-0": group ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Operation:
    """A collective, a send or a receive that has been launched and has not ended.

    name: without the backend: "all_reduce", "send 0->1"
    sequence: its number on the group, counted for collectives and transfers separately
    sizes: of its inputs, or of its outputs where it has no inputs
    """

    name: str
    sequence: int
    is_transfer: bool
    sizes: list[list[int]]
    dtypes: list[str]

    @property
    def text(self) -> str:
        """Describe it, such as "all_reduce, number 17, of [4, 1024] BFloat16"."""
        tensors = ", ".join(
            f"{size} {kind}" for size, kind in zip(self.sizes, self.dtypes, strict=False)
        )
        return f"{self.name}, number {self.sequence}" + (f", of {tensors}" if tensors else "")


@dataclass(frozen=True)
class Launched:
    """What one rank has launched on one process group.

    ranks: the group's global ranks; empty: not known
    collectives, transfers: the newest sequence numbers
    pending: the oldest operations that have not ended
    """

    group: str
    description: str
    ranks: list[int]
    collectives: int
    transfers: int
    pending: list[Operation]

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Launched":
        """Restore what `dataclasses.asdict` has made of it."""
        pending = [Operation(**each) for each in table["pending"]]
        return cls(**{**table, "pending": pending})

    def has_launched(self, operation: Operation) -> bool:
        """Tell whether this rank has come as far as an operation of the group."""
        newest = self.transfers if operation.is_transfer else self.collectives
        return newest >= operation.sequence


def read_dump(
    dump: Mapping[str, Any], members: Mapping[str, Sequence[int]] | None = None
) -> list[Launched]:
    """Summarise a dump by process group.

    Args:
        dump: what `_dump_nccl_trace_json` or `_dump_fr_trace_json` gives, parsed
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
                ranks=list(recorded or (members or {}).get(name, ())),
                collectives=max(entry["collective_seq_id"] for entry in entries),
                transfers=max(entry["p2p_seq_id"] for entry in entries),
                pending=[operation_of(entry) for entry in entries if is_pending(entry)][
                    :MAX_PENDING
                ],
            )
        )
    return found


def is_pending(entry: Mapping[str, Any]) -> bool:
    """Tell whether an operation has not ended.

    torch's watchdog retires operations that have ended. gloo's are retired without ever being
    marked as completed.
    """
    return not entry["retired"] and entry["state"] != "completed"


def operation_of(entry: Mapping[str, Any]) -> Operation:
    """Turn an entry of a dump into an operation."""
    is_transfer = entry["is_p2p"]
    of = "input" if entry["input_sizes"] else "output"
    return Operation(
        name=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
        sequence=entry["p2p_seq_id" if is_transfer else "collective_seq_id"],
        is_transfer=is_transfer,
        sizes=entry[f"{of}_sizes"],
        dtypes=entry[f"{of}_dtypes"],
    )


def describe_waiting(launched: Mapping[int, Sequence[Launched]], names: Sequence[str]) -> str:
    """Name the operations that ranks wait in, with the ranks that have not joined; empty: none.

    Args:
        launched: of each rank that has written a report
        names: of all ranks
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
        # Receives are posted ahead of time, and some are pending in every healthy pipeline.
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
    """Describe what some ranks wait in; the first value tells whether others are missing."""
    group = by_group[ranks[0], group_name]
    operation = group.pending[0]
    called = f"group {group_name}" + (f" ({group.description})" if group.description else "")
    verb = "waits" if len(ranks) == 1 else "wait"
    text = f"{_list(ranks, names)} {verb} in {operation.text}, on {called}"
    if group.ranks:
        text += f" of ranks {_numbers(group.ranks)}"
    others = {rank: by_group[rank, group_name].pending[0] for rank in ranks[1:]}
    unlike = [rank for rank, other in others.items() if not _match(operation, other)]
    if unlike:
        return True, f"{text}, while {names[unlike[0]]} is in {others[unlike[0]].text}"
    expected = _expected(operation, group)
    known = {rank: by_group.get((rank, group_name)) for rank in expected}
    missing = [r for r, found in known.items() if not found or not found.has_launched(operation)]
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        return True, f"{text}; {_list(missing, names)} {verb} not joined"
    if expected:
        return False, f"{text}, which all of its ranks have joined"
    return False, text


def _expected(operation: Operation, group: Launched) -> list[int]:
    """Return the ranks that an operation needs and whose sequence numbers can be compared.

    Ranks count the transfers that they take part in, which are the same ones for both ranks only
    where a group has no third.
    """
    return [] if operation.is_transfer and len(group.ranks) > 2 else group.ranks


def _match(one: Operation, other: Operation) -> bool:
    """Tell whether two ranks are in the same collective; sizes count where they have to agree."""
    if one.is_transfer:
        return True
    return one.name == other.name and (one.name != "all_reduce" or one.sizes == other.sizes)


def _list(ranks: Sequence[int], names: Sequence[str]) -> str:
    more = len(ranks) - MAX_RANKS_IN_MESSAGE
    text = ", ".join(names[rank] for rank in ranks[:MAX_RANKS_IN_MESSAGE])
    return text + (f" and {more} more" if more > 0 else "")


def _numbers(ranks: Sequence[int]) -> str:
    """Write ranks as "0 to 7", or one by one."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:MAX_RANKS_IN_MESSAGE]))
    return shown + (", ..." if len(ranks) > MAX_RANKS_IN_MESSAGE else "")


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return what a function returns, or None when it fails or takes longer.

    A dump asks CUDA whether events have passed, and that call can hang too.
    """
    found: list[T] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:  # whatever it is, the hang itself matters more
            print(f"the flight recorder cannot be read: {error}", flush=True)

    thread = threading.Thread(target=run, name="flight recorder", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
