"""Stages post their messages in an order that NCCL can run; mutants of this order hang."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product

import pytest
import torch

from benchmarks.communication_slots import SCHEDULES
from models.parallel.collectives import TensorAxis
from tests.nccl_rules.slots import (
    LaunchRule,
    StepProgram,
    pass_seconds,
    smallest_slots,
    step_seconds,
    sufficient_slots,
)
from threefold.config.layout import PAIRED_SCHEDULES
from threefold.pipeline import schedules
from threefold.pipeline.channels import Boundary
from threefold.pipeline.schedules import (
    Action,
    Pass,
    Pipeline,
    Route,
    StageAction,
    min_micro_batches,
    rounds,
    routes,
)

PIPELINES = {  # name of the schedule -> its pipelines
    f"{schedule}-{virtual_stages}{'-paired' if paired else ''}": [
        Pipeline(
            stages=p,
            micro_batches=m,
            schedule=schedule,
            virtual_stages=virtual_stages,
            paired=paired,
        )
        for p in (2, 3, 8)
        for m in (1, p + 1, 2 * p)
        if m >= min_micro_batches(schedule, p, paired=paired)
    ]
    for schedule, virtual_stages in SCHEDULES
    for paired in ((False, True) if schedule in PAIRED_SCHEDULES else (False,))
}
FEW = {
    name: [each for each in pipelines if each.micro_batches == 2 * each.stages]
    for name, pipelines in PIPELINES.items()
}


def stuck_at_first_use(steps: StepProgram, connected: set[Route]) -> list[int]:
    """Return the stages whose host the first use of a route blocks forever.

    The first operation on a route returns when the peer has posted its own. No other operation
    blocks the host: it launches the wait for a message and continues.
    """
    left = [list(events) for events in steps.stages]
    arrived: dict[Route, set[int]] = {}
    connected = set(connected)

    def passes(stage: int, event: StageAction) -> bool:
        operation = steps.operation(event)
        if operation is None or operation.route in connected:
            return True
        arrived.setdefault(operation.route, set()).add(stage)
        if len(arrived[operation.route]) == 2:
            connected.add(operation.route)
        return operation.route in connected

    progress = True
    while progress:
        progress = False
        for stage, events in enumerate(left):
            while events and passes(stage, events[0]):
                events.pop(0)
                progress = True
    return [stage for stage, events in enumerate(left) if events]


class ReceivesByNeed(schedules._Receives):
    """Receives in the order in which the stage needs the messages."""

    def up_to(self, work: Pass | None) -> Iterator[StageAction]:
        """Yield the receive of one message, whatever its sender sends before it."""
        if work is not None:
            yield StageAction(Action.POST_RECEIVE, work)


@pytest.mark.parametrize("schedule", PIPELINES)
def test_receives_are_posted_in_the_order_of_the_sends(schedule: str) -> None:
    for pipeline, training in product(PIPELINES[schedule], (True, False)):
        steps = StepProgram(pipeline, training=training)
        operations = [steps.operation(event) for event in chain.from_iterable(steps.stages)]
        for route in routes(pipeline):
            of_route = [each for each in operations if each is not None and each.route == route]
            sent = [each.message for each in of_route if each.is_send]
            received = [each.message for each in of_route if not each.is_send]
            assert sent == received, pipeline


@pytest.mark.parametrize("schedule", PIPELINES)
def test_the_next_message_is_expected_before_a_stage_waits(schedule: str) -> None:
    for pipeline in PIPELINES[schedule]:
        for stage, events in enumerate(StepProgram(pipeline, training=True).stages):
            waits = [event.work for event in events if event.action == Action.WAIT]
            posted: set[Pass] = set()
            for event in events:
                if event.action == Action.POST_RECEIVE:
                    posted.add(event.work)
                if event.action == Action.WAIT:
                    following = waits[waits.index(event.work) + 1 :][:1]
                    assert posted.issuperset([event.work, *following]), stage


@pytest.mark.parametrize("schedule", FEW)
def test_no_host_is_blocked_once_the_routes_are_connected(schedule: str) -> None:
    for pipeline, training in product(FEW[schedule], (True, False)):
        steps = StepProgram(pipeline, training=training)
        assert stuck_at_first_use(steps, connected=set(routes(pipeline))) == [], pipeline


@pytest.mark.parametrize("schedule", FEW)
def test_without_connections_every_training_step_hangs(schedule: str) -> None:
    for pipeline in FEW[schedule]:
        assert stuck_at_first_use(StepProgram(pipeline, training=True), connected=set())


@pytest.mark.parametrize("schedule", PIPELINES)
def test_two_kernels_in_posting_order_are_sufficient(schedule: str) -> None:
    """The outcome does not depend on the duration of passes: hosts and queues run sequentially and
    wait only for each other."""
    for pipeline, training in product(PIPELINES[schedule], (True, False)):
        steps = StepProgram(pipeline, training=training)
        seconds = pass_seconds(pipeline)
        rule = LaunchRule.POSTING_ORDER
        for one_queue in (False, True):
            assert smallest_slots(steps, rule=rule, seconds=seconds, one_queue=one_queue) <= 2


@pytest.mark.parametrize("schedule", PIPELINES)
def test_four_kernels_are_sufficient_in_any_order(schedule: str) -> None:
    for pipeline in PIPELINES[schedule]:
        for training in (True, False):
            assert sufficient_slots(StepProgram(pipeline, training=training)) <= 4


@pytest.mark.parametrize("schedule", FEW)
def test_two_kernels_cost_two_per_cent_at_most(schedule: str) -> None:
    for pipeline in FEW[schedule]:
        steps, seconds = StepProgram(pipeline, training=True), pass_seconds(pipeline)
        rule = LaunchRule.POSTING_ORDER
        unlimited = step_seconds(steps, 99, rule=LaunchRule.FREE_COMMUNICATOR, seconds=seconds)
        assert step_seconds(steps, 2, rule=rule, seconds=seconds) <= 1.02 * unlimited


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev"])
def test_receives_in_the_order_of_need_would_hang(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "_Receives", ReceivesByNeed)
    pipeline = Pipeline(stages=4, micro_batches=8, schedule=schedule, virtual_stages=2)
    steps = StepProgram(pipeline, training=True)
    seconds = pass_seconds(pipeline)
    rule = LaunchRule.FREE_COMMUNICATOR
    assert step_seconds(steps, 99, rule=rule, seconds=seconds) is None


def test_one_kernel_would_hang() -> None:
    pipeline = Pipeline(stages=2, micro_batches=4)
    steps = StepProgram(pipeline, training=True)
    rule, seconds = LaunchRule.FREE_COMMUNICATOR, pass_seconds(pipeline)
    assert step_seconds(steps, 1, rule=rule, seconds=seconds) is None


@pytest.mark.parametrize("schedule", PIPELINES)
def test_every_message_has_a_route(schedule: str) -> None:
    for pipeline in PIPELINES[schedule]:
        used = {
            (needed.stage, work.stage)
            for order in pipeline.orders
            for work in order
            if (needed := pipeline.needed(work)) is not None and needed.stage != work.stage
        }
        assert used == set(routes(pipeline))


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
def test_few_calls_create_the_groups_of_all_routes(
    stages: int, schedule: str, virtual_stages: int
) -> None:
    pipeline = Pipeline(
        stages=stages, micro_batches=2 * stages, schedule=schedule, virtual_stages=virtual_stages
    )
    found = rounds(pipeline)
    assert sorted(chain.from_iterable(found)) == routes(pipeline)
    for routes_of_round in found:
        members = list(chain.from_iterable(routes_of_round))
        assert len(members) == len(set(members))
    assert len(found) <= 6


@pytest.mark.parametrize(("columns", "is_parted"), [(98, True), (99, False)])
def test_parts_of_a_message_are_equal(columns: int, is_parted: bool) -> None:
    boundary = Boundary((255, 1, columns), torch.float32, TensorAxis(size=2))
    assert boundary.is_parted == is_parted
    assert not replace(boundary, tensor=TensorAxis(size=2, sequence_parallel=True)).is_parted
