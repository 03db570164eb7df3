"""A stage's instructions receive ahead, send at once and reduce as early as possible."""

from itertools import chain

import pytest
from deepspeed.runtime.pipe.schedule import PipeInstruction

from models.pipeline.instructions import PassSchedule
from models.pipeline.schedule.order import Pipeline
from models.pipeline.schedule.passes import BACKWARD, FORWARD, Pass

PIPELINES = [
    Pipeline(stages=p, micro_batches=m, schedule=schedule, chunks=chunks)
    for schedule, chunks in (
        ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2),
        ("dualpipev", 2),
    )
    for p, m in ((2, 4), (4, 9))
]  # fmt: skip
KINDS = {"RecvActivation": FORWARD, "RecvGrad": BACKWARD}
COMPUTE = ("ForwardPass", "BackwardPass", "WeightPass")


def name(pipeline: Pipeline) -> str:
    return f"{pipeline.schedule}-{pipeline.stages}x{pipeline.chunks}-{pipeline.micro_batches}"


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
                loads = found[number + 1].name == "LoadMicroBatch"
                assert found[number + 1 + loads].name in COMPUTE
                assert posted or not any(later.name in KINDS for later in found[number:])
            if each.name.startswith("Send"):
                before = found[number - 1]
                assert before.name in COMPUTE and before.kwargs == each.kwargs
        assert posted == []
        sends = sum(each.name.startswith("Send") for each in found)
        expected = [pipeline.receiver(work) for work in pipeline.orders[stage]]
        assert sends == sum(each is not None and each.stage != stage for each in expected)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_a_chunk_is_reduced_when_its_last_backward_pass_is_over(pipeline: Pipeline) -> None:
    for stage in range(pipeline.stages):
        found = instructions(pipeline, stage)
        ends = "WeightPass" if pipeline.splits else "BackwardPass"
        for chunk in range(pipeline.chunks):
            (reduced,) = [
                n
                for n, each in enumerate(found)
                if each.name == "ReduceGrads" and each.kwargs.get("chunk") == chunk
            ]
            of_chunk = [
                n
                for n, each in enumerate(found)
                if each.name == ends and each.kwargs["chunk"] == chunk
            ]
            assert of_chunk[-1] < reduced
            between = {each.name for each in found[of_chunk[-1] + 1 : reduced]}
            assert between <= {"SendGrad"}
        assert [each.name for each in found[-2:]] == ["ReduceGrads", "OptimizerStep"]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_the_ends_load_each_micro_batch_once(pipeline: Pipeline) -> None:
    last, _ = pipeline.stage_and_chunk(pipeline.virtual_stages - 1)
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
