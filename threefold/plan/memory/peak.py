"""Memory of the ranks of each stage: model states, buffers of ZeRO, and the peak during a step.

The model states are weights, gradients and optimizer state.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, q and k the
columns of all queries and of all keys, a heads, v vocabulary, t tensor ranks; bytes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from models.config import ModelConfig
from models.cost import (
    DOWN,
    attention_matrices,
    block_parameters,
    position_parameters,
    routed_parameters,
)
from threefold.config.deepspeed_json import BYTES
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.job import Job, PlannedLayout, once_per_job
from threefold.plan.memory.activations import (
    held_activations,
    in_flight_at_the_end,
    micro_batches_in_flight,
    most_activations,
    receive_bytes,
)
from threefold.plan.memory.working import (
    adds_in_matmul,
    block_working_bytes,
    forward_working_bytes,
    loss_bytes,
    momentum_parameters,
    muon_working_bytes,
    waiting_loss_bytes,
)
from threefold.plan.software import RUNNING_BUCKETS, Footprint
from threefold.plan.stage_contents import (
    blocks_by_kind,
    last_stage,
    own_parameters,
    routed_stage_parameters,
    stage_parameters,
    table_parameters,
    tokens_per_micro_batch,
)

# Memory of the model states and of ZeRO's buffers; bytes per rank.

MOMENT_BYTES = 4  # of a parameter in one state of the optimizer


def state_bytes(
    footprint: Footprint,
    layout: PlannedLayout,
    parameters: float,
    routed: float = 0.0,
    with_momentum: float = 0.0,
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state kept between steps.

    routed: number of `parameters` that belong to experts; only replicas / expert ranks have the
        same ones and shard their optimizer state
    with_momentum: number of parameters, on all ranks that shard them, that Muon updates and that
        have one state instead of two

    Rajbhandari et al. 2020 (arXiv 1910.02054), section 5: stage 1 shards the optimizer state over
    the data ranks, or those of a shard group, stage 2 also gradients, stage 3 also weights.
    """
    ranks = layout.dp_cp_size
    stage = layout.zero_stage
    sharded = parameters + (routed * (layout.expert - 1) if layout.zero_stage else 0.0)
    weights = footprint.weight * (sharded / ranks if stage == 3 else parameters)
    owners = layout.optimizer_ranks
    if stage >= 2:
        gradients = footprint.gradient * sharded / owners
    else:
        gradients = footprint.sum_bytes * parameters
    optimizer = footprint.optimizer + (footprint.zero3_copy if stage == 3 else 0)
    optimizer = (optimizer * sharded - MOMENT_BYTES * with_momentum) / owners
    return weights, gradients, optimizer


class TransientBytes(NamedTuple):
    """Bytes that DeepSpeed allocates only within a step.

    Attributes:
        gradients: gradients during the micro-batches
        reducing: additional gradients during the reduction over the data ranks
        buffers: buffers during the micro-batches
        reducing_buffers: buffers during the reduction
    """

    gradients: float
    reducing: float
    buffers: float
    reducing_buffers: float


