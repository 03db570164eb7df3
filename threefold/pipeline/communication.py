"""Messages between pipeline stages and the order in which they are posted. Arithmetic only.

NCCL runs the operations of a communicator in the order in which they were posted and knows no tags.
Each ordered pair of stages therefore has a communicator of its own, over which activations and
gradients arrive in the order of the sender's passes, and the receiver posts its receives in that
same order, whatever the order in which it needs the messages.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from threefold.pipeline.passes import Pass
from threefold.pipeline.schedules import Pipeline

Route = tuple[int, int]  # (sending stage, receiving stage)


class Action(StrEnum):
    """An action of a stage within a step."""

    POST_RECEIVE = "post receive"
    WAIT = "wait"
    COMPUTE = "compute"
    SEND = "send"


class Event(NamedTuple):
    """One action of a stage.

    work: the pass that is computed, whose input is received, or whose result is sent
    """

    action: Action
    work: Pass


def routes(pipeline: Pipeline) -> list[Route]:
    """Return the pairs of stages that send to each other, in the same order on every rank."""
    stages = [pipeline.stage_and_chunk(index)[0] for index in range(pipeline.virtual_stages)]
    forward = {(a, b) for a, b in pairwise(stages) if a != b}
    return sorted(forward | {(b, a) for a, b in forward})


def rounds(pipeline: Pipeline) -> list[list[Route]]:
    """Divide the routes into rounds in which every stage has one route at most.

    The process groups of a round are disjoint, so that one call creates all of them.
    """
    found: list[list[Route]] = []
    for route in routes(pipeline):
        free = (
            each for each in found if not set(route) & {stage for pair in each for stage in pair}
        )
        target = next(free, None)
        if target is None:
            found.append(target := [])
        target.append(route)
    return found


def is_remote(stage: int, other: Pass | None) -> bool:
    """Return True if `other` exists and runs on another stage."""
    return other is not None and other.stage != stage


def program(pipeline: Pipeline, stage: int, *, training: bool) -> Iterator[Event]:
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
                yield Event(Action.WAIT, work)
        for work in unit:
            yield Event(Action.COMPUTE, work)
        for work in unit:
            if is_remote(stage, pipeline.receiver(work)):
                yield Event(Action.SEND, work)


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

    def up_to(self, work: Pass | None) -> Iterator[Event]:
        """Yield the receives that must be posted for the message of `work` to arrive."""
        if work is None:
            return
        source = self.pipeline.needed(work)
        assert source is not None
        sender = source.stage
        end = max(self.indices[work] + 1, self.posted[sender])
        for each in self.messages[sender][self.posted[sender] : end]:
            yield Event(Action.POST_RECEIVE, each)
        self.posted[sender] = end
