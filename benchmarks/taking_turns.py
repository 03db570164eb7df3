"""Contestants that take turns, each in processes of its own.

The parent tells one after the other to take a step, and gets back when it began and ended; between
its turns a contestant waits for the parent's word and costs nothing. What a contestant prints goes
into a file, which is shown should it fail.
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
from typing import Any, NamedTuple

from recipes.proving.worlds import free_port, rank_variables

PRELOADED = ["benchmarks.one_step.contestants"]
LOG_SHOWN = 4000  # characters of what a contestant has printed before it failed
Play = Callable[..., None]  # (its end of the pipe, *arguments), in a contestant's process


class Turn(NamedTuple):
    """A step, by a clock that all processes share.

    loss: where it is known
    """

    start: float
    end: float
    loss: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Player:
    """A contestant as the parent sees it; a process for each of its ranks.

    cores: the last of which its ranks keep to once settled; empty: a GPU computes
    """

    def __init__(self, play: Play, *arguments: Any, cores: Sequence[int], ranks: int = 1):
        context = multiprocessing.get_context("forkserver" if cores else "spawn")
        if cores:
            context.set_forkserver_preload(PRELOADED)
        self._log = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
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
        """Until it is there."""
        self._answers()

    def settle(self) -> None:
        """Keep each rank to a core from now on."""
        for process, core in zip(self._processes, self._cores, strict=False):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})

    def step(self) -> Turn:
        """Its next step; of several ranks, from the first one's beginning to the last one's end."""
        self.begin_step()
        return self.end_step()

    def begin_step(self) -> None:
        """Let it begin its next step."""
        self._say("step")

    def end_step(self) -> Turn:
        """The step that was begun."""
        turns = self._answers()
        losses = [turn.loss for turn in turns if turn.loss is not None]
        start, end = min(turn.start for turn in turns), max(turn.end for turn in turns)
        return Turn(start, end, losses[0] if losses else None)

    def ask(self, question: str, *arguments: Any) -> list[Any]:
        """What each rank answers."""
        self._say(question, *arguments)
        return self._answers()

    def close(self) -> None:
        """End it."""
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
            for pipe in wait(list(waiting)):
                try:
                    answers[waiting[pipe]] = pipe.recv()
                except EOFError:
                    text = self._file(waiting[pipe]).read_text(errors="replace")[-LOG_SHOWN:]
                    self.close()
                    raise RuntimeError(f"a contestant failed; its last words:\n{text}") from None
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
    """In a contestant's process: write to its file, and play."""
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
        os._exit(0)  # the teardown of libraries' threads is not what is measured


def serve(pipe: Connection, contestant: Any) -> None:
    """Answer what the parent asks, in a contestant's process, until it is ended."""
    pipe.send("ready")
    while True:
        question, arguments = pipe.recv()
        pipe.send(getattr(contestant, question)(*arguments))


@contextlib.contextmanager
def players(plays: Mapping[str, Callable[[], Player]]) -> Iterator[dict[str, Player]]:
    """Contestants by name, built beside each other, ended whatever happens."""
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
    """The turns of each, the first `warm_up` of which are not to be timed.

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
    """All contestants compute the same.

    tolerance: of the first step's loss, relative

    Raises:
        AssertionError: one does not, with all losses.
    """
    losses = {name: each[0].loss for name, each in turns.items() if each[0].loss is not None}
    expected = next(iter(losses.values()))
    assert all(abs(loss / expected - 1) < tolerance for loss in losses.values()), losses


def ratio(numerator: Sequence[Turn], denominator: Sequence[Turn]) -> float:
    """The median over the rounds of one contestant's seconds by another's."""
    pairs = zip(numerator, denominator, strict=True)
    return median(above.seconds / below.seconds for above, below in pairs)


def median_seconds(turns: Sequence[Turn]) -> float:
    """Of a step."""
    return median(turn.seconds for turn in turns)


def cores_at_hand() -> list[int]:
    """Those that this process may use; systems like to run on the first ones."""
    return sorted(os.sched_getaffinity(0))
