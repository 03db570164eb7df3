"""The order of a pipeline's passes is DeepSpeed's and the papers'; its time is what they say."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest
from deepspeed.runtime.pipe import schedule as deepspeed_schedule

from recipes.planning.activations import micro_batches_in_flight
from recipes.planning.job import Job, Machine, Spread, job_of
from recipes.planning.schedule import (
    ChunkPass,
    Pipeline,
    Seconds,
    TimedPass,
    Turn,
    idle_share,
    pipeline_seconds,
    simulate,
)
from recipes.planning.step_time import step_time
from recipes.training.recipe import DEFAULT_RECIPE, load_recipe, shipped_recipes

PIPELINES = [
    *(Pipeline(stages=p, micro_batches=m) for p, m in ((1, 3), (2, 1), (4, 3), (4, 9), (8, 32))),
    *(
        Pipeline(stages=p, chunks=v, micro_batches=m)
        for p, v, m in ((2, 2, 2), (4, 2, 4), (4, 3, 8), (8, 2, 32))
    ),
    *(
        Pipeline(stages=p, chunks=2, micro_batches=m, schedule="dualpipev")
        for p, m in ((2, 4), (2, 9), (4, 8), (4, 13), (8, 16))
    ),
]
WITH_PIPELINE = [
    path
    for path in shipped_recipes()
    if path != DEFAULT_RECIPE and load_recipe(path).layout.pipeline > 1
]


def name(pipeline: Pipeline) -> str:
    return f"{pipeline.schedule}-{pipeline.stages}x{pipeline.chunks}-{pipeline.micro_batches}"


def equal(pipeline: Pipeline, forward: float = 1.0, backward: float = 2.0, transfer: float = 0.0):
    p = pipeline.stages
    return Seconds(forward=[forward] * p, backward=[backward] * p, transfer=transfer)


def uneven(pipeline: Pipeline) -> Seconds:
    p = pipeline.stages
    return Seconds(
        forward=[1.0 + 0.3 * (stage % 3) for stage in range(p)],
        backward=[2.0 + 0.5 * (stage % 2) for stage in range(p)],
        transfer=0.2,
    )


def most_in_flight(turns: Sequence[Turn]) -> int:
    """Chunks whose activations are held at once, at most."""
    held = most = 0
    for work in chain.from_iterable(turns):
        held += 1 if work.forward else -1
        most = max(most, held)
    return most


def allowed(pipeline: Pipeline, stage: int) -> float:
    spread = Spread(pipeline=pipeline.stages, chunks=pipeline.chunks, schedule=pipeline.schedule)
    return micro_batches_in_flight(spread, stage, pipeline.micro_batches) * pipeline.chunks


def problems(pipeline: Pipeline, timeline: Sequence[Sequence[TimedPass]], transfer: float) -> list:
    """What a timeline does before it can, or two things at a time."""
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


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_every_pass_runs_once_and_after_what_it_needs(pipeline: Pipeline) -> None:
    timeline = simulate(pipeline, uneven(pipeline))
    works = [timed.work for timed in chain.from_iterable(timeline)]
    expected = {
        ChunkPass(stage, chunk, number, forward)
        for stage in range(pipeline.stages)
        for chunk in range(pipeline.chunks)
        for number in range(pipeline.micro_batches)
        for forward in (True, False)
    }
    assert len(works) == len(expected) and set(works) == expected
    assert problems(pipeline, timeline, transfer=0.2) == []


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_no_more_is_in_flight_than_memory_has_counted(pipeline: Pipeline) -> None:
    for stage in range(pipeline.stages):
        if pipeline.stages > 1:
            assert most_in_flight(pipeline.turns(stage)) == allowed(pipeline, stage)


def test_all_forward_first_is_seen() -> None:
    pipeline = Pipeline(stages=4, micro_batches=8)
    forwards = [[(ChunkPass(s, 0, n, True),) for n in range(8)] for s in range(4)]
    backwards = [[(ChunkPass(s, 0, n, False),) for n in range(8)] for s in range(4)]
    turns = [f + b for f, b in zip(forwards, backwards, strict=True)]
    timeline = simulate(pipeline, equal(pipeline), turns)
    assert pipeline_seconds(timeline) == (8 + 3) * 3  # no slower; it is the memory that it costs
    assert all(most_in_flight(turns[stage]) > allowed(pipeline, stage) for stage in range(4))
    with pytest.raises(ValueError, match="the stages wait for each other"):
        simulate(pipeline, equal(pipeline), [turn[::-1] for turn in turns])


def test_a_timeline_that_runs_too_early_is_seen() -> None:
    pipeline = Pipeline(stages=2, micro_batches=3)
    timeline = simulate(pipeline, equal(pipeline, transfer=0.5))
    assert problems(pipeline, timeline, transfer=0.5) == []
    assert problems(pipeline, timeline, transfer=0.6)
    timeline[1][1] = timeline[1][1]._replace(start=timeline[1][0].start)
    assert problems(pipeline, timeline, transfer=0.5)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (4, 4), (4, 17), (8, 5)])
def test_1f1b_takes_what_the_paper_says(p: int, m: int) -> None:
    pipeline = Pipeline(stages=p, micro_batches=m)
    timeline = simulate(pipeline, equal(pipeline, 1.0, 2.0))
    assert pipeline_seconds(timeline) == (m + p - 1) * 3
    assert idle_share(timeline) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 2), (4, 2, 8), (4, 4, 16), (8, 3, 8)])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, v: int, m: int) -> None:
    pipeline = Pipeline(stages=p, chunks=v, micro_batches=m)
    timeline = simulate(pipeline, equal(pipeline, 1.0, 2.0))
    assert pipeline_seconds(timeline) == pytest.approx((m + (p - 1) / v) * 3)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 32), (8, 16), (16, 32)])
def test_dualpipev_hides_half_a_forward_pass_of_each_stage(p: int, m: int) -> None:
    """Without the split of weight gradients it is not the half of the bubble."""
    pipeline = Pipeline(stages=p, chunks=2, micro_batches=m, schedule="dualpipev")
    timeline = simulate(pipeline, equal(pipeline, 1.0, 2.0))
    assert pipeline_seconds(timeline) == (m + p - 1) * 3 - p / 2


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (4, 3), (4, 8), (5, 7)])
def test_1f1b_is_in_deepspeeds_order(p: int, m: int) -> None:
    for stage in range(p):
        train = deepspeed_schedule.TrainSchedule(m, p, stage)
        theirs = [
            isinstance(each, deepspeed_schedule.ForwardPass)
            for each in chain.from_iterable(train.steps())
            if isinstance(each, deepspeed_schedule.ForwardPass | deepspeed_schedule.BackwardPass)
        ]
        turns = Pipeline(stages=p, micro_batches=m).turns(stage)
        assert [work.forward for (work,) in turns] == theirs


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 7), (4, 8), (5, 13)])
def test_dualpipev_is_in_deepspeeds_order_and_sends_when_it_does(p: int, m: int) -> None:
    pipeline = Pipeline(stages=p, chunks=2, micro_batches=m, schedule="dualpipev")
    for stage in range(p):
        works, sent = deepspeeds_dualpipev(p, m, stage)
        turns = pipeline.turns(stage)
        assert list(chain.from_iterable(turns)) == works
        after = {}
        for turn in turns:
            after |= dict.fromkeys(turn, works.index(turn[-1]))
        assert {work: after[work] for work in sent} == sent


def deepspeeds_dualpipev(
    p: int, m: int, stage: int
) -> tuple[list[ChunkPass], dict[ChunkPass, int]]:
    """Its passes, and of those whose result is sent, the pass after which that happens."""
    works, queued, sent = [], [], {}
    kinds = {"ForwardPass": True, "SendActivation": True, "BackwardPass": False, "SendGrad": False}
    steps = deepspeed_schedule.DualPipeVSchedule(m, p, stage).steps()
    for each in chain.from_iterable(steps):
        if each.name == "CommitP2P":
            sent |= {work: len(works) - 1 for work in queued}
            queued = []
        elif each.name in kinds:
            work = ChunkPass(stage, each.phase, each.buffer_id % m, kinds[each.name])
            (queued if each.name.startswith("Send") else works).append(work)
    return works, sent


def shipped_job(path: Path) -> Job:
    recipe = load_recipe(path)
    return job_of(recipe, Machine.of_cluster(recipe.cluster))


@pytest.mark.parametrize("path", WITH_PIPELINE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_formula_of_the_step_is_the_simulation(path: Path) -> None:
    job = shipped_job(path)
    time = step_time(job)
    formula = time.compute + time.tensor + time.pipeline + time.bubble
    simulated = pipeline_seconds(simulate(Pipeline.of(job), Seconds.of(job)))
    assert formula == pytest.approx(simulated, rel=0.02)


def test_what_has_no_order_is_refused() -> None:
    job = shipped_job(WITH_PIPELINE[-1])  # two stages, eight micro-batches
    three = replace(job, global_sequences=3 * job.spread.data)
    with pytest.raises(ValueError, match="dualpipev with 2 stages and 3 micro-batches; use 4"):
        Pipeline.of(replace(three, spread=replace(job.spread, schedule="dualpipev", chunks=2)))
    with pytest.raises(ValueError, match="2 interleaved stages and 3 micro-batches; use 4"):
        Pipeline.of(replace(three, spread=replace(job.spread, chunks=2)))
