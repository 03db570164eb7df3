"""Diagnosis of an ended attempt: its events, the cause, and the nodes that are not used again.

Pure functions, so that every combination can be tested. docs/fault-tolerance.md has the table.
"""

import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from models.errors import a_few
from threefold.pretrain.preflight.evaluate import MAX_BLAMED_NODES
from threefold.runtime.exits import (
    BUSY,
    FINISHED,
    HUNG,
    INTERRUPTED,
    REJECTED,
    STOPPED,
    UNFIT,
)

T = TypeVar("T")
MAX_FAILURES_WITHOUT_CHECKPOINT = 3  # after which the run stops; lost nodes do not count
MAX_TEXTS_SHOWN = 8
STOP_SIGNALS = (-signal.SIGTERM, -signal.SIGUSR1)  # exit codes of ranks killed by them
FINAL = {  # exit codes after which a restart would end in the same way
    REJECTED: "the run was rejected",
    STOPPED: "the run stopped",
    BUSY: "the run folder is in use",
}


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank.

    Attributes:
        rank: global rank
        code: exit code, or the negative number of the signal that killed it
    """

    rank: int
    host: str
    code: int

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} ({self.host}) was killed by {signal_name(-self.code)}"
        return f"rank {self.rank} ({self.host}) exited with {self.code}"


@dataclass(frozen=True)
class AttemptResult:
    """The end of an attempt, as launch.py saw it.

    Attributes:
        lost: host -> reason, for hosts that no longer answer
        ends: the ends of ranks before launch.py killed the others, in the order of their reports
        asked: True if a user asked launch.py to stop
        asked_again: True if a user asked it twice, so that the ranks were killed
        checkpoint: the step of the newest checkpoint; 0 if there is none
        restarting: the reason why launch.py asked the ranks to save and end; "" if it did not
        behind: the hosts of the ranks that a hang report names as behind
        preflight_broken: host -> reason, for hosts that the preflight names as broken
        preflight_slow: host -> reason, for hosts that the preflight names as slow, and that can be
            replaced
        gpu_broken: host -> error of a GPU, for hosts that must not be used any more
        gpu_suspects: host -> error of a GPU, for hosts that may still be used
        several_hosts: True if the attempt had more than one host
        out_of_memory: True if memory ran out on a rank
        other_layout: True if memory ran out in a layout of launch.py, and there is another one
        saved_step: the step that the ranks saved before they stopped on request; None if unknown
    """

    lost: Mapping[str, str] = field(default_factory=dict)
    ends: Sequence[RankEnd] = ()
    asked: bool = False
    asked_again: bool = False
    checkpoint: int = 0
    restarting: str = ""
    behind: Sequence[str] = ()
    gpu_broken: Mapping[str, str] = field(default_factory=dict)
    preflight_broken: Mapping[str, str] = field(default_factory=dict)
    preflight_slow: Mapping[str, str] = field(default_factory=dict)
    gpu_suspects: Mapping[str, str] = field(default_factory=dict)
    several_hosts: bool = False
    out_of_memory: bool = False
    other_layout: bool = False
    saved_step: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The cause of the end of an attempt, and what follows from it.

    Attributes:
        reason: the cause, for messages and events
        exit_code: exit code of launch.py; None if the run is restarted
        blamed: hosts with a failure of their own
        counts: True if the failure counts among those without a new checkpoint
        preflight_broken: hosts that must not be used again, because of the preflight
        preflight_slow: hosts that are used only if no other one is left, because of the preflight
    """

    reason: str
    exit_code: int | None = None
    blamed: Sequence[str] = ()
    counts: bool = False
    preflight_broken: Sequence[str] = ()
    preflight_slow: Sequence[str] = ()


