"""The nodes of a run: which ones answer, which are spare, and which have failed too often."""

import sys
import time
from collections.abc import Callable, Collection

from models.errors import UserError
from recipes.launching.causes import Failures
from recipes.nodes.connection import Agent, Connections

SECONDS_TO_CONNECT = 60.0
SECONDS_BETWEEN_CONNECTS = 5.0  # to a host that does not answer


class Nodes:
    """The hosts of a run and the connections to them.

    Args:
        list_hosts: returns the names of the hosts, which may become more during the run
        connections: the connections, at first none
        failures: the failures of the run, which grow during the run
        node_seconds: time without a sign of life after which a host is lost
    """

    def __init__(
        self,
        list_hosts: Callable[[], list[str]],
        connections: Connections,
        failures: Failures,
        *,
        node_seconds: float,
    ):
        self.list_hosts, self.hosts = list_hosts, list_hosts()
        self.connections, self.failures, self.node_seconds = connections, failures, node_seconds
        self._next_connect: dict[str, float] = {}  # for hosts without an agent

    def agent(self, host: str) -> Agent | None:
        """Return the agent of a connected host; None for a host without a connection."""
        return self.connections.agents.get(host)

    def usable(self) -> list[str]:
        """Return the hosts that answer and have not failed too often.

        They are in the order of the list, except that slow hosts come last.
        """
        answering = filter(self._answers, self.hosts)
        found = [host for host in answering if not self.failures.left_out(host)]
        return sorted(found, key=self.failures.slow.__contains__)

    def spares(self, used: Collection[str]) -> int:
        """Return the number of usable hosts that are neither used nor slow."""
        return len(set(self.usable()).difference(used, self.failures.slow))

    def keep_connected(self) -> None:
        """Connect to the hosts without an agent, and drop the agents that do not answer."""
        now = time.monotonic()
        free = self.connections.free_connections()
        for host in self.hosts:
            if self.agent(host) is None:
                due = now >= self._next_connect.get(host, 0.0)
                if due and free > 0 and not self.failures.left_out(host):
                    free -= 1
                    self._open(host)
            elif self.is_silent(host):
                self.drop(host)

    def _open(self, host: str) -> None:
        try:
            self.connections.open(host)
        except OSError as error:  # no such program, or too many processes or open files
            print(f"launch.py: no connection to {host}: {error.strerror}", file=sys.stderr)
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
            self.keep_connected()
            for report in self.connections.reports():
                if report.content is None:
                    self.drop(report.host)

    def refresh(self) -> str:
        """Read the list of hosts again; return a message if it is not valid."""
        try:
            self.hosts = self.list_hosts()
        except UserError as problem:
            return str(problem)
        return ""

    def absence(self, host: str) -> str:
        """Return the reason why a host is not used."""
        if host in self.failures.broken:
            return "broken, as the preflight has found"
        if self.failures.left_out(host):
            return f"left out after {self.failures.of_nodes[host]} failures"
        if not self._answers(host):
            return "no answer"
        return "slow, as the preflight has found" if host in self.failures.slow else "spare"

    def _answers(self, host: str) -> bool:
        agent = self.agent(host)
        return agent is not None and agent.ready
