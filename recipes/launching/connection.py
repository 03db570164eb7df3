"""launch.py's connections to the agents of the nodes, all watched by one thread."""

import contextlib
import json
import os
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AGENT = Path(__file__).with_name("node_agent.py")
SECONDS_BETWEEN_BEATS = 1.0
SECONDS_PER_LOOK = 0.1
SSH = ("ssh", "-oBatchMode=yes", "-oStrictHostKeyChecking=accept-new", "-oConnectTimeout=5")
# A step gets one core, unless it asks for more; the ranks divide all cores that the job has there.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--mem=0",
        "--cpu-bind=none", "--kill-on-bad-exit=0", "--quiet")  # fmt: skip

FORWARDED = (  # beginnings of the names of environment variables that the ranks get
    "DS_", "FI_", "GLOO_", "HF_", "LD_LIBRARY_PATH", "MKL_", "NCCL_", "OMP_", "PATH", "PYTHON",
    "PYTORCH_", "TORCH", "TRITON_", "UCX_", "WANDB_", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip

Connect = Callable[[str, Sequence[str]], list[str]]  # (host, command) -> command that runs it there


def over_ssh(host: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs a command on a host over ssh."""
    return [*SSH, host, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"]


def over_srun(host: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs a command on a node of this Slurm allocation."""
    cores = os.environ.get("SLURM_CPUS_ON_NODE", "1")
    return [*SRUN, f"--cpus-per-task={cores}", f"--nodelist={host}", *command]


def here(host: str, command: Sequence[str]) -> list[str]:
    """Return the command unchanged; it runs on this machine, whatever the name of the host."""
    return list(command)


@dataclass
class Agent:
    """A connection to the agent of a node.

    Attributes:
        host: name of the host
        process: ssh or srun
        heard_at: time of the last report, on the clock of time.monotonic
        ready: True once the agent has reported
    """

    host: str
    process: subprocess.Popen[bytes]
    heard_at: float = field(default_factory=time.monotonic)
    ready: bool = False
    rest: bytes = b""

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command; do nothing if the connection is broken or blocked."""
        assert self.process.stdin
        content = memoryview(json.dumps(command).encode() + b"\n")
        with contextlib.suppress(OSError):
            while content:
                written = self.process.stdin.write(content)  # None: the pipe is full
                if not written:
                    return
                content = content[written:]

    def silent_seconds(self) -> float:
        """Return the time since the last report."""
        return time.monotonic() - self.heard_at


@dataclass(frozen=True)
class Report:
    """A report of an agent; `content` is None if the connection has ended."""

    host: str
    content: dict[str, Any] | None


class Connections:
    """The connections to all agents, by host.

    Args:
        connect: how a command is started on a host
        run: name of the run; an agent first ends whatever an earlier agent of the run has left
        silence_seconds: an agent ends its ranks after this time without a command
        stop_seconds: time that an agent gives its ranks to save and end
        standby: number of processes that each agent keeps ready to become ranks
    """

    def __init__(
        self,
        connect: Connect,
        *,
        run: str,
        silence_seconds: float,
        stop_seconds: float,
        standby: int,
    ):
        self.connect = connect
        self.arguments = [run, f"{silence_seconds:g}", f"{stop_seconds:g}", str(standby)]
        self.agents: dict[str, Agent] = {}
        self._selector = selectors.DefaultSelector()
        self._beat_at = 0.0

    def open(self, host: str) -> Agent:
        """Start the agent of a host; it reports when it is ready."""
        command = [sys.executable, str(AGENT), *self.arguments]
        process = subprocess.Popen(
            self.connect(host, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stdout,  # the output of the ranks
            bufsize=0,
            start_new_session=True,  # Ctrl-C goes to launch.py, which asks the ranks to save
        )
        assert process.stdin and process.stdout
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        agent = self.agents[host] = Agent(host, process)
        self._selector.register(process.stdout, selectors.EVENT_READ, agent)
        return agent

    def close(self, host: str) -> None:
        """End the connection to a host; its agent then ends its ranks, if it is alive."""
        agent = self.agents.pop(host)
        assert agent.process.stdin and agent.process.stdout
        self._selector.unregister(agent.process.stdout)
        for stream in (agent.process.stdin, agent.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        agent.process.kill()
        agent.process.wait()

    def close_all(self, seconds: float) -> None:
        """End all connections; agents that answer get some time to end first."""
        for agent in self.agents.values():
            assert agent.process.stdin
            agent.process.stdin.close()
        deadline = time.monotonic() + seconds
        for agent in self.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(max(0.0, deadline - time.monotonic()))
        for host in list(self.agents):
            self.close(host)

    def reports(self) -> Iterator[Report]:
        """Wait for reports for at most SECONDS_PER_LOOK, and yield those that have arrived.

        Beats are sent meanwhile, and their answers are not yielded.
        """
        now = time.monotonic()
        if now - self._beat_at >= SECONDS_BETWEEN_BEATS:
            self._beat_at = now
            for agent in self.agents.values():
                agent.send({"do": "beat"})
        for key, _ in self._selector.select(SECONDS_PER_LOOK):
            agent = key.data
            if self.agents.get(agent.host) is not agent:
                continue  # closed by the caller, after an earlier report of this loop
            yield from self._read(agent)

    def _read(self, agent: Agent) -> Iterator[Report]:
        assert agent.process.stdout
        arrived = agent.process.stdout.read(1 << 20)
        if arrived is None:
            return
        if not arrived:
            yield Report(agent.host, None)
            return
        agent.heard_at = time.monotonic()
        agent.ready = True
        *lines, agent.rest = (agent.rest + arrived).split(b"\n")
        for line in lines:
            content = _parse(line)
            if content is not None and content["is"] != "beat":
                yield Report(agent.host, content)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a report; None for other output of ssh, srun or a shell's start-up files."""
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    if isinstance(content, dict) and isinstance(content.get("is"), str):
        return content
    if line.strip():
        os.write(2, line + b"\n")
    return None


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the ranks on all nodes get.

    They travel through the input of the agents, so they appear in no process list and no log.
    """
    return {name: value for name, value in environment.items() if name.startswith(FORWARDED)}
