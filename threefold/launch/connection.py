"""launch.py's connections to the agents of the nodes, all watched by one thread."""

import contextlib
import json
import os
import selectors
import shlex
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

AGENT = Path(__file__).with_name("node_agent.py")
SECONDS_BETWEEN_BEATS = 1.0
SECONDS_PER_POLL = 0.1
SSH = ("ssh", "-oBatchMode=yes", "-oStrictHostKeyChecking=accept-new", "-oConnectTimeout=5")
# A step gets one core, unless it asks for more; the ranks divide all cores that the job has there.
# --export=ALL: the job may have been submitted with SBATCH_EXPORT=NONE.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--mem=0",
        "--cpu-bind=none", "--kill-on-bad-exit=0", "--quiet", "--export=ALL")  # fmt: skip

MAX_CONNECTING = 64  # nodes that are being connected to at the same time
Connect = Callable[[str, Sequence[str]], list[str]]  # (host, command) -> command that runs it there


def over_ssh(host: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs a command on a host over ssh."""
    return [*SSH, "--", host, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"]


def over_srun(host: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs a command on a node of this Slurm allocation."""
    cores = os.environ.get("SLURM_CPUS_ON_NODE")  # of the node of the batch script
    options = [f"--cpus-per-task={cores}"] if cores else []
    # srun would pass on the address of a login node, to which the user has connected with ssh.
    without = ("env", "--unset=SSH_CONNECTION")
    return [*SRUN, *options, f"--nodelist={host}", *without, *command]


def on_this_machine(host: str, command: Sequence[str]) -> list[str]:
    """Return the command unchanged; it runs on this machine, whatever the name of the host."""
    return list(command)


# Advice for users whose hosts do not answer.
ADVICE: Mapping[Connect, str] = {
    over_ssh: "check the names in the hostfile, that sshd runs on the hosts, and that ssh asks for "
    "no password; to start all ranks on this machine instead, use --launcher local",
    over_srun: "check the state of the nodes with sinfo -N; Slurm drops a dead node from the job, "
    "and scontrol requeue JOB starts the job again with its full number of nodes",
}


@dataclass
class Agent:
    """A connection to the agent of a node.

    Attributes:
        process: ssh or srun
        heard_at: time of the last report, on the clock of time.monotonic
        machine: name of the machine, as the agent has reported it
        address: address of the host that ssh has connected to; empty if it is unknown
        ready: True once the agent has reported that it is ready
        server: port and secret of the server of the node's snapshots, if there is one
        rest: incomplete last line of the reports
        output_rest: incomplete last line of the ranks' output
        unsent: commands that the pipe had no room for
        lock: held while the pipe is written, by the main thread and the heartbeats' thread
    """

    host: str
    process: subprocess.Popen[bytes]
    heard_at: float = field(default_factory=time.monotonic)
    machine: str = ""
    address: str = ""
    ready: bool = False
    server: dict[str, Any] | None = None
    rest: bytes = b""
    output_rest: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command; what the pipe has no room for is sent by later calls of `flush`."""
        with self.lock:
            self.unsent += json.dumps(command).encode() + b"\n"
        self.flush()

    def beat(self) -> None:
        """Send a heartbeat, unless earlier commands still wait."""
        if not self.unsent:
            self.send({"do": "beat"})
        else:
            self.flush()

    def flush(self) -> None:
        """Send as much as the pipe has room for; do nothing if the connection is broken."""
        assert self.process.stdin
        with self.lock, contextlib.suppress(OSError, ValueError):  # ValueError: closed
            while self.unsent:
                written = self.process.stdin.write(self.unsent)  # None: the pipe is full
                if not written:
                    return
                del self.unsent[:written]

    def silent_seconds(self) -> float:
        """Return the time since the last report."""
        return time.monotonic() - self.heard_at


@dataclass
class FailedAttempts:
    """The failed attempts to connect to a host since its last answer; each error is printed once.

    Attributes:
        lines: output of the current attempt so far
        earlier: output of the previous attempt
    """

    count: int = 0
    lines: list[str] = field(default_factory=list)
    earlier: list[str] = field(default_factory=list)

    def new_lines(self, text: str) -> str:
        """Record output of the current attempt; return the lines that the previous one lacked."""
        lines = text.splitlines(keepends=True)
        self.lines += lines
        return "".join(line for line in lines if line not in self.earlier)

    def end(self) -> bool:
        """End the current attempt; return True if a line about a repeated error is due.

        It is due at attempts 2, 4, 8, ... whose output equals that of the previous attempt.
        """
        self.count += 1
        repeated = bool(self.lines) and self.lines == self.earlier
        self.earlier, self.lines = self.lines, []
        return repeated and self.count.bit_count() == 1


@dataclass(frozen=True)
class AgentReport:
    """A report of an agent; `content` is None if the connection has ended."""

    host: str
    content: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """The settings of the agents.

    Attributes:
        run: name of the run; an agent first ends whatever an earlier agent of the run has left
        silence_seconds: an agent ends its ranks after this time without a command
        stop_seconds: time that an agent gives its ranks to save and end
        standby: number of processes that each agent keeps ready to become ranks
        snapshots: prefix of the folders for snapshots in memory; empty if the run takes none
    """

    run: str
    silence_seconds: float
    stop_seconds: float
    standby: int
    snapshots: str = ""

    def arguments(self, host: str) -> list[str]:
        """Return the command-line arguments of the agent of a host."""
        seconds = [f"{self.silence_seconds:g}", f"{self.stop_seconds:g}"]
        folder = f"{self.snapshots}-{host}" if self.snapshots else ""
        return [self.run, *seconds, str(self.standby), folder]


class Connections:
    """The connections to all agents, by host.

    Args:
        connect: how a command is started on a host
        variables: environment variables of the ranks, which standby processes need too
        python: the command that starts Python on a host

    Attributes:
        admit: (host, machine) -> False if the agent must end without touching other processes
    """

    def __init__(
        self,
        connect: Connect,
        settings: AgentSettings,
        *,
        variables: Mapping[str, str],
        python: Sequence[str] = (sys.executable,),
    ):
        self.connect, self.settings = connect, settings
        self.variables, self.python = variables, python
        self.agents: dict[str, Agent] = {}
        self.admit: Callable[[str, str], bool] = lambda host, machine: True
        self._failed: defaultdict[str, FailedAttempts] = defaultdict(FailedAttempts)
        self._selector = selectors.DefaultSelector()
        self._closed = threading.Event()
        # A thread of its own, because the main thread may be busy with planning or a slow disk.
        threading.Thread(target=self._beat, name="heartbeats", daemon=True).start()

    def open(self, host: str) -> Agent:
        """Start the agent of a host; it reports when it is ready.

        Raises:
            OSError: the program that connects cannot be started; the reason has been printed.
        """
        command = [*self.python, str(AGENT), *self.settings.arguments(host)]
        try:
            process = subprocess.Popen(
                self.connect(host, command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,  # the output of the ranks
                bufsize=0,
                start_new_session=True,  # Ctrl-C goes to launch.py, which asks the ranks to save
            )
        except OSError as error:  # no such program, or too many processes or open files
            reason = f"launch.py: no connection to {host}: {error.strerror}\n"
            print(self._failed[host].new_lines(reason), end="", file=sys.stderr, flush=True)
            self._count_attempt(host)
            raise
        assert process.stdin and process.stdout and process.stderr
        agent = self.agents[host] = Agent(host, process)
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
        for stream in (process.stdout, process.stderr):
            self._selector.register(stream, selectors.EVENT_READ, agent)
        return agent

    def close(self, host: str) -> None:
        """End the connection to a host; its agent then ends its ranks, if it is alive."""
        agent = self.agents.pop(host)
        process = agent.process
        assert process.stdin and process.stdout and process.stderr
        if process.stderr in self._selector.get_map():  # the end of the output may be the error
            self._print(agent)
        if not agent.machine:
            self._count_attempt(host)
        for stream in (process.stdout, process.stderr):
            with contextlib.suppress(KeyError):  # its end has been seen
                self._selector.unregister(stream)
        agent.send({"do": "end"})
        with agent.lock, contextlib.suppress(OSError):  # the heartbeats' thread may be writing
            process.stdin.close()
        for stream in (process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                stream.close()
        agent.process.kill()
        agent.process.wait()

    def close_all(self, seconds: float) -> None:
        """End all connections; agents that answer get some time to end first."""
        self._closed.set()
        for agent in self.agents.values():
            assert agent.process.stdin
            agent.send({"do": "end"})
            with agent.lock, contextlib.suppress(OSError):
                agent.process.stdin.close()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(
            agent.process.poll() is None for agent in self.agents.values()
        ):
            for _ in self.reports():  # prints the last output of the ranks
                pass
        for host in list(self.agents):
            self.close(host)

    def reports(self) -> Iterator[AgentReport]:
        """Wait for reports for at most SECONDS_PER_POLL, and yield those that have arrived.

        The output of the ranks is printed meanwhile.
        """
        for agent in self.agents.values():
            if agent.unsent:
                agent.flush()
        for key, _ in self._selector.select(SECONDS_PER_POLL):
            agent = key.data
            if self.agents.get(agent.host) is not agent:
                continue  # closed by the caller, after an earlier report of this loop
            if key.fileobj is agent.process.stderr:
                self._print(agent)
            else:
                yield from self._read(agent)

    def _beat(self) -> None:
        while not self._closed.wait(SECONDS_BETWEEN_BEATS):
            for agent in list(self.agents.values()):
                agent.beat()

    def _arrived(self, stream: IO[bytes]) -> bytes | None:
        """Return what has arrived: None for nothing yet, empty at the end, which comes once."""
        arrived: bytes | None = stream.read(1 << 20)
        if arrived == b"":
            self._selector.unregister(stream)
        return arrived

    def _print(self, agent: Agent) -> None:
        """Print the complete lines of the ranks' output that have arrived."""
        assert agent.process.stderr
        arrived = self._arrived(agent.process.stderr)
        if arrived is None:
            return
        complete, newline, agent.output_rest = (agent.output_rest + arrived).rpartition(b"\n")
        if not arrived:
            complete, agent.output_rest = complete + newline + agent.output_rest, b""
        text = (complete + newline if arrived else complete).decode(errors="replace")
        if not agent.machine:  # an error of ssh or srun, perhaps that of the last attempt
            text = self._failed[agent.host].new_lines(text)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _count_attempt(self, host: str) -> None:
        """Count a failed attempt to connect to a host, and report a repeated error."""
        if self._failed[host].end():
            count = self._failed[host].count
            print(f"launch.py: no connection to {host}: the same error, connection attempt {count}",
                  file=sys.stderr, flush=True)  # fmt: skip

    def _read(self, agent: Agent) -> Iterator[AgentReport]:
        assert agent.process.stdout
        arrived = self._arrived(agent.process.stdout)
        if arrived is None:
            return
        if not arrived:
            yield AgentReport(agent.host, None)
            return
        agent.heard_at = time.monotonic()
        *lines, agent.rest = (agent.rest + arrived).split(b"\n")
        for line in lines:
            content = _parse(line)
            if content is None or content["is"] == "beat":
                continue
            if content["is"] == "here":
                agent.machine, agent.address = content["host"], content["address"]
                self._failed.pop(agent.host, None)
                machine = f"{content['host']} {content['boot']}" if content["boot"] else ""
                if not self.admit(agent.host, machine):
                    yield AgentReport(agent.host, None)
                    return
                agent.send({"do": "begin"})
            elif content["is"] == "ready":
                agent.ready = True
                if "port" in content:
                    agent.server = {"port": content["port"], "secret": content["secret"]}
                agent.send({"do": "prepare", "variables": dict(self.variables)})
            else:
                yield AgentReport(agent.host, content)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a report; None for other output of ssh, srun or a shell's start-up files."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and isinstance(content.get("is"), str):
        return content
    if line.strip():
        print(line.decode(errors="replace"), file=sys.stderr, flush=True)
    return None
