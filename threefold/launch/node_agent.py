"""The agent of launch.py on a node: starts the ranks of this node, and reports how they end.

The agent reads commands from its standard input and writes reports to its standard output, a JSON
object per line. The ranks write to its standard error.

    {"do": "port"}                     -> {"is": "port", "port": 29500}
    {"do": "prepare", "variables": {...}}     environment of standby processes
    {"do": "start", "attempt": 1, "command": [...], "variables": {...}, "standby": true,
     "ranks": [{"RANK": "0", "LOCAL_RANK": "0"}, ...], "servers": [...]}
    {"do": "signal", "number": 15}     signal to all ranks
    {"do": "kill"}                     SIGKILL to all ranks and their children
    {"do": "end"}                      launch.py closes the connection on purpose
    {"do": "beat"}                     -> {"is": "beat"}
    {"do": "look"}                     -> {"is": "gpus", "answer": true, "errors": [[TEXT, SEVERE]]}
                                       -> {"is": "here", "host": "node1", "boot": "ID",
                                           "address": "10.0.0.1"}
    {"do": "begin"}                    -> {"is": "ready"}
                                       -> {"is": "exit", "attempt": 1, "rank": 3, "code": 0}

The agent looks at the GPUs of its node every minute (gpu_watch.py) and on command, and reports new
errors. The first report, "here", has the name of the machine, the ID of its boot, and the address
at which ssh has reached it. While a command takes long, for example because the file server does
not answer, the agent reports "beat" by itself.

If commands stop coming (launch.py or the network is gone), the agent asks its ranks to save and
stop, kills them if they do not end, and ends itself. If the first node of an elastic Slurm job has
died, and launch.py with it, the agent requeues the job before it ends. Only the standard library is
imported, so that an agent starts in a few milliseconds.

    python threefold/launch/node_agent.py RUN SECONDS_OF_SILENCE SECONDS_TO_STOP STANDBY SNAPSHOTS

SNAPSHOTS is the prefix of the snapshot folder, or empty if the run takes no snapshots. If it is
set, "ready" also reports the port and secret of this node's snapshot server, and "start" carries
the servers of all nodes.

The agent keeps STANDBY processes that have already imported what a rank needs (standby.py).

RUN is the prefix of the names of the run's leases. On "begin", the agent kills the agents and ranks
that an earlier connection of this run has left on this node. If RUN is empty, it does not;
`--launcher local` needs that, because several agents share the machine.
"""

import os
import sys

if __name__ == "__main__":  # import from the repository's root, not from threefold/launch/
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import contextlib
import json
import math
import random
import select
import selectors
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from threefold.checkpoint.snapshots.names import FOLDER_VARIABLE, SERVERS
from threefold.launch.gpu_watch import GpuWatch
from threefold.runtime.launchers import free_port

# Processes that an earlier agent of a run has left on this node; only the standard library.

SECONDS_FOR_LEFTOVERS = 10.0  # for killed processes to end
SCRIPTS = ("node_agent.py", "standby.py")


