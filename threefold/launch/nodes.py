"""The nodes of a run: which ones answer, which are spare, and which have failed too often."""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from models.errors import UserError
from threefold.launch.connection import MAX_CONNECTING, Agent, Connections
from threefold.launch.diagnosis import Failures

SECONDS_TO_CONNECT = 60.0
SECONDS_BETWEEN_LISTS = 10.0  # of hosts, which a user may extend
SECONDS_BETWEEN_CONNECTS = 5.0  # to a host that does not answer


class Nodes:
    """The hosts of a run and the connections to them.

    Args:
        connections: the connections, at first none
        node_seconds: time without a sign of life after which a host is lost
        distinct: reject hosts that are the same machine under two names

    Attributes:
        gpu_errors: (host, error, severe) of errors that agents have reported and that launch.py has
            not handled
        aliases: host -> the host of the list that is the same machine
    """

    def __init__(
        self,
        list_hosts: Callable[[], list[str]],
        connections: Connections,
        failures: Failures,
        *,
        node_seconds: float,
        distinct: bool = True,
    ):
        self.list_hosts, self.hosts = list_hosts, list_hosts()
        self._listed_at = time.monotonic()
        self.connections, self.failures, self.node_seconds = connections, failures, node_seconds
        self.gpu_errors: list[tuple[str, str, bool]] = []
        self.aliases: dict[str, str] = {}
        self._distinct = distinct
        self._machines: dict[str, str] = {}  # host -> machine
        connections.admit = self.admit
        self._next_connect: dict[str, float] = {}  # for hosts without an agent

    def agent(self, host: str) -> Agent | None:
        """Return the agent of a connected host; None for a host without a connection."""
        return self.connections.agents.get(host)

    def usable(self) -> list[str]:
        """Return the hosts that answer and are not left out, in the order of the list.

        Hosts that were slow come last.
        """
        hosts = [host for host in self.hosts if self._answers(host) and self._may_be_used(host)]
        return sorted(hosts, key=self.failures.is_slow)

    def spares(self, used: Collection[str]) -> int:
        """Return the number of usable hosts that are neither used nor slow."""
        others = set(self.usable()).difference(used)
        return sum(not self.failures.is_slow(host) for host in others)

    def keep_connected(self) -> None:
        """Connect to the hosts without an agent, and drop the agents that do not answer."""
        now = time.monotonic()
        agents = self.connections.agents.values()
        free = MAX_CONNECTING - sum(not agent.ready for agent in agents)
        for host in self.hosts:
            if self.agent(host) is None:
                due = now >= self._next_connect.get(host, 0.0)
                if due and free > 0 and self._may_be_used(host):
                    free -= 1
                    self._open(host)
            elif self.is_silent(host):
                self.drop(host)

    def _open(self, host: str) -> None:
        try:
            self.connections.open(host)
        except OSError:
            self.drop(host)

    def is_silent(self, host: str) -> bool:
        """Return True if a host has a connection but has not answered for too long."""
        agent = self.agent(host)
        if agent is None:
            return False
        return agent.silent_seconds() > (self.node_seconds if agent.ready else SECONDS_TO_CONNECT)

    def drop(self, host: str) -> None:
        """End the connection to a host, and try again later."""
        if host in self.connections.agents:
            self.connections.close(host)
        self._next_connect[host] = time.monotonic() + SECONDS_BETWEEN_CONNECTS

    def wait_for(self, count: int, *, seconds: float, stop: Callable[[], bool]) -> None:
        """Wait until `count` hosts can be used, `seconds` have passed, or `stop` returns True."""
        deadline = time.monotonic() + seconds
        while len(self.usable()) < count and time.monotonic() < deadline and not stop():
            self._poll()

    def wait_for_answers(self, *, seconds: float, stop: Callable[[], bool]) -> None:
        """Wait, as `wait_for` does, until no connection to a host that may be used is pending."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not stop():
            if all(host in self._next_connect for host in self.missing()):
                return
            self._poll()

    def missing(self) -> list[str]:
        """Return the hosts that may be used and have not answered."""
        return [host for host in self.hosts if self._may_be_used(host) and not self._answers(host)]

    def wait_for_all(self, most: int, *, seconds: float, stop: Callable[[], bool]) -> None:
        """Wait until all hosts, or `most` of them, can be used, as `wait_for` does."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not stop():
            if len(self.usable()) >= min(most, sum(map(self._may_be_used, self.hosts))):
                return
            self._poll()

    def note_gpus(self, host: str, content: Mapping[str, Any]) -> None:
        """Note the errors of GPUs that an agent has reported."""
        self.gpu_errors += [(host, str(text), bool(severe)) for text, severe in content["errors"]]

    def _poll(self) -> None:
        self.keep_connected()
        for report in self.connections.reports():
            if report.content is None:
                self.drop(report.host)
            elif report.content["is"] == "gpus":
                self.note_gpus(report.host, report.content)

    def admit(self, host: str, machine: str) -> bool:
        """Return False for a host that is the same machine as another host of the list.

        Otherwise, the agents of the two hosts would kill each other.

        Args:
            host: a host whose agent has just started
            machine: name and boot ID of its machine; "" if they are unknown
        """
        other = owner(machine, self._machines, self.hosts)
        if self._distinct and other not in ("", host):
            self.aliases[host] = other
            name = machine.partition(" ")[0]
            print(f"launch.py: {host} and {other} are the same machine ({name}), so {host} is not "
                  f"used; remove one of them from the hostfile",
                  file=sys.stderr, flush=True)  # fmt: skip
            return False
        self._machines[host] = machine
        return True

    def refresh(self) -> str:
        """Read the list of hosts again if the last time is SECONDS_BETWEEN_LISTS ago.

        Returns:
            A message if the list is not valid; otherwise "".
        """
        if time.monotonic() - self._listed_at < SECONDS_BETWEEN_LISTS:
            return ""
        self._listed_at = time.monotonic()
        try:
            self.hosts = self.list_hosts()
            self.aliases = {host: other for host, other in self.aliases.items()
                            if other in self.hosts}  # fmt: skip
        except UserError as problem:
            return str(problem)
        return ""

    def absence(self, host: str) -> str:
        """Return the reason why a host is not used."""
        if host in self.aliases:
            return f"the same machine as {self.aliases[host]}"
        if reason := self.failures.reason(host):
            return f"left out: {reason}"
        if not self._answers(host):
            return "no answer"
        return "spare, because it was slow" if self.failures.is_slow(host) else "spare"

    def _may_be_used(self, host: str) -> bool:
        return host not in self.aliases and not self.failures.left_out(host)

    def _answers(self, host: str) -> bool:
        agent = self.agent(host)
        return agent is not None and agent.ready


def owner(machine: str, machines: Mapping[str, str], hosts: Sequence[str]) -> str:
    """Return the host that was the first to be on a machine; "" if there is none.

    Args:
        machine: name and boot ID of the machine; "" if they are unknown
        machines: host -> its machine, for hosts that have been admitted
        hosts: the hosts of the list; a user may have removed others
    """
    known = (name for name in hosts if machine and machines.get(name) == machine)
    return next(known, "")
