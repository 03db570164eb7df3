"""The failures of a run so far, and the nodes that are therefore not used.

Failures expire, so that a node is not left out for errors that happen to any node from time to
time: with 512 nodes, of which each fails once in 200 days, about 39 healthy nodes would be left
out within 90 days if failures counted forever. Within `hours` = 24, it is about one.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from threefold.launch.attempt_events import ranks_in
from threefold.launch.diagnosis import MAX_FAILURES_WITHOUT_CHECKPOINT, Diagnosis
from threefold.pretrain.preflight.judge import MAX_BLAMED_NODES

BROKEN = "the preflight has found it broken"


@dataclass
class Failures:
    """The failures of a run so far; times are seconds since the epoch.

    Attributes:
        limit: failures after which a host is left out; 0 for no limit
        hours: time after which a failure no longer counts
        clock: returns the time
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
                self._count(_names(event.get("blamed")), moment)
                for host in _names(event.get("broken")):
                    self.broken[host] = moment, BROKEN
                self.slow |= dict.fromkeys(_names(event.get("slow")), moment)
            elif kind == "gpu_error" and event.get("left_out"):
                for host in _names([event.get("node")]):
                    self.broken[host] = moment, str(event.get("error", ""))
            elif kind == "replace":
                self.slow |= dict.fromkeys(_names(event.get("nodes")), moment)
                self.replaced_ranks.update(ranks_in(event.get("ranks")))
            elif kind == "forget":
                for known in (self.of_nodes, self.broken, self.slow, self.replaced_ranks):
                    known.clear()

    def note(self, diagnosis: Diagnosis, checkpoint: int) -> str:
        """Count a failure.

        Args:
            diagnosis: its cause
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
        failures: the failures of the run
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
        broken = self.to_leave_out(new)
        for host, error, severe in new:
            self._found[host, error] = severe and host in broken
            if self._found[host, error]:
                self.failures.leave_out(host, error)
        return [(host, error, self._found[host, error]) for host, error, _ in new]

    def to_leave_out(self, errors: Iterable[tuple[str, str, bool]]) -> set[str]:
        """Return the hosts to leave out because of new errors.

        Many hosts with severe errors at once point to the driver or to the power supply, so they
        are not left out.
        """
        hosts = {host for host, _, severe in errors if severe}
        return hosts if self.action == "leave_out" and len(hosts) <= MAX_BLAMED_NODES else set()

    def of_hosts(self, hosts: Iterable[str], *, severe: bool) -> dict[str, str]:
        """Return the errors of some hosts during the attempt, by host.

        Args:
            hosts: the hosts
            severe: return the errors for which hosts are left out; otherwise, all others
        """
        found: dict[str, list[str]] = {}
        for (host, error), left_out in self._found.items():
            if left_out == severe and host in set(hosts):
                found.setdefault(host, []).append(error)
        return {host: ", ".join(errors) for host, errors in found.items()}


def _names(value: Any) -> Sequence[str]:
    """Return the names in a list of a file that a user may have edited."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
