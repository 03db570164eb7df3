"""Predicted seconds of a training step, of its parts and of each pass of its pipeline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from math import ceil, log2
from operator import add

from models.config import ModelConfig
from threefold.config.deepspeed_json import BYTES
from threefold.pipeline.balance import PROPORTION_UNITS, pass_proportions
from threefold.pipeline.schedules import BACKWARD, FORWARD, WEIGHT, Kind, Pass, Pipeline
from threefold.pipeline.simulation import Timeline, pipeline_seconds, simulate
from threefold.plan.job import Job
from threefold.plan.stage_contents import (
    blocks_by_kind,
    kinds_of_virtual_stages,
    last_stage,
    tokens_per_micro_batch,
)
from threefold.plan.time.block import (
    ForwardBackward,
    block_job,
    block_passes,
    gather_seconds,
    prediction_passes,
    sharded_end_passes,
    transfer_seconds,
)
from threefold.plan.time.update import data_time, optimizer_time

MAX_SIMULATED_STAGES = 4
MAX_SIMULATED_ROUNDS = 2  # a round has one micro-batch per stage
MAX_WHOLE_STAGES = 8  # of a pipeline with fewer rounds that is simulated as it is, in 40 ms

Lengths = tuple[int, int, int]  # of a forward, a backward and a weight-gradient pass


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of a step's seconds on the slowest stage."""

    compute: float
    tensor: float  # tensor-parallel collectives
    context: float = 0.0  # communication of the context ranks
    expert: float = 0.0  # exchange of tokens between experts
    pipeline: float  # transfers between stages
    bubble: float  # waiting for other stages
    data: float  # reduction of gradients, gathering of weights
    optimizer: float
    waiting: float  # for slower nodes
    forward: tuple[float, ...]  # of a micro-batch, by stage
    backward: tuple[float, ...]

    @property
    def total(self) -> float:
        """The whole step."""
        spent = self.compute + self.tensor + self.context + self.expert
        spent += self.pipeline + self.bubble
        return spent + self.data + self.optimizer + self.waiting


TIME_PARTS = [field.name for field in fields(StepTime) if field.name not in ("forward", "backward")]


def step_time(job: Job) -> StepTime:
    """Predict the time of a step.

    The slowest stage runs all its micro-batches one after the other, and is idle for the bubble
    (`waiting_for_stages`).
    """
    layout, machine, software = job.layout, job.machine, job.software
    blocks = {
        kind: tuple(sum(chunks) for chunks in stages)
        for kind, stages in blocks_by_kind(job).items()
    }
    stages = _with_ends(job, blocks, last_stage(layout))
    slowest = max(stages, key=lambda stage: stage.total)
    forward, backward = slowest.forward, slowest.backward
    transfer = transfer_time(job)
    # Each micro-batch crosses every chunk's boundary once forward and once backward.
    sent = (
        job.micro_batches * 2 * layout.virtual_stages * transfer * (1 - software.pipeline_overlap)
    )
    filling = 2 * (layout.pipeline - 1) * transfer
    bubble = waiting_for_stages(job, stages) + filling
    data = data_time(job, backward.total, slowest.weights.total)
    optimizer = optimizer_time(job)
    hidden = hidden_by_pairs(job, stages.index(slowest), slowest)
    running = job.micro_batches * slowest.total - hidden
    busy = running + sent + bubble + data + optimizer
    doublings = max(0.0, log2(machine.gpus / machine.gpus_per_node))
    return StepTime(
        compute=job.micro_batches * (forward.compute + backward.compute),
        tensor=job.micro_batches * (forward.tensor + backward.tensor),
        pipeline=sent,
        bubble=bubble,
        data=data,
        optimizer=optimizer,
        waiting=busy * machine.gpu.straggling * software.straggler_factor * doublings,
        forward=tuple(stage.forward.total for stage in stages),
        backward=tuple(stage.backward.total for stage in stages),
        context=job.micro_batches * (forward.context + backward.context),
        expert=job.micro_batches * (forward.expert + backward.expert) - hidden,
    )


