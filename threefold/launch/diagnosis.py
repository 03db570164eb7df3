"""Diagnosis of an ended attempt: the cause, the node to blame, and whether to restart.

Pure functions, so that every combination can be tested. docs/fault-tolerance.md has the table.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from threefold.pretrain.preflight.judge import MAX_BLAMED_NODES
from threefold.runtime.exits import (
    BUSY,
    FINISHED,
    HUNG,
    INTERRUPTED,
    REJECTED,
    STOPPED,
    UNFIT,
)

MAX_FAILURES_WITHOUT_CHECKPOINT = 3  # after which the run stops; lost nodes do not count
MAX_IN_MESSAGE = 8
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
        host: its host
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
class Outcome:
    """The end of an attempt, as launch.py saw it.

    Attributes:
        lost: host -> reason, for hosts that no longer answer
        ends: the ends of ranks before launch.py killed the others, in the order of their reports
        asked: True if a user asked launch.py to stop
        restarting: the reason why launch.py asked the ranks to save and end; "" if it did not
        behind: the hosts of the ranks that a hang report names as behind
        preflight_broken: host -> reason, for hosts that the preflight names as broken
        preflight_slow: host -> reason, for hosts that the preflight names as slow, and that can be
            replaced
        gpu_broken: host -> error of a GPU, for hosts that must not be used any more
        gpu_suspects: host -> error of a GPU, for hosts that may still be used
        other_layout: True if memory ran out in a layout of launch.py, and there is another one
    """

    lost: Mapping[str, str] = field(default_factory=dict)
    ends: Sequence[RankEnd] = ()
    asked: bool = False
    restarting: str = ""
    behind: Sequence[str] = ()
    gpu_broken: Mapping[str, str] = field(default_factory=dict)
    preflight_broken: Mapping[str, str] = field(default_factory=dict)
    preflight_slow: Mapping[str, str] = field(default_factory=dict)
    gpu_suspects: Mapping[str, str] = field(default_factory=dict)
    other_layout: bool = False


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


def diagnose(outcome: Outcome) -> Diagnosis:
    """Return the cause of the end of an attempt.

    A lost node or a broken GPU takes precedence over every error that ranks report, and a rank
    killed by a signal over ordinary exit codes. Among ordinary exit codes, the first one reported
    counts, but the node is blamed on which a GPU has reported an error, if there is one.
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


def _stop_on_request(outcome: Outcome, codes: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of an attempt that ended after a user asked launch.py to stop."""
    reason = "launch.py was asked to stop"
    if outcome.lost and INTERRUPTED not in codes:
        reason += ", and a node was lost before the ranks had saved"
        return Diagnosis(reason, exit_code=1)
    # Before the first step, the signal itself ends a rank.
    orderly = all(code in (FINISHED, INTERRUPTED, *STOP_SIGNALS) for code in codes)
    code = INTERRUPTED if INTERRUPTED in codes or orderly else _first_failure(codes)
    return Diagnosis(reason, exit_code=code)


def _error_of_a_rank(outcome: Outcome, codes: Sequence[int]) -> Diagnosis:
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
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def shown(texts: Sequence[str], *, separator: str = ", ") -> str:
    """Return texts for a message, at most MAX_IN_MESSAGE of them."""
    more = len(texts) - MAX_IN_MESSAGE
    return separator.join(texts[:MAX_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")


def _few(hosts: Sequence[str]) -> Sequence[str]:
    """Return the hosts; none if there are many, because then a network or a disk has failed."""
    return hosts if len(hosts) <= MAX_BLAMED_NODES else ()


def _first_failure(codes: Sequence[int]) -> int:
    """Return the first exit code other than 0 as launch.py can return it."""
    code = next((code for code in codes if code != FINISHED), FINISHED)
    return 128 - code if code < 0 else code
