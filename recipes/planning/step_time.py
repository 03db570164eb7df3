"""How long a step takes, and where the time goes. All times are seconds."""

from dataclasses import dataclass
from math import log2

from recipes.planning.block_time import Pass, block_job, block_passes, end_passes
from recipes.planning.job import Job
from recipes.planning.kernels import BYTES, memory_seconds
from recipes.planning.network import all_reduce_seconds, gather_seconds, transfer_seconds
from recipes.planning.stages import (
    blocks_of_stages,
    last_stage,
    stage_parameters,
    table_parameters,
    tokens_per_micro_batch,
)

# Bytes per parameter of an Adam step in mixed precision: fp32 weight and two moments read and
# written (24), fp32 gradient read by the norm, read, scaled and written, and read by the update
# (16), 16-bit weight written (2).
OPTIMIZER_BYTES = 42


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step by what they are spent on, on the slowest stage."""

    compute: float
    tensor: float  # collectives of the tensor ranks
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
        spent = self.compute + self.tensor + self.pipeline + self.bubble
        return spent + self.data + self.optimizer + self.waiting


def step_time(job: Job) -> StepTime:
    """Predict a step.

    A stage's micro-batches run one after the other; before its first and after its last one, the
    slowest stage waits for every other stage once or, interleaved, for a chunk of each (Narayanan
    et al. 2021, arXiv 2104.04473, section 2.2). DualPipeV as DeepSpeed runs it, with the gradients
    of weights and inputs together, hides half a forward pass of each stage (`schedule.py`).
    """
    spread, machine, software = job.spread, job.machine, job.software
    stages = stage_passes(job)
    work = [forward.total + backward.total for forward, backward in stages]
    slowest = max(range(len(work)), key=work.__getitem__)
    forward, backward = stages[slowest]
    transfer = transfer_time(job)
    # Each micro-batch crosses every chunk's border on the way forward and back.
    sent = job.micro_batches * 2 * spread.chunks * transfer * (1 - software.pipeline_overlap)
    filling = 2 * (spread.pipeline - 1) * transfer
    bubble = sum(work) - work[slowest]
    if spread.schedule == "dualpipev":
        bubble = max(0.0, bubble - sum(f.total for f, _ in stages) / 2)
    else:
        bubble /= spread.chunks
    bubble += filling
    data = data_time(job, backward.total)
    optimizer = optimizer_time(job)
    running = job.micro_batches * work[slowest]
    busy = running + sent + bubble + data + optimizer
    doublings = max(0.0, log2(machine.gpus / machine.gpus_per_node))
    return StepTime(
        compute=job.micro_batches * (forward.compute + backward.compute),
        tensor=job.micro_batches * (forward.tensor + backward.tensor),
        pipeline=sent,
        bubble=bubble,
        data=data,
        optimizer=optimizer,
        waiting=busy * machine.gpu.straggling * software.straggling * doublings,
        forward=tuple(f.total for f, _ in stages),
        backward=tuple(b.total for _, b in stages),
    )


def stage_passes(job: Job) -> list[tuple[Pass, Pass]]:
    """Forward and backward of a micro-batch through all chunks of each stage."""
    spread = job.spread
    shared = block_job(job)
    forward, backward = block_passes(shared)
    first, last = end_passes(shared)
    dealt = blocks_of_stages(job.model.layers, spread.pipeline, spread.chunks, spread.schedule)
    end = last_stage(spread.pipeline, spread.schedule)
    passes = {blocks: (forward * blocks, backward * blocks) for blocks in set(dealt)}
    stages = [passes[blocks] for blocks in dealt]
    for stage, ends in ((0, first), (end, last)):
        stages[stage] = stages[stage][0] + ends[0], stages[stage][1] + ends[1]
    return stages


def transfer_time(job: Job) -> float:
    """One micro-batch's activation from a stage to the next."""
    spread = job.spread
    if spread.pipeline == 1:
        return 0.0
    row = tokens_per_micro_batch(job.model, spread) * job.model.hidden_size * BYTES[job.precision]
    stride = spread.tensor * spread.context * spread.data
    if not (job.software.split_transfers or spread.sequence_parallel):
        return transfer_seconds(job.machine, row, stride=stride)
    part = transfer_seconds(job.machine, row / spread.tensor, stride=stride)
    if spread.sequence_parallel:
        return part
    return part + gather_seconds(job.machine, row, ranks=spread.tensor, stride=1)


def data_time(job: Job, last_backward: float) -> float:
    """Gradients added up over the data ranks and new weights gathered, once per step.

    Where it overlaps, the last micro-batch's backward pass hides it, the first forward pass the
    weights. ZeRO-2 and 3 have done most of it with every micro-batch.
    """
    spread, software = job.spread, job.software
    ranks = spread.data * spread.context
    if ranks == 1 or spread.zero_stage == 3:
        return 0.0
    stride = spread.tensor
    parameters = max(stage_parameters(job.model, job.spread))
    weights = parameters * BYTES[job.precision]
    gradients = parameters * software.bytes_of_gradients(BYTES[job.precision])
    reduced = gather_seconds(job.machine, gradients, ranks=ranks, stride=stride)
    gathered = gather_seconds(job.machine, weights, ranks=ranks, stride=stride)
    if spread.zero_stage == 0:
        gathered = 0.0
    if spread.zero_stage == 0 or not software.reduce_scatter:
        reduced = all_reduce_seconds(job.machine, gradients, ranks=ranks, stride=stride)
    if spread.zero_stage == 2:
        reduced = 0.0
    # The first forward pass takes half as long as the last backward one.
    hidden = min(reduced + gathered, 1.5 * last_backward) * software.data_overlap
    return reduced + gathered - hidden


def optimizer_time(job: Job) -> float:
    """The update of this rank's share of the parameters, the host's time of a step, tied tables."""
    spread = job.spread
    parameters = max(stage_parameters(job.model, job.spread))
    update = memory_seconds(job.machine.gpu, parameters / job.optimizer_ranks * OPTIMIZER_BYTES)
    tied = 0.0
    if job.model.tie_embeddings and spread.pipeline > 1:
        table = table_parameters(job.model, spread.tensor)
        tied = 2 * transfer_seconds(
            job.machine,
            table * job.software.bytes_of_gradients(BYTES[job.precision]),
            stride=spread.tensor * spread.context * spread.data,
        )
    return update + tied + job.software.step_seconds