def hidden_by_pairs(job: Job, stage: int, passes: ForwardBackward) -> float:
    """Return the seconds of exchanges of tokens in a step that pairs of passes hide.

    Each pass of a pair computes while the other one exchanges tokens.
    """
    layout = job.layout
    # On a CPU, the same cores compute and communicate.
    if not layout.expert_overlap or job.machine.gpu.device == "cpu":
        return 0.0
    forward, backward = passes.forward, passes.backward
    hidden = min(forward.expert, backward.compute) + min(backward.expert, forward.compute)
    p, v, m = layout.pipeline, layout.virtual_stages, job.micro_batches
    fewest, more = (pair_count(layout.schedule, p, v, n * p, stage) for n in (2, 3))
    pairs = fewest + (m - 2 * p) / p * (more - fewest)
    return job.software.expert_overlap * pairs * hidden / v


@lru_cache(maxsize=1024)
def pair_count(
    schedule: str, stages: int, virtual_stages: int, micro_batches: int, stage: int
) -> int:
    """Return the pairs of passes of a stage in a step; see `Pipeline.units`."""
    pipeline = Pipeline(
        stages=stages,
        virtual_stages=virtual_stages,
        micro_batches=micro_batches,
        schedule=schedule,
        paired=True,
    )
    return sum(len(unit) > 1 for unit in pipeline.units(pipeline.orders[stage]))


def waiting_for_stages(job: Job, stages: Sequence[ForwardBackward]) -> float:
    """Return the bubble: the seconds that the slowest stage is idle in a step.

    With 1F1B, the stage waits for one micro-batch of every other stage, partly before its first and
    partly after its last micro-batch. With interleaving, it waits for only one chunk of every other
    stage (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). ZB-H1 fills a part of this time
    with the available weight-gradient passes (Qi et al. 2023, arXiv 2401.10241, table 2). With
    ZB-V, the stage waits for half a forward pass of each stage if all passes take equally long;
    otherwise the bubble is simulated. With DualPipeV, which computes the gradients of weights and
    inputs together, it waits for the backward pass of each stage; if it runs pairs of passes, also
    for the forward pass. `pipeline/schedules.py` defines the orders, and the tests compare these
    formulas with simulations.
    """
    p, v, m = job.layout.pipeline, job.layout.virtual_stages, job.micro_batches
    schedule = job.layout.schedule
    slowest = max(stages, key=lambda stage: stage.total)
    others = sum(stage.total for stage in stages) - slowest.total
    if schedule == "dualpipev":
        backward = sum(stage.backward.total for stage in stages) - slowest.backward.total
        if job.layout.expert_overlap:
            backward += sum(stage.forward.total for stage in stages) - slowest.forward.total
        return max(0.0, backward - slowest.forward.total / 2)
    if schedule == "zb-h1":
        weights = sum(stage.weights.total for stage in stages) - slowest.weights.total
        missing = max(0, p - m) * slowest.weights.total
        return others - 2 * weights + missing
    if schedule == "zb-v":
        return zero_bubble_v_wait(job, slowest)
    if m < p:  # each chunk also waits for the last stage
        return others * (p - m + (m - 1) / v) / (p - 1)
    return others / v


def zero_bubble_v_wait(job: Job, stage: ForwardBackward) -> float:
    """Return the idle seconds of a ZB-V step if all stages take as long as `stage`.

    The idle time grows about in proportion to p - 1, and hardly with the number of micro-batches
    from two per stage on, so the simulation uses few stages and, in proportion, micro-batches.
    """
    p, m = job.layout.pipeline, job.micro_batches
    if p > MAX_WHOLE_STAGES or m >= MAX_SIMULATED_ROUNDS * p:
        p = min(p, MAX_SIMULATED_STAGES)
        m = min(ceil(m * p / job.layout.pipeline), MAX_SIMULATED_ROUNDS * p)
    lengths = (
        round(PROPORTION_UNITS * stage.forward.total / stage.total),
        round(PROPORTION_UNITS * (stage.backward.total - stage.weights.total) / stage.total),
        round(PROPORTION_UNITS * stage.weights.total / stage.total),
    )
    proportions = pass_proportions(job.model, job.layout.recompute)
    waited = simulated_wait(p, m, proportions, lengths)
    return max(0.0, waited) / sum(lengths) * stage.total * (job.layout.pipeline - 1) / (p - 1)


