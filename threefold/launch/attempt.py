"""The command of the ranks, and one start of it on some nodes, watched until all ranks end."""

import argparse
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from models.errors import UserError
from threefold.config.loading import REPOSITORY
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.launch.connection import Agent
from threefold.launch.diagnosis import AttemptResult, RankEnd
from threefold.launch.hosts import Nodes
from threefold.launch.replanning import Placement
from threefold.pretrain.preflight.evaluate import SPARE_NODES
from threefold.run_folder.folder import RunFolder
from threefold.runtime.environment import set_torch_variables

SECONDS_TO_ANSWER = 3.0  # after a failure, for nodes to show that they are alive
SECONDS_FOR_MESSAGES = 1.0  # between a failure and the end of the other ranks
SECONDS_FOR_ORDERLY_END = 60.0  # between the first and the last rank that ends by itself
SECONDS_FOR_GPUS = 5.0  # after a failure, for nodes to look at their GPUs
SECONDS_TO_KILL = 10.0
LOST_CONNECTION = "connection closed"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command of the ranks, and its environment.

    Attributes:
        words: the command of a rank, without the options that launch.py adds
        variables: environment variables of all ranks
        shares_machine: all nodes are this machine (--launcher local)
        pipelined: standby processes have the environment of a layout with pipeline stages
        python: the command that starts Python on a node, for its agent
    """

    words: Sequence[str]
    variables: Mapping[str, str]
    ranks_per_node: int
    shares_machine: bool = False
    pipelined: bool = False
    python: Sequence[str] = (sys.executable,)

    def address_of(self, host: str, agent: Agent | None) -> str:
        """Return the address at which other ranks reach a host.

        For USER@HOST, and for a name that is not known to this machine, perhaps because it is an
        alias of ~/.ssh/config, it is the address that ssh has connected to. Otherwise it is the
        name, whose address may belong to another network than that of ssh.
        """
        if self.shares_machine:
            return LOOPBACK
        user, _, name = host.rpartition("@")
        if agent and agent.address and (user or not has_address(name)):
            return agent.address
        is_loopback = name == "localhost" or name.startswith("127.")
        return agent.machine if agent and is_loopback else name


@cache
def has_address(name: str) -> bool:
    """Return True if this machine knows an address of a host."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):  # UnicodeError: not a name of the Internet
        return False


