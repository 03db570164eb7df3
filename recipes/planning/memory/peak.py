"""Peak memory of the ranks of each stage during a step.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, q and k the
columns of all queries and of all keys, a heads, v vocabulary, t tensor ranks; bytes.
"""

from dataclasses import dataclass

from models.cost import block_parameters, position_parameters
from recipes.planning.inputs.footprint import Footprint
from recipes.planning.inputs.job import Job, JobLayout
from recipes.planning.inputs.kernels import BYTES
from recipes.planning.inputs.stage_contents import (
    blocks_of_stages,
    last_stage,
    stage_parameters,
    table_parameters,
    tokens_per_micro_batch,
)
from recipes.planning.memory.activations import (
    expected_bytes,
    held_activations,
    in_flight_at_the_end,
    micro_batches_in_flight,
    most_activations,
)
from recipes.planning.memory.working_memory import (
    block_working_bytes,
    forward_working_bytes,
    loss_bytes,
    waiting_loss_bytes,
)

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on each rank of one stage, at the fullest moment of a step; they add up to `total`."""

    weights: float
    gradients: float
    optimizer: float  # fp32 weights and moments
    activations: float  # of all micro-batches in flight
    working: float  # of the operation at hand: a block that is computed again, or the logits
    buffers: float  # DeepSpeed's
    overhead: float  # CUDA, NCCL, fragmentation

    @property
    def total(self) -> float:
        """All of it."""
        return self.counted + self.overhead

    @property
    def counted(self) -> float:
        """What the program itself has allocated."""
        return self.state + self.activations + self.working + self.buffers

    @property
    def state(self) -> float:
        """What recomputation does not change."""
        return self.weights + self.gradients + self.optimizer


def stage_memory(job: Job) -> list[StageMemory]:
    """What each stage needs."""
    return [memory_of_stage(job, stage) for stage in range(job.layout.pipeline)]


def fullest_stage(job: Job, first: StageMemory | None = None) -> StageMemory:
    """The stage that needs most.

    Of stages with as many blocks, what is in flight grows or shrinks from each to the next. So it
    is the first or the last one of these, the neighbour of an end of the pipeline, or the first one
    that runs more micro-batches than it holds and has gradients while it is full.

    first: the first stage's memory, where it is known
    """
    layout, micro_batches = job.layout, job.micro_batches
    last = layout.pipeline - 1
    alike: dict[tuple[int, ...], list[int]] = {}
    for stage, blocks in enumerate(blocks_of_stages(job)):
        alike.setdefault(blocks, []).append(stage)
    looked_at = {min(1, last), max(0, last - 1), last}
    for stages in alike.values():
        running_more = (
            stage
            for stage in stages
            if micro_batches_in_flight(layout, stage, micro_batches) < micro_batches
        )
        looked_at |= {stages[0], stages[-1], next(running_more, 0)}
    found = [first or memory_of_stage(job, 0)]
    found += [memory_of_stage(job, stage) for stage in looked_at - {0}]
    return max(found, key=lambda each: each.total)


def host_bytes(job: Job) -> float:
    """What a node's processes build in the host's memory before their GPUs have it, in fp32.

    Each builds what its stage and tensor rank hold, whatever ZeRO spreads later.
    """
    together = min(job.machine.gpus, job.machine.gpus_per_node)
    return BYTES["fp32"] * max(stage_parameters(job)) * together


@dataclass(frozen=True)
class Moment:
    """What is there at a moment of a step beside weights, gradients and state that always are."""

    activations: float = 0.0
    working: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.activations + self.working + self.gradients + self.buffers


def memory_of_stage(job: Job, stage: int) -> StageMemory:
    """What one stage needs at its fullest moment."""
    layout, footprint = job.layout, job.footprint
    parameters = stage_parameters(job)[stage]
    weights, gradients, optimizer = state_bytes(footprint, layout, parameters, job.optimizer_ranks)
    moment = max(moments(job, stage, parameters), key=lambda each: each.total)
    overhead = footprint.overhead_gib
    if overhead is None:
        overhead = job.machine.gpu.context_gib
    wasted = footprint.fragmentation * (moment.activations + moment.working)
    return StageMemory(
        weights=weights,
        gradients=gradients + moment.gradients,
        optimizer=optimizer,
        activations=moment.activations,
        working=moment.working,
        buffers=moment.buffers,
        overhead=overhead * GIB + wasted,
    )


def moments(job: Job, stage: int, parameters: int) -> list[Moment]:
    """The moments of a step that may be a stage's fullest.

    The end of the forward pass, with the loss on the last stage, and a block's backward pass, with
    all activations there; the reduction of gradients; the update, when activations are gone.
    """
    layout, footprint = job.layout, job.footprint
    flying = micro_batches_in_flight(layout, stage, job.micro_batches)
    activations = most_activations(job, stage, forward=False)
    passing = passing_bytes(footprint, layout, parameters)
    # In the first micro-batch there are no gradients of weights yet but the newest ones, and a
    # step of one micro-batch, or of as many as are in flight, has no later one.
    first_only = job.micro_batches <= flying
    gradients = passing.gradients
    newest = gradients
    if first_only and layout.zero_stage < 2:
        newest = footprint.running_gradient * newest_parameters(job, stage)
    # ZeRO-2's buckets are anew in each backward pass, the others stay from the first one on; ZeRO-3
    # gathers in both passes.
    before_backward = layout.zero_stage == 2 or (first_only and layout.zero_stage < 2)
    block = block_working_bytes(job, first_only)
    forward = max(forward_working_bytes(job), loss_bytes(job, stage, first_only))
    found = [
        Moment(
            most_activations(job, stage, forward=True),
            forward,
            0.0 if first_only else gradients,
            0.0 if before_backward else passing.buffers,
        ),
        Moment(activations, block + waiting_loss_bytes(job, stage), newest, passing.buffers),
        Moment(gradients=footprint.updating * parameters / layout.data),
    ]
    reduced = gradients + passing.reducing
    if layout.zero_stage < 2:  # at the end of the step
        held = held_bytes(job, stage)
        found.append(Moment(gradients=reduced, buffers=passing.reducing_buffers + held))
    else:  # whenever a bucket is full: so much of the backward pass is behind it
        left = activations * (1 - min(1.0, footprint.bucket_elements / parameters))
        found.append(Moment(left, block, reduced, passing.reducing_buffers))
        if layout.zero_stage == 2:
            found.append(head_reduction(job, activations, passing.buffers))
    if not footprint.stock_pipeline and layout.chunks > 1 and layout.data > 1:
        # The first chunk goes backward, while the others' gradients are added up already.
        early = footprint.reducing * (parameters - first_chunk_parameters(job, stage))
        ending = in_flight_at_the_end(layout, stage, job.micro_batches)
        held = held_activations(job, stage, ending) + expected_bytes(job)
        found.append(Moment(held, block, gradients + early))
    return found


def head_reduction(job: Job, activations: float, buckets: float) -> Moment:
    """Return the moment at which ZeRO-2 reduces the head's gradient, if no bucket can hold it.

    DeepSpeed reduces such a gradient by itself as soon as it exists, and converts it to the
    precision of the sum while all activations are still there.
    """
    model, footprint = job.model, job.footprint
    head = table_parameters(model, job.layout.tensor)
    if model.tie_embeddings or head <= footprint.bucket_elements:
        return Moment()
    size, sent = footprint.weight, footprint.sent or footprint.weight
    converted = sent if sent != size else 0.0
    return Moment(activations, 0.0, size * head, buckets + converted * head)


def first_chunk_parameters(job: Job, stage: int) -> int:
    """Parameters of a stage's first chunk."""
    model, tensor = job.model, job.layout.tensor
    found = blocks_of_stages(job)[stage][0] * block_parameters(model, tensor)
    if stage == 0:
        found += table_parameters(model, tensor) + position_parameters(model)
    return found


