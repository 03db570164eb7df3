"""Processes for a proof: worlds of ranks that train many variants each, several worlds at once."""

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from recipes.proving.compare import Outcome
from recipes.proving.layouts import Variant

CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
PRELOADED = [  # once, for all processes; the last three are imported when an engine is built
    "recipes.proving.trial",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "deepspeed.runtime.zero.muon.muon_optimizer",
]
LAST_LINES = 12  # of a rank's output, in a message


@dataclass
class WorldOfRanks:
    """The processes that train some variants of one size, and what is left of their work."""

    variants: list[Variant]
    logs: Path
    processes: list[Any] = field(default_factory=list)
    reports: list[Connection] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  # ranks that have reported their last
    deadline: float = 0.0

    @property
    def size(self) -> int:
        """Its ranks."""
        return self.variants[0].world_size

    @property
    def open_reports(self) -> list[Connection]:
        """Where something may still come from."""
        return [report for rank, report in enumerate(self.reports) if rank not in self.ended]

    def start(self, seconds: float) -> None:
        """Start the processes; imports are done already, in the server they are forked from."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = _free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, port, self.variants, theirs, self._log(rank))
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.reports.append(ours)
        self.deadline = time.monotonic() + seconds

    def stop(self) -> None:
        """End the processes, if they have not ended."""
        for process in self.processes:
            process.kill()
        for process, report in zip(self.processes, self.reports, strict=True):
            process.join()
            report.close()

    def last_words(self) -> str:
        """The end of every rank's output."""
        texts = []
        for rank in range(self.size):
            lines = self._log(rank).read_text(errors="replace").splitlines()
            texts.append("\n".join([f"rank {rank} of {self.size}:", *lines[-LAST_LINES:]]))
        return "\n".join(texts)

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank{rank}"


def run_variants(
    variants: Sequence[Variant], *, ranks: int, seconds: float
) -> Iterator[tuple[Variant, Outcome | str]]:
    """Each variant with its outcome, or with the text of what went wrong, as they come.

    A variant that fails ends its world; the ones after it go on in a new one.

    ranks: so many processes at most run at a time
    seconds: a variant that takes longer has failed
    """
    os.environ.update(CPU)
    waiting = [
        [variant for variant in variants if variant.world_size == size]
        for size in sorted({variant.world_size for variant in variants}, reverse=True)
    ]
    running: list[WorldOfRanks] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                for group in list(waiting):
                    if sum(world.size for world in running) + group[0].world_size <= ranks:
                        waiting.remove(group)
                        world = WorldOfRanks(group, Path(tempfile.mkdtemp(dir=folder)))
                        world.start(seconds)
                        running.append(world)
                wait([report for world in running for report in world.open_reports], timeout=1.0)
                for world in list(running):
                    yield from _collect(world, seconds)
                    if world.processes and not world.variants:
                        running.remove(world)
                    elif not world.processes:  # it failed
                        running.remove(world)
                        waiting += [world.variants] if world.variants else []
        finally:
            for world in running:
                world.stop()


def _collect(world: WorldOfRanks, seconds: float) -> Iterator[tuple[Variant, Outcome | str]]:
    """What has come from a world; one that has failed is stopped, its processes forgotten."""
    failure = None
    for rank, report in enumerate(world.reports):
        while failure is None and rank not in world.ended and report.poll():
            try:
                kind, content = pickle.loads(report.recv_bytes())
            except EOFError:  # it has ended, and only rank 0 ends after its last outcome is out
                world.ended.add(rank)
                world.processes[rank].join(1.0)
                code = world.processes[rank].exitcode
                if code or (rank == 0 and world.variants):
                    failure = f"rank {rank} ended, exit code {code}"
                break
            if kind == "failure":
                failure = f"rank {rank}: {content}"
            elif rank == 0:
                world.deadline = time.monotonic() + seconds
                yield world.variants.pop(0), content
    if failure is None and world.variants and time.monotonic() > world.deadline:
        failure = f"nothing within {seconds:.0f} seconds"
    if failure is not None:
        world.stop()
        failure += f"\n{world.last_words()}"
        yield world.variants.pop(0), failure
        world.processes.clear()
    elif not world.variants:
        world.stop()


def _rank(rank: int, port: int, variants: Sequence[Variant], report: Connection, log: Path) -> None:
    """One process: train the variants, report outcomes (rank 0) or the exception that ended it."""
    size = variants[0].world_size
    os.environ |= CPU | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from recipes.proving.trial import try_variants  # torch: only ranks need it

    try:
        for outcome in try_variants(variants):
            if rank == 0:
                report.send_bytes(pickle.dumps(("outcome", outcome)))
    except Exception as problem:  # whatever it is, it is this variant's result
        traceback.print_exc()
        sys.stderr.flush()
        report.send_bytes(pickle.dumps(("failure", f"{type(problem).__name__}: {problem}")))
    # torch's teardown of its threads sometimes aborts; the results are out by now.
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
