"""Ranks on this machine, forked from a server that has done the imports or in new interpreters.

The output of a rank goes to a file, because a full pipe would stop the rank.
"""

import atexit
import contextlib
import gc
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from threefold.config.sections import REPOSITORY
from threefold.runtime.exits import interrupts_blocked
from threefold.runtime.launchers import free_port

CPU_VARIABLES = {  # environment variables of a rank on one core
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    # The fork server must import from this checkout instead of the working directory.
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONSAFEPATH": "1",
}
MAX_LOG_LINES = 12  # of a rank, in a message to users
MAX_TRACEBACK_LINES = 60  # of a rank, in an exception for developers
SECONDS_TO_TERMINATE = 10.0  # for a launcher to end its processes on other nodes
# Run a command that the kernel kills when its parent process ends, for whatever reason. The
# setting (PR_SET_PDEATHSIG) survives `exec`.
DIES_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):  # otherwise the parent has ended before the call
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class RankFailed(Exception):
    """A rank ended, or reached a time limit, before it sent its message."""


class ForkedRanks:
    """Processes that call a function as the ranks of a world.

    A pipe connects this process with each of them.

    Args:
        function: of a module; a rank calls it with its end of the pipe and the arguments
        logs: folder for the output of the ranks
        preload: modules that the fork server imports once for all ranks. The first fork server of
            this process remains. Empty: each rank is a new interpreter, as CUDA needs it.
        variables: environment variables of the ranks, in addition to this process's

    Attributes:
        processes: by rank
        pipes: by rank, of the ranks whose end has not been noticed
    """

    def __init__(
        self,
        size: int,
        function: Callable[..., None],
        *arguments: Any,
        logs: Path,
        preload: Sequence[str],
        variables: Mapping[str, str] = CPU_VARIABLES,
    ):
        self.processes: list[Any] = []
        self.pipes: dict[int, Connection] = {}
        self.logs = [log_file(logs, rank) for rank in range(size)]
        context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            context.set_forkserver_preload(list(preload))
            resource_tracker.ensure_running()  # its start would unblock the signal
            with environment(variables), interrupts_blocked():
                forkserver.ensure_running()
        # A plain pickle copies tensors, whereas multiprocessing would share their memory.
        work, port = pickle.dumps((function, arguments)), free_port()
        try:
            for rank, log in enumerate(self.logs):
                self.pipes[rank], theirs = context.Pipe()
                log.write_bytes(b"")
                own = {**os.environ, **variables, **rank_variables(rank, size, port)}
                process = context.Process(
                    target=_run, args=(work, theirs, log, own, REPOSITORY), daemon=True
                )
                process.start()
                theirs.close()
                self.processes.append(process)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "ForkedRanks":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def receive(self, rank: int) -> Any:
        """Return the next message of a rank.

        Raises:
            EOFError: the rank has ended.
        """
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.pipes.pop(rank).close()
            self.processes[rank].join(1.0)
            raise EOFError(
                f"rank {rank} exited with code {self.processes[rank].exitcode}"
            ) from None

    def gather(self, seconds: float | None = None) -> list[Any]:
        """Return a message of every rank.

        Args:
            seconds: time limit

        Raises:
            RankFailed: a rank has ended, or the time is over. All ranks are killed.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        messages: dict[int, Any] = {}
        reason = ""
        while not reason and len(messages) < len(self.processes):
            waiting = {pipe: rank for rank, pipe in self.pipes.items() if rank not in messages}
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not (ready := wait(waiting, left)):
                reason = f"ranks {sorted(waiting.values())} sent nothing within {seconds} seconds"
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    messages[rank] = self.receive(rank)
                except EOFError as end:
                    reason = str(end)
        if reason:
            self.stop()
            raise RankFailed(f"{reason}\n{log_tails(self.logs, MAX_TRACEBACK_LINES)}")
        return [messages[rank] for rank in sorted(messages)]

    def stop(self) -> None:
        """Kill the processes that still run, and wait for all."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        while self.pipes:
            self.pipes.popitem()[1].close()


