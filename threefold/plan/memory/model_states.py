"""Memory of the model states and of ZeRO's buffers, by ZeRO stage; bytes per rank.

The model states are weights, gradients and optimizer state.
"""

from typing import NamedTuple

from threefold.plan.footprint import Footprint
from threefold.plan.job import JobLayout

MOMENT_BYTES = 4  # of a parameter in one state of the optimizer


def state_bytes(
    footprint: Footprint,
    layout: JobLayout,
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
    ranks = layout.replicas
    stage = layout.zero_stage
    weights = footprint.weight * parameters / (ranks if stage == 3 else 1)
    sharded = parameters + (routed * (layout.expert - 1) if layout.zero_stage else 0.0)
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


def transient_bytes(footprint: Footprint, layout: JobLayout, parameters: int) -> TransientBytes:
    """Return the gradients and buffers that exist only within a step, for `parameters` weights."""
    if layout.zero_stage < 2:
        whole, bucket = footprint.reducing, footprint.reducing_bucket
        if layout.replicas == 1 and not footprint.stock_pipeline:
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
    gathered, still_gathered = min(parameters, most), min(parameters - full, most)
    return TransientBytes(
        gradients=0.0,
        reducing=0.0,
        buffers=bucket + size * gathered,
        reducing_buffers=bucket + size * still_gathered + sent * full,
    )
