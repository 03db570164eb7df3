"""Diagnosis of an ended attempt: the cause, the node to blame, and whether to restart.

Pure functions, so that every combination can be tested. docs/fault-tolerance.md has the table.
"""

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recipes.training.runtime.exits import (
    BUSY,
    FINISHED,
    HUNG,
    INTERRUPTED,
    REJECTED,
    STOPPED,
    UNFIT,
)

MAX_FAILURES_WITHOUT_CHECKPOINT = 3  # after which the run stops; lost nodes do not count
MAX_BLAMED = 8  # hosts that can have caused the same failure
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
            return f"rank {self.rank} ({self.host}) was killed by {signal.Signals(-self.code).name}"
        return f"rank {self.rank} ({self.host}) exited with {self.code}"


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt, as launch.py saw it.

    Attributes:
        lost: host -> reason, for hosts that no longer answer
        ends: the ends of ranks before launch.py killed the others, in the order of their reports
        asked: True if a user asked launch.py to stop
        growing: True if launch.py asked the ranks to save because more nodes are available
        behind: the hosts of the ranks that a hang report names as behind
        broken: host -> reason, for hosts that the preflight names as broken
        slow: host -> reason, for hosts that the preflight names as slow, and that can be replaced
    """

    lost: Mapping[str, str] = field(default_factory=dict)
    ends: Sequence[RankEnd] = ()
    asked: bool = False
    growing: bool = False
    behind: Sequence[str] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    slow: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """The cause of the end of an attempt, and what follows from it.

    Attributes:
        reason: the cause, for messages and events
        exit_code: exit code of launch.py; None if the run is restarted
        blamed: hosts with a failure of their own
        counts: True if the failure counts among those without a new checkpoint
        broken: hosts that must not be used again, because of the preflight
        slow: hosts that are used only if no other one is left, because of the preflight
    """

    reason: str
    exit_code: int | None = None
    blamed: Sequence[str] = ()
    counts: bool = False
    broken: Sequence[str] = ()
    slow: Sequence[str] = ()


def diagnose(outcome: Outcome) -> Diagnosis:
    """Return the cause of the end of an attempt.

    A lost node takes precedence over every error that its peers report, and a rank killed by a
    signal over ordinary exit codes. Among ordinary exit codes, the first one reported counts.
    """
    codes = [end.code for end in outcome.ends]
    if codes and not outcome.lost and all(code == FINISHED for code in codes):
        return Diagnosis("every step is done", exit_code=FINISHED)
    if outcome.asked:
        # Before the first step, the signal itself ends a rank.
        orderly = all(code in (FINISHED, INTERRUPTED, *STOP_SIGNALS) for code in codes)
        code = INTERRUPTED if INTERRUPTED in codes or orderly else _first_failure(codes)
        return Diagnosis("launch.py was asked to stop", exit_code=code)
    final = next((end for end in outcome.ends if end.code in FINAL), None)
    if final and not outcome.lost:
        return Diagnosis(f"{FINAL[final.code]}: {final}", exit_code=final.code)
    if outcome.lost:
        reasons = [f"{host}: {reason}" for host, reason in outcome.lost.items()]
        return Diagnosis(shown(reasons, separator="; "), blamed=_few(list(outcome.lost)))
    if UNFIT in codes:
        named = {**outcome.broken, **outcome.slow}
        if not named:
            return Diagnosis("preflight: the ranks cannot train here", exit_code=UNFIT)
        reason = f"preflight: {shown(list(named.values()), separator='; ')}"
        return Diagnosis(reason, broken=list(outcome.broken), slow=list(outcome.slow))
    if outcome.growing and codes and all(code in (FINISHED, INTERRUPTED) for code in codes):
        return Diagnosis("more nodes are available")
    killed = [end for end in outcome.ends if end.code < 0]
    if killed:
        return Diagnosis(str(killed[0]), blamed=[killed[0].host], counts=True)
    if HUNG in codes:
        hosts = f" ({', '.join(outcome.behind)})" if outcome.behind else ""
        reason = f"the run made no progress{hosts if _few(outcome.behind) else ''}"
        return Diagnosis(reason, blamed=_few(outcome.behind), counts=True)
    failed = next(end for end in outcome.ends if end.code != FINISHED)
    if failed.code == INTERRUPTED:  # a user has sent a signal to a rank
        return Diagnosis(f"the run was asked to stop: {failed}", exit_code=INTERRUPTED)
    return Diagnosis(str(failed), blamed=[failed.host], counts=True)


def shown(texts: Sequence[str], *, separator: str = ", ") -> str:
    """Return texts for a message, at most MAX_IN_MESSAGE of them."""
    more = len(texts) - MAX_IN_MESSAGE
    return separator.join(texts[:MAX_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")


def _few(hosts: Sequence[str]) -> Sequence[str]:
    """Return the hosts; none if there are many, because then a network or a disk has failed."""
    return hosts if len(hosts) <= MAX_BLAMED else ()


def _first_failure(codes: Sequence[int]) -> int:
    """Return the first exit code other than 0 as launch.py can return it."""
    code = next((code for code in codes if code != FINISHED), FINISHED)
    return 128 - code if code < 0 else code


@dataclass
class Failures:
    """The failures of a run so far.

    Attributes:
        limit: failures after which a host is left out; 0 for no limit
        of_nodes: host -> number of failures
        last_checkpoint: step of the newest checkpoint at the last failure
        without_checkpoint: failures since that checkpoint was saved, without lost nodes
        broken: hosts that the preflight has named as broken
        slow: hosts that the preflight has named as slow
    """

    limit: int
    of_nodes: Counter[str] = field(default_factory=Counter)
    last_checkpoint: int = -1
    without_checkpoint: int = 0
    broken: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)

    def note(self, diagnosis: Diagnosis, checkpoint: int) -> str:
        """Count a failure.

        Args:
            diagnosis: its cause
            checkpoint: step of the newest checkpoint; 0 if there is none

        Returns:
            The reason why the run must not be restarted; "" if it may.
        """
        self.of_nodes.update(diagnosis.blamed)
        self.broken.update(diagnosis.broken)
        self.slow.update(diagnosis.slow)
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

    def left_out(self, host: str) -> bool:
        """Return True if a host is broken, or has failed too often to be used again."""
        return host in self.broken or 0 < self.limit <= self.of_nodes[host]
