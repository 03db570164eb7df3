"""A stage's instructions receive ahead, send at once and reduce as early as can be."""

from itertools import chain

import pytest
from deepspeed.runtime.pipe.schedule import PipeInstruction

from models.pipeline.channels import routes
from models.pipeline.instructions import PassSchedule
from models.pipeline.order import BACKWARD, FORWARD, Pass, Pipeline

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
def test_every_receive_is_one_ahead_and_every_send_follows_its_pass(pipeline: Pipeline) -> None:
    for stage in range(pipeline.stages):
        found = instructions(pipeline, stage)
        posted: list[Pass] = []
        for number, each in enumerate(found):
            if each.name in KINDS:
                place = each.kwargs["chunk"], each.kwargs["buffer_id"]
                posted.append(Pass(KINDS[each.name], stage, *place))
                assert len(posted) <= 2
            if each.name == "CommitP2P" and each.kwargs:
                arguments = each.kwargs
                work = Pass(arguments["kind"], stage, arguments["chunk"], arguments["buffer_id"])
                assert posted.pop(0) == work
                assert found[number + 1].name in COMPUTE
                assert posted or not any(later.name in KINDS for later in found[number:])
            if each.name.startswith("Send"):
                before = found[number - 1]
                assert before.name in COMPUTE and before.kwargs == each.kwargs
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
    last, _ = pipeline.place(pipeline.positions - 1)
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


def stuck_on_nccl(pipeline: Pipeline, *, training: bool, by_route: bool = True) -> list[int]:
    """The stages that hang if a communicator runs what a rank posts to it one after the other.

    by_route: one communicator for each route; otherwise one for activations and one for gradients
    """
    stages = range(pipeline.stages)
    left = [instructions(pipeline, stage, training) for stage in stages]
    queues: dict[tuple, list[tuple[str, Pass]]] = {}  # (stage, communicator) -> what it has posted
    done: set[tuple[str, Pass]] = set()

    def post(stage: int, verb: str, work: Pass) -> None:
        """work: the pass that starts with what is sent or received"""
        sender = pipeline.needed(work).stage
        communicator = (work.kind, sender, work.stage) if by_route else (work.kind,)
        queues.setdefault((stage, communicator), []).append((verb, work))

    def run(stage: int) -> bool:
        each = left[stage][0]
        place = each.kwargs.get("chunk"), each.kwargs.get("buffer_id")
        if each.name in KINDS:
            post(stage, "receive", Pass(KINDS[each.name], stage, *place))
        elif each.name.startswith("Send"):
            kind = FORWARD if each.name == "SendActivation" else BACKWARD
            post(stage, "send", pipeline.receiver(Pass(kind, stage, *place)))
        elif each.name == "CommitP2P" and each.kwargs:
            awaited = Pass(each.kwargs["kind"], stage, *place)
            return ("receive", awaited) in done and bool(left[stage].pop(0))
        left[stage].pop(0)
        return True

    def meet() -> bool:
        heads = {queue[0]: queue for queue in queues.values() if queue}
        for verb, work in list(heads):
            if verb == "send" and ("receive", work) in heads:
                heads["send", work].pop(0)
                heads["receive", work].pop(0)
                done.update({("send", work), ("receive", work)})
                return True
        return False

    progress = True
    while progress:
        progress = meet()
        for stage in stages:
            while left[stage] and run(stage):
                progress = True
    return [stage for stage in stages if left[stage]]


FEW = [
    Pipeline(stages=p, micro_batches=m, schedule=schedule, chunks=chunks)
    for schedule, chunks in (
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zb-h1", 1),
        ("zb-v", 2),
    )
    for p in (2, 3, 5, 8)
    for m in (1, 2, p, p + 1, 2 * p + 1)
]  # fmt: skip


@pytest.mark.parametrize("pipeline", [*PIPELINES, *FEW], ids=name)
@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
def test_nothing_hangs_where_communicators_run_in_turn(pipeline: Pipeline, training: bool) -> None:
    assert stuck_on_nccl(pipeline, training=training) == []


def test_with_fewer_communicators_interleaved_stages_would_hang() -> None:
    pipeline = Pipeline(stages=5, micro_batches=2, schedule="interleaved", chunks=2)
    assert stuck_on_nccl(pipeline, training=True, by_route=False)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=name)
def test_every_message_has_a_route(pipeline: Pipeline) -> None:
    used = {
        (work.kind, needed.stage, work.stage)
        for order in pipeline.orders
        for work in order
        if (needed := pipeline.needed(work)) is not None and needed.stage != work.stage
    }
    assert used == set(routes(pipeline))