def kill_group(process: int) -> None:
    """Kill a process and the processes of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def end_leftovers(run: str) -> None:
    """Kill the agents and ranks of a run on this node, except this process, and wait for their end.

    Args:
        run: the first argument of agents, and the beginning of the value of --lease of ranks
    """
    left = leftovers(run)
    for process in left:
        kill_group(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS_FOR_LEFTOVERS
    while leftovers(run) and time.monotonic() < deadline:
        time.sleep(0.05)


def leftovers(run: str) -> list[int]:
    """Return the processes of a run on this node, except this one."""
    pids = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as stream:
                words = stream.read().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        is_agent = len(words) > 2 and words[1].endswith(SCRIPTS) and words[2] == run
        lease = words[words.index("--lease") + 1] if "--lease" in words[:-1] else ""
        if is_agent or lease.startswith(f"{run}."):
            pids.append(int(entry))
    return pids


# The standby processes of a node, which have already imported what a rank needs (standby.py).
#
# Only the standard library is imported.

SECONDS_BEFORE_STANDBY = 30.0  # after a start or a failure, so that imports do not slow the ranks
STANDBY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standby.py")


class StandbyPool:
    """Standby processes, started one at a time.

    Args:
        run: name of the run, for the command lines of the processes

    Attributes:
        variables: environment of the processes; None until launch.py has sent it
        ready: the processes that have imported everything
    """

    def __init__(self, size: int, *, run: str, say: Callable[[str], None]):
        self.size, self.say = size, say
        self.command = [sys.executable, STANDBY, run]
        self.variables: Mapping[str, str] | None = None
        self.ready: list[subprocess.Popen[bytes]] = []
        self._starting: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0

    def pause(self) -> None:
        """Start no process for a while."""
        self._next_start = time.monotonic() + SECONDS_BEFORE_STANDBY

    def keep(self) -> None:
        """Start a process if one is missing and no other one is being started."""
        self.ready = [process for process in self.ready if process.poll() is None]
        if self._starting is not None:
            self._check_start(self._starting)
        elif (
            len(self.ready) < self.size
            and self.variables is not None
            and time.monotonic() >= self._next_start
        ):
            try:
                self._starting = subprocess.Popen(
                    self.command,
                    env=os.environ | dict(self.variables),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:  # too many processes, or too little memory
                self.say(f"no standby process can be started: {error.strerror}")
                self.pause()

    def _check_start(self, process: "subprocess.Popen[bytes]") -> None:
        """Note whether the process that is being started has become ready or has failed."""
        assert process.stdout
        if not select.select([process.stdout], [], [], 0)[0]:
            return
        if process.stdout.readline() == b"ready\n":
            self.ready.append(process)
        else:  # it has failed, and printed why
            self.pause()
        self._starting = None

    def wake(
        self, command: Sequence[str], variables: Mapping[str, str]
    ) -> "subprocess.Popen[bytes] | None":
        """Turn a standby process into a rank; return None if there is none."""
        while self.ready:
            process = self.ready.pop()
            assert process.stdin and process.stdout
            script = next(place for place, word in enumerate(command) if word.endswith(".py"))
            line = json.dumps({"words": list(command[script:]), "variables": dict(variables)})
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(line.encode() + b"\n")
                process.stdin.close()
                process.stdout.close()
                return process
        return None

    def kill(self) -> None:
        """Kill all standby processes."""
        for process in [*self.ready, *([self._starting] if self._starting else [])]:
            kill_group(process.pid)


# The server of a node's snapshots. Importing snapshot_server.py would double the time of a start.

SNAPSHOT_SERVER = os.path.join(os.path.dirname(STANDBY), "snapshot_server.py")
SECONDS_TO_DELETE = 10.0
MAX_QUEUED_CONNECTIONS = 1024  # that wait for a thread of the server


class ServerProcess:
    """The server of a node, as its agent sees it.

    Attributes:
        process: the server; it ends when its standard input is closed
        folder: the folder of the node's snapshots
        secret: what requests must know
    """

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path, *, port: int, secret: str):
        self.process, self.folder, self.port, self.secret = process, folder, port, secret

    @classmethod
    def start(cls, prefix: Path) -> "ServerProcess":
        """Create an empty folder for snapshots, and start its server.

        Args:
            prefix: the path of the folder, without the number that this function appends. What
                earlier agents have left under the same prefix is deleted

        Raises:
            OSError: the folder cannot be created.
        """
        for earlier in prefix.parent.glob(f"{prefix.name}.*"):
            shutil.rmtree(earlier, ignore_errors=True)
        # Another name each time: the server of an agent that has just been killed deletes its own.
        folder = prefix.with_name(f"{prefix.name}.{os.getpid()}")
        folder.mkdir(mode=0o700)
        secret = os.urandom(16).hex()
        with socket.create_server(
            ("", 0), family=socket.AF_INET, backlog=MAX_QUEUED_CONNECTIONS
        ) as listening:
            process = subprocess.Popen(
                [sys.executable, SNAPSHOT_SERVER, str(folder), str(listening.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
            port = listening.getsockname()[1]
        assert process.stdin
        process.stdin.write(f"{secret}\n".encode())
        process.stdin.flush()
        return cls(process, folder, port=port, secret=secret)

    def write_servers(self, servers: Sequence[dict[str, Any]]) -> bool:
        """Write the list of all servers for the ranks of this node; return False if that fails."""
        file = self.folder / SERVERS
        whole = file.with_suffix(".new")
        try:
            whole.write_text(json.dumps(servers), encoding="utf-8")
            os.replace(whole, file)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Let the server delete the snapshots and end."""
        assert self.process.stdin
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_DELETE)


