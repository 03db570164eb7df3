"""The events of an attempt's ranks, as launch.py reads them from events.jsonl.

Pure functions of the events since the start of the attempt, oldest first.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


def events_of(events: Sequence[dict[str, Any]], lease: str) -> list[dict[str, Any]]:
    """Return the events since the start of an attempt, the newest one."""
    starts = [index for index, event in enumerate(events) if event.get("attempt") == lease]
    return list(events[starts[0] :]) if starts else []


def trains(events: Iterable[Event]) -> bool:
    """Return True once the first step is done, after which the ranks can save."""
    return any(event["event"] == "first_step" for event in events)


def ran_out_of_memory(events: Iterable[Event]) -> bool:
    """Return True if memory ran out on a rank."""
    return any(event["event"] == "stop" and event.get("out_of_memory") is True for event in events)


def ranks_behind(events: Iterable[Event]) -> list[int]:
    """Return the ranks that the newest hang report names as behind."""
    stops = [event["behind"] for event in events if event["event"] == "stop" and "behind" in event]
    return ranks_in(stops[-1]) if stops else []


def slow_ranks(events: Iterable[Event]) -> list[int]:
    """Return the ranks that the newest comparison of speeds reports as slow for too long.

    Ranks of an earlier comparison do not count if a later one no longer reports them.
    """
    found = [event for event in events if event["event"] == "slow"]
    if not found:
        return []
    return [rank for event in found if event["step"] == found[-1]["step"]
            for rank in ranks_in(event.get("ranks"))]  # fmt: skip


def hosts_of(ranks: Iterable[int], hosts: Sequence[str], ranks_per_node: int) -> list[str]:
    """Return the hosts of some ranks, in the order of the hosts."""
    indices = {rank // ranks_per_node for rank in ranks}
    return [host for index, host in enumerate(hosts) if index in indices]


def start_of(events: Iterable[Event]) -> int:
    """Return the step after which the attempt has started; 0 if it has not."""
    starts = [event["step"] for event in events if event["event"] in ("start", "resume")]
    return int(starts[-1]) if starts else 0


def unfit_hosts(
    events: Iterable[Event], hosts: Sequence[str], ranks_per_node: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the broken and the slow hosts that the preflight has left out, with the reasons."""
    named: tuple[dict[str, str], dict[str, str]] = ({}, {})
    found = [event for event in events if event["event"] == "preflight"]
    for node in found[-1].get("left_out", ()) if found else ():
        host = hosts[node["rank"] // ranks_per_node]
        named[0 if node["broken"] else 1][host] = f"{host}: {node['reason']}"
    return named


@dataclass(frozen=True)
class Replacement:
    """The decision about slow hosts.

    Attributes:
        hosts: the hosts to replace; none if they stay
        problem: the reason why slow hosts stay; "" if none is slow or all are replaced
    """

    hosts: Sequence[str] = ()
    problem: str = ""


def replacement(
    slow: Sequence[str], spare: int, *, action: str, replaced: Collection[int], ranks: Iterable[int]
) -> Replacement:
    """Decide whether slow hosts are replaced.

    Args:
        slow: the hosts with slow ranks
        spare: number of other hosts that can be used and were not slow
        action: `cluster.on_slow_rank`
        replaced: ranks whose hosts have already been replaced because they were slow
        ranks: the slow ranks
    """
    if not slow or action == "warn":
        return Replacement()
    if any(rank in replaced for rank in ranks):
        return Replacement(problem="the same ranks were slow on other nodes, so the cause is not "
                                   "the node")  # fmt: skip
    if spare < len(slow):
        return Replacement(problem="there are not enough spare nodes")
    return Replacement(slow)


def ranks_in(value: Any) -> list[int]:
    """Return the ranks in a list of a file that a user may have edited."""
    return [rank for rank in value if isinstance(rank, int)] if isinstance(value, list) else []
