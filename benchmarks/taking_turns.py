"""Contestants of a benchmark, which take turns and run in separate processes.

The parent asks one after the other to run a step, and receives its start and end times; between
its turns a contestant blocks on the pipe and uses no CPU time. The output of a contestant goes
into a file, which is shown if the contestant fails.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from threefold.runtime.ranks import ForkedRanks

PRELOADED = ["benchmarks.one_step.contestants"]
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
        self._cores = cores[-ranks:]
        self._logs = tempfile.TemporaryDirectory()
        self.ranks = ForkedRanks(
            ranks,
            play,
            *arguments,
            logs=Path(self._logs.name),
            preload=PRELOADED if cores else (),
            variables={},
        )

    def wait(self) -> None:
        """Wait until all ranks are ready."""
        self.ranks.gather()

    def settle(self) -> None:
        """Pin each rank to a core."""
        for process, core in zip(self.ranks.processes, self._cores, strict=False):
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
        turns = self.ranks.gather()
        losses = [turn.loss for turn in turns if turn.loss is not None]
        start, end = min(turn.start for turn in turns), max(turn.end for turn in turns)
        return Turn(start, end, losses[0] if losses else None)

    def ask(self, question: str, *arguments: Any) -> list[Any]:
        """Call a method of the contestant on each rank, and return the results."""
        self._say(question, *arguments)
        return self.ranks.gather()

    def close(self) -> None:
        """Kill the processes of the contestant."""
        self.ranks.stop()
        self._logs.cleanup()

    def _say(self, question: str, *arguments: Any) -> None:
        for pipe in self.ranks.pipes.values():
            pipe.send((question, arguments))


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
