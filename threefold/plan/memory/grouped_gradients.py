"""Memory of gradients that are reduced after groups of micro-batches: Threefold's ZeRO-2."""

from models.config import ModelConfig
from threefold.plan.footprint import RUNNING_BUCKETS
from threefold.plan.job import Job, JobLayout, once_per_job
from threefold.plan.memory.model_states import TransientBytes
from threefold.plan.stage_contents import last_stage, stage_parameters, table_parameters


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
        tied = model.tie_embeddings and is_end
        table = size * table_parameters(model, layout.tensor) if tied else 0.0
        return TransientBytes(table, 0.0, size * most, size * most)
    held = size * stage_parameters(job)[stage]
    if layout.schedule == "interleaved" and is_aligned(job, every):
        held *= min(1.0, 2 / layout.chunks)
    return TransientBytes(held, 0.0, 0.0, 0.0)


@once_per_job
def running_elements(job: Job) -> float:
    """Return the most elements of a bucket that is filled and of those being sent."""
    buckets = bucket_sizes(job.model, job.layout, job.footprint.group_bucket_elements)
    several = range(len(buckets) - RUNNING_BUCKETS)
    return max(sum(buckets[n : n + RUNNING_BUCKETS + 1]) for n in several)


def is_aligned(job: Job, every: int) -> bool:
    """Return True if each group of an interleaved schedule lies in one round of micro-batches."""
    stages = job.layout.pipeline
    return job.micro_batches % stages == 0 and stages % every == 0


def bucket_sizes(model: ModelConfig, layout: JobLayout, elements: float) -> list[float]:
    """Return the elements of the buckets of a few blocks' matrices, in the order of the layers.

    elements: maximum size of a bucket, unless a single matrix is larger
    """
    h, t = model.hidden_size, layout.tensor
    matrices = [
        h * (model.query_size + 2 * model.key_value_size) / t,
        h * model.query_size / t,
        h * model.gate_and_up_size / t,
        h * model.mlp_size / t,
    ]
    if model.experts is not None:
        each = model.experts.count / (t * layout.expert) * model.experts.ffn_hidden_size * h
        columns = model.activation_columns(model.experts.ffn_hidden_size)
        matrices += [each * columns / model.experts.ffn_hidden_size, each]
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