# The end of an elastic Slurm job whose first node, with the batch script and launch.py, has died.
#
# Because of --no-kill, Slurm leaves such a job in the state RUNNING without any process.

SECONDS_BETWEEN_QUESTIONS = 15.0  # to Slurm; the time varies, because all agents ask
SECONDS_FOR_SLURM = 1800.0  # to notice that a node is dead: SlurmdTimeout, by default 300
SECONDS_FOR_ANSWER = 60.0


def may_be_requeued(environment: Mapping[str, str]) -> bool:
    """Return True if this is an elastic Slurm job that may be requeued."""
    elastic = environment.get("ELASTIC") == "yes" and environment.get("REQUEUE", "yes") == "yes"
    return elastic and bool(environment.get("SLURM_JOB_ID"))


def requeue_without_batch_host(job: str) -> None:
    """Wait until Slurm has removed the node of the batch script from a job, and requeue the job.

    If that node is alive, the batch script decides about the job, and this process ends with it.
    """
    deadline = time.monotonic() + SECONDS_FOR_SLURM
    with contextlib.suppress(OSError):  # in a container without Slurm's programs
        while time.monotonic() < deadline:
            host = output_of("squeue", "--noheader", f"--jobs={job}", "--format=%B")
            is_gone = host and is_gone_from(job, host)
            if is_gone and output_of("scontrol", "requeue", job) is not None:
                return
            time.sleep(SECONDS_BETWEEN_QUESTIONS * random.uniform(0.5, 1.5))


def is_gone_from(job: str, host: str) -> bool:
    """Return True if a job no longer has a node."""
    jobs = ("squeue", "--noheader", f"--jobs={job}", f"--nodelist={host}", "--format=%i")
    return output_of(*jobs) == ""


