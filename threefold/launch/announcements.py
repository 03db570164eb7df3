"""Messages and events of launch.py: its attempts, their ends, and what it decides about nodes."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from models.errors import counted
from threefold.launch.attempt import Attempt
from threefold.launch.connection import ADVICE
from threefold.launch.diagnosis import Diagnosis, shown
from threefold.launch.nodes import Nodes
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import published, step_of


class Announcements:
    """Prints what launch.py does, and records it in events.jsonl.

    Args:
        folder: the run folder
        nodes: all nodes
        minimum_nodes: `cluster.minimum_nodes`
    """

    def __init__(self, folder: RunFolder, nodes: Nodes, minimum_nodes: int):
        self.folder, self.nodes, self.minimum_nodes = folder, nodes, minimum_nodes
        self._newest = 0

    def say(self, text: str) -> None:
        """Print a message."""
        print(f"launch.py: {text}", file=sys.stderr, flush=True)

    def newest_checkpoint(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none.

        If the file server does not answer, it is the step that was found last.
        """
        with contextlib.suppress(OSError):
            self._newest = max(map(step_of, published(self.folder.checkpoints)), default=0)
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
        self.say(
            f"attempt {attempt.number} on {shown(attempt.hosts)}: {placement.layout}"
            + (f"; not used: {others}" if others else "")
        )

    def end(self, attempt: Attempt, diagnosis: Diagnosis, step: int, problem: str) -> None:
        """Announce the end of an attempt.

        Args:
            attempt: the attempt
            diagnosis: the cause of its end
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
            self.say(diagnosis.reason)
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
        self.say(f"attempt {attempt.number} ended: {diagnosis.reason}{details}; {then}")

    def gpu_error(self, host: str, error: str, *, left_out: bool) -> None:
        """Announce an error of a GPU."""
        self._record("gpu_error", node=host, error=error, left_out=left_out)
        what_follows = "; the node is left out from the next attempt on" if left_out else ""
        self.say(f"{host}: {error}{what_follows}")

    def replace(self, hosts: list[str], ranks: list[int]) -> None:
        """Announce the replacement of slow hosts."""
        self._record("replace", nodes=hosts, ranks=ranks, reason="slow")

    def wait(self, hosts: Sequence[str], *, seconds: float, is_short: bool) -> None:
        """Announce the first wait for hosts that have not answered.

        Args:
            hosts: these hosts
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
        self.say(
            f"no answer from {shown(hosts)}: {what_follows}" + (f"; {advice}" if advice else "")
        )

    def shortage(self) -> str:
        """Return the number of nodes that can be used, and why it is too small."""
        usable = len(self.nodes.usable())
        text = f"{usable} of {len(self.nodes.hosts)} nodes can be used"
        if usable < self.minimum_nodes:
            return f"{text}, and the run needs cluster.minimum_nodes = {self.minimum_nodes}"
        return f"{text}, and no layout fits on them (cluster.minimum_nodes = {self.minimum_nodes})"

    def _record(self, event: str, **facts: Any) -> None:
        self.folder.event(event, self.newest_checkpoint(), **facts)
