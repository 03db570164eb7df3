"""The attempts of a run: each start of its ranks, until every step is done, and the messages."""

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from models.errors import UserError, counted
from threefold.config.recipe import Recipe
from threefold.launch.attempt import SECONDS_TO_KILL, Attempt, Command
from threefold.launch.connection import ADVICE, AgentSettings, Connect, Connections
from threefold.launch.diagnosis import (
    Diagnosis,
    Failures,
    GpuErrors,
    diagnose,
    events_of,
    hosts_of,
    ran_out_of_memory,
    ranks_behind,
    replacement,
    saved_on_request,
    shown,
    slow_ranks,
    start_of,
    trains,
    unfit_hosts,
)
from threefold.launch.hosts import SECONDS_BETWEEN_LISTS, SECONDS_TO_CONNECT, Nodes
from threefold.launch.replanning import Placement, Replanner
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import newest_step
from threefold.run_folder.lock import grant
from threefold.runtime.exits import HUNG, INTERRUPTED, StopSignals

# Messages and events of launch.py: its attempts, their ends, and what it decides about nodes.


def say(text: str) -> None:
    """Print a message."""
    print(f"launch.py: {text}", file=sys.stderr, flush=True)


class Announcements:
    """Prints what launch.py does, and records it in events.jsonl."""

    def __init__(self, folder: RunFolder, nodes: Nodes, minimum_nodes: int):
        self.folder, self.nodes, self.minimum_nodes = folder, nodes, minimum_nodes
        self._newest = 0

    def newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none.

        If the file server does not answer, it is the step that was found last.
        """
        with contextlib.suppress(OSError):
            self._newest = newest_step(self.folder.checkpoints)
        return self._newest

    def begin(self, attempt: Attempt, reason: str) -> None:
        """Announce an attempt, its nodes and the nodes that are not used."""
        placement, nodes = attempt.placement, self.nodes
        unused = {host: nodes.absence(host) for host in nodes.hosts if host not in attempt.hosts}
        self._record(
            "attempt",
            attempt=attempt.lease,
            number=attempt.number,
            reason=reason,
            nodes=list(attempt.hosts),
            unused=unused,
            layout=placement.layout,
            overrides=list(placement.overrides),
            predicted_step_seconds=placement.step_seconds,
        )
        others = shown([f"{host} ({why})" for host, why in unused.items()])
        say(
            f"attempt {attempt.number} on {shown(attempt.hosts)}: {placement.layout}"
            + (f"; not used: {others}" if others else "")
        )

    def end(self, attempt: Attempt, diagnosis: Diagnosis, step: int, problem: str) -> None:
        """Announce the end of an attempt.

        Args:
            step: the later of the newest checkpoint's step and the step that the attempt started
                from
            problem: the reason why the run is not restarted; "" if it is
        """
        self.folder.event(
            "attempt_end",
            step,
            attempt=attempt.lease,
            number=attempt.number,
            reason=diagnosis.reason,
            blamed=list(diagnosis.blamed),
            broken=list(diagnosis.preflight_broken),
            slow=list(diagnosis.preflight_slow),
        )
        if diagnosis.exit_code is not None:
            say(diagnosis.reason)
            return
        reasons = {
            host: self.nodes.failures.reason(host)
            for host in [*diagnosis.blamed, *diagnosis.preflight_broken]
        }
        left_out = [host for host, reason in reasons.items() if reason]
        details = f"; {shown(left_out)} will not be used again for now" if left_out else ""
        if diagnosis.preflight_slow:
            details += (
                f"; {shown(diagnosis.preflight_slow)} will be used only if no other node is left"
            )
        then = problem or "restarting"  # the ranks name the step that they start from
        say(f"attempt {attempt.number} ended: {diagnosis.reason}{details}; {then}")

    def gpu_error(self, host: str, error: str, *, left_out: bool) -> None:
        """Announce an error of a GPU."""
        self._record("gpu_error", node=host, error=error, left_out=left_out)
        what_follows = "; the node is left out from the next attempt on" if left_out else ""
        say(f"{host}: {error}{what_follows}")

    def replace(self, hosts: list[str], ranks: list[int]) -> None:
        """Announce the replacement of slow hosts."""
        self._record("replace", nodes=hosts, ranks=ranks, reason="slow")

    def wait(self, hosts: Sequence[str], *, seconds: float, is_short: bool) -> None:
        """Announce the first wait for hosts that have not answered.

        Args:
            seconds: longest time that launch.py waits for them
            is_short: True if the run cannot start without them
        """
        if is_short:
            what_follows = (
                f"the run needs at least cluster.minimum_nodes = {self.minimum_nodes} of the "
                f"{counted(len(self.nodes.hosts), 'listed node')}; waiting up to {seconds:.0f} s"
            )
        else:
            what_follows = f"waiting up to {seconds:.0f} s before the run starts on the others"
        advice = ADVICE.get(self.nodes.connections.connect, "")
        say(f"no answer from {shown(hosts)}: {what_follows}" + (f"; {advice}" if advice else ""))

    def shortage(self) -> str:
        """Return the number of nodes that can be used, and why it is too small."""
        usable = len(self.nodes.usable())
        text = f"{usable} of {len(self.nodes.hosts)} nodes can be used"
        if usable < self.minimum_nodes:
            return f"{text}, and the run needs cluster.minimum_nodes = {self.minimum_nodes}"
        return f"{text}, and no layout fits on them (cluster.minimum_nodes = {self.minimum_nodes})"

    def _record(self, event: str, **facts: Any) -> None:
        self.folder.event(event, self.newest_checkpoint(), **facts)


SECONDS_FOR_SPARE_NODES = 10.0  # to wait for all nodes, at the start
SECONDS_FOR_NODES = 600.0  # to wait for nodes if too few answer, including the waits at the start
SECONDS_TO_SAVE = 300.0  # for ranks whose launch.py has ended, if supervision has no limit
MAX_EXCLUDED_LAYOUTS = 3  # layouts of launch.py that ran out of memory


class Launcher:
    """A run on several nodes, restarted on the nodes that are left.

    Args:
        recipe: the recipe, with the user's overrides
        folder: the run folder, which this process has locked
        list_hosts: returns the hosts, which may become more during the run
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
        self.token = hashlib.sha256(os.fsencode(folder.path)).hexdigest()[:12]
        self.started = f"{time.time_ns():x}"
        self.failures = Failures(recipe.cluster.node_failures, recipe.cluster.failure_hours)
        self.failures.restore(folder.read_events())
        self.stop_requests = 0  # times that a user has asked to stop
        self._asked_by = signal.SIGTERM
        self._signals = StopSignals()
        self.connections = Connections(
            connect,
            agent_settings(recipe, command, self.token),
            variables=command.variables,
            python=command.python,
        )
        self.nodes = Nodes(
            list_hosts,
            self.connections,
            self.failures,
            node_seconds=float(recipe.supervision.node_seconds),
            distinct=not command.shares_machine,
        )
        self.announcements = Announcements(folder, self.nodes, self.cluster.minimum_nodes)
        self.gpus = GpuErrors(self.failures, self.cluster.on_gpu_error)
        self.slow_comparisons = recipe.supervision.slow_comparisons
        self.excluded = 0  # layouts that ran out of memory
        self._slow_seen = (0, 0)  # attempt and step of the comparison that was handled last
        self._events: list[dict[str, Any]] = []
        self._events_read = ("", -1)  # attempt and size of the file

    def request_stop(self, number: int = signal.SIGTERM, frame: object = None) -> None:
        """Ask the ranks to save and stop; the second time, kill them. A signal handler.

        A closed terminal, for example, sends a signal more than once.
        """
        if self._signals.note(number) in ("first", "repeated"):
            self.stop_requests += 1
            self._asked_by = signal.Signals(number)

    def run(self) -> int:
        """Start attempts until the run ends; return the exit code of launch.py."""
        try:
            number, reason, since = 1, "started", time.monotonic()
            self._wait_at_the_start()
            while placement := self._find_placement(since):
                try:
                    attempt = self._start(number, placement, reason)
                except OSError as error:  # the lease cannot be written
                    say(
                        f"{error.filename or self.folder.path} cannot be written "
                        f"({error.strerror}); free disk space or make it writable, then rerun the "
                        f"same command to resume"
                    )
                    return 1
                code, reason = self._follow(attempt)
                if code is not None:
                    return code
                number, since = number + 1, time.monotonic()
            return self._give_up(reason, has_started=number > 1)
        finally:
            self.connections.close_all(SECONDS_TO_KILL)

    def _wait_at_the_start(self) -> None:
        """Wait for all nodes that the run can use, but longer only for those that it needs."""
        began = time.monotonic()
        self.nodes.wait_for_answers(seconds=SECONDS_FOR_SPARE_NODES, stop=self._is_asked)
        left = SECONDS_FOR_SPARE_NODES - (time.monotonic() - began)
        missing, usable = self.nodes.missing(), len(self.nodes.usable())
        if missing and usable < self.cluster.nodes and not self.stop_requests:
            is_short = usable < self.cluster.minimum_nodes
            seconds = SECONDS_FOR_NODES if is_short else left + SECONDS_TO_CONNECT
            self.announcements.wait(missing, seconds=seconds, is_short=is_short)
        for most, seconds in (
            (len(self.nodes.hosts), left),
            (self.cluster.nodes, SECONDS_TO_CONNECT),
        ):
            self.nodes.wait_for_all(most, seconds=seconds, stop=self._is_asked)

    def _start(self, number: int, placement: Placement, reason: str) -> Attempt:
        """Start an attempt, after giving it the run folder.

        Raises:
            OSError: the lease cannot be written.
        """
        lease = f"{self.token}.{self.started}.{number}"
        hosts = self.nodes.usable()[: placement.nodes]
        attempt = Attempt(number, lease, nodes=self.nodes, hosts=hosts, placement=placement)
        self.gpus.begin()
        self._events = []
        grant(self.folder.path, lease)
        self.announcements.begin(attempt, reason)
        attempt.start(self.command)
        return attempt

    def _follow(self, attempt: Attempt) -> tuple[int | None, str]:
        """Watch an attempt to its end.

        Returns:
            The exit code of launch.py, or None if the run is restarted; and the reason.
        """
        outcome = attempt.watch(asked=lambda: self.stop_requests, why_restart=self._why_restart)
        self._handle_gpu_errors()
        events = self._events_of(attempt)
        hung = any(end.code == HUNG for end in attempt.ends)
        behind = hosts_of(
            ranks_behind(events) if hung else (), attempt.hosts, self.command.ranks_per_node
        )
        out_of_memory = ran_out_of_memory(events)
        broken, slow = unfit_hosts(events, attempt.hosts, self.command.ranks_per_node)
        diagnosis = diagnose(
            replace(
                outcome,
                checkpoint=self.announcements.newest_checkpoint(),
                behind=behind,
                preflight_broken=broken,
                preflight_slow=slow,
                gpu_broken=self.gpus.of_hosts(attempt.hosts, severe=True),
                gpu_suspects=self.gpus.of_hosts(attempt.hosts, severe=False),
                several_hosts=len(attempt.hosts) > 1,
                out_of_memory=out_of_memory,
                other_layout=out_of_memory and self._find_other_layout(attempt),
                saved_step=saved_on_request(events),
            )
        )
        step = max(self.announcements.newest_checkpoint(), start_of(events))
        problem = ""
        if diagnosis.exit_code is None:
            problem = self.failures.note(diagnosis, step)
        self.announcements.end(attempt, diagnosis, step, problem)
        if problem:
            return next((end.code for end in attempt.ends if end.code > 0), 1), diagnosis.reason
        return diagnosis.exit_code, diagnosis.reason

    def _find_placement(self, since: float) -> Placement | None:
        """Return the layout on the usable hosts; wait for hosts if there are too few.

        since: beginning of the wait, on the clock of time.monotonic
        """
        minimum = self.cluster.minimum_nodes
        deadline = since + SECONDS_FOR_NODES
        told = False
        while not self.stop_requests:
            self._handle_gpu_errors()
            self._refresh()
            usable = len(self.nodes.usable())
            if placement := self.replanner.best(usable, minimum):
                return placement
            if time.monotonic() > deadline:
                return None
            if not told:
                told = True
                say(
                    f"{self.announcements.shortage()}; waiting up to "
                    f"{deadline - time.monotonic():.0f} s"
                )
            left = min(SECONDS_BETWEEN_LISTS, deadline - time.monotonic())
            self.nodes.wait_for(usable + 1, seconds=left, stop=self._is_asked)
        return None

    def _find_other_layout(self, attempt: Attempt) -> bool:
        """Exclude the layout of an attempt that ran out of memory, if launch.py has chosen it.

        Returns:
            True if there is another layout on the usable nodes.
        """
        if not attempt.placement.chosen or self.excluded == MAX_EXCLUDED_LAYOUTS:
            return False
        self.excluded += 1
        self.replanner.exclude(attempt.placement)
        usable = len(self.nodes.usable())
        return self.replanner.best(usable, self.cluster.minimum_nodes) is not None

    def _why_restart(self, attempt: Attempt) -> str:
        """Return the reason why the ranks should save and end; "" if there is none."""
        self._handle_gpu_errors()
        reason = self._why_fewer(attempt) or self._why_others(attempt) or self._why_more(attempt)
        return reason if reason and trains(self._events_of(attempt)) else ""

    def _why_fewer(self, attempt: Attempt) -> str:
        """Return the reason to restart without a host that was left out during the attempt."""
        left_out = {host: self.failures.reason(host) for host in attempt.hosts}
        reasons = [f"{host}: {reason}" for host, reason in left_out.items() if reason]
        if not reasons:
            return ""
        usable = len(self.nodes.usable())
        placement = self.replanner.best(usable, self.cluster.minimum_nodes)
        return shown(reasons, separator="; ") if placement else ""

    def _why_others(self, attempt: Attempt) -> str:
        """Return the reason to restart with spare hosts in place of slow ones."""
        events = self._events_of(attempt)
        ranks = slow_ranks(events)
        step = max((e["step"] for e in events if e["event"] == "slow"), default=0)
        if not ranks or (attempt.number, step) == self._slow_seen:
            return ""
        slow = hosts_of(ranks, attempt.hosts, self.command.ranks_per_node)
        decision = replacement(
            slow,
            self.nodes.spares(attempt.hosts),
            action=self.cluster.on_slow_rank,
            replaced=self.failures.replaced_ranks,
            ranks=ranks,
        )
        self._slow_seen = attempt.number, step
        if decision.problem:
            say(f"{shown(slow)} not replaced although slow: {decision.problem}")
        if not decision.hosts:
            return ""
        self.failures.replaced_ranks.update(ranks)
        self.failures.count_slow(slow)
        self.announcements.replace(slow, ranks)
        return f"{shown(slow)}: slow in {self.slow_comparisons} successive comparisons"

    def _why_more(self, attempt: Attempt) -> str:
        """Return the reason to restart on more nodes."""
        if len(attempt.hosts) >= self.cluster.nodes:
            return ""
        self._refresh()  # a user may have added hosts
        usable = len(self.nodes.usable())
        if usable <= len(attempt.hosts):
            return ""
        larger = self.replanner.best(usable, len(attempt.hosts) + 1)
        return "more nodes are available" if larger else ""

    def _handle_gpu_errors(self) -> None:
        """Record new errors of GPUs, and leave out hosts with a severe one."""
        reported, self.nodes.gpu_errors = self.nodes.gpu_errors, []
        for host, error, left_out in self.gpus.handle(reported):
            self.announcements.gpu_error(host, error, left_out=left_out)

    def _refresh(self) -> None:
        """Read the list of hosts again, unless it has just been read."""
        if problem := self.nodes.refresh():
            say(f"{problem}; continuing with the earlier hosts")

    def _events_of(self, attempt: Attempt) -> list[dict[str, Any]]:
        """Return the events since the start of an attempt; read the file only if it has grown."""
        try:
            # Opening the file makes NFS ask the server; the size in its cache may be out of date.
            with self.folder.events.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
        except OSError:  # the file server does not answer, or nothing has been written
            size = -1
        if (attempt.lease, size) != self._events_read:
            with contextlib.suppress(UserError):  # otherwise, the events that are known remain
                self._events = events_of(self.folder.read_events(), attempt.lease)
                self._events_read = attempt.lease, size
        return self._events

    def _is_asked(self) -> bool:
        return self.stop_requests > 0

    def _give_up(self, reason: str, *, has_started: bool) -> int:
        """Return the exit code of a run that is not started (again) on the usable nodes."""
        name, rerun = self._asked_by.name, "rerun the same command"
        if has_started:
            rerun += f" to resume (the last attempt: {reason})"
        if not self.stop_requests:
            say(f"{self.announcements.shortage()}; repair or add nodes, then {rerun}")
            return 1
        if has_started:
            say(f"interrupted by {name} while no ranks were running; {rerun}")
            return INTERRUPTED
        say(f"interrupted by {name} before any ranks were started")
        # For other signals, slurm/pretrain.slurm needs the code to requeue the job.
        return 128 + signal.SIGINT if self._asked_by == signal.SIGINT else INTERRUPTED


def agent_settings(recipe: Recipe, command: Command, token: str) -> AgentSettings:
    """Return the settings of the agents.

    Args:
        token: name of the run
    """
    assert recipe.cluster
    checkpoint = recipe.checkpoint
    memory = f"{checkpoint.snapshot_folder}/threefold-{token}" if checkpoint.snapshot_every else ""
    return AgentSettings(
        run="" if command.shares_machine else token,
        silence_seconds=float(recipe.supervision.node_seconds),
        stop_seconds=float(recipe.supervision.hang_seconds or SECONDS_TO_SAVE),
        standby=command.ranks_per_node if recipe.cluster.standby else 0,
        snapshots=memory,
    )