def diagnose(outcome: AttemptResult) -> Diagnosis:
    """Return the cause of the end of an attempt.

    A lost node or a broken GPU takes precedence over every error that ranks report, and a rank
    killed by a signal over ordinary exit codes. Among ordinary exit codes, the first one reported
    counts, but the node is blamed on which a GPU has reported an error, if there is one. If only
    the ranks of one of several hosts have rejected the run, or have stopped, that host is blamed.
    """
    codes = [end.code for end in outcome.ends]
    if codes and not outcome.lost and all(code == FINISHED for code in codes):
        return Diagnosis("every step is done", exit_code=FINISHED)
    if outcome.asked:
        return _stop_on_request(outcome, codes)
    gone = {**outcome.gpu_broken, **outcome.lost}
    final = next((end for end in outcome.ends if end.code in FINAL), None)
    if final and not gone:
        if final.code == STOPPED and outcome.other_layout:
            return Diagnosis(f"memory ran out in a layout that launch.py had chosen: {final}")
        if _is_of_one_host(outcome, final):
            reason = f"{final}, and no rank of another host did"
            return Diagnosis(reason, blamed=[final.host], counts=True)
        return Diagnosis(f"{FINAL[final.code]}: {final}", exit_code=final.code)
    if gone:
        reasons = [f"{host}: {reason}" for host, reason in gone.items()]
        return Diagnosis(shown(reasons, separator="; "), blamed=_few(list(gone)))
    if UNFIT in codes:
        named = {**outcome.preflight_broken, **outcome.preflight_slow}
        if not named:
            return Diagnosis("preflight: the ranks cannot train here", exit_code=UNFIT)
        reason = f"preflight: {shown(list(named.values()), separator='; ')}"
        return Diagnosis(
            reason,
            preflight_broken=list(outcome.preflight_broken),
            preflight_slow=list(outcome.preflight_slow),
        )
    if outcome.restarting and codes and all(code in (FINISHED, INTERRUPTED) for code in codes):
        return Diagnosis(outcome.restarting)
    return _error_of_a_rank(outcome, codes)


def _is_of_one_host(outcome: AttemptResult, final: RankEnd) -> bool:
    """Return True if only the ranks of one host have rejected the run or stopped.

    The ranks of all hosts report a problem of the recipe or of the run. If only one host reports
    it, the host is the cause: for example, it has no driver, or cannot read the corpus. A single
    rank may report a lack of memory, a locked folder, or what follows another rank's failure.
    """
    first = next(end for end in outcome.ends if end.code != FINISHED)
    if first.code not in (REJECTED, STOPPED) or not outcome.several_hosts or outcome.out_of_memory:
        return False
    return {end.host for end in outcome.ends if end.code in FINAL} == {final.host}


