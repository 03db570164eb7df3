"""Division of a model's blocks among the chunks of a pipeline. Arithmetic only."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from models.config import ModelConfig
from models.cost import attention_multiply_adds, block_multiply_adds, head_multiply_adds
from threefold.pipeline.schedules import last_stage, stage_and_chunk, virtual_stage_of

# Durations are rounded to this fraction of a micro-batch, so that passes end at the same times.
PROPORTION_UNITS = 48


def head_in_blocks(model: ModelConfig, recompute: str) -> float:
    """Return the cost of the logits in blocks; full recomputation makes blocks more expensive."""
    again = 4 / 3 if recompute == "full" else 1
    return head_multiply_adds(model) / (block_multiply_adds(model) * again)


def pass_proportions(model: ModelConfig, recompute: str) -> tuple[int, int, int]:
    """Return the relative durations of a block's forward, backward and weight passes, by FLOPs.

    Attention has no weights, and its backward pass takes twice as long as its forward pass.
    Recomputation is part of the backward pass.
    """
    attention = attention_multiply_adds(model)
    weights = block_multiply_adds(model) - attention
    again = {"none": 0, "selective": attention, "full": weights + attention}[recompute]
    passes = (weights + attention, weights + 2 * attention + again, weights)
    forward, backward, later = (
        round(PROPORTION_UNITS * seconds / sum(passes)) for seconds in passes
    )
    return forward, backward, later


@lru_cache(maxsize=4096)
def divide_blocks(
    blocks: int, *, schedule: str, stages: int, virtual_stages: int, head: float
) -> tuple[int, ...]:
    """Return the number of blocks of each virtual stage that makes the slowest stage fastest.

    Each virtual stage has at least one block. The remaining blocks are assigned one by one to the
    stage with the least work, and within it to the chunk with the least work. Among equals the last
    one is chosen, because in 1F1B it holds the fewest micro-batches. The embedding costs nothing,
    because it is a look-up.

    head: cost of the logits, which the last virtual stage computes, in blocks
    """
    counts = [1] * (stages * virtual_stages)
    of_chunks = [1.0] * len(counts)
    of_chunks[-1] += head
    loads = [float(virtual_stages)] * stages
    loads[last_stage(schedule, stages, virtual_stages)] += head
    for _ in range(blocks - len(counts)):
        stage = min(reversed(range(stages)), key=loads.__getitem__)
        own = [virtual_stage_of(schedule, stages, stage, chunk) for chunk in range(virtual_stages)]
        virtual_stage = min(reversed(own), key=of_chunks.__getitem__)
        counts[virtual_stage] += 1
        of_chunks[virtual_stage] += 1
        loads[stage] += 1
    return tuple(counts)


def divide_evenly(blocks: int, parts: int) -> tuple[int, ...]:
    """Return the number of blocks of each part; the first parts have one more if need be."""
    fewest, more = divmod(blocks, parts)
    return tuple(fewest + (part < more) for part in range(parts))


def imbalance(block_counts: Sequence[int], *, schedule: str, stages: int, head: float) -> float:
    """Return the work of the slowest stage, divided by the mean over all stages."""
    loads = [0.0] * stages
    for virtual_stage, blocks in enumerate(block_counts):
        loads[stage_and_chunk(schedule, stages, virtual_stage)[0]] += blocks
    loads[last_stage(schedule, stages, len(block_counts) // stages)] += head
    return max(loads) * stages / sum(loads)


def balance_text(block_counts: Sequence[int], *, schedule: str, stages: int, head: float) -> str:
    """Describe the division of blocks and its imbalance in a line."""
    runs = [(blocks, len(list(run))) for blocks, run in groupby(block_counts)]
    more = imbalance(block_counts, schedule=schedule, stages=stages, head=head) - 1
    virtual_stages = len(block_counts) // stages
    unit = "stage" if virtual_stages == 1 else "chunk"
    (blocks, count), *others = runs
    parts = [f"{count} {unit}{'s' * (count > 1)} of {blocks} block{'s' * (blocks > 1)}"]
    parts += [f"{count} of {blocks}" for blocks, count in others]
    text = f"{', '.join(parts)}; the slowest stage has {more:.1%} more work than the mean"
    return text if virtual_stages == 1 else f"{stages} stages of {virtual_stages} chunks: {text}"
