"""What each stage of a pipeline holds."""

from functools import lru_cache

from models.config import ModelConfig
from models.cost import block_parameters, norm_parameters, position_parameters
from recipes.planning.job import Spread


def deal(blocks: int, parts: int) -> list[int]:
    """`blocks` over `parts`, as evenly as can be, the first ones one more.

    As DeepSpeed deals them (`partition_balanced`, deepspeed/runtime/utils.py).
    """
    each, more = divmod(blocks, parts)
    return [each + (part < more) for part in range(parts)]


@lru_cache(maxsize=4096)
def blocks_of_stages(layers: int, pipeline: int, chunks: int, schedule: str) -> tuple[int, ...]:
    """Blocks that each stage holds, all its chunks together."""
    parts = deal(layers, pipeline * chunks)
    if schedule == "dualpipev":  # one part on the way out, one on the way back
        return tuple(parts[r] + parts[2 * pipeline - 1 - r] for r in range(pipeline))
    return tuple(sum(parts[r::pipeline]) for r in range(pipeline))


def stage_parameters(model: ModelConfig, spread: Spread) -> tuple[int, ...]:
    """Parameters that a rank of each stage holds; a tied table counts on both ends."""
    return _stage_parameters(model, spread.tensor, spread.pipeline, spread.chunks, spread.schedule)


@lru_cache(maxsize=4096)
def _stage_parameters(
    model: ModelConfig, tensor: int, pipeline: int, chunks: int, schedule: str
) -> tuple[int, ...]:
    block = block_parameters(model, tensor)
    held = [block * n for n in blocks_of_stages(model.layers, pipeline, chunks, schedule)]
    table = table_parameters(model, tensor)
    last = last_stage(pipeline, schedule)
    held[0] += table + position_parameters(model)
    held[last] += norm_parameters(model)
    if last != 0 or not model.tie_embeddings:
        held[last] += table
    return tuple(held)


def table_parameters(model: ModelConfig, tensor: int) -> int:
    """Parameters of a tensor rank's part of the embedding, or of the output matrix."""
    return model.padded_vocab_size(tensor) // tensor * model.hidden_size


def last_stage(pipeline: int, schedule: str) -> int:
    """The stage with the logits."""
    return 0 if schedule == "dualpipev" else pipeline - 1


def tokens_per_micro_batch(model: ModelConfig, spread: Spread) -> int:
    """Tokens of a micro-batch on a rank."""
    return spread.micro_sequences * model.sequence_length // spread.context
