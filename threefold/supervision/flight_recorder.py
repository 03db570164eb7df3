"""Torch's flight recorder: the collective that each rank waits in, and the missing ranks.

torch keeps the last collectives of every process group in a ring buffer, with sizes and sequence
numbers (torch/csrc/distributed/c10d/FlightRecorder.hpp). Ranks launch the collectives of a group in
the same order. A rank whose newest sequence number is lower than that of a collective has therefore
not joined the collective yet.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_PENDING = 4  # operations of a group that a report keeps, oldest first
MAX_STATEMENTS = 4  # in a message
MAX_RANKS_OF_A_COLLECTIVE = 8
TRANSFER = re.compile(r"(?:send|recv) (\d+)(?:->|<-)(\d+)")  # "send 0->1", "recv 1<-0": group ranks


@dataclass(frozen=True)
class Operation:
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
        ranks: the group's global ranks; empty if they are unknown
        collectives: the newest sequence number of a collective
        transfers: the newest sequence number of a transfer
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
        """Restore an object from the result of `dataclasses.asdict`."""
        pending = [Operation(**each) for each in table["pending"]]
        return cls(**{**table, "pending": pending})

    def has_launched(self, operation: Operation) -> bool:
        """Return True if this rank has launched an operation of the group."""
        newest = self.transfers if operation.is_transfer else self.collectives
        return newest >= operation.sequence


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
    """Return True if an operation has not ended.

    torch's watchdog retires operations that have ended. Operations of gloo are retired without ever
    being marked as completed.
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

    Each rank counts only the transfers that it takes part in. Two ranks count the same transfers
    only if the group has no third rank.
    """
    return [] if operation.is_transfer and len(group.ranks) > 2 else group.ranks


def _match(one: Operation, other: Operation) -> bool:
    """Return True if two ranks are in the same collective; sizes of an all-reduce must be equal."""
    if one.is_transfer:
        return True
    return one.name == other.name and (one.name != "all_reduce" or one.sizes == other.sizes)


def _list(ranks: Sequence[int], names: Sequence[str]) -> str:
    more = len(ranks) - MAX_RANKS_OF_A_COLLECTIVE
    text = ", ".join(names[rank] for rank in ranks[:MAX_RANKS_OF_A_COLLECTIVE])
    return text + (f" and {more} more" if more > 0 else "")


def _numbers(ranks: Sequence[int]) -> str:
    """Format ranks as a range, such as "0 to 7", or one by one."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:MAX_RANKS_OF_A_COLLECTIVE]))
    return shown + (", ..." if len(ranks) > MAX_RANKS_OF_A_COLLECTIVE else "")
