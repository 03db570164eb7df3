"""Simulate the communication kernels of a pipeline on devices that run K of them at a time.

A device holds K communication kernels at a time; each communicator runs its operations in the order
in which they were posted, and a message is transferred once its send and its receive are both
resident. Three launch rules say which posted operation becomes resident next:

- posting order: the earliest one, even while its communicator is busy
- free communicator: the earliest one whose communicator is free
- any order: any one whose communicator is free, as unfavourable as possible

With one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), an operation that cannot be launched also
blocks all computation that was launched after it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from threefold.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    Action,
    Pass,
    Pipeline,
    Route,
    StageAction,
    program,
)

MAX_SLOTS = 16  # upper limit of a search


class LaunchRule(StrEnum):
    """Rule that selects the posted operation that becomes resident next."""

    POSTING_ORDER = "posting order"
    FREE_COMMUNICATOR = "free communicator"
    ANY_ORDER = "any order"


class Operation(NamedTuple):
    """A posted send or receive.

    message: the pass that starts with the message as its input
    """

    route: Route
    message: Pass
    is_send: bool


class StepProgram:
    """The events of all stages of a pipeline in one step."""

    def __init__(self, pipeline: Pipeline, *, training: bool):
        self.pipeline = pipeline
        self.stages = [
            list(program(pipeline, stage, training=training)) for stage in range(pipeline.stages)
        ]

    def operation(self, event: StageAction) -> Operation | None:
        """Return the send or receive that an event posts, if it posts one."""
        if event.action == Action.POST_RECEIVE:
            sender = self.pipeline.needed(event.work).stage
            return Operation((sender, event.work.stage), event.work, is_send=False)
        if event.action == Action.SEND:
            receiver = self.pipeline.receiver(event.work)
            return Operation((event.work.stage, receiver.stage), receiver, is_send=True)
        return None

    @cached_property
    def posted_at(self) -> dict[Operation, tuple[int, int]]:
        """Return the stage and the index of the event that posts each operation."""
        return {
            operation: (stage, index)
            for stage, events in enumerate(self.stages)
            for index, event in enumerate(events)
            if (operation := self.operation(event)) is not None
        }


@dataclass
class _Stage:
    """A stage's host, compute stream and communication kernels."""

    events: Sequence[StageAction]
    done: int = 0  # events
    busy_until: float = 0.0
    posted: list[Operation] = field(default_factory=list)  # not resident yet
    resident: dict[Route, Operation] = field(default_factory=dict)
    received: set[Pass] = field(default_factory=set)


def step_seconds(
    steps: StepProgram,
    slots: int,
    *,
    rule: LaunchRule,
    seconds: Callable[[Pass], float],
    one_queue: bool = False,
    chooser: random.Random | None = None,
) -> float | None:
    """Return the length of a step, or None if the stages deadlock.

    Args:
        steps: the events of all stages
        slots: number of communication kernels that a device can hold at a time
        rule: rule that selects the next operation to launch; `ANY_ORDER` draws from `chooser`
        seconds: function that returns the duration of a pass
        one_queue: whether an operation that cannot be launched blocks computation
    """
    stages = [_Stage(events) for events in steps.stages]
    now = 0.0

    def launch(stage: _Stage) -> bool:
        free, seen = [], set()
        for operation in stage.posted:
            first = operation.route not in seen
            seen.add(operation.route)
            if first and operation.route not in stage.resident:
                free.append(operation)
            elif rule == LaunchRule.POSTING_ORDER:
                break
        if not free or len(stage.resident) >= slots:
            return False
        if rule == LaunchRule.POSTING_ORDER and free[0] is not stage.posted[0]:
            return False
        chosen = chooser.choice(free) if rule == LaunchRule.ANY_ORDER else free[0]
        stage.posted.remove(chosen)
        stage.resident[chosen.route] = chosen
        return True

    def transfer(stage: _Stage) -> bool:
        for route, operation in list(stage.resident.items()):
            other = stages[route[0] + route[1] - stages.index(stage)]
            if route in other.resident and other.resident[route].message == operation.message:
                del stage.resident[route], other.resident[route]
                stages[route[1]].received.add(operation.message)
                return True
        return False

    def advance(stage: _Stage) -> bool:
        if stage.done == len(stage.events) or stage.busy_until > now:
            return False
        event = stage.events[stage.done]
        operation = steps.operation(event)
        if operation is not None:
            stage.posted.append(operation)
        elif (one_queue and stage.posted) or (
            event.action == Action.WAIT and event.work not in stage.received
        ):
            return False
        elif event.action == Action.COMPUTE:
            stage.busy_until = now + seconds(event.work)
        stage.done += 1
        return True

    while True:
        progress = True
        while progress:
            progress = False
            for each in stages:
                while launch(each) or transfer(each) or advance(each):
                    progress = True
        later = [each.busy_until for each in stages if each.busy_until > now]
        if not later:
            break
        now = min(later)
    finished = all(s.done == len(s.events) and not (s.posted or s.resident) for s in stages)
    return now if finished else None


def smallest_slots(steps: StepProgram, *, rule: LaunchRule, **settings) -> int:
    """Return the smallest number of slots with which a step ends; `settings`: of `step_seconds`."""
    for slots in range(1, MAX_SLOTS + 1):
        if step_seconds(steps, slots, rule=rule, **settings) is not None:
            return slots
    raise AssertionError(f"the step does not end, even with {MAX_SLOTS} slots")


def sufficient_slots(steps: StepProgram) -> int:
    """Return a number of slots that suffices for any launch order and any duration of passes.

    It is the largest number of communicators of a stage on which an operation may be pending at the
    same time. An operation may be pending at an event unless the events that must precede this
    event, on any stage, have posted both the operation and its counterpart.
    """
    return max(_most_pending(steps, stage, events) for stage, events in enumerate(steps.stages))


def _most_pending(steps: StepProgram, stage: int, events: Sequence[StageAction]) -> int:
    progress = [0] * len(steps.stages)  # events of each stage that must be over
    pending: list[Operation] = []
    most = 0
    for index, event in enumerate(events):
        _require(steps, progress, stage, index + 1)
        if (operation := steps.operation(event)) is not None:
            pending.append(operation)
        pending = [each for each in pending if not _is_met(steps, progress, each)]
        most = max(most, len({each.route for each in pending}))
    return most


def _is_met(steps: StepProgram, progress: Sequence[int], operation: Operation) -> bool:
    """Return whether the counterpart of an operation must have been posted."""
    peer, index = steps.posted_at[operation._replace(is_send=not operation.is_send)]
    return progress[peer] > index


def _require(steps: StepProgram, progress: list[int], stage: int, count: int) -> None:
    """Advance `progress` by the first `count` events of a stage and all that must precede them."""
    required = [(stage, count)]
    while required:
        stage, count = required.pop()
        before, progress[stage] = progress[stage], max(progress[stage], count)
        for event in steps.stages[stage][before:count]:
            if event.action == Action.WAIT:
                sender = steps.pipeline.needed(event.work).stage
                sent = Operation((sender, stage), event.work, is_send=True)
                required.append((sender, steps.posted_at[sent][1] + 1))


def pass_seconds(pipeline: Pipeline) -> Callable[[Pass], float]:
    """Return durations of passes in the pipeline's proportions, in arbitrary units."""
    forward, backward, weight = pipeline.proportions
    if not pipeline.splits:
        backward += weight
    by_kind = {FORWARD: forward, BACKWARD: backward}
    return lambda work: by_kind.get(work.kind, weight) / pipeline.virtual_stages
