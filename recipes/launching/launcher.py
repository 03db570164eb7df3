"""The attempts of a run: each start of its ranks, until every step is done."""

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from recipes.launching.attempt import SECONDS_TO_KILL, Attempt, Command
from recipes.launching.causes import Diagnosis, Failures, Outcome, diagnose, shown
from recipes.launching.nodes import SECONDS_TO_CONNECT, Nodes
from recipes.launching.replanning import Placement, Replanner
from recipes.nodes.connection import Connect, Connections
from recipes.training.recipe.schema import Recipe
from recipes.training.run_folder.checkpoint_folders import published, step_of
from recipes.training.run_folder.folder import RunFolder
from recipes.training.run_folder.lease import grant
from recipes.training.runtime.exits import HUNG, UNFIT

SECONDS_FOR_SPARE_NODES = 10.0  # to wait for all nodes, at the start
SECONDS_FOR_NODES = 600.0  # to wait for nodes if too few answer
SECONDS_BETWEEN_LISTS = 10.0  # of hosts, which a user may extend
SECONDS_TO_SAVE = 300.0  # for ranks whose launch.py has ended, if supervision has no limit
ECHO_SECONDS = 2.0  # signals within this time are one request


class Launcher:
    """A run on several nodes, restarted on the nodes that are left.

    Args:
        recipe: the recipe, with the user's overrides
        folder: the run folder, which this process has locked
        command: how the ranks are started
        replanner: finds the layouts
        list_hosts: returns the hosts, which may become more during the run
        connect: how a command is started on a host
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        command: Command,
        *,
        replanner: Replanner,
        list_hosts: Callable[[], list[str]],
        connect: Connect,
    ):
        assert recipe.cluster
        self.folder, self.command, self.replanner = folder, command, replanner
        self.cluster = recipe.cluster
        # A later launch.py of the same run folder has the same token, and so ends the ranks that
        # this one leaves behind if it is killed.
        self.token = hashlib.sha256(str(folder.path).encode()).hexdigest()[:12]
        self.started = f"{time.time_ns():x}"
        self.failures = Failures(recipe.cluster.node_failures)
        self.asked = 0  # times that a user has asked to stop
        self._asked_at = -ECHO_SECONDS
        checkpoint = recipe.checkpoint
        node_seconds = float(recipe.supervision.node_seconds)
        self.connections = Connections(
            connect,
            run="" if command.master else self.token,
            silence_seconds=node_seconds,
            stop_seconds=float(recipe.supervision.hang_seconds or SECONDS_TO_SAVE),
            standby=command.ranks_per_node if recipe.cluster.standby else 0,
            variables=command.variables,
            snapshots=f"{checkpoint.snapshot_folder}/threefold-{self.token}"
            if checkpoint.snapshot_every
            else "",
        )
        self.nodes = Nodes(list_hosts, self.connections, self.failures, node_seconds=node_seconds)

    def ask(self, *_: object) -> None:
        """Ask the ranks to save and stop; the second time, kill them. A signal handler.

        A closed terminal, for example, sends a signal more than once.
        """
        now = time.monotonic()
        if now - self._asked_at >= ECHO_SECONDS:
            self.asked += 1
            self._asked_at = now

    def run(self) -> int:
        """Start attempts until the run ends; return the exit code of launch.py."""
        try:
            number, reason = 1, "started"
            hosts = len(self.nodes.hosts)
            for count, seconds in (
                (hosts, SECONDS_FOR_SPARE_NODES),
                (min(hosts, self.cluster.nodes), SECONDS_TO_CONNECT),
            ):
                self.nodes.wait_for(count, seconds=seconds, stop=self._is_asked)
            while placement := self._find_placement():
                try:
                    attempt = self._start(number, placement, reason)
                except OSError as error:  # the lease cannot be written
                    self._say(f"{error.filename or self.folder.path}: {error.strerror}; mend the "
                              f"disk and rerun the same command to resume")  # fmt: skip
                    return 1
                code, reason = self._follow(attempt)
                if code is not None:
                    return code
                number += 1
            return self._give_up(reason)
        finally:
            self.connections.close_all(SECONDS_TO_KILL)

    def _start(self, number: int, placement: Placement, reason: str) -> Attempt:
        """Start an attempt, after giving it the run folder.

        Raises:
            OSError: the lease cannot be written.
        """
        lease = f"{self.token}.{self.started}.{number}"
        hosts = self.nodes.usable()[: placement.nodes]
        attempt = Attempt(number, lease, nodes=self.nodes, hosts=hosts, placement=placement)
        grant(self.folder.path, lease)
        self._announce(attempt, reason)
        attempt.start(self.command)
        return attempt

    def _follow(self, attempt: Attempt) -> tuple[int | None, str]:
        """Watch an attempt to its end.

        Returns:
            The exit code of launch.py, or None if the run is restarted; and the reason.
        """
        outcome = attempt.watch(asked=lambda: self.asked, should_grow=self._should_grow)
        broken, slow = self._unfit(attempt)
        behind = self._hosts_behind(attempt)
        diagnosis = diagnose(replace(outcome, behind=behind, broken=broken, slow=slow))
        step = max(self._newest_checkpoint(), self._start_of(attempt))
        problem = ""
        if diagnosis.exit_code is None:
            problem = self.failures.note(diagnosis, step)
        self._tell_end(attempt, diagnosis, step, problem)
        if problem:
            return next((end.code for end in attempt.ends if end.code > 0), 1), diagnosis.reason
        return diagnosis.exit_code, diagnosis.reason

    def _find_placement(self) -> Placement | None:
        """Return the layout on the usable hosts; wait for hosts if there are too few."""
        minimum = self.cluster.minimum_nodes
        deadline = time.monotonic() + SECONDS_FOR_NODES
        told = False
        while not self.asked:
            if problem := self.nodes.refresh():
                self._say(f"{problem}; continuing with the earlier hosts")
            usable = len(self.nodes.usable())
            if placement := self.replanner.best(usable, minimum):
                return placement
            if time.monotonic() > deadline:
                return None
            if not told:
                told = True
                self._say(f"{self._shortage(usable)}; waiting up to {SECONDS_FOR_NODES:.0f} s")
            left = min(SECONDS_BETWEEN_LISTS, deadline - time.monotonic())
            self.nodes.wait_for(usable + 1, seconds=left, stop=self._is_asked)
        return None

    def _should_grow(self, attempt: Attempt) -> bool:
        """Return True if the ranks should save and end, because more nodes could be used."""
        if len(attempt.hosts) >= self.cluster.nodes:
            return False
        if problem := self.nodes.refresh():  # a user may have added hosts
            self._say(f"{problem}; continuing with the earlier hosts")
        usable = len(self.nodes.usable())
        if usable <= len(attempt.hosts):
            return False
        larger = self.replanner.best(usable, len(attempt.hosts) + 1)
        return larger is not None and self._trains(attempt)

    def _trains(self, attempt: Attempt) -> bool:
        """Return True once the attempt has finished its first step, after which it can save."""
        return any(event["event"] == "first_step" for event in self._events_of(attempt))

    def _hosts_behind(self, attempt: Attempt) -> list[str]:
        """Return the hosts of the ranks that the attempt's hang report names as behind."""
        if not any(end.code == HUNG for end in attempt.ends):
            return []
        events = self._events_of(attempt)
        stops = [
            event["behind"] for event in events if event["event"] == "stop" and "behind" in event
        ]
        ranks = [rank for rank in stops[-1] if isinstance(rank, int)] if stops else []
        indices = {rank // self.command.ranks_per_node for rank in ranks}
        return [host for index, host in enumerate(attempt.hosts) if index in indices]

    def _unfit(self, attempt: Attempt) -> tuple[dict[str, str], dict[str, str]]:
        """Return the broken and the slow hosts that the attempt's preflight names, with reasons."""
        named: tuple[dict[str, str], dict[str, str]] = ({}, {})
        if any(end.code == UNFIT for end in attempt.ends):
            found = [each for each in self._events_of(attempt) if each["event"] == "preflight"]
            for node in found[-1].get("left_out", ()) if found else ():
                host = attempt.hosts[node["rank"] // self.command.ranks_per_node]
                named[0 if node["broken"] else 1][host] = f"{host}: {node['reason']}"
        return named

    def _events_of(self, attempt: Attempt) -> list[dict[str, Any]]:
        """Return the events since the start of an attempt, the newest one."""
        events = self.folder.read_events()
        starts = [i for i, event in enumerate(events) if event.get("attempt") == attempt.lease]
        return events[starts[0] :] if starts else []

    def _newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none."""
        return max(map(step_of, published(self.folder.checkpoints)), default=0)

    def _start_of(self, attempt: Attempt) -> int:
        """Return the step after which an attempt has started; 0 if it has not."""
        starts = [e["step"] for e in self._events_of(attempt) if e["event"] in ("start", "resume")]
        return starts[-1] if starts else 0

    def _is_asked(self) -> bool:
        return self.asked > 0

    def _announce(self, attempt: Attempt, reason: str) -> None:
        """Print and record an attempt, its nodes and the nodes that are not used."""
        placement, nodes = attempt.placement, self.nodes
        unused = {host: nodes.absence(host) for host in nodes.hosts if host not in attempt.hosts}
        self.folder.event(
            "attempt",
            self._newest_checkpoint(),
            attempt=attempt.lease,
            reason=reason,
            nodes=list(attempt.hosts),
            unused=unused,
            layout=placement.layout,
            overrides=list(placement.overrides),
            predicted_step_seconds=placement.seconds,
        )
        others = shown([f"{host} ({why})" for host, why in unused.items()])
        self._say(
            f"attempt {attempt.number} on {shown(attempt.hosts)}: {placement.layout}"
            + (f"; not used: {others}" if others else "")
        )

    def _tell_end(self, attempt: Attempt, diagnosis: Diagnosis, step: int, problem: str) -> None:
        """Print and record the end of an attempt."""
        self.folder.event(
            "attempt_end",
            step,
            attempt=attempt.lease,
            reason=diagnosis.reason,
            blamed=[*diagnosis.blamed, *diagnosis.broken, *diagnosis.slow],
        )
        if diagnosis.exit_code is not None:
            self._say(diagnosis.reason)
            return
        blamed = [*diagnosis.blamed, *diagnosis.broken]
        left_out = [host for host in blamed if self.failures.left_out(host)]
        details = f"; {shown(left_out)} will not be used again" if left_out else ""
        if diagnosis.slow:
            details += f"; {shown(diagnosis.slow)} will be used only if no other node is left"
        where = f"after step {step}" if step else "at step 1"
        then = problem or f"restarting {where}"
        self._say(f"attempt {attempt.number} ended: {diagnosis.reason}{details}; {then}")

    def _shortage(self, usable: int) -> str:
        minimum = self.cluster.minimum_nodes
        text = f"{usable} of {len(self.nodes.hosts)} nodes can be used"
        if usable < minimum:
            return f"{text}, and the run needs cluster.minimum_nodes = {minimum}"
        return f"{text}, and no layout fits on them (cluster.minimum_nodes = {minimum})"

    def _give_up(self, reason: str) -> int:
        """Return the exit code of a run that cannot be started again on the usable nodes."""
        if self.asked:
            return diagnose(Outcome(asked=True)).exit_code or 0
        self._say(
            f"{self._shortage(len(self.nodes.usable()))}; repair or add nodes, then rerun the same "
            f"command to resume (the last attempt: {reason})"
        )
        return 1

    def _say(self, text: str) -> None:
        print(f"launch.py: {text}", file=sys.stderr, flush=True)