def output_of(*command: str) -> str | None:
    """Return the output of a command of Slurm; None if it fails.

    Raises:
        OSError: the command is not installed.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=SECONDS_FOR_ANSWER,
        )
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout.strip()


SECONDS_BETWEEN_CHECKS = 0.5
SECONDS_BETWEEN_BEATS = 1.0  # while a command takes long
MAX_SECONDS_BUSY = 1800.0  # after which the node counts as lost
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class NodeAgent:
    """The ranks of this node.

    Args:
        silence_seconds: time without a command after which launch.py counts as gone
        stop_seconds: time in which the ranks may save and end after a signal
        run: name of the run, for leftovers and the command lines of standby processes
        snapshots: prefix of the folder for snapshots; empty for none
    """

    def __init__(
        self,
        silence_seconds: float,
        stop_seconds: float,
        *,
        run: str,
        standby: int,
        snapshots: str,
    ):
        self.silence_seconds, self.stop_seconds = silence_seconds, stop_seconds
        self.run_name = run
        self.standby = StandbyPool(standby, run=run, say=self.say)
        self.snapshots = snapshots
        self.server: ServerProcess | None = None  # of snapshots, from "begin" on
        self.attempt = 0
        self.stopping = False  # the ranks have been asked to save and stop
        self.end_is_expected = False  # launch.py has announced its end, or was asked to stop
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.gpus = GpuWatch()
        self._heard_at = time.monotonic()
        self._rest = b""  # of a line that has not arrived completely
        self._busy_since = math.inf  # start of this round of commands; inf while waiting for one
        self._writing = threading.Lock()  # one report at a time

    def run(self) -> NoReturn:
        """Carry out commands until the input ends, or none has come for too long."""
        signal.signal(signal.SIGTERM, lambda *_: self.leave(requeue=False))
        for ignored in (signal.SIGINT, signal.SIGHUP):  # of a terminal; launch.py decides
            signal.signal(ignored, signal.SIG_IGN)
        children, child_ended = os.pipe()
        os.set_blocking(child_ended, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(child_ended, warn_on_full_buffer=False)
        here = {"host": socket.gethostname(), "boot": boot_id(), "address": ssh_address(os.environ)}
        self.report({"is": "here"} | here)
        threading.Thread(target=self._beat_while_busy, daemon=True).start()
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(children, selectors.EVENT_READ)
            while True:
                self._busy_since = math.inf
                ready = {key.fd for key, _ in selector.select(SECONDS_BETWEEN_CHECKS)}
                self._busy_since = time.monotonic()
                if children in ready:
                    os.read(children, 4096)
                self.report_ended()
                self.report_gpus()
                self.standby.keep()
                if 0 in ready:
                    self.read_commands()
                elif time.monotonic() - self._heard_at > self.silence_seconds:
                    seconds = f"{self.silence_seconds:g} s"
                    self.say(f"no command from launch.py for {seconds}; ending the ranks")
                    self.leave()

    def _beat_while_busy(self) -> None:
        while True:
            time.sleep(SECONDS_BETWEEN_BEATS)
            if SECONDS_BETWEEN_BEATS <= time.monotonic() - self._busy_since <= MAX_SECONDS_BUSY:
                with contextlib.suppress(OSError):  # launch.py has ended
                    self._write({"is": "beat"})

    def begin(self) -> None:
        """End what an earlier agent has left, start the server of snapshots, and report."""
        if self.run_name:
            end_leftovers(self.run_name)
        facts: dict[str, Any] = {"is": "ready"}
        if self.snapshots:
            try:
                self.server = ServerProcess.start(Path(self.snapshots))
                facts |= {"port": self.server.port, "secret": self.server.secret}
            except OSError as error:  # the run continues without snapshots
                self.say(f"no snapshots in memory: {self.snapshots}: {error.strerror}")
        self.report(facts)

    def read_commands(self) -> None:
        """Read and carry out the commands that have arrived."""
        arrived = os.read(0, 1 << 20)
        if not arrived:
            if self.ranks:
                self.say("launch.py has ended; ending the ranks")
            self.leave()
        self._heard_at = time.monotonic()
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        for line in lines:
            try:
                command = json.loads(line)
            except (ValueError, RecursionError):
                self.say(f"ignored a command that is not JSON: {line[:80]!r}")
                continue
            self.carry_out(command)

    def carry_out(self, command: dict[str, Any]) -> None:
        """Carry out one command."""
        kind = command["do"]
        if kind == "begin":
            self.begin()
        elif kind == "beat":
            self.report({"is": "beat"})
        elif kind == "port":
            self.report({"is": "port", "port": free_port()})
        elif kind == "look":
            self.gpus.ask()
            self.report_gpus()
        elif kind == "prepare":
            self.standby.variables = command["variables"]
        elif kind == "start":
            self.start(command)
        elif kind == "signal":
            self.end_is_expected |= command["number"] == signal.SIGTERM  # SIGUSR1: to restart
            self.signal(command["number"])
        elif kind == "kill":
            self.kill()
        elif kind == "end":
            self.end_is_expected = True

    def start(self, command: dict[str, Any]) -> None:
        """Start the ranks of an attempt, each in a process group of its own."""
        self.attempt = command["attempt"]
        self.stopping = False
        self.standby.pause()
        common = command["variables"]
        if self.server and self.server.write_servers(command["servers"]):
            common |= {FOLDER_VARIABLE: str(self.server.folder)}
        for own in command["ranks"]:
            rank, variables = int(own["RANK"]), common | own
            words = command["command"]
            standby = self.standby.wake(words, variables) if command["standby"] else None
            try:
                self.ranks[rank] = standby or subprocess.Popen(
                    words,
                    env=os.environ | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    stderr=2,
                    start_new_session=True,
                )
            except OSError as error:
                self.say(f"{words[0]} cannot be started: {error.strerror}")
                self.report({"is": "exit", "attempt": self.attempt, "rank": rank, "code": 127})

    def report_ended(self) -> None:
        """Report the ranks that have ended, with the negative signal number if killed."""
        for rank, process in list(self.ranks.items()):
            code = process.poll()
            if code is None:
                continue
            kill_group(process.pid)  # its children, such as workers of libraries
            del self.ranks[rank]
            self.report({"is": "exit", "attempt": self.attempt, "rank": rank, "code": code})

    def report_gpus(self) -> None:
        """Report new errors of the GPUs, and the answer to a request."""
        found = self.gpus.poll(training=bool(self.ranks))
        if found and any(found):
            answer, errors = found
            self.report({"is": "gpus", "answer": answer, "errors": errors})

    def signal(self, number: int) -> None:
        """Ask all ranks to save and stop, once: a second signal would end a rank that saves."""
        if self.stopping:
            return
        self.stopping = True
        for process in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        """Kill all ranks and their children."""
        for process in self.ranks.values():
            kill_group(process.pid)

    def leave(self, *, requeue: bool = True) -> NoReturn:
        """Ask the ranks to save and stop, kill those that do not, and end this process.

        requeue: requeue an elastic Slurm job if its first node has died, unless launch.py has ended
            on purpose
        """
        self._busy_since = math.inf
        self.standby.kill()
        self.gpus.stop()
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + self.stop_seconds
        while time.monotonic() < deadline and any(p.poll() is None for p in self.ranks.values()):
            time.sleep(0.1)
        self.kill()
        if self.server:
            self.server.end()
        if requeue and not self.end_is_expected and may_be_requeued(os.environ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of Slurm, which ends the job
            requeue_without_batch_host(os.environ["SLURM_JOB_ID"])
        os._exit(0)

    def report(self, report: dict[str, Any]) -> None:
        """Write a report; if launch.py has closed the pipe, end the ranks and this process."""
        try:
            self._write(report)
        except OSError:
            self.leave()

    def _write(self, report: dict[str, Any]) -> None:
        with self._writing:
            os.write(1, json.dumps(report).encode() + b"\n")

    def say(self, text: str) -> None:
        """Print a message, if that is still possible."""
        with contextlib.suppress(OSError):
            line = f"{socket.gethostname()}: {text}\n"
            os.write(2, line.encode(errors="backslashreplace"))


def ssh_address(environment: Mapping[str, str]) -> str:
    """Return the IPv4 address of this machine that ssh has connected to.

    Return "" if the agent was not started by ssh, or if the address is loopback or not of this
    machine (srun passes on the login node's variables).
    """
    words = environment.get("SSH_CONNECTION", "").split()  # client, its port, server, its port
    address = words[2] if len(words) == 4 else ""
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return ""
    return "" if address.startswith("127.") else address


def boot_id() -> str:
    """Return the ID of this boot of the machine; empty if it is unknown."""
    try:
        with open(BOOT_ID, encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    run, silence, stop, standby, snapshots = sys.argv[1:6]
    agent = NodeAgent(
        float(silence), float(stop), run=run, standby=int(standby), snapshots=snapshots
    )
    agent.run()