def newest_parameters(job: Job, stage: int) -> float:
    """Parameters whose gradients are there while the first block's backward pass runs."""
    layout, model = job.layout, job.model
    found = block_parameters(model, layout.tensor)
    if stage == last_stage(layout):
        found += table_parameters(model, layout.tensor)
    return found


def state_bytes(
    footprint: Footprint, layout: JobLayout, parameters: float, optimizer_ranks: int | None = None
) -> tuple[float, float, float]:
    """Weights, gradients and optimizer's state from step to step.

    Rajbhandari et al. 2020 (arXiv 1910.02054), section 5: stage 1 spreads the optimizer's state
    over the data ranks, stage 2 gradients, stage 3 weights.
    """
    ranks = layout.data * layout.context
    stage = layout.zero_stage
    weights = footprint.weight * parameters / (ranks if stage == 3 else 1)
    gradients = footprint.gradient * parameters / (ranks if stage >= 2 else 1)
    optimizer = footprint.optimizer + (footprint.zero3_copy if stage == 3 else 0)
    optimizer *= parameters / (optimizer_ranks or layout.optimizer_ranks)
    return weights, gradients, optimizer


@dataclass(frozen=True)
class Passing:
    """What DeepSpeed adds within a step.

    gradients: while micro-batches run
    reducing: gradients more while they are added up over the data ranks
    buffers: while micro-batches run
    reducing_buffers: while gradients are added up
    """

    gradients: float
    reducing: float
    buffers: float
    reducing_buffers: float


