"""The orders of passes agree with DeepSpeed and the papers, and so do their step times."""

from collections import defaultdict
from collections.abc import Callable
from itertools import chain, pairwise

import pytest
from deepspeed.runtime.pipe import schedule as deepspeed_schedule

from models.errors import UserError
from threefold.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    WEIGHT,
    Kind,
    Order,
    Pass,
    Pipeline,
    min_micro_batches,
)
from threefold.pipeline.simulation import Timeline, idle_share, pipeline_seconds, simulate

CHUNKS = {"interleaved": (2, 3), "zb-v": (2,), "dualpipev": (2,)}  # the others: 1
MANY = [
    Pipeline(stages=p, virtual_stages=v, micro_batches=m, schedule=schedule)
    for schedule in SCHEDULES
    for v in CHUNKS.get(schedule, (1,))
    for p in range(1, 9)
    for m in sorted({1, 2, 3, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 3, 4 * p})
    if m >= min_micro_batches(schedule, p)
]
OF_SCHEDULE = {name: [each for each in MANY if each.schedule == name] for name in SCHEDULES}
FEW = [
    Pipeline(stages=p, virtual_stages=v, micro_batches=m, schedule=schedule)
    for schedule, p, v, m in (
        ("1f1b", 1, 1, 3), ("1f1b", 4, 1, 3), ("1f1b", 4, 1, 9),
        ("interleaved", 2, 2, 2), ("interleaved", 4, 3, 7), ("interleaved", 3, 2, 11),
        ("zb-h1", 4, 1, 3), ("zb-h1", 4, 1, 9),
        ("zb-v", 2, 2, 1), ("zb-v", 4, 2, 9),
        ("dualpipev", 2, 2, 4), ("dualpipev", 4, 2, 13),
        ("gpipe", 4, 1, 3), ("gpipe", 4, 1, 9),
    )
]  # fmt: skip


def most_in_flight(order: Order) -> int:
    """Return the maximum number of micro-batches whose activations a stage holds at the same time.

    A chunk holds them until the last of its backward passes, that of the weights included.
    """
    ending = WEIGHT if any(work.kind == WEIGHT for work in order) else BACKWARD
    held = most = 0
    for work in order:
        held += (work.kind == FORWARD) - (work.kind == ending)
        most = max(most, held)
    return most


def name(pipeline: Pipeline) -> str:
    sizes = f"{pipeline.stages}x{pipeline.virtual_stages}-{pipeline.micro_batches}"
    return f"{pipeline.schedule}-{sizes}"


def seconds(
    pipeline: Pipeline, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0
) -> Callable[[Pass], float]:
    """Return the durations of a micro-batch's passes; an undivided backward pass has both parts."""
    whole = backward + (0.0 if pipeline.splits else weight)
    spent = {FORWARD: forward, BACKWARD: whole, WEIGHT: weight}
    return lambda work: spent[work.kind] / pipeline.virtual_stages


def uneven(work: Pass) -> float:
    kinds = {FORWARD: 1.0, BACKWARD: 1.7, WEIGHT: 0.6}
    return kinds[work.kind] * (1 + 0.3 * (work.stage % 3)) + 0.1 * work.chunk


def all_passes(pipeline: Pipeline) -> set[Pass]:
    kinds = list(Kind) if pipeline.splits else [FORWARD, BACKWARD]
    return {
        Pass(kind, stage, chunk, number)
        for kind in kinds
        for stage in range(pipeline.stages)
        for chunk in range(pipeline.virtual_stages)
        for number in range(pipeline.micro_batches)
    }


def too_early(pipeline: Pipeline, timeline: Timeline, transfer: float) -> list:
    """Return the passes that start before their input exists or while their stage is busy."""
    ends = {timed.work: timed.end for timed in chain.from_iterable(timeline)}
    wrong = []
    for stage in timeline:
        wrong += [(a, b) for a, b in pairwise(stage) if b.start < a.end]
        for timed in stage:
            needed = pipeline.needed(timed.work)
            if needed is not None:
                sent = transfer if needed.stage != timed.work.stage else 0.0
                if timed.start < ends[needed] + sent - 1e-9:
                    wrong.append(timed)
    return wrong


def overtaking(pipeline: Pipeline, orders: list[Order]) -> list:
    """Return each (sender, receiver, kind) whose messages are needed in another order than sent."""
    sent, wanted = defaultdict(list), defaultdict(list)
    for order in orders:
        for work in order:
            receiver, needed = pipeline.receiver(work), pipeline.needed(work)
            if receiver is not None and receiver.stage != work.stage:
                sent[work.stage, receiver.stage, work.kind].append(receiver)
            if needed is not None and needed.stage != work.stage:
                wanted[needed.stage, work.stage, work.kind].append(work)
    return [channel for channel in sent | wanted if sent[channel] != wanted[channel]]