@lru_cache(maxsize=4096)
def simulated_wait(
    stages: int, micro_batches: int, proportions: Lengths, lengths: Lengths
) -> float:
    """Return the length of a ZB-V step minus the passes of one stage, in the unit of `lengths`.

    Args:
        proportions: lengths of the passes from which the order is computed
        lengths: lengths of the passes in the simulation
    """
    pipeline = Pipeline(
        stages=stages, micro_batches=micro_batches, virtual_stages=2, schedule="zb-v",
        proportions=proportions,
    )  # fmt: skip
    takes = {kind: length / 2 for kind, length in zip(Kind, lengths, strict=True)}
    timeline = simulate(pipeline, lambda work: takes[work.kind])
    return pipeline_seconds(timeline) - micro_batches * sum(lengths)


def _with_ends(
    job: Job, blocks: Mapping[ModelConfig, Sequence[int]], last: int
) -> list[ForwardBackward]:
    """Return the times of parts of the model with the embedding, the head and predictions.

    Args:
        blocks: number of blocks of each kind in each part; the first part also has the embedding
        last: index of the part with the head
    """
    shared = block_job(job)
    embedding, head = sharded_end_passes(shared)
    of_kinds = [block_passes(shared.with_model(kind)) for kind in blocks]
    passes: dict[tuple[int, ...], ForwardBackward] = {}
    parts = []
    for counts in zip(*blocks.values(), strict=True):
        if counts not in passes:
            of_part = [block * n for block, n in zip(of_kinds, counts, strict=True) if n]
            passes[counts] = reduce(add, of_part, ForwardBackward())
        parts.append(passes[counts])
    parts[0] += embedding
    parts[last] += head
    if job.model.prediction is not None:
        parts[last] += prediction_passes(shared) * job.model.prediction_depth
    return parts


def transfer_time(job: Job) -> float:
    """Return the seconds of sending a micro-batch's activation to the next stage."""
    layout = job.layout
    if layout.pipeline == 1:
        return 0.0
    row = tokens_per_micro_batch(job.model, layout) * job.model.hidden_size * BYTES[job.precision]
    stride = layout.tensor * layout.dp_cp_size
    if not (job.software.split_transfers or layout.sequence_parallel):
        return transfer_seconds(job.machine, row, stride=stride)
    part = transfer_seconds(job.machine, row / layout.tensor, stride=stride)
    if layout.sequence_parallel:
        return part
    return part + gather_seconds(job.machine, row, ranks=layout.tensor, stride=1)


# Order and duration of each pass of a job's pipeline.


def pipeline_of(job: Job) -> Pipeline:
    """Return the pipeline of a job, which determines the order of its passes.

    Raises:
        UserError: the schedule does not support this number of micro-batches.
    """
    layout = job.layout
    return Pipeline(
        stages=layout.pipeline,
        virtual_stages=layout.virtual_stages,
        micro_batches=job.micro_batches,
        schedule=layout.schedule,
        proportions=pass_proportions(job.model, layout.recompute),
        paired=layout.expert_overlap,
    )


def pass_seconds(job: Job) -> Callable[[Pass], float]:
    """Return a function from a pass to its predicted seconds."""
    pipeline = pipeline_of(job)
    seconds: dict[tuple[Kind, int], float] = {}
    blocks = kinds_of_virtual_stages(job.model, job.blocks_of_virtual_stages)
    for virtual_stage, ends in enumerate(_with_ends(job, blocks, -1)):
        deferred = ends.weights.total if pipeline.splits else 0.0
        seconds[FORWARD, virtual_stage] = ends.forward.total
        seconds[BACKWARD, virtual_stage] = ends.backward.total - deferred
        seconds[WEIGHT, virtual_stage] = deferred
    return lambda work: seconds[work.kind, pipeline.virtual_stage(work.stage, work.chunk)]


def timeline_of(job: Job) -> Timeline:
    """Simulate the start and end of each pass, including transfers and idle times.

    Raises:
        UserError: the schedule does not support this number of micro-batches.
    """
    return simulate(pipeline_of(job), pass_seconds(job), transfer=transfer_time(job))
