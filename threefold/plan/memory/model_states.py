"""Memory of the model states, of ZeRO's buffers and of grouped gradients; bytes per rank.

The model states are weights, gradients and optimizer state.
"""

import math
from typing import NamedTuple

from models.config import ModelConfig
from models.cost import DOWN, attention_matrices
from threefold.plan.job import Job, PlannedLayout, once_per_job
from threefold.plan.software import RUNNING_BUCKETS, Footprint
from threefold.plan.stage_contents import last_stage, stage_parameters, table_parameters

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
    gradients = footprint.gradient * (sharded / owners if stage >= 2 else parameters)
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


def transient_bytes(footprint: Footprint, layout: PlannedLayout, parameters: int) -> TransientBytes:
    """Return the gradients and buffers that exist only within a step, for `parameters` weights."""
    if layout.zero_stage < 2:
        whole, bucket = footprint.reducing, footprint.reducing_bucket
        if layout.dp_cp_size == 1 and not footprint.stock_pipeline:
            whole = bucket = 0.0  # a single data rank does not reduce gradients
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
    bucket, most = sent * footprint.bucket_elements, footprint.gathered_elements
    if footprint.keeps_gathered and layout.pipeline > 1:
        return TransientBytes(4.0 * parameters, 0.0, size * parameters, size * parameters)
    gathered, still_gathered = min(parameters, most), min(parameters - full, most)
    return TransientBytes(
        gradients=0.0,
        reducing=0.0,
        buffers=bucket + size * gathered,
        reducing_buffers=bucket + size * still_gathered + sent * full,
    )


# Memory of gradients that are reduced after groups of micro-batches: Threefold's ZeRO-2.


def grouped_bytes(job: Job, stage: int) -> TransientBytes:
    """Return the bytes of a stage's gradients that are not yet in shards.

    With one micro-batch in a group, a bucket is sent as soon as it is complete: one is filled while
    others are being sent. With more, the gradients of a chunk exist from its first to its last
    micro-batch of the group, and with an interleaved schedule those of the chunk before are being
    sent at the same time.
    """
    layout, footprint, model = job.layout, job.footprint, job.model
    every, size = job.micro_batches_per_reduction, footprint.gradient
    if every == 1:
        most = running_elements(job)
        # Tied gradients are summed over the stages first, at the end of the step.
        is_end = stage in (0, last_stage(layout))
        tied = model.copies_embedding and is_end
        table = size * table_parameters(model, layout.tensor) if tied else 0.0
        return TransientBytes(table, 0.0, size * most, size * most)
    held = size * stage_parameters(job)[stage]
    # Aligned: each group lies in one round of an interleaved schedule's micro-batches.
    is_aligned = job.micro_batches % layout.pipeline == 0 and layout.pipeline % every == 0
    if layout.schedule == "interleaved" and is_aligned:
        held *= min(1.0, 2 / layout.virtual_stages)
    return TransientBytes(held, 0.0, 0.0, 0.0)


@once_per_job
def running_elements(job: Job) -> float:
    """Return the most elements of a bucket that is filled and of those being sent."""
    buckets = bucket_sizes(job.model, job.layout, job.footprint.group_bucket_elements)
    several = range(len(buckets) - RUNNING_BUCKETS)
    return max(sum(buckets[n : n + RUNNING_BUCKETS + 1]) for n in several)


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
    return footprint.gradient * table
