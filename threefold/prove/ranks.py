"""Processes of a proof: several worlds of ranks at a time, each of which trains many cases."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from threefold.config.loading import REPOSITORY
from threefold.prove.compare import ResumeResult, TrainingResult
from threefold.prove.layouts import ProofCase
from threefold.runtime.exits import interrupts_blocked
from threefold.runtime.launchers import free_port

RANK_ENVIRONMENT = {  # environment variables of every rank
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    # The fork server must import from this checkout instead of the working directory.
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONSAFEPATH": "1",
}
# The fork server imports these modules once for all processes. Without the last three, each process
# would import them when it builds an engine.
PRELOADED_MODULES = [
    "threefold.prove.relay",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
]
MAX_LINES_IN_MESSAGE = 12  # lines of a rank's output in a message

Result = tuple[ProofCase, TrainingResult | ResumeResult | str]


@dataclass
class RankPool:
    """The processes that train cases of one world size.

    Attributes:
        done: number of cases that have a result
        failure: the reason why the next case failed, if it did
    """

    cases: Sequence[ProofCase]
    logs: Path
    seconds: float
    relay: Path | None = None
    done: int = 0
    failure: str | None = None
    deadline: float = 0.0
    processes: list[Any] = field(default_factory=list)
    reports: dict[int, Connection] = field(
        default_factory=dict
    )  # by rank, of the ranks that still run

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.cases[0].world_size

    @property
    def finished(self) -> bool:
        """True if no more results will arrive."""
        return self.failure is not None or self.done == len(self.cases)

    def start(self) -> None:
        """Start the processes, forked from a server that has done the imports."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED_MODULES)
        port = free_port()
        self.deadline = time.monotonic() + self.seconds
        resource_tracker.ensure_running()  # its start would unblock the signal
        with environment(RANK_ENVIRONMENT):
            with interrupts_blocked():
                forkserver.ensure_running()
            for rank in range(self.size):
                ours, theirs = context.Pipe(duplex=False)
                self.reports[rank] = ours
                self._log(rank).touch()
                settings = (rank, port, self._log(rank), REPOSITORY)
                arguments = (settings, self.cases, self.relay, theirs)
                process = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)

    def stop(self) -> None:
        """Kill the processes that still run, and wait for all."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for report in self.reports.values():
            report.close()

    def results(self) -> Iterator[Result]:
        """Yield the results since the last call, and set `failure` if a rank failed."""
        yield from self._outcomes()
        for rank in sorted(self.reports):
            failed_at = self._failure_of(rank)
            if failed_at is not None:
                # Rank 0 may not yet have sent the results that precede the failure.
                while self.done < failed_at and self.reports.get(0) and self.reports[0].poll(1.0):
                    yield from self._outcomes()
                return
        if not self.finished and time.monotonic() > self.deadline:
            self.failure = f"no result within {self.seconds:.0f} seconds"

    def _outcomes(self) -> Iterator[Result]:
        """Yield the outcomes that rank 0 has sent."""
        while 0 in self.reports and self.reports[0].poll():
            message = self._receive(0)
            if message is None or isinstance(message[1], str):
                if message:
                    self.failure = f"rank 0: {message[1]}"
                return
            self.deadline = time.monotonic() + self.seconds
            self.done += 1
            yield self.cases[self.done - 1], message[1]

    def _failure_of(self, rank: int) -> int | None:
        """Return the index of the case at which a rank failed, or None."""
        if self.failure is not None:
            return self.done
        while rank in self.reports and self.reports[rank].poll():
            message = self._receive(rank)
            if message is None:  # the rank has ended
                self.processes[rank].join(1.0)
                code = self.processes[rank].exitcode
                if code or (rank == 0 and self.done < len(self.cases)):
                    self.failure = f"rank {rank} exited with code {code}"
                    return self.done
            elif isinstance(message[1], str):
                self.failure = f"rank {rank}: {message[1]}"
                return message[0]
        return None

    def _receive(self, rank: int) -> tuple[int, TrainingResult | ResumeResult | str] | None:
        """Return (index of the case, outcome or error) from a rank; None if the rank has ended."""
        try:
            return pickle.loads(self.reports[rank].recv_bytes())
        except EOFError:
            self.reports.pop(rank).close()
            return None

    def log_tails(self) -> str:
        """Return the last lines of every rank's output."""
        texts = []
        for rank in range(self.size):
            lines = self._log(rank).read_text(encoding="utf-8", errors="replace").splitlines()
            texts.append(
                "\n".join([f"rank {rank} of {self.size}:", *lines[-MAX_LINES_IN_MESSAGE:]])
            )
        return "\n".join(texts)

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}"


def run_cases(
    cases: Sequence[ProofCase], *, ranks: int, seconds: float, relay: Path | None = None
) -> Iterator[tuple[ProofCase, TrainingResult | ResumeResult | str]]:
    """Yield each case with its outcome, or with the text of its error, in order of completion.

    A case that fails ends its world; the remaining cases continue in a new world.

    Args:
        ranks: maximum number of processes at a time
        seconds: time limit of a case
        relay: folder through which each case passes the run to the next; all cases then have the
            same world size

    Raises:
        ValueError: a case needs more than `ranks` ranks.
    """
    sizes = sorted({case.world_size for case in cases}, reverse=True)
    if sizes and sizes[0] > ranks:
        raise ValueError(f"a layout of {sizes[0]} ranks does not fit into ranks = {ranks}")
    waiting = [[case for case in cases if case.world_size == n] for n in sizes]
    running: list[RankPool] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                for group in list(waiting):
                    if sum(world.size for world in running) + group[0].world_size <= ranks:
                        waiting.remove(group)
                        logs = Path(tempfile.mkdtemp(dir=folder))
                        world = RankPool(group, logs, seconds, relay)
                        running.append(world)
                        world.start()
                wait([r for world in running for r in world.reports.values()], timeout=1.0)
                for world in list(running):
                    yield from world.results()
                    if world.finished:
                        running.remove(world)
                        world.stop()
                    if world.failure is not None:
                        failed, *rest = world.cases[world.done :]
                        yield failed, f"{world.failure}\n{world.log_tails()}"
                        waiting += [rest] if rest else []
        finally:
            for world in running:
                world.stop()


@contextlib.contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Temporarily change environment variables, which the fork server and its ranks inherit."""
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


def _rank(
    settings: tuple[int, int, Path, Path],
    cases: Sequence[ProofCase],
    relay: Path | None,
    report: Connection,
) -> None:
    """Train the cases in one process, and report outcomes (rank 0) or an error (all ranks).

    Args:
        settings: rank, port, log, and the checkout that the rank must have imported
        report: connection to the process that started the ranks
    """
    rank, port, log, repository = settings
    size = cases[0].world_size
    os.environ |= RANK_ENVIRONMENT | rank_variables(rank, size, port)
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except FileNotFoundError:  # the proof was interrupted while this process was being started
        os._exit(0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from threefold.prove.relay import run_relay  # torch: only ranks need it
    from threefold.prove.training import train_cases

    done = 0
    try:
        assert repository == REPOSITORY, f"this rank has imported {REPOSITORY}"
        for outcome in run_relay(cases, relay) if relay else train_cases(cases):
            if rank == 0:
                report.send_bytes(pickle.dumps((done, outcome)))
            done += 1
    except Exception as problem:  # any exception is the result of this case
        traceback.print_exc()
        sys.stderr.flush()
        report.send_bytes(pickle.dumps((done, f"{type(problem).__name__}: {problem}")))
    # The results are sent. Skip torch's teardown of its threads, which sometimes aborts.
    os._exit(0)
