"""The order in which a pipeline's stages run their passes, and when each pass runs.

Legend: p stages, v chunks of a stage, m micro-batches. A turn is what a stage computes before it
sends: one pass, or with DualPipeV two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from recipes.planning.job import Job
from recipes.planning.step_time import step_time, transfer_time


class ChunkPass(NamedTuple):
    """One micro-batch through one chunk of a stage, forward or backward."""

    stage: int
    chunk: int
    micro_batch: int
    forward: bool


class TimedPass(NamedTuple):
    """A pass and its seconds since the step's start."""

    work: ChunkPass
    start: float
    end: float


Turn = tuple[ChunkPass, ...]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What decides the order: "1f1b" with several chunks is interleaved."""

    stages: int
    chunks: int = 1
    micro_batches: int
    schedule: str = "1f1b"

    @classmethod
    def of(cls, job: Job) -> "Pipeline":
        """A job's.

        Raises:
            ValueError: the schedule has no order for so many micro-batches.
        """
        p, v, m = job.spread.pipeline, job.spread.chunks, job.micro_batches
        folded = job.spread.schedule == "dualpipev"
        if folded and m < 2 * p:
            raise ValueError(f"dualpipev with {p} stages and {m} micro-batches; use {2 * p}")
        if v > 1 and not folded and m % p:
            raise ValueError(f"{p} interleaved stages and {m} micro-batches; use {-(-m // p) * p}")
        return cls(stages=p, chunks=v, micro_batches=m, schedule=job.spread.schedule)

    def position(self, stage: int, chunk: int) -> int:
        """Where in the model a chunk is, from 0 to p v - 1."""
        if self.schedule == "dualpipev" and chunk == 1:
            return 2 * self.stages - 1 - stage
        return chunk * self.stages + stage

    def place(self, position: int) -> tuple[int, int]:
        """The stage and the chunk that are there."""
        chunk, stage = divmod(position, self.stages)
        if self.schedule == "dualpipev" and chunk == 1:
            stage = self.stages - 1 - stage
        return stage, chunk

    def needed(self, work: ChunkPass) -> ChunkPass | None:
        """The pass whose result another one starts with; None: it starts with tokens."""
        position = self.position(work.stage, work.chunk)
        last = self.stages * self.chunks - 1
        if work.forward:
            if position == 0:
                return None
            return ChunkPass(*self.place(position - 1), work.micro_batch, True)
        if position == last:
            return work._replace(forward=True)
        return ChunkPass(*self.place(position + 1), work.micro_batch, False)

    def turns(self, stage: int) -> list[Turn]:
        """All that a stage does in a step, in order."""
        if self.schedule == "dualpipev":
            return _folded(stage, self.stages, self.micro_batches)
        if self.chunks > 1:
            return _interleaved(stage, self.stages, self.chunks, self.micro_batches)
        return _one_forward_one_backward(stage, self.stages, self.micro_batches)


def _one_forward_one_backward(stage: int, p: int, m: int) -> list[Turn]:
    """1F1B (Narayanan et al. 2021, arXiv 2104.04473, figure 4, top), DeepSpeed's TrainSchedule."""
    forwards = [ChunkPass(stage, 0, number, True) for number in range(m)]
    backwards = [ChunkPass(stage, 0, number, False) for number in range(m)]
    return _alternating(forwards, backwards, p - stage - 1)


def _interleaved(stage: int, p: int, v: int, m: int) -> list[Turn]:
    """Interleaved 1F1B (the same, section 2.2.2 and figure 4, bottom).

    p micro-batches go through a stage's first chunk, then through its second, and so on, before
    the next p; backward from the last chunk to the first.
    """
    rounds = [(first, chunk) for first in range(0, m, p) for chunk in range(v)]
    forwards, backwards = [], []
    for first, chunk in rounds:
        for number in range(first, first + p):
            forwards.append(ChunkPass(stage, chunk, number, True))
            backwards.append(ChunkPass(stage, v - 1 - chunk, number, False))
    return _alternating(forwards, backwards, p * (v - 1) + 2 * (p - stage - 1))


def _alternating(
    forwards: Sequence[ChunkPass], backwards: Sequence[ChunkPass], ahead: int
) -> list[Turn]:
    """So many forward passes, then forward and backward in turn, then what is left."""
    ahead = min(ahead, len(forwards))
    pairs = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    order = [*forwards[:ahead], *pairs, *backwards[len(forwards) - ahead :]]
    return [(work,) for work in order]