def length(pipeline: Pipeline, *spent: float) -> float:
    return pipeline_seconds(simulate(pipeline, seconds(pipeline, *spent)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_runs_once_and_messages_are_needed_in_the_order_of_sending(
    schedule: str,
) -> None:
    for pipeline in OF_SCHEDULE[schedule]:
        orders = pipeline.orders
        works = list(chain.from_iterable(orders))
        assert len(works) == len(set(works)) and set(works) == all_passes(pipeline), name(pipeline)
        assert all(work.stage == n for n, order in enumerate(orders) for work in order)
        assert overtaking(pipeline, orders) == [], name(pipeline)
        assert overtaking(pipeline, pipeline.forward_orders) == [], name(pipeline)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_stage_waits_forever(schedule: str) -> None:
    for pipeline in OF_SCHEDULE[schedule]:
        simulate(pipeline, seconds(pipeline))
        simulate(pipeline, uneven, transfer=0.2)
        simulate(pipeline, uneven, orders=pipeline.forward_orders)


@pytest.mark.parametrize("pipeline", FEW, ids=name)
def test_every_pass_runs_after_its_input_exists(pipeline: Pipeline) -> None:
    timeline = simulate(pipeline, uneven, transfer=0.2)
    assert too_early(pipeline, timeline, transfer=0.2) == []
    assert too_early(pipeline, timeline, transfer=0.3) or pipeline.stages == 1


@pytest.mark.parametrize("pipeline", FEW, ids=name)
def test_needed_and_receiver_are_each_others_reverse(pipeline: Pipeline) -> None:
    for work in all_passes(pipeline):
        needed = pipeline.needed(work)
        if work.kind == WEIGHT:
            assert needed == work._replace(kind=BACKWARD) and pipeline.receiver(work) is None
        elif needed is None:
            assert work.kind == FORWARD and pipeline.virtual_stage(work.stage, work.chunk) == 0
        elif needed.kind == work.kind:
            assert pipeline.receiver(needed) == work
        else:  # the loss
            assert pipeline.receiver(needed) is None
    places = {
        pipeline.stage_and_chunk(position) for position in range(pipeline.total_virtual_stages)
    }
    assert len(places) == pipeline.total_virtual_stages
    assert all(pipeline.stage_and_chunk(pipeline.virtual_stage(*each)) == each for each in places)


def test_1f1b_takes_what_the_paper_says() -> None:
    for pipeline in OF_SCHEDULE["1f1b"]:
        p, m = pipeline.stages, pipeline.micro_batches
        timeline = simulate(pipeline, seconds(pipeline, 1.0, 1.5, 0.5))
        assert pipeline_seconds(timeline) == (m + p - 1) * 3
        assert idle_share(timeline) == pytest.approx((p - 1) / (m + p - 1))


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    for pipeline in OF_SCHEDULE["interleaved"]:
        p, v, m = pipeline.stages, pipeline.virtual_stages, pipeline.micro_batches
        # Whether or not p divides m; with fewer than p each chunk waits for the last stage's.
        theory = (max(m, p) + (min(m, p) - 1) / v) * 3
        assert length(pipeline, 1.0, 1.25, 0.75) == pytest.approx(theory), name(pipeline)


def test_zb_h1_fills_the_bubble_with_weights() -> None:
    """Qi et al. 2023 (arXiv 2401.10241), table 2; fewer than p micro-batches leave less to fill."""
    for pipeline in OF_SCHEDULE["zb-h1"]:
        p, m = pipeline.stages, pipeline.micro_batches
        for f, b, w in ((1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 2.5, 0.5)):
            theory = m * (f + b + w) + (p - 1) * (f + b - w) + max(0, p - m) * w
            assert length(pipeline, f, b, w) == pytest.approx(theory), name(pipeline)


def test_zb_v_waits_half_a_forward_pass_for_each_other_stage() -> None:
    for pipeline in OF_SCHEDULE["zb-v"]:
        p, m = pipeline.stages, pipeline.micro_batches
        beyond = length(pipeline) - (3 * m + (p - 1) / 2)
        if m >= p:  # in up to four stages exactly, in more by half a pass for every two of them
            assert 0 <= beyond <= (0 if p <= 4 else p // 2 * 0.5), name(pipeline)


def test_zb_v_waits_where_passes_take_unequally_long() -> None:
    """The order assumes equal durations; otherwise the longest of the three sets the pace."""
    for f, b, w in ((1.0, 1.25, 0.75), (1.0, 0.75, 1.25), (1.0, 2.0, 0.75)):
        few, many = (
            Pipeline(stages=4, virtual_stages=2, micro_batches=m, schedule="zb-v") for m in (16, 20)
        )
        each = (length(many, f, b, w) - length(few, f, b, w)) / 4
        assert each == pytest.approx(max(f + b + w, 3 * b)), (f, b, w)


def test_dualpipev_waits_for_the_backward_pass_of_each_other_stage() -> None:
    """Without separate weight passes the bubble is not halved."""
    for pipeline in OF_SCHEDULE["dualpipev"]:
        p, m = pipeline.stages, pipeline.micro_batches
        if p > 1:
            assert length(pipeline) == pytest.approx(3 * m + 2 * (p - 1) - 1 / 2), name(pipeline)
            assert length(pipeline) <= (m + p - 1) * 3 - p / 2


def test_1f1b_holds_a_micro_batch_for_each_stage_that_follows() -> None:
    for pipeline in OF_SCHEDULE["1f1b"]:
        p, m = pipeline.stages, pipeline.micro_batches
        held = [most_in_flight(order) for order in pipeline.orders]
        assert held == [min(m, p - stage) for stage in range(p)], name(pipeline)


def test_interleaved_holds_megatrons_warm_up_and_one_more() -> None:
    for pipeline in OF_SCHEDULE["interleaved"]:
        p, v, m = pipeline.stages, pipeline.virtual_stages, pipeline.micro_batches
        first = -(-m // max(1, m // p))  # of a round
        held = [most_in_flight(order) for order in pipeline.orders]
        warm_up = [first * (v - 1) + 2 * (p - stage - 1) for stage in range(p)]
        assert held == [min(m * v, each + 1) for each in warm_up], name(pipeline)


def test_zero_bubble_schedules_hold_no_more_than_the_first_stage_of_1f1b() -> None:
    for pipeline in OF_SCHEDULE["zb-h1"] + OF_SCHEDULE["zb-v"]:
        p, v, m = pipeline.stages, pipeline.virtual_stages, pipeline.micro_batches
        held = [most_in_flight(order) for order in pipeline.orders]
        assert max(held) == min(m, p) * v, name(pipeline)
        assert max(held) <= p * v, name(pipeline)


def test_dualpipev_holds_half_a_micro_batch_more() -> None:
    for pipeline in OF_SCHEDULE["dualpipev"]:
        p = pipeline.stages
        assert [most_in_flight(order) for order in pipeline.orders] == [2 * p + 1] * p or p == 1


def test_running_all_forward_passes_first_is_noticed() -> None:
    pipeline = Pipeline(stages=4, micro_batches=8)
    orders = [
        [Pass(kind, stage, 0, n) for kind in (FORWARD, BACKWARD) for n in range(8)]
        for stage in range(4)
    ]
    timeline = simulate(pipeline, seconds(pipeline), orders=orders)
    assert pipeline_seconds(timeline) == (8 + 3) * 3  # no slower; it is the memory that it costs
    assert [most_in_flight(order) for order in orders] == [8] * 4


def test_a_deadlock_of_stages_is_noticed() -> None:
    pipeline = Pipeline(stages=4, micro_batches=8)
    backwards = [order[::-1] for order in pipeline.orders]
    with pytest.raises(ValueError, match="the stages wait for each other"):
        simulate(pipeline, seconds(pipeline), orders=backwards)
    orders = list(pipeline.orders)
    first_two = list(orders[2])
    first_two[:2] = first_two[1::-1]
    orders[2] = first_two  # its micro-batches the other way round: it runs, but in another order
    assert overtaking(pipeline, orders) == [(1, 2, FORWARD), (2, 3, FORWARD)]


def test_a_timeline_that_runs_too_early_is_noticed() -> None:
    pipeline = Pipeline(stages=2, micro_batches=3)
    timeline = simulate(pipeline, seconds(pipeline), transfer=0.5)
    assert too_early(pipeline, timeline, transfer=0.5) == []
    timeline[1][1] = timeline[1][1]._replace(start=timeline[1][0].start)
    assert too_early(pipeline, timeline, transfer=0.5)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (4, 3), (4, 8), (5, 7)])
def test_1f1b_is_in_deepspeeds_order(p: int, m: int) -> None:
    for stage, order in enumerate(Pipeline(stages=p, micro_batches=m).orders):
        train = deepspeed_schedule.TrainSchedule(m, p, stage)
        theirs = [
            isinstance(each, deepspeed_schedule.ForwardPass)
            for each in chain.from_iterable(train.steps())
            if isinstance(each, deepspeed_schedule.ForwardPass | deepspeed_schedule.BackwardPass)
        ]
        assert [work.kind == FORWARD for work in order] == theirs


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 7), (4, 8), (5, 13)])
def test_dualpipev_is_in_deepspeeds_order(p: int, m: int) -> None:
    pipeline = Pipeline(stages=p, virtual_stages=2, micro_batches=m, schedule="dualpipev")
    kinds = {"ForwardPass": FORWARD, "BackwardPass": BACKWARD}
    for stage, order in enumerate(pipeline.orders):
        steps = deepspeed_schedule.DualPipeVSchedule(m, p, stage).steps()
        theirs = [
            Pass(kinds[each.name], stage, each.phase, each.buffer_id % m)
            for each in chain.from_iterable(steps)
            if each.name in kinds
        ]
        assert order == theirs


def test_too_few_micro_batches_are_rejected() -> None:
    message = "dualpipev with 2 stages and 3 micro-batches; use 4"
    with pytest.raises(UserError, match=message):
        Pipeline(stages=2, virtual_stages=2, micro_batches=3, schedule="dualpipev")