def _stop_on_request(outcome: AttemptResult, codes: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of an attempt that ended after a user asked launch.py to stop."""
    reason = "launch.py was asked to stop"
    if outcome.saved_step is not None:  # nodes that are lost afterwards do not matter
        reason += f", and the ranks saved at step {outcome.saved_step}"
        return Diagnosis(reason, exit_code=INTERRUPTED)
    if outcome.lost and INTERRUPTED not in codes:
        reason += ", and a node was lost before the ranks had saved"
        return Diagnosis(reason, exit_code=1)
    # Before the first step, the signal itself ends a rank.
    orderly = all(code in (FINISHED, INTERRUPTED, *STOP_SIGNALS) for code in codes)
    if INTERRUPTED in codes or orderly:
        return Diagnosis(reason, exit_code=INTERRUPTED)
    failed = next(end for end in outcome.ends if end.code != FINISHED)
    if outcome.asked_again and failed.code == -signal.SIGKILL:
        step = f"resumes after step {outcome.checkpoint}" if outcome.checkpoint else "starts again"
        reason += f" twice, so the ranks were killed before they had saved; a rerun {step}"
    else:
        reason += f", but {failed}"
    return Diagnosis(reason, exit_code=128 - failed.code if failed.code < 0 else failed.code)


def _error_of_a_rank(outcome: AttemptResult, codes: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of an attempt in which a rank was killed, hung or crashed."""
    suspects = _few(list(outcome.gpu_suspects))
    errors = "; ".join(f"{host}: {outcome.gpu_suspects[host]}" for host in suspects)
    errors = f" ({errors})" if errors else ""
    killed = [end for end in outcome.ends if end.code < 0]
    if killed:
        blamed = suspects or [killed[0].host]
        return Diagnosis(f"{killed[0]}{errors}", blamed=blamed, counts=True)
    if HUNG in codes:
        hosts = f" ({', '.join(outcome.behind)})" if outcome.behind else ""
        reason = f"the run made no progress{hosts if _few(outcome.behind) else ''}"
        return Diagnosis(reason + errors, blamed=suspects or _few(outcome.behind), counts=True)
    failed = next(end for end in outcome.ends if end.code != FINISHED)
    if failed.code == INTERRUPTED:  # a user has sent a signal to a rank
        return Diagnosis(f"the run was asked to stop: {failed}", exit_code=INTERRUPTED)
    return Diagnosis(f"{failed}{errors}", blamed=suspects or [failed.host], counts=True)


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none in Python."""
    names = {member.value: member.name for member in signal.Signals}
    return names.get(number, f"signal {number}")


shown = partial(a_few, most=MAX_TEXTS_SHOWN)


def _few(hosts: Sequence[str]) -> Sequence[str]:
    """Return the hosts; none if there are many, because then a network or a disk has failed."""
    return hosts if len(hosts) <= MAX_BLAMED_NODES else ()


# The events of an attempt's ranks, as launch.py reads them from events.jsonl.
#
# Pure functions of the events since the start of the attempt, oldest first.

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


def saved_on_request(events: Iterable[Event]) -> int | None:
    """Return the step at which the ranks stopped and saved on request; None if they have not."""
    stops = [event for event in events if event["event"] == "stop"]
    return stops[-1]["step"] if stops and stops[-1].get("exit_code") == INTERRUPTED else None


def ranks_behind(events: Iterable[Event]) -> list[int]:
    """Return the ranks that the newest hang report names as behind."""
    stops = [event["behind"] for event in events if event["event"] == "stop" and "behind" in event]
    return items_of(stops[-1], int) if stops else []


def slow_ranks(events: Iterable[Event]) -> list[int]:
    """Return the ranks that the newest comparison of speeds reports as slow for too long.

    Ranks of an earlier comparison do not count if a later one no longer reports them.
    """
    reports = [event for event in events if event["event"] == "slow"]
    if not reports:
        return []
    return [rank for event in reports if event["step"] == reports[-1]["step"]
            for rank in items_of(event.get("ranks"), int)]  # fmt: skip


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
    reports = [event for event in events if event["event"] == "preflight"]
    for node in reports[-1].get("left_out", ()) if reports else ():
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
    """
    if not slow or action == "warn":
        return Replacement()
    if any(rank in replaced for rank in ranks):
        return Replacement(problem="the same ranks were slow on other nodes, so the cause is not "
                                   "the node")  # fmt: skip
    if spare < len(slow):
        return Replacement(problem="there are not enough spare nodes")
    return Replacement(slow)


def items_of(value: Any, kind: type[T]) -> list[T]:
    """Return the ranks or names in a list of a file that a user may have edited."""
    return [item for item in value if isinstance(item, kind)] if isinstance(value, list) else []


# The failures of a run so far, and the nodes that are therefore not used.
#
# Failures expire, so that a node is not left out for errors that happen to any node from time to
# time: with 512 nodes, of which each fails once in 200 days, about 39 healthy nodes would be left
# out within 90 days if failures counted forever. Within `hours` = 24, it is about one.

BROKEN = "the preflight has found it broken"


@dataclass
class Failures:
    """The failures of a run so far; times are seconds since the epoch.

    Attributes:
        limit: failures after which a host is left out; 0 for no limit
        hours: time after which a failure no longer counts
        of_nodes: host -> times of its failures
        broken: host -> time and reason, for hosts that are left out at once
        slow: host -> time; slow hosts are used after all others
        replaced_ranks: ranks whose hosts were replaced because they were slow
        last_checkpoint: `checkpoint` of the last failure (see `note`)
        without_checkpoint: failures since that checkpoint was saved, without lost nodes
    """

    limit: int
    hours: float = 24.0
    clock: Callable[[], float] = time.time
    of_nodes: dict[str, list[float]] = field(default_factory=dict)
    broken: dict[str, tuple[float, str]] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)
    replaced_ranks: set[int] = field(default_factory=set)
    last_checkpoint: int = -1
    without_checkpoint: int = 0

    def restore(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add the failures of nodes that earlier processes of launch.py have recorded."""
        for event in events:
            kind, moment = event.get("event"), event.get("time")
            if not isinstance(moment, int | float):  # a user may have edited the file
                continue
            if kind == "attempt_end":
                self._count(items_of(event.get("blamed"), str), moment)
                for host in items_of(event.get("broken"), str):
                    self.broken[host] = moment, BROKEN
                self.slow |= dict.fromkeys(items_of(event.get("slow"), str), moment)
            elif kind == "gpu_error" and event.get("left_out"):
                for host in items_of([event.get("node")], str):
                    self.broken[host] = moment, str(event.get("error", ""))
            elif kind == "replace":
                self.slow |= dict.fromkeys(items_of(event.get("nodes"), str), moment)
                self.replaced_ranks.update(items_of(event.get("ranks"), int))
            elif kind == "forget":
                for known in (self.of_nodes, self.broken, self.slow, self.replaced_ranks):
                    known.clear()

    def note(self, diagnosis: Diagnosis, checkpoint: int) -> str:
        """Count a failure.

        Args:
            checkpoint: the later of the newest checkpoint's step and the step that the attempt
                started from; 0 if there is neither

        Returns:
            The reason why the run must not be restarted; "" if it may.
        """
        self._count(diagnosis.blamed, self.clock())
        for host in diagnosis.preflight_broken:
            self.leave_out(host, BROKEN)
        self.count_slow(diagnosis.preflight_slow)
        if checkpoint != self.last_checkpoint:
            self.last_checkpoint, self.without_checkpoint = checkpoint, 0
        self.without_checkpoint += diagnosis.counts
        if self.without_checkpoint < MAX_FAILURES_WITHOUT_CHECKPOINT:
            return ""
        since = f"after step {checkpoint}" if checkpoint else "in the run folder"
        return (
            f"the run failed {self.without_checkpoint} times without a new checkpoint {since}, so "
            f"a restart would probably fail too; read the messages of the ranks above"
        )

    def leave_out(self, host: str, reason: str) -> None:
        """Leave a host out at once, until the reason expires."""
        self.broken[host] = self.clock(), reason

    def count_slow(self, hosts: Iterable[str]) -> None:
        """Use hosts only after all others, until that expires."""
        self.slow |= dict.fromkeys(hosts, self.clock())

    def left_out(self, host: str) -> bool:
        """Return True if a host is broken or has failed too often to be used now."""
        return bool(self.reason(host))

    def reason(self, host: str) -> str:
        """Return the reason why a host is left out; "" if it may be used."""
        moment, error = self.broken.get(host, (0.0, ""))
        if error and self._counts(moment):
            return error
        recent = sum(map(self._counts, self.of_nodes.get(host, ())))
        if 0 < self.limit <= recent:
            return f"{recent} failures within {self.hours:g} hours"
        return ""

    def is_slow(self, host: str) -> bool:
        """Return True if a host was slow."""
        return host in self.slow and self._counts(self.slow[host])

    def _counts(self, moment: float) -> bool:
        return self.clock() - moment < self.hours * 3600

    def _count(self, hosts: Iterable[str], moment: float) -> None:
        for host in hosts:
            self.of_nodes.setdefault(host, []).append(moment)


class GpuErrors:
    """The errors of GPUs during an attempt.

    Args:
        action: `cluster.on_gpu_error`
    """

    def __init__(self, failures: Failures, action: str):
        self.failures, self.action = failures, action
        self._found: dict[tuple[str, str], bool] = {}  # (host, error) -> whether to leave it out

    def begin(self) -> None:
        """Forget the errors of the previous attempt, when another one starts."""
        self._found.clear()

    def handle(self, reported: Iterable[tuple[str, str, bool]]) -> list[tuple[str, str, bool]]:
        """Leave out the hosts with a severe error.

        Args:
            reported: host, error, and whether it is severe

        Returns:
            The errors that are new during the attempt: host, error, and whether the host is left
            out because of it.
        """
        new = list(dict.fromkeys(error for error in reported if error[:2] not in self._found))
        broken = {host for host, _, severe in new if severe}
        # Many at once point to the driver or to the power supply, so they are not left out.
        if self.action != "leave_out" or len(broken) > MAX_BLAMED_NODES:
            broken = set()
        for host, error, severe in new:
            self._found[host, error] = severe and host in broken
            if self._found[host, error]:
                self.failures.leave_out(host, error)
        return [(host, error, self._found[host, error]) for host, error, _ in new]

    def of_hosts(self, hosts: Iterable[str], *, severe: bool) -> dict[str, str]:
        """Return the errors of some hosts during the attempt, by host.

        Args:
            severe: return the errors for which hosts are left out; otherwise, all others
        """
        found: dict[str, list[str]] = {}
        for (host, error), left_out in self._found.items():
            if left_out == severe and host in set(hosts):
                found.setdefault(host, []).append(error)
        return {host: ", ".join(errors) for host, errors in found.items()}