def _folded(stage: int, p: int, m: int) -> list[Turn]:
    """DualPipeV, step by step as DeepSpeed's DualPipeVSchedule (runtime/pipe/schedule.py).

    A pass's result leaves with the next CommitP2P, so that a turn may have two passes.
    """
    counts = {(chunk, forward): 0 for chunk in (0, 1) for forward in (True, False)}

    def take(chunk: int, forward: bool) -> ChunkPass:
        number = counts[chunk, forward]
        counts[chunk, forward] += 1
        return ChunkPass(stage, chunk, number, forward)

    def steps() -> Iterator[Turn]:
        after, last = p - stage - 1, stage == p - 1
        for _ in range(2 * after):
            yield (take(0, True),)
        for _ in range(stage):
            yield take(0, True), take(1, True)
        if last:  # what its second chunk makes leaves one pass later, with the first chunk's next
            yield (take(0, True),)
            yield take(1, True), take(0, True)
            yield (take(1, False),)
        else:
            yield take(0, True), take(1, True)
        for _ in range(after):
            yield (take(1, False),)
            yield (take(1, True),)
        for number in range(m - 2 * p + stage + 1):
            if number or not last:
                yield take(0, True), take(1, False)
            yield take(1, True), take(0, False)
        for _ in range(after):
            yield (take(1, False),)
            yield take(1, True), take(0, False)
        for _ in range(stage + 1):
            yield (take(1, False),)
            yield (take(0, False),)
        for _ in range(after):
            yield (take(0, False),)

    return list(steps())


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """What a pass takes: of a micro-batch through all chunks by stage, which take equally long.

    transfer: from one stage to another, of a micro-batch; neither of them waits for it otherwise
    """

    forward: Sequence[float]
    backward: Sequence[float]
    transfer: float = 0.0

    @classmethod
    def of(cls, job: Job) -> "Seconds":
        """A job's."""
        time = step_time(job)
        transfer = transfer_time(job) * (1 - job.software.pipeline_overlap)
        return cls(forward=time.forward, backward=time.backward, transfer=transfer)


def simulate(
    pipeline: Pipeline, seconds: Seconds, turns: Sequence[Sequence[Turn]] | None = None
) -> list[list[TimedPass]]:
    """When each pass runs, by stage and in the stage's order.

    A pass starts when its stage is free and what it needs is there; what a turn makes leaves when
    the turn is over.

    turns: of each stage, if not the pipeline's own

    Raises:
        ValueError: the stages wait for each other.
    """
    if turns is None:
        turns = [pipeline.turns(stage) for stage in range(pipeline.stages)]
    orders = [[each for turn in order for each in _steps(turn)] for order in turns]
    done: list[list[TimedPass]] = [[] for _ in orders]
    over: dict[ChunkPass, float] = {}  # when a pass ends, for its own stage
    arrived: dict[ChunkPass, float] = {}  # and when the next stage has its result

    def arrival(work: ChunkPass) -> float | None:
        needed = pipeline.needed(work)
        if needed is None:
            return 0.0
        return (over if needed.stage == work.stage else arrived).get(needed)

    def run_next(stage: int) -> bool:
        if len(done[stage]) == len(orders[stage]):
            return False
        work, together, leaving = orders[stage][len(done[stage])]
        arrivals = [arrival(each) for each in together]
        if None in arrivals:
            return False
        took = (seconds.forward if work.forward else seconds.backward)[stage] / pipeline.chunks
        start = max(arrivals + [timed.end for timed in done[stage][-1:]])
        done[stage].append(TimedPass(work, start, start + took))
        over[work] = start + took
        arrived.update(dict.fromkeys(leaving, start + took + seconds.transfer))
        return True

    progress = True
    while progress:
        progress = False
        for stage in range(pipeline.stages):
            while run_next(stage):
                progress = True
    stuck = [order[len(d)][0] for order, d in zip(orders, done, strict=True) if len(d) < len(order)]
    if stuck:
        raise ValueError(f"the stages wait for each other: {stuck}")
    return done


def _steps(turn: Turn) -> Iterator[tuple[ChunkPass, Turn, Turn]]:
    """Of each pass of a turn: itself, the passes whose inputs it waits for, those that leave then.

    What a forward and a backward pass of one turn need comes together, in one CommitP2P.
    """
    mixed = turn[0].forward != turn[-1].forward
    for place, work in enumerate(turn):
        together = turn if mixed and place == 0 else (work,)
        yield work, together, turn if place == len(turn) - 1 else ()


def pipeline_seconds(timeline: Sequence[Sequence[TimedPass]]) -> float:
    """From the first pass to the end of the last one."""
    return max(stage[-1].end for stage in timeline)


def idle_share(timeline: Sequence[Sequence[TimedPass]]) -> float:
    """The share of all stages' time in which they wait: the bubble and the transfers."""
    busy = sum(timed.end - timed.start for stage in timeline for timed in stage)
    return 1 - busy / (len(timeline) * pipeline_seconds(timeline))