def transient_bytes(
    footprint: Footprint, layout: PlannedLayout, parameters: int, gathered: float
) -> TransientBytes:
    """Return the gradients and buffers that exist only within a step, for `parameters` weights.

    gathered: most elements that ZeRO-3 gathers at once
    """
    if layout.zero_stage < 2:
        whole, bucket = footprint.reducing, footprint.reducing_bucket
        if parameters <= footprint.bucket_elements:
            whole = max(whole, footprint.reducing_one_bucket)
        return TransientBytes(
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
        return TransientBytes(0.0, 0.0, buckets, buckets + flat)
    bucket = sent * footprint.bucket_elements
    if footprint.keeps_gathered and layout.pipeline > 1:
        return TransientBytes(4.0 * parameters, 0.0, size * parameters, size * parameters)
    still_gathered = min(parameters - full, gathered)
    return TransientBytes(
        gradients=0.0,
        reducing=0.0,
        buffers=bucket + size * min(parameters, gathered),
        reducing_buffers=bucket + size * still_gathered + sent * full,
    )


@once_per_job
def most_gathered(job: Job) -> float:
    """Return the most elements that ZeRO-3 gathers at once.

    DeepSpeed's limit holds for prefetching only: the current module is always gathered whole. The
    experts of a layer are one module. Stacks without DeepSpeed's buckets have no such modules.
    """
    footprint, model, layout = job.footprint, job.model, job.layout
    if not footprint.bucket_elements:
        return footprint.gathered_elements
    return max(
        footprint.gathered_elements,
        table_parameters(model, layout.tensor),
        routed_parameters(model, layout.tensor, layout.expert),
        model.hidden_size * model.gate_and_up_size // layout.tensor,
    )


# Memory of Threefold's ZeRO-1 in addition to its sums.


def sent_bytes(footprint: Footprint) -> float:
    """Return the bytes of a gradient while the data ranks sum it, with Threefold's ZeRO-1 and 2."""
    return footprint.sent or footprint.sum_bytes


def copy_bytes(footprint: Footprint, layout: PlannedLayout) -> float:
    """Return the bytes per parameter of the copy in which the data ranks sum gradients.

    It is made when a bucket is complete. There is none if gradients are sent in the type of the
    sums. A rank that owns all shards sends nothing; it converts the sums for the optimizer.
    """
    sent = BYTES["fp32"] if layout.optimizer_ranks == 1 else sent_bytes(footprint)
    return 0.0 if sent == footprint.sum_bytes else sent


def shard_copy_bytes(footprint: Footprint, layout: PlannedLayout) -> float:
    """Return the bytes per parameter of the fp32 shard that the optimizer reads.

    It is a part of the sums if these are in fp32.
    """
    if footprint.sum_bytes == BYTES["fp32"] or layout.zero_stage != 1 or footprint.stock_pipeline:
        return 0.0
    return BYTES["fp32"] / layout.optimizer_ranks


def bucket_copy_bytes(job: Job, parameters: float, head: int = 0) -> float:
    """Return the most bytes of the copies of complete buckets with `parameters`.

    They exist until the end of the step. With shard groups, each is freed when its sum is complete.

    Args:
        head: number of `parameters` that are those of a head, which is a bucket itself
    """
    size = copy_bytes(job.footprint, job.layout)
    if size and job.layout.dp_shard > 1:
        parameters = min(parameters, max(map(sum, running_buckets(job))) + head)
    return size * parameters


def reduction_bytes(job: Job, stage: int, parameters: int) -> float:
    """Return the bytes that the reduction adds to the sums at the end of a step."""
    footprint, layout = job.footprint, job.layout
    copies = bucket_copy_bytes(job, parameters)
    if not copies:
        return shard_copy_bytes(footprint, layout) * parameters
    shards = BYTES["fp32"] / layout.optimizer_ranks * parameters
    newest = footprint.weight * newest_gradient_elements(job, stage)
    # Without shard groups, a shard takes the place of its copy.
    return newest + (copies + shards if layout.dp_shard > 1 else max(copies, shards))


def newest_gradient_elements(job: Job, stage: int) -> float:
    """Return the elements of the last large gradient of a step, which exists next to its sum."""
    model, tensor = job.model, job.layout.tensor
    if stage == 0:
        return table_parameters(model, tensor)
    return 0.0 if adds_in_matmul(job) else model.hidden_size * model.gate_and_up_size / tensor


def separate_head_parameters(job: Job, stage: int) -> int:
    """Return the parameters of the head if its gradient is a bucket itself, otherwise 0."""
    model, table = job.model, table_parameters(job.model, job.layout.tensor)
    is_apart = table > job.footprint.group_bucket_elements and not model.copies_embedding
    return table if is_apart and stage == last_stage(job.layout) else 0


# Memory of gradients that are reduced after groups of micro-batches: Threefold's ZeRO-2.


def grouped_bytes(job: Job, stage: int) -> TransientBytes:
    """Return the bytes of a stage's gradients that are not yet in shards.

    With one micro-batch in a group, a bucket is sent as soon as it is complete: one is filled while
    others are being sent. With more, the gradients of a chunk exist from its first to its last
    micro-batch of the group, and with an interleaved schedule those of the chunk before are being
    sent at the same time.
    """
    layout, footprint, model = job.layout, job.footprint, job.model
    every, size = job.micro_batches_per_reduction, footprint.sum_bytes
    if every == 1:
        most = running_bytes(job)
        # Tied gradients are summed over the stages first, at the end of the step.
        is_end = stage in (0, last_stage(layout))
        tied = model.copies_embedding and is_end
        table = size * table_parameters(model, layout.tensor) if tied else 0.0
        return TransientBytes(table, 0.0, most, most)
    held = size * stage_parameters(job)[stage]
    # Aligned: each group lies in one round of an interleaved schedule's micro-batches.
    is_aligned = job.micro_batches % layout.pipeline == 0 and layout.pipeline % every == 0
    if layout.schedule == "interleaved" and is_aligned:
        held *= min(1.0, 2 / layout.virtual_stages)
    copies = running_copies(job)
    return TransientBytes(held, 0.0, copies, copies)


@once_per_job
def running_bytes(job: Job) -> float:
    """Return the most bytes of a bucket that is filled and of those being sent."""
    size, sent = job.footprint.sum_bytes, sent_bytes(job.footprint)
    if sent == size:
        return size * max(sum(run) for run in running_buckets(job))
    # A bucket that is sent in another type exists in both types when it is complete.
    return max(sent * sum(run) + size * run[-1] for run in running_buckets(job))


@once_per_job
def running_copies(job: Job) -> float:
    """Return the most bytes that sending in another type adds to the sums of a whole chunk.

    The sums of the buckets that are being sent have been freed, except that of the newest.
    """
    size, sent = job.footprint.sum_bytes, sent_bytes(job.footprint)
    if sent == size:
        return 0.0
    return max(sent * sum(run) - size * sum(run[:-1]) for run in running_buckets(job))


def running_buckets(job: Job) -> list[list[float]]:
    """Return the elements of the buckets that are being sent when each bucket is complete."""
    sizes = bucket_sizes(job.model, job.layout, job.footprint.group_bucket_elements)
    return [sizes[max(0, last - RUNNING_BUCKETS) : last + 1] for last in range(len(sizes))]


def bucket_sizes(model: ModelConfig, layout: PlannedLayout, elements: float) -> list[float]:
    """Return the elements of the buckets of a few blocks' matrices, in the order of the layers."""
    h, t = model.hidden_size, layout.tensor
    if model.latent is None:
        matrices = [
            h * (model.query_size + 2 * model.key_value_size) / t,
            h * model.query_size / t,
        ]
    else:
        matrices = [
            math.prod(shape) / (1 if name in DOWN else t)
            for name, shape in attention_matrices(model).items()
        ]
    matrices += [h * model.gate_and_up_size / t, h * model.mlp_size / t]
    if model.experts is not None:
        per_matrix = model.experts.count / (t * layout.expert) * model.experts.ffn_hidden_size * h
        columns = model.activation_columns(model.experts.ffn_hidden_size)
        matrices += [per_matrix * columns / model.experts.ffn_hidden_size, per_matrix]
    sizes = [0.0]
    for matrix in (RUNNING_BUCKETS + 2) * matrices:
        if sizes[-1] + matrix <= elements:
            sizes[-1] += matrix
        else:
            sizes.append(matrix)
    return sizes + RUNNING_BUCKETS * [0.0]


def table_gradient_bytes(job: Job) -> float:
    """Return the bytes of the gradient of an embedding or of the head, if it is a bucket itself."""
    footprint = job.footprint
    table = table_parameters(job.model, job.layout.tensor)
    is_small = table <= footprint.group_bucket_elements
    if is_small or job.micro_batches_per_reduction > 1 or job.model.tie_embeddings:
        return 0.0
    size, sent = footprint.sum_bytes, sent_bytes(footprint)
    return (size if sent == size else size + sent) * table


# Memory of a stage at each moment of a step.

GIB = 2**30
# Predictions of published peaks are rarely larger than that by more than this share: 5 of 134.
MEMORY_BAND = 0.15
MIN_SAVING = 0.15  # share of the counted memory that another layout must save after a shortage


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes per rank of one stage at its peak within a step; the parts add up to `total`."""

    weights: float
    gradients: float
    optimizer: float  # fp32 weights and moments
    activations: float  # of all micro-batches in flight
    working: float  # of the current operation, such as a recomputed block or the logits
    buffers: float  # DeepSpeed's
    overhead: float  # CUDA, NCCL, fragmentation

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.counted + self.overhead

    @property
    def counted(self) -> float:
        """The bytes allocated by the program itself, without overhead."""
        return self.state + self.activations + self.working + self.buffers

    @property
    def state(self) -> float:
        """The bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


def limit_after_shortage(memory: StageMemory) -> float:
    """Return the memory in bytes that another layout may need if memory ran out in this one.

    Args:
        memory: predicted memory of the fullest stage of the layout that ran out of memory
    """
    return (1 - MIN_SAVING) * memory.counted + memory.overhead


def stage_memory(job: Job) -> list[StageMemory]:
    """Return the peak memory of each stage."""
    return [memory_of_stage(job, stage) for stage in range(job.layout.pipeline)]


def fullest_stage(job: Job, first: StageMemory | None = None) -> StageMemory:
    """Return the peak memory of the fullest stage.

    Not all stages need to be computed. Among stages with the same blocks, the activations
    in flight grow or shrink monotonically, so the fullest stage is the first or the last of them, a
    neighbour of the pipeline's ends, or the first stage that runs more micro-batches than it
    holds, because it has accumulated gradients when its activations peak.

    Args:
        first: the first stage's memory, if known
    """
    layout, micro_batches = job.layout, job.micro_batches
    last = layout.pipeline - 1
    stages_by_blocks: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for stage, blocks in enumerate(zip(*blocks_by_kind(job).values(), strict=True)):
        stages_by_blocks.setdefault(blocks, []).append(stage)
    candidates = {min(1, last), max(0, last - 1), last}
    for stages in stages_by_blocks.values():
        running_more = (
            stage
            for stage in stages
            if micro_batches_in_flight(layout, stage, micro_batches) < micro_batches
        )
        candidates |= {stages[0], stages[-1], next(running_more, 0)}
    memory = [first or memory_of_stage(job, 0)]
    memory += [memory_of_stage(job, stage) for stage in candidates - {0}]
    return max(memory, key=lambda stage: stage.total)


def host_bytes(job: Job) -> float:
    """Return the bytes of host memory that a node's processes need to build the model.

    Each process builds the whole part of its stage and tensor rank in fp32, which ZeRO-1 and 2
    shard later. Under ZeRO-3 it builds its shard on the GPU, and DeepSpeed moves the shard through
    host memory once.
    """
    together = min(job.machine.gpus, job.machine.gpus_per_node)
    parameters = max(stage_parameters(job)) * together
    if job.layout.zero_stage == 3:
        return BYTES[job.precision] * parameters / job.layout.dp_cp_size
    return BYTES["fp32"] * parameters


def fits(job: Job) -> bool:
    """Return True if every stage may fit into GPU memory and, during its construction, the host's.

    A stage may fit if its predicted memory exceeds the GPU's by less than `MEMORY_BAND`.
    """
    gpu = job.machine.gpu
    fullest = max(stage.total for stage in stage_memory(job))
    may_fit = not exceeds_band(fullest / GIB, gpu.memory_gib)
    return may_fit and host_bytes(job) <= gpu.node_memory_gib * GIB


def exceeds_band(predicted: float, available: float) -> bool:
    """Return True if predicted memory exceeds the available memory by more than `MEMORY_BAND`."""
    return predicted > available * (1 + MEMORY_BAND)


# A NamedTuple, because a search creates hundreds of thousands of moments, and it takes longer to
# create frozen dataclasses.
class Moment(NamedTuple):
    """Bytes at one moment of a step, in addition to the state kept between steps."""

    activations: float = 0.0
    working: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.activations + self.working + self.gradients + self.buffers


def memory_of_stage(job: Job, stage: int) -> StageMemory:
    """Return the peak memory of one stage."""
    footprint, parameters = job.footprint, stage_parameters(job)[stage]
    state = state_of_stage(job, stage) if stage else state_of_first_stage(job)
    weights, gradients, optimizer = state
    moment = max(peak_candidates(job, stage, parameters), key=lambda peak: peak.total)
    wasted = footprint.fragmentation * (moment.activations + moment.working)
    return StageMemory(
        weights=weights,
        gradients=gradients + moment.gradients,
        optimizer=optimizer,
        activations=moment.activations,
        working=moment.working,
        buffers=moment.buffers,
        overhead=context_gib(job) * GIB + wasted,
    )


def state_of_stage(job: Job, stage: int) -> tuple[float, float, float]:
    """Return the bytes of weights, of gradients and of optimizer state that a stage keeps."""
    parameters, routed = stage_parameters(job)[stage], routed_stage_parameters(job)[stage]
    momentum = momentum_parameters(job, stage)
    return state_bytes(job.footprint, job.layout, parameters, routed, momentum)


@once_per_job
def state_of_first_stage(job: Job) -> tuple[float, float, float]:
    """Return the bytes that `state_of_stage` returns for the first stage."""
    return state_of_stage(job, 0)


def context_gib(job: Job) -> float:
    """Return the GiB of CUDA and the communication library, which no allocator counts."""
    overhead = job.footprint.overhead_gib
    return job.machine.gpu.context_gib if overhead is None else overhead


def peak_candidates(job: Job, stage: int, parameters: int) -> list[Moment]:
    """Return the moments of a step at which a stage may reach its peak.

    They are the end of the forward pass (with the loss on the last stage) and a block's backward
    pass, both with all activations; the reduction of gradients; and the update, without
    activations.
    """
    layout, footprint = job.layout, job.footprint
    flying = micro_batches_in_flight(layout, stage, job.micro_batches)
    activations = in_forward = most_activations(job, stage)
    if layout.schedule == "zb-v":
        in_forward = most_activations(job, stage, forward_of_zb_v=True)
    is_grouped = layout.zero_stage == 2 and not job.shards_in_passes
    passing = (
        grouped_bytes(job, stage)
        if is_grouped
        else transient_bytes(footprint, layout, parameters, most_gathered(job))
    )
    # During the first micro-batch only the newest weight gradients exist. A step that has no more
    # micro-batches than are in flight reaches its peak in the first one.
    first_only = job.micro_batches <= flying
    gradients = passing.gradients
    newest = gradients
    if first_only and not job.shards_in_passes and not is_grouped:
        # The gradients that exist during the first block's backward pass.
        existing = parameters_of_block(job)
        if stage == last_stage(layout):
            existing += table_parameters(job.model, layout.tensor)
        newest = footprint.running_gradient * existing
    # ZeRO-2 allocates its buckets in each backward pass; other buckets stay from the first backward
    # pass on. ZeRO-3 gathers in both passes.
    before_backward = layout.zero_stage == 2 or (first_only and not job.shards_in_passes)
    block = block_working_bytes(job, first_only)
    forward = max(forward_working_bytes(job), loss_bytes(job, stage, first_only))
    waiting = waiting_loss_bytes(job, stage)
    passes = [(block, passing.buffers)]
    if SCHEDULES[layout.schedule].splits and adds_in_matmul(job):
        # Weight passes need no working memory, and other passes fill hardly any bucket.
        passes = [(block, 0.0), (0.0, passing.buffers)]
    moments = [
        Moment(
            in_forward,
            forward,
            0.0 if first_only else gradients,
            0.0 if before_backward and not is_grouped else passing.buffers,
        ),
        *(Moment(activations, working + waiting, newest, buffers) for working, buffers in passes),
        Moment(
            working=muon_working_bytes(job, stage),
            gradients=own_parameters(job, stage)
            * (footprint.updating / layout.optimizer_ranks + shard_copy_bytes(footprint, layout)),
        ),
    ]
    reduced = gradients + passing.reducing
    if not (footprint.stock_pipeline or is_grouped or job.shards_in_passes):
        reduced += reduction_bytes(job, stage, parameters)
    if not job.shards_in_passes:  # at the end of the step
        held = held_bytes(job, stage)
        moments.append(Moment(gradients=reduced, buffers=passing.reducing_buffers + held))
        if is_grouped:
            moments += table_reductions(job, stage, activations, passing)
    else:  # whenever a bucket is full, which is after its part of the backward pass
        left = activations * (1 - min(1.0, footprint.bucket_elements / parameters))
        working = block_working_bytes(job, first_only, reducing=True)
        moments.append(Moment(left, working, reduced, passing.reducing_buffers))
        if layout.zero_stage == 2:
            moments.append(head_reduction(job, activations, passing.buffers))
    if not footprint.stock_pipeline and not is_grouped and not job.shards_in_passes:
        # These gradients are already being reduced during the first chunk's backward pass.
        head = separate_head_parameters(job, stage)
        early = bucket_copy_bytes(job, early_parameters(job, stage, parameters), head)
        if early or layout.virtual_stages > 1:
            ending = in_flight_at_the_end(layout, stage, job.micro_batches)
            held = held_activations(job, stage, ending) + receive_bytes(job)
            moments.append(Moment(held, block, gradients + early))
    return moments


def early_parameters(job: Job, stage: int, parameters: int) -> int:
    """Return the parameters whose gradients are reduced before those of a stage's first blocks.

    They are those of the other chunks, or else of the head. With shard groups, copies of a few
    buckets exist throughout the pass.
    """
    if job.layout.dp_shard > 1:
        return parameters
    if job.layout.virtual_stages > 1:
        return parameters - first_chunk_parameters(job, stage)
    return separate_head_parameters(job, stage)


def table_reductions(
    job: Job, stage: int, activations: float, passing: TransientBytes
) -> list[Moment]:
    """Return the moments at which the gradient of the head or the embedding is a bucket itself.

    The head's is the first of a backward pass, and the embedding's the last.
    """
    table = table_gradient_bytes(job)
    moments = []
    if stage == last_stage(job.layout):
        moments.append(Moment(activations, 0.0, passing.gradients + table, passing.buffers))
    if stage == 0:
        flying = max(1, micro_batches_in_flight(job.layout, stage, job.micro_batches))
        left = activations * (1 - 1 / flying)
        once = job.footprint.weight * table_parameters(job.model, job.layout.tensor)
        moments.append(Moment(left, once, passing.gradients + table, passing.buffers))
    return moments


def head_reduction(job: Job, activations: float, buckets: float) -> Moment:
    """Return the moment at which ZeRO-2 reduces the head's gradient, if no bucket can hold it.

    DeepSpeed reduces such a gradient separately as soon as it exists, and converts it to the
    precision of the sum while all activations are still held.
    """
    model, footprint = job.model, job.footprint
    head = table_parameters(model, job.layout.tensor)
    if model.tie_embeddings or head <= footprint.bucket_elements:
        return Moment()
    size, sent = footprint.weight, footprint.sent or footprint.weight
    converted = sent if sent != size else 0.0
    return Moment(activations, 0.0, size * head, buckets + converted * head)


def first_chunk_parameters(job: Job, stage: int) -> int:
    """Return the parameters of a stage's first chunk."""
    model, tensor = job.model, job.layout.tensor
    parameters = sum(
        block_parameters(kind, tensor, job.layout.expert) * stages[stage][0]
        for kind, stages in blocks_by_kind(job).items()
    )
    if stage == 0:
        parameters += table_parameters(model, tensor) + position_parameters(model)
    return parameters


@once_per_job
def parameters_of_block(job: Job) -> int:
    """Return a rank's parameters of a block of the last kind."""
    return block_parameters(job.model, job.layout.tensor, job.layout.expert)


def held_bytes(job: Job, stage: int) -> float:
    """Return the bytes that the last stage of DeepSpeed's own pipeline holds between steps.

    They are logits, inputs and gradients.
    """
    layout, model = job.layout, job.model
    if layout.pipeline == 1 or not job.footprint.stock_pipeline or stage != last_stage(layout):
        return 0.0
    tokens, t = tokens_per_micro_batch(model, layout), layout.tensor
    logits = job.footprint.held_logits * tokens * model.padded_vocab_size(t) / t
    rows = 4 * job.footprint.weight * tokens * model.hidden_size
    return logits + rows / layout.sequence_ranks
