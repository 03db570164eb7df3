"""Contestants of a benchmark, which take turns and run in separate processes.

The parent asks one after the other to run a step, and receives its start and end times; between
its turns a contestant blocks on the pipe and uses no CPU time. The output of a contestant goes
into a file, which is shown if the contestant fails.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

from threefold.prove.ranks import free_port, rank_variables

PRELOADED = ["benchmarks.one_step.contestants"]
MAX_LOG_CHARACTERS = 4000  # of a failed contestant's output, in the error message
Play = Callable[..., None]  # (child's end of the pipe, *arguments), in a contestant's process


class Turn(NamedTuple):
    """The start and end of a step, by a clock that all processes share.

    loss: None if it is not known
    """

    start: float
    end: float
    loss: float | None = None

    @property
    def seconds(self) -> float:
        """The duration of the step."""
        return self.end - self.start


class Player:
    """The parent's handle of a contestant, which has one process per rank.

    cores: cores to pin the ranks to, from the last one on; empty on a GPU
    """

    def __init__(self, play: Play, *arguments: Any, cores: Sequence[int], ranks: int = 1):
        context: Any = multiprocessing.get_context("forkserver" if cores else "spawn")
        if cores:
            context.set_forkserver_preload(PRELOADED)
        self._log = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        port = free_port()
        self._cores = cores[-ranks:]
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            environment = rank_variables(rank, ranks, port) if ranks > 1 else {}
            process = context.Process(
                target=begin, args=(theirs, self._file(rank), environment, play, arguments)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait(self) -> None:
        """Wait until all ranks are ready."""
        self._answers()

    def settle(self) -> None:
        """Pin each rank to a core."""
        for process, core in zip(self._processes, self._cores, strict=False):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})

    def step(self) -> Turn:
        """Run the next step; with several ranks, from the first start to the last end."""
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> None:
        """Start the next step without waiting for its end."""
        self._say("step")

    def end_step(self) -> Turn:
        """Wait for the end of the started step."""
        turns = self._answers()
        losses = [turn.loss for turn in turns if turn.loss is not None]
        start, end = min(turn.start for turn in turns), max(turn.end for turn in turns)
        return Turn(start, end, losses[0] if losses else None)

    def ask(self, question: str, *arguments: Any) -> list[Any]:
        """Call a method of the contestant on each rank, and return the results."""
        self._say(question, *arguments)
        return self._answers()

    def close(self) -> None:
        """Kill the processes of the contestant."""
        for process in self._processes:
            process.kill()
            process.join()
        self._log.cleanup()

    def _say(self, question: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((question, arguments))

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {pipe: n for n, pipe in enumerate(self._pipes) if n not in answers}
            for pipe in cast(list[Connection], wait(list(waiting))):
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except EOFError:
                    text = self._file(waiting[pipe]).read_text(errors="replace")[
                        -MAX_LOG_CHARACTERS:
                    ]
                    self.close()
                    raise RuntimeError(
                        f"a contestant failed; the end of its output:\n{text}"
                    ) from None
        return [answers[rank] for rank in range(len(answers))]

    def _file(self, rank: int) -> Path:
        return Path(self._log.name) / f"rank{rank}.log"


def begin(
    pipe: Connection,
    log: Path,
    environment: Mapping[str, str],
    play: Play,
    arguments: tuple[Any, ...],
) -> None:
    """Run a contestant in its process, with its output in a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.environ |= environment
    try:
        play(pipe, *arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.close()
        os._exit(0)  # skips the teardown of libraries' threads


def serve(pipe: Connection, contestant: Any) -> None:
    """Answer the parent's requests, in a contestant's process, until it is killed."""
    pipe.send("ready")
    while True:
        question, arguments = pipe.recv()
        pipe.send(getattr(contestant, question)(*arguments))


@contextlib.contextmanager
def players(plays: Mapping[str, Callable[[], Player]]) -> Iterator[dict[str, Player]]:
    """Start contestants in parallel, yield them by name, and kill them at the end."""
    started: dict[str, Player] = {}
    try:
        for name, start in plays.items():
            started[name] = start()
        for player in started.values():
            player.wait()
        yield started
    finally:
        for player in started.values():
            player.close()


def take_turns(
    contestants: Mapping[str, Player], *, warm_up: int, rounds: int
) -> dict[str, list[Turn]]:
    """Return the turns of each contestant, including `warm_up` turns that must not be timed.

    In the very first one kernels are compiled, on all cores and by all contestants at once; from
    then on one of them runs at a time.
    """
    for player in contestants.values():
        player.begin_step()
    turns = {name: [player.end_step()] for name, player in contestants.items()}
    for player in contestants.values():
        player.settle()
    for _ in range(warm_up + rounds - 1):
        for name, player in contestants.items():
            turns[name].append(player.step())
    return turns


def check_first_losses(turns: Mapping[str, Sequence[Turn]], tolerance: float) -> None:
    """Check that all contestants compute the same loss.

    tolerance: largest relative difference of the first step's losses

    Raises:
        AssertionError: the losses differ.
    """
    losses = {name: each[0].loss for name, each in turns.items() if each[0].loss is not None}
    expected = next(iter(losses.values()))
    assert all(abs(loss / expected - 1) < tolerance for loss in losses.values()), losses


def ratio(numerator: Sequence[Turn], denominator: Sequence[Turn]) -> float:
    """Return the median over the rounds of one contestant's time divided by another's."""
    pairs = zip(numerator, denominator, strict=True)
    return median(above.seconds / below.seconds for above, below in pairs)


def median_seconds(turns: Sequence[Turn]) -> float:
    """Return the median seconds of a step."""
    return median(turn.seconds for turn in turns)


def cores_at_hand() -> list[int]:
    """Return the cores that this process may use; systems tend to run on the first ones."""
    return sorted(os.sched_getaffinity(0))
