"""What each stage of a pipeline holds."""

from functools import lru_cache
from typing import Any

from models.config import ModelConfig
from models.cost import block_parameters, norm_parameters, position_parameters
from models.pipeline.schedule import order
from models.pipeline.schedule.balance import balance_text, head_in_blocks, imbalance
from models.pipeline.schedule.order import virtual_stage_of
from recipes.planning.inputs.job import Job, Spread


def blocks_of_stages(job: Job) -> tuple[tuple[int, ...], ...]:
    """Blocks of each stage's chunks."""
    spread = job.spread
    dealt = job.blocks_of_positions
    return _blocks_of_stages(dealt, spread.schedule, spread.pipeline, spread.chunks)


@lru_cache(maxsize=4096)
def _blocks_of_stages(
    dealt: tuple[int, ...], schedule: str, pipeline: int, chunks: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(dealt[virtual_stage_of(schedule, pipeline, stage, chunk)] for chunk in range(chunks))
        for stage in range(pipeline)
    )


def stage_imbalance(job: Job) -> float:
    """The slowest stage's work over the mean of all."""
    return imbalance(job.blocks_of_positions, **_sharing(job))


def stages_text(job: Job) -> str:
    """How its blocks are dealt, in a line."""
    return balance_text(job.blocks_of_positions, **_sharing(job))


def _sharing(job: Job) -> dict[str, Any]:
    spread = job.spread
    head = head_in_blocks(job.model, spread.recompute)
    return {"schedule": spread.schedule, "stages": spread.pipeline, "head": head}


def stage_parameters(job: Job) -> tuple[int, ...]:
    """Parameters that a rank of each stage holds; a tied table counts on both ends."""
    tensor, last = job.spread.tensor, last_stage(job.spread)
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
    """Parameters of a tensor rank's part of the embedding, or of the output matrix."""
    return model.padded_vocab_size(tensor) // tensor * model.hidden_size


def last_stage(spread: Spread) -> int:
    """The stage with the logits."""
    return order.last_stage(spread.schedule, spread.pipeline, spread.chunks)


def tokens_per_micro_batch(model: ModelConfig, spread: Spread) -> int:
    """Tokens of a micro-batch on a rank."""
    return spread.micro_sequences * model.sequence_length // spread.context
