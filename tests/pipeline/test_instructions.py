"""A stage's instructions receive ahead, send at once and reduce as early as possible."""

from dataclasses import replace
from itertools import chain, product

import pytest
from deepspeed.runtime.pipe.schedule import PipeInstruction

from threefold.pipeline.engine import PassSchedule
from threefold.pipeline.schedules import BACKWARD, FORWARD, WEIGHT, Pass, Pipeline

PIPELINES = [
    Pipeline(stages=p, micro_batches=m, schedule=schedule, virtual_stages=v, reduce_every=every)
    for schedule, v in (
        ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2),
        ("dualpipev", 2),
    )
    for p, m, every in ((2, 4, 0), (4, 9, 0), (4, 9, 2), (2, 4, 1))
]  # fmt: skip
PIPELINES += [
    replace(pipeline, paired=True)
    for pipeline in PIPELINES
    if pipeline.schedule in ("interleaved", "dualpipev")
]
KINDS = {"RecvActivation": FORWARD, "RecvGrad": BACKWARD}
PASSES = {BACKWARD: "BackwardPass", WEIGHT: "WeightPass"}
COMPUTE = ("ForwardPass", "BackwardPass", "WeightPass")


def name(pipeline: Pipeline) -> str:
    reduction = f"-every {pipeline.reduce_every}" if pipeline.reduce_every else ""
    sizes = f"{pipeline.stages}x{pipeline.virtual_stages}-{pipeline.micro_batches}"
    paired = "-paired" if pipeline.paired else ""
    return f"{pipeline.schedule}-{sizes}{reduction}{paired}"


def instructions(pipeline: Pipeline, stage: int, training: bool = True) -> list[PipeInstruction]:
    return list(chain.from_iterable(PassSchedule(pipeline, stage, training=training).steps()))


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_every_wait_follows_its_receive_and_every_send_its_pass(pipeline: Pipeline) -> None:
    for stage in range(pipeline.stages):
        found = instructions(pipeline, stage)
        posted: list[Pass] = []
        for number, each in enumerate(found):
            if each.name in KINDS:
                place = each.kwargs["chunk"], each.kwargs["buffer_id"]
                posted.append(Pass(KINDS[each.name], stage, *place))
            if each.name == "CommitP2P" and each.kwargs:
                arguments = each.kwargs
                work = Pass(arguments["kind"], stage, arguments["chunk"], arguments["buffer_id"])
                posted.remove(work)
                following = [later.name for later in found[number + 1 : number + 6]]
                waited = [other for other in following if other not in ("LoadMicroBatch", *KINDS)]
                assert waited[0] in COMPUTE or (pipeline.paired and waited[0] == "CommitP2P")
                assert posted or not any(later.name in KINDS for later in found[number:])
            if each.name.startswith("Send"):
                before = found[max(0, number - (3 if pipeline.paired else 1)) : number]
                assert each.kwargs in [unit.kwargs for unit in before if unit.name in COMPUTE]
        assert posted == []
        sends = sum(each.name.startswith("Send") for each in found)
        expected = [pipeline.receiver(work) for work in pipeline.orders[stage]]
        assert sends == sum(each is not None and each.stage != stage for each in expected)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_a_chunk_is_reduced_when_its_last_backward_pass_is_over(pipeline: Pipeline) -> None:
    for stage in range(pipeline.stages):
        found = instructions(pipeline, stage)
        kinds = (BACKWARD, WEIGHT) if pipeline.splits else (BACKWARD,)
        for kind, chunk in product(kinds, range(pipeline.virtual_stages)):
            reductions = [
                n
                for n, each in enumerate(found)
                if each.name == "ReduceGrads"
                and (each.kwargs.get("kind"), each.kwargs.get("chunk")) == (kind, chunk)
            ]
            passes = [
                n
                for n, each in enumerate(found)
                if each.name == PASSES[kind] and each.kwargs["chunk"] == chunk
            ]
            every = pipeline.reduce_every or len(passes)
            ending = [*passes[every - 1 :: every]]
            ending += [] if passes[-1] in ending else passes[-1:]
            for last, reduced in zip(ending, reductions, strict=True):
                assert last < reduced
                between = {each.name for each in found[last + 1 : reduced]}
                assert between <= {"SendGrad", *(["SendActivation"] * pipeline.paired)}
        assert [each.name for each in found[-2:]] == ["ReduceGrads", "OptimizerStep"]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_the_ends_load_each_micro_batch_once(pipeline: Pipeline) -> None:
    last, _ = pipeline.stage_and_chunk(pipeline.total_virtual_stages - 1)
    for stage in range(pipeline.stages):
        for training in (True, False):
            found = instructions(pipeline, stage, training)
            loaded = [each.kwargs["buffer_id"] for each in found if each.name == "LoadMicroBatch"]
            is_end = stage in (0, last)
            assert loaded == (list(range(pipeline.micro_batches)) if is_end else [])


def test_validation_runs_forward_only() -> None:
    for pipeline in PIPELINES:
        for stage in range(pipeline.stages):
            names = {each.name for each in instructions(pipeline, stage, training=False)}
            assert names <= {
                "LoadMicroBatch", "RecvActivation", "CommitP2P", "ForwardPass", "SendActivation",
            }  # fmt: skip
