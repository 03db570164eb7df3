"""How a model's blocks are dealt to the chunks of a pipeline. Arithmetic only."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from models.config import ModelConfig
from models.cost import attention_multiply_adds, block_multiply_adds, head_multiply_adds
from models.pipeline.schedule.order import last_stage, place, place_in_model

UNITS = 48  # that a micro-batch's passes are rounded to; few lengths make passes end together


def head_in_blocks(model: ModelConfig, recompute: str) -> float:
    """What the logits cost, as a multiple of a block; blocks may be computed twice."""
    again = 4 / 3 if recompute == "full" else 1
    return head_multiply_adds(model) / (block_multiply_adds(model) * again)


def pass_proportions(model: ModelConfig, recompute: str) -> tuple[int, int, int]:
    """How long a block's forward, backward and weights' passes take, to each other, by FLOPs.

    Attention has no weights, and its backward pass is twice as long; what is computed again is part
    of the backward pass.
    """
    attention = attention_multiply_adds(model)
    weights = block_multiply_adds(model) - attention
    again = {"none": 0, "selective": attention, "full": weights + attention}[recompute]
    passes = (weights + attention, weights + 2 * attention + again, weights)
    forward, backward, later = (round(UNITS * each / sum(passes)) for each in passes)
    return forward, backward, later


@lru_cache(maxsize=4096)
def deal_blocks(
    blocks: int, *, schedule: str, stages: int, chunks: int, head: float
) -> tuple[int, ...]:
    """Blocks of each chunk, in the model's order, so that the slowest stage is as fast as can be.

    Each has one or more. One by one the others go to the stage that has least to do, and there to
    the chunk that has; of equal ones to the last, which in 1F1B holds fewest micro-batches. The
    embedding counts nothing: it looks up and multiplies nothing.

    head: what the last chunk has to do beside its blocks, in blocks
    """
    counts = [1] * (stages * chunks)
    of_chunks = [1.0] * len(counts)
    of_chunks[-1] += head
    loads = [float(chunks)] * stages
    loads[last_stage(schedule, stages, chunks)] += head
    for _ in range(blocks - len(counts)):
        stage = min(reversed(range(stages)), key=loads.__getitem__)
        positions = [place_in_model(schedule, stages, stage, chunk) for chunk in range(chunks)]
        position = min(reversed(positions), key=of_chunks.__getitem__)
        counts[position] += 1
        of_chunks[position] += 1
        loads[stage] += 1
    return tuple(counts)


def deal_evenly(blocks: int, parts: int) -> tuple[int, ...]:
    """Blocks of each part, as evenly as can be, the first ones one more."""
    each, more = divmod(blocks, parts)
    return tuple(each + (part < more) for part in range(parts))


def imbalance(dealt: Sequence[int], *, schedule: str, stages: int, head: float) -> float:
    """The slowest stage's work over the mean of all."""
    loads = [0.0] * stages
    for position, blocks in enumerate(dealt):
        loads[place(schedule, stages, position)[0]] += blocks
    loads[last_stage(schedule, stages, len(dealt) // stages)] += head
    return max(loads) * stages / sum(loads)


def balance_text(dealt: Sequence[int], *, schedule: str, stages: int, head: float) -> str:
    """How blocks are dealt and what that costs, in a line."""
    runs = [(blocks, len(list(run))) for blocks, run in groupby(dealt)]
    parts = ", ".join(f"{count} x {blocks}" if count > 1 else f"{blocks}" for blocks, count in runs)
    more = imbalance(dealt, schedule=schedule, stages=stages, head=head) - 1
    what = "stages" if len(dealt) == stages else f"{len(dealt) // stages} chunks of {stages} stages"
    return f"blocks of {what}: {parts}; the slowest stage has {more:.1%} more to do than the mean"