def passing_bytes(footprint: Footprint, layout: JobLayout, parameters: int) -> Passing:
    """Return the gradients and buffers that exist only within a step, for `parameters` weights."""
    if layout.zero_stage < 2:
        whole, bucket = footprint.reducing, footprint.reducing_bucket
        if layout.data == 1 and not footprint.stock_pipeline:
            whole = bucket = 0.0  # nobody to add up with
        if parameters <= footprint.bucket_elements:
            whole = max(whole, footprint.reducing_one_bucket)
        return Passing(
            gradients=footprint.running_gradient * parameters,
            reducing=whole * parameters,
            buffers=footprint.bucket,
            reducing_buffers=footprint.bucket + bucket,
        )
    # ZeRO-2 has two buckets in the weights' precision; their gradients are flattened, and converted
    # before they are summed. ZeRO-3 has one bucket in the precision of the sums, a flattened copy,
    # and the gathered weights except those whose gradients are in the bucket.
    size, sent = footprint.weight, footprint.sent or footprint.weight
    full = min(parameters, footprint.bucket_elements)
    if layout.zero_stage == 2:
        buckets = 2 * size * footprint.bucket_elements
        flat = size * full + (sent * full if sent != size else 0.0)
        return Passing(0.0, 0.0, buckets, buckets + flat)
    bucket, most = sent * footprint.bucket_elements, footprint.gathered_elements
    gathered, still_gathered = min(parameters, most), min(parameters - full, most)
    return Passing(
        gradients=0.0,
        reducing=0.0,
        buffers=bucket + size * gathered,
        reducing_buffers=bucket + size * still_gathered + sent * full,
    )


def held_bytes(job: Job, stage: int) -> float:
    """What the last stage of DeepSpeed's own pipeline holds from step to step.

    Logits, inputs and gradients.
    """
    layout, model = job.layout, job.model
    if layout.pipeline == 1 or not job.footprint.stock_pipeline or stage != last_stage(layout):
        return 0.0
    tokens, t = tokens_per_micro_batch(model, layout), layout.tensor
    logits = job.footprint.held_logits * tokens * model.padded_vocab_size(t) / t
    rows = 4 * job.footprint.weight * tokens * model.hidden_size
    return logits + rows / layout.sequence_ranks
