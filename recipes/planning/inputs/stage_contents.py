"""Blocks and parameters of each pipeline stage."""

from functools import lru_cache
from typing import Any

from models.config import ModelConfig
from models.cost import block_parameters, norm_parameters, position_parameters
from models.pipeline.schedule import order
from models.pipeline.schedule.balance import balance_text, head_in_blocks, imbalance
from models.pipeline.schedule.order import virtual_stage_of
from recipes.planning.inputs.job import Job, JobLayout


def blocks_of_stages(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return the number of blocks of each chunk of each stage."""
    layout = job.layout
    blocks = job.blocks_of_virtual_stages
    return _blocks_of_stages(blocks, layout.schedule, layout.pipeline, layout.chunks)


@lru_cache(maxsize=4096)
def _blocks_of_stages(
    blocks: tuple[int, ...], schedule: str, pipeline: int, chunks: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(blocks[virtual_stage_of(schedule, pipeline, stage, chunk)] for chunk in range(chunks))
        for stage in range(pipeline)
    )


def stage_imbalance(job: Job) -> float:
    """Return the slowest stage's work relative to the mean of all stages."""
    return imbalance(job.blocks_of_virtual_stages, **_sharing(job))


def stages_text(job: Job) -> str:
    """Describe the division of the blocks over the stages in one line."""
    return balance_text(job.blocks_of_virtual_stages, **_sharing(job))


def _sharing(job: Job) -> dict[str, Any]:
    layout = job.layout
    head = head_in_blocks(job.model, layout.recompute)
    return {"schedule": layout.schedule, "stages": layout.pipeline, "head": head}


def stage_parameters(job: Job) -> tuple[int, ...]:
    """Return the parameters per rank of each stage; both ends count tied embeddings."""
    tensor, last = job.layout.tensor, last_stage(job.layout)
    return _stage_parameters(job.model, tensor, last, blocks_of_stages(job))


@lru_cache(maxsize=4096)
def _stage_parameters(
    model: ModelConfig, tensor: int, last: int, blocks: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    block = block_parameters(model, tensor)
    held = [block * sum(chunks) for chunks in blocks]
    table = table_parameters(model, tensor)
    held[0] += table + position_parameters(model)
    held[last] += norm_parameters(model)
    if last != 0 or not model.tie_embeddings:
        held[last] += table
    return tuple(held)


def table_parameters(model: ModelConfig, tensor: int) -> int:
    """Return the parameters of a tensor rank's part of the embedding or output matrix."""
    return model.padded_vocab_size(tensor) // tensor * model.hidden_size


def last_stage(layout: JobLayout) -> int:
    """Return the stage that computes the logits."""
    return order.last_stage(layout.schedule, layout.pipeline, layout.chunks)


def tokens_per_micro_batch(model: ModelConfig, layout: JobLayout) -> int:
    """Return the tokens of a micro-batch on one rank."""
    return layout.micro_sequences * model.sequence_length // layout.context