@atexit.register
def _end_fork_server() -> None:
    """Kill the fork server.

    It would end only after its imports, and keep the output of this process open until then.
    """
    server: Any = forkserver._forkserver
    if (process := server._forkserver_pid) is not None:
        os.kill(process, signal.SIGKILL)
        server._stop()


def _run(
    work: bytes, pipe: Connection, log: Path, variables: dict[str, str], repository: Path
) -> None:
    """Call the function of `ForkedRanks` in the process of a rank."""
    # Exclude the objects of the fork server's imports from garbage collection. Otherwise the first
    # collection writes to the header of every object and so copies nearly all shared memory pages,
    # which costs each rank half a second of CPU time.
    gc.freeze()
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # the ranks were stopped while this process was being started
        os._exit(0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(variables)
    assert repository == REPOSITORY, f"this rank has imported {REPOSITORY}"
    function, arguments = pickle.loads(work)
    function(pipe, *arguments)
    sys.stdout.flush()
    # Skip torch's teardown of its threads, which sometimes aborts.
    os._exit(0)


def send(pipe: Connection, message: Any) -> None:
    """Send a message to the process that started this rank; tensors are copied."""
    pipe.send_bytes(pickle.dumps(message))


@dataclass
class Processes:
    """Running processes of ranks, or of a launcher.

    Attributes:
        running: name for messages -> process
        local: True if all processes are ranks on this machine, which may be killed at once
    """

    running: dict[str, subprocess.Popen] = field(default_factory=dict)
    local: bool = True

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        """Start a process in its own session. The kernel kills it when this process ends."""
        with log.open("ab") as output:
            self.running[name] = subprocess.Popen(
                killed_with_parent(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> dict[str, int]:
        """Return the exit codes of processes that have ended, negative after a signal."""
        codes = {name: process.poll() for name, process in self.running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def wait(self, seconds: float = math.inf, *, until_failure: bool = False) -> None:
        """Wait until all processes have ended, a process has failed, or the time is over."""
        deadline = time.monotonic() + seconds
        while len(codes := self.ended()) < len(self.running) and time.monotonic() < deadline:
            if until_failure and any(codes.values()):
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """End all processes, and wait for them."""
        if not self.local:
            self._signal(signal.SIGTERM)
            self.wait(SECONDS_TO_TERMINATE)
        self._signal(signal.SIGKILL)
        for process in self.running.values():
            process.wait()

    def _signal(self, number: int) -> None:
        for process in self.running.values():
            if process.poll() is None or not self.local:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


def start_interpreters(
    size: int, arguments: Sequence[str], *, logs: Path, variables: Mapping[str, str]
) -> Processes:
    """Run `python ARGUMENTS` as every rank of a world, with their output in a folder.

    Args:
        variables: environment variables of the ranks, in addition to this process's
    """
    processes, port = Processes(), free_port()
    for rank in range(size):
        own = {**os.environ, **variables, **rank_variables(rank, size, port)}
        command = [sys.executable, *arguments]
        processes.start(f"rank {rank}", command, own, log_file(logs, rank))
    return processes


def killed_with_parent(command: Sequence[str]) -> list[str]:
    """Wrap a command so that the kernel kills it when this process ends."""
    return [sys.executable, "-SEc", DIES_WITH_PARENT, str(os.getpid()), *command]


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Temporarily change environment variables, which a fork server and its ranks inherit."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment variables that a launcher sets for a rank on a single node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def log_file(folder: Path, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return folder / f"rank{rank}.log"


def log_tails(files: Iterable[Path], lines: int = MAX_LOG_LINES) -> str:
    """Return the last lines of each file that has any, below the file's name."""
    texts = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        if ends := text.strip().splitlines()[-lines:]:
            texts.append("\n".join([f"{file.stem}:", *ends]))
    return "\n".join(texts)
