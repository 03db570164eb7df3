"""Processes of a proof: several worlds of ranks at a time, each of which trains many cases."""

import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import UserError
from threefold.prove.compare import ResumeResult, TrainingResult
from threefold.prove.layouts import ProofCase
from threefold.runtime.ranks import ForkedRanks, log_tails, send

# The fork server imports these modules once for all processes. Without the last three, each process
# would import them when it builds an engine.
PRELOADED_MODULES = [
    "threefold.prove.training",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
]

if TYPE_CHECKING:  # torch
    from threefold.prove.recording import Recording

Result = tuple[ProofCase, "TrainingResult | ResumeResult | Recording | str"]


class RankPool:
    """The processes that train cases of one world size.

    Args:
        folder: of the logs of all processes
        seconds: time limit of a case
        relay: see `run_cases`

    Attributes:
        done: number of cases that have a result
        failure: the reason why the next case failed, if it did
    """

    def __init__(
        self, cases: Sequence[ProofCase], *, folder: Path, seconds: float, relay: Path | None
    ):
        self.cases, self.seconds = cases, seconds
        self.done = 0
        self.failure: str | None = None
        self.size = cases[0].world_size
        logs = Path(tempfile.mkdtemp(dir=folder))
        self.ranks = ForkedRanks(
            self.size, _run_cases, cases, relay, logs=logs, preload=PRELOADED_MODULES
        )
        self.deadline = time.monotonic() + seconds

    @property
    def finished(self) -> bool:
        """True if no more results will arrive."""
        return self.failure is not None or self.done == len(self.cases)

    def results(self) -> Iterator[Result]:
        """Yield the results since the last call, and set `failure` if a rank failed."""
        for rank in sorted(self.ranks.pipes):  # rank 0, which sends the results, is the first
            yield from self._received(rank, len(self.cases))
        if not self.finished and time.monotonic() > self.deadline:
            self.failure = f"no result within {self.seconds:.0f} seconds"

    def _received(self, rank: int, end: int, patience: float = 0.0) -> Iterator[Result]:
        """Yield the results that a rank has sent, until `end` cases are done or one has failed.

        Args:
            patience: seconds to wait for the next message
        """
        pipes = self.ranks.pipes
        while not self.finished and self.done < end:
            if rank not in pipes or not pipes[rank].poll(patience):
                return
            try:
                index, outcome = self.ranks.receive(rank)
            except EOFError as ended:
                if rank == 0 or self.ranks.processes[rank].exitcode:
                    self.failure = str(ended)
                return
            if isinstance(outcome, str):
                # Rank 0 may not yet have sent the results that precede the failure.
                yield from self._received(0, index, patience=1.0)
                self.failure = f"rank {rank}: {outcome}"
            else:
                self.deadline = time.monotonic() + self.seconds
                self.done += 1
                yield self.cases[index], outcome


def run_cases(
    cases: Sequence[ProofCase], *, ranks: int, seconds: float, relay: Path | None = None
) -> Iterator[Result]:
    """Yield each case with its outcome, or with the text of its error, in order of completion.

    A case that fails ends its world; the remaining cases continue in a new world. There is one
    world of each size. But if all cases have one size, as the reference and its perturbed runs do,
    they are divided among several worlds, with at most one rank per core.

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
    if len(waiting) == 1 and relay is None:
        worlds = max(1, min(ranks, len(os.sched_getaffinity(0))) // sizes[0])
        waiting = [list(cases[n::worlds]) for n in range(min(worlds, len(cases)))]
    running: list[RankPool] = []
    with tempfile.TemporaryDirectory() as name:
        try:
            while waiting or running:
                for group in list(waiting):
                    if sum(pool.size for pool in running) + group[0].world_size <= ranks:
                        waiting.remove(group)
                        running.append(
                            RankPool(group, folder=Path(name), seconds=seconds, relay=relay)
                        )
                wait([p for pool in running for p in pool.ranks.pipes.values()], timeout=1.0)
                for pool in list(running):
                    yield from pool.results()
                    if pool.finished:
                        running.remove(pool)
                        pool.ranks.stop()
                    if pool.failure is not None:
                        failed, *rest = pool.cases[pool.done :]
                        yield failed, f"{pool.failure}\n{log_tails(pool.ranks.logs)}"
                        waiting += [rest] if rest else []
        finally:
            for pool in running:
                pool.ranks.stop()


def _run_cases(pipe: Connection, cases: Sequence[ProofCase], relay: Path | None) -> None:
    """Train the cases in one rank, and send outcomes (rank 0) or an error (all ranks)."""
    from threefold.prove.training import (
        run_relay,  # torch: only ranks need it
        train_cases,
    )

    done = 0
    try:
        for outcome in run_relay(cases, relay) if relay else train_cases(cases):
            if outcome is not None:  # of rank 0
                send(pipe, (done, outcome))
            done += 1
    except UserError as problem:
        send(pipe, (done, str(problem)))
    except Exception as problem:  # any other exception is the result of this case, too
        traceback.print_exc()
        send(pipe, (done, f"{type(problem).__name__}: {problem}"))
