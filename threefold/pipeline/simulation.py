"""Simulation of the times of passes, and of the messages between stages. Arithmetic only."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import chain, pairwise
from statistics import median
from typing import NamedTuple

from threefold.pipeline.schedules import Kind, Order, Pass, Pipeline


class TimedPass(NamedTuple):
    """A pass and its seconds since the step's start."""

    work: Pass
    start: float
    end: float


Timeline = list[list[TimedPass]]  # by stage, in the stage's order


def simulate(
    pipeline: Pipeline,
    seconds: Callable[[Pass], float],
    *,
    transfer: float = 0.0,
    orders: Sequence[Order] | None = None,
) -> Timeline:
    """Return the timeline in which a pass runs as soon as its stage is idle and its input is there.

    A result is sent at once, and neither stage waits during the transfer. A pair takes the sum of
    both durations. The timeline has its passes one after the other, but both results are available
    at the end of the pair.

    Args:
        transfer: seconds of a transfer between two stages
        orders: the order of passes of each stage, if it differs from the pipeline's

    Raises:
        ValueError: the stages wait for each other.
    """
    orders = pipeline.orders if orders is None else orders
    done: Timeline = [[] for _ in orders]
    ends: dict[Pass, float] = {}
    units = [deque(pipeline.units(order)) for order in orders]

    def run_next(stage: int) -> bool:
        unit = units[stage][0]
        start = done[stage][-1].end if done[stage] else 0.0
        for needed in filter(None, map(pipeline.needed, unit)):
            if needed not in ends:
                return False
            arrival = ends[needed] + (transfer if needed.stage != stage else 0.0)
            start = max(start, arrival)
        for work in unit:
            done[stage].append(TimedPass(work, start, start + seconds(work)))
            start = done[stage][-1].end
        ends.update(dict.fromkeys(unit, start))
        units[stage].popleft()
        return True

    progress = True
    while progress:
        progress = False
        for stage in range(len(orders)):
            while units[stage] and run_next(stage):
                progress = True
    stuck = [left[0] for left in units if left]
    if stuck:
        raise ValueError(f"the stages wait for each other: {stuck}")
    return done


def pipeline_seconds(timeline: Timeline) -> float:
    """Return the seconds from the start of the step to the end of the last pass."""
    return max(stage[-1].end for stage in timeline)


def idle_share(timeline: Timeline) -> float:
    """Return the share of the stages' time that is idle, in bubbles and transfers."""
    busy = sum(timed.end - timed.start for stage in timeline for timed in stage)
    return 1 - busy / (len(timeline) * pipeline_seconds(timeline))


def typical_seconds(timeline: Timeline) -> Callable[[Pass], float]:
    """Return a function that gives the median duration of a pass's kind, stage and chunk."""
    spans: dict[tuple[Kind, int, int], list[float]] = {}
    for timed in chain.from_iterable(timeline):
        work = timed.work
        spans.setdefault((work.kind, work.stage, work.chunk), []).append(timed.end - timed.start)
    medians = {key: median(seconds) for key, seconds in spans.items()}
    return lambda work: medians[work.kind, work.stage, work.chunk]


# Messages between pipeline stages and the order in which they are posted. Arithmetic only.
#
# NCCL runs the operations of a communicator in the order in which they were posted and knows no
# tags. Each ordered pair of stages therefore has a communicator of its own, over which activations
# and gradients arrive in the order of the sender's passes, and the receiver posts its receives in
# that same order, whatever the order in which it needs the messages.

Route = tuple[int, int]  # (sending stage, receiving stage)


class Action(StrEnum):
    """An action of a stage within a step."""

    POST_RECEIVE = "post receive"
    WAIT = "wait"
    COMPUTE = "compute"
    SEND = "send"


class SimulatedEvent(NamedTuple):
    """One action of a stage.

    work: the pass that is computed, whose input is received, or whose result is sent
    """

    action: Action
    work: Pass


def routes(pipeline: Pipeline) -> list[Route]:
    """Return the pairs of stages that send to each other, in the same order on every rank."""
    stages = [pipeline.stage_and_chunk(index)[0] for index in range(pipeline.total_virtual_stages)]
    forward = {(a, b) for a, b in pairwise(stages) if a != b}
    return sorted(forward | {(b, a) for a, b in forward})


def rounds(pipeline: Pipeline) -> list[list[Route]]:
    """Divide the routes into rounds in which every stage has one route at most.

    The process groups of a round are disjoint, so that one call creates all of them.
    """
    rounds: list[list[Route]] = []
    for route in routes(pipeline):
        free = (
            routes
            for routes in rounds
            if not set(route) & {stage for pair in routes for stage in pair}
        )
        target = next(free, None)
        if target is None:
            rounds.append(target := [])
        target.append(route)
    return rounds


def is_remote(stage: int, other: Pass | None) -> bool:
    """Return True if `other` exists and runs on another stage."""
    return other is not None and other.stage != stage


def program(pipeline: Pipeline, stage: int, *, training: bool) -> Iterator[SimulatedEvent]:
    """Yield the actions of a stage in a step: the order in which it calls the communicators.

    Before a stage waits for a message, it posts the receive of the message after it. All receives
    that precede this one in the order of its sender are posted first. A send follows its pass, or
    the pair of passes that its pass belongs to.
    """
    order = pipeline.orders_of_step(training=training)[stage]
    needed = iter([work for work in order if is_remote(stage, pipeline.needed(work))])
    receives = _Receives(pipeline, stage, training=training)
    yield from receives.up_to(next(needed, None))
    for unit in pipeline.units(order):
        for work in unit:
            if is_remote(stage, pipeline.needed(work)):
                yield from receives.up_to(next(needed, None))
                yield SimulatedEvent(Action.WAIT, work)
        for work in unit:
            yield SimulatedEvent(Action.COMPUTE, work)
        for work in unit:
            if is_remote(stage, pipeline.receiver(work)):
                yield SimulatedEvent(Action.SEND, work)


class _Receives:
    """The receives of a stage, grouped by sender and in the order of that sender."""

    def __init__(self, pipeline: Pipeline, stage: int, *, training: bool):
        self.pipeline = pipeline
        self.messages: dict[int, list[Pass]] = {}  # by sender: the passes that its messages are for
        for sender, order in enumerate(pipeline.orders_of_step(training=training)):
            receivers = map(pipeline.receiver, order)
            if sender != stage:
                self.messages[sender] = [w for w in receivers if w is not None and w.stage == stage]
        self.indices = {w: n for messages in self.messages.values() for n, w in enumerate(messages)}
        self.posted = dict.fromkeys(self.messages, 0)

    def up_to(self, work: Pass | None) -> Iterator[SimulatedEvent]:
        """Yield the receives that must be posted for the message of `work` to arrive."""
        if work is None:
            return
        source = self.pipeline.needed(work)
        assert source is not None
        sender = source.stage
        end = max(self.indices[work] + 1, self.posted[sender])
        for message in self.messages[sender][self.posted[sender] : end]:
            yield SimulatedEvent(Action.POST_RECEIVE, message)
        self.posted[sender] = end