class Attempt:
    """The ranks of one start of the run.

    Args:
        number: number of the attempt, from 1
        lease: its name in the run folder
        hosts: the hosts of the attempt, in the order of their ranks

    Attributes:
        running: the ranks that have not ended, with their hosts
        ends: the ranks that have ended, in the order of their reports
        lost: the hosts that no longer answer, with the reason
    """

    def __init__(
        self,
        number: int,
        lease: str,
        *,
        nodes: Nodes,
        hosts: Sequence[str],
        placement: Placement,
    ):
        self.number, self.lease, self.nodes = number, lease, nodes
        self.hosts, self.placement = hosts, placement
        self.running: dict[int, str] = {}
        self.ends: list[RankEnd] = []
        self.lost: dict[str, str] = {}
        self._reported_gpus: set[str] = set()  # hosts whose GPUs were checked after a failure

    @property
    def failed(self) -> bool:
        """True if a host is lost or a rank has ended with an error."""
        return bool(self.lost) or any(end.code for end in self.ends)

    def start(self, command: Command) -> None:
        """Start the ranks on all hosts, unless a host is lost before."""
        port = self._ask_port()
        if self.lost:
            return
        words = list(command.words)
        for override in self.placement.overrides:
            words += ["--set", override]
        words += ["--lease", self.lease]
        size = command.ranks_per_node
        first = self.hosts[0]
        common = {
            **command.variables,
            "WORLD_SIZE": str(len(self.hosts) * size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": command.address_of(first, self.nodes.agent(first))
            if len(self.hosts) > 1
            else LOOPBACK,
            "MASTER_PORT": str(port),
            SPARE_NODES: str(self.nodes.spares(self.hosts)),
        }
        servers = [
            {"node": host, "address": command.address_of(host, agent)} | agent.server
            for host, agent in self.nodes.connections.agents.items()
            if agent.ready and agent.server
        ]
        for place, host in enumerate(self.hosts):
            lowest = place * size
            self.running |= dict.fromkeys(range(lowest, lowest + size), host)
            ranks = [
                {"RANK": str(lowest + local_rank), "LOCAL_RANK": str(local_rank)}
                for local_rank in range(size)
            ]
            start = {
                "do": "start",
                "attempt": self.number,
                "command": words,
                "variables": common,
                "standby": self.placement.pipelined == command.pipelined,
                "ranks": ranks,
                "servers": servers,
            }
            self._send([host], start)

    def watch(
        self, *, asked: Callable[[], int], why_restart: Callable[["Attempt"], str]
    ) -> AttemptResult:
        """Wait until all ranks have ended, and return the outcome.

        Args:
            asked: returns how often a user has asked the run to stop: the first time the ranks
                save, the second time they are killed
            why_restart: returns the reason why the ranks should save and end, for example because
                more nodes can be used; "" if there is none
        """
        signalled, restarting = False, ""
        next_look = first_end = 0.0
        while self.running and not self.failed:
            self._poll()
            first_end = first_end or (time.monotonic() if self.ends else 0.0)
            if first_end and time.monotonic() - first_end > SECONDS_FOR_ORDERLY_END:
                self._end_rest()  # every step is done, but a rank hangs at its end
                break
            if asked() and not signalled:
                signalled = True
                self._signal(signal.SIGTERM)
            if asked() > 1:
                self._send(self.hosts, {"do": "kill"})
            elif not signalled and not restarting and time.monotonic() >= next_look:
                next_look = time.monotonic() + self.nodes.node_seconds / 4
                restarting = why_restart(self)
                if restarting:
                    self._signal(signal.SIGUSR1)
        if self.failed:
            self._settle(asked)
        return AttemptResult(
            lost=self.lost,
            ends=self.ends,
            asked=bool(asked()),
            asked_again=asked() > 1,
            restarting=restarting,
        )

    def _ask_port(self) -> int:
        """Return a free port of the first host; 0 if the host is lost."""
        first = self.hosts[0]
        self._send([first], {"do": "port"})
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        while time.monotonic() < deadline and first not in self.lost:
            for report in self.nodes.connections.reports():
                self._note(report.host, report.content)
                if report.host == first and report.content and report.content["is"] == "port":
                    return int(report.content["port"])
        if first not in self.lost:
            self._lose(first, f"no answer for {SECONDS_TO_ANSWER:g} s")
        return 0

    def _poll(self) -> None:
        """Note the reports that arrive, and the hosts that have fallen silent."""
        for report in self.nodes.connections.reports():
            self._note(report.host, report.content)
        silent = [host for host in self.hosts if self.nodes.is_silent(host)]
        # A host may reach the limit between the two checks, and is then dropped by the second one.
        silent += self.nodes.keep_connected()
        for host in silent:
            if host in self.hosts and host not in self.lost:
                self._lose(host, f"no sign of life for {self.nodes.node_seconds:g} s")

    def _note(self, host: str, content: Mapping[str, Any] | None) -> None:
        """Note the report of a host; the content is None if its connection has ended."""
        if content is None:
            if host in self.hosts and host not in self.lost:
                self._lose(host, LOST_CONNECTION)
            else:
                self.nodes.drop(host)
        elif content["is"] == "exit" and content["attempt"] == self.number:
            rank = content["rank"]
            if rank in self.running:
                del self.running[rank]
                self.ends.append(RankEnd(rank, host, content["code"]))
        elif content["is"] == "gpus":
            self.nodes.note_gpus(host, content)
            if content["answer"]:
                self._reported_gpus.add(host)

    def _lose(self, host: str, reason: str) -> None:
        self.lost[host] = reason
        self.running = {rank: where for rank, where in self.running.items() if where != host}
        self.nodes.drop(host)

    def _settle(self, asked: Callable[[], int]) -> None:
        """Find the hosts that are lost after the first failure, and end the remaining ranks."""
        failed_at = time.monotonic()
        self._reported_gpus.clear()  # an earlier answer may belong to the previous attempt
        self._send(self.hosts, {"do": "look"})
        self._find_lost()
        codes = {end.code for end in self.ends if end.code}
        orderly = not self.lost and all(1 < code < 128 for code in codes)
        self._wait(SECONDS_FOR_ORDERLY_END if orderly else SECONDS_FOR_MESSAGES, asked)
        self._end_rest()
        while time.monotonic() < failed_at + SECONDS_FOR_GPUS and asked() < 2:
            if self._reported_gpus.issuperset(host for host in self.hosts if host not in self.lost):
                break
            self._poll()

    def _end_rest(self) -> None:
        """Kill the ranks that have not ended, without counting their ends."""
        seen = len(self.ends)
        self._send(self.hosts, {"do": "kill"})
        self._wait(SECONDS_TO_KILL, lambda: 0)
        for host in sorted(set(self.running.values())):  # a process that cannot be killed
            self._lose(host, f"its ranks did not end within {SECONDS_TO_KILL:g} s")
        del self.ends[seen:]  # launch.py has killed these ranks

    def _find_lost(self) -> None:
        """Give every host a moment to report again, and count those that do not as lost."""
        failed_at = time.monotonic()
        deadline = failed_at + min(SECONDS_TO_ANSWER, self.nodes.node_seconds)
        silent = self._unheard_since(failed_at)
        while silent and time.monotonic() < deadline:
            for report in self.nodes.connections.reports():
                self._note(report.host, report.content)
            silent = self._unheard_since(failed_at)
        for host in silent:
            agent = self.nodes.agent(host)
            seconds = agent.silent_seconds() if agent else 0.0
            self._lose(host, f"no sign of life for {seconds:.1f} s")

    def _unheard_since(self, moment: float) -> list[str]:
        """Return the hosts not yet counted as lost that have not reported after a moment."""
        agents = {host: self.nodes.agent(host) for host in self.hosts if host not in self.lost}
        return [host for host, agent in agents.items() if not agent or agent.heard_at <= moment]

    def _wait(self, seconds: float, asked: Callable[[], int]) -> None:
        """Wait until all ranks have ended, but not if a user asks to stop a second time."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline and asked() < 2:
            self._poll()

    def _signal(self, number: signal.Signals) -> None:
        self._send(self.hosts, {"do": "signal", "number": int(number)})

    def _send(self, hosts: Sequence[str], command: Mapping[str, Any]) -> None:
        for host in hosts:
            if host not in self.lost and (agent := self.nodes.agent(host)):
                agent.send(command)


PRETRAIN = REPOSITORY / "recipes" / "pretrain.py"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
FORWARDED = (  # beginnings of the names of environment variables that the ranks get
    "CUBLAS_", "CUDA_", "DEEPSPEED_TIMEOUT", "DS_", "FI_", "GLOO_", "HF_", "LD_LIBRARY_PATH",
    "MKL_", "NCCL_", "NETRC", "OMP_", "PATH", "PYTHON", "PYTORCH_", "TORCH", "TRITON_", "UCX_",
    "WANDB_", *PROXIES, *(name.upper() for name in PROXIES),
)  # fmt: skip
FORWARDED_NAMES = (
    "CC", "CXX", "LD_PRELOAD", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
)  # fmt: skip
OF_CONTAINERS = ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", *FORWARDED_NAMES)


def rank_command(
    options: argparse.Namespace,
    recipe: Recipe,
    folder: RunFolder,
    *,
    file: Path,
    shares_machine: bool,
) -> Command:
    """Return the command of the ranks.

    Args:
        file: the recipe, with the user's overrides

    Raises:
        UserError: the option --resume is not supported.
    """
    assert recipe.cluster
    # The agents run in the container, and start the ranks there.
    python = in_container(options.container) if options.container else [sys.executable]
    words = [python[-1], "-u", str(PRETRAIN), str(file)]
    words += ["--run-dir", str(folder.path), "--resume", resume_option(options.resume, recipe)]
    words += ["--resume-once", options.resume_once or f"launch-{time.time_ns():x}"]
    pipelined = PhasePlan(recipe).has_pipeline
    variables = forwarded(os.environ, container=bool(options.container))
    set_torch_variables(variables, deterministic=recipe.training.deterministic, pipelined=pipelined)
    return Command(
        words=words,
        variables=variables,
        ranks_per_node=recipe.cluster.gpus_per_node,
        shares_machine=shares_machine,
        pipelined=pipelined,
        python=python,
    )


def resume_option(resume: str, recipe: Recipe) -> str:
    """Return the option --resume of the ranks, with an absolute path.

    resume: the option --resume of launch.py

    Raises:
        UserError: the option is "never", for which the run folder would have to be moved.
    """
    if resume == "never":
        raise UserError(
            f"--resume never is not supported, because launch.py holds the run folder; use another "
            f"folder, for example --run-dir runs/{recipe.name}-2, or rename that of the earlier run"
        )
    return "auto" if resume == "auto" else str(Path(resume).absolute())


def in_container(image: str) -> list[str]:
    """Return the command that starts Python in an Apptainer image, with the GPUs of its host."""
    return ["apptainer", "exec", "--nv", image, "python"]


def check_container(image: str, *, shares_machine: bool) -> None:
    """Reject a missing container image or Apptainer, as far as this machine can tell.

    shares_machine: the ranks run on this machine

    Raises:
        UserError: the image does not exist, or the ranks run here and apptainer is not on PATH.
    """
    # Nodes may have folders that this machine does not have.
    is_visible = shares_machine or Path(image).absolute().parent.is_dir()
    if "://" not in image and is_visible and not Path(image).exists():
        raise UserError(
            f"--container {image}: no such image; build one as described in "
            f"slurm/container/threefold.def"
        )
    if shares_machine and shutil.which("apptainer") is None:
        raise UserError(
            f"--container {image}: the program apptainer is not on PATH; install it, or omit "
            f"--container"
        )


def forwarded(environment: Mapping[str, str], *, container: bool = False) -> dict[str, str]:
    """Return the environment variables that the ranks on all nodes get.

    They travel through the input of the agents, so they appear in no process list and no log.

    Args:
        environment: the environment of launch.py
        container: True if the ranks run in a container, which has programs and libraries of its own
    """
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(FORWARDED) or name in FORWARDED_NAMES)
        and not (container and name in OF_CONTAINERS)
    }
