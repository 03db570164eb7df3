"""Division of a model's blocks among the chunks of a pipeline, and of lists by size or number.

Arithmetic only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice, permutations
from typing import TypeVar

from models.config import ModelConfig
from models.cost import (
    attention_multiply_adds,
    block_multiply_adds,
    head_multiply_adds,
    kinds_of_layers,
    prediction_multiply_adds,
)
from threefold.pipeline.schedules import last_stage, stage_and_chunk, virtual_stage_of

# Durations are rounded to this fraction of a micro-batch, so that passes end at the same times.
PROPORTION_UNITS = 48
LOAD_QUANTUM = 0.005  # share of a stage's load below which loads count as the same
LOAD_DIGITS = 6  # of a chunk's load in blocks that is compared with another one

Item = TypeVar("Item")


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the layers of a model by FLOPs, relative to its last block.

    The embedding costs nothing, because it is a look-up.

    Attributes:
        blocks: of each block, in the model's order
        head: of the logits, which the last virtual stage computes, with the prediction modules
    """

    blocks: tuple[float, ...]
    head: float

    @property
    def are_equal(self) -> bool:
        """True if all blocks have the same cost."""
        return min(self.blocks) == max(self.blocks)


@lru_cache
def layer_costs(model: ModelConfig, recompute: str) -> LayerCosts:
    """Return the costs of a model's layers; full recomputation makes blocks more expensive."""
    block, depth = block_multiply_adds(model), model.prediction_depth
    again = 4 / 3 if recompute == "full" else 1
    head = (1 + depth) * head_multiply_adds(model) / (block * again)
    return LayerCosts(
        tuple(block_multiply_adds(kind) / block for kind in model.uniform_models),
        head + depth * prediction_multiply_adds(model) / block,
    )


def pass_proportions(model: ModelConfig, recompute: str) -> tuple[int, int, int]:
    """Return the relative durations of the blocks' forward, backward and weight passes, by FLOPs.

    Attention has no weights, and its backward pass takes twice as long as its forward pass.
    Recomputation is part of the backward pass.
    """
    kinds = kinds_of_layers(model).items()
    attention = sum(attention_multiply_adds(kind) * count for kind, count in kinds)
    weights = sum(block_multiply_adds(kind) * count for kind, count in kinds) - attention
    again = {"none": 0, "selective": attention, "full": weights + attention}[recompute]
    passes = (weights + attention, weights + 2 * attention + again, weights)
    forward, backward, later = (
        round(PROPORTION_UNITS * seconds / sum(passes)) for seconds in passes
    )
    return forward, backward, later


@lru_cache(maxsize=4096)
def divide_blocks(
    costs: LayerCosts, *, schedule: str, stages: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return the number of blocks of each virtual stage that makes the slowest stage fastest.

    Each virtual stage has at least one block. The remaining blocks are assigned one by one to the
    stage with the least work, and within it to the chunk with the least work. Among equals the last
    one is chosen, because in 1F1B it holds the fewest micro-batches. Blocks that differ in cost are
    assigned as if they did not, and then moved for as long as that makes the loads smaller. With
    several chunks per stage, the result may be a part of a block from the best one.
    """
    blocks = len(costs.blocks)
    head = costs.head if costs.are_equal else costs.head * blocks / sum(costs.blocks)
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
    if costs.are_equal:
        return tuple(counts)
    while better := _better_division(tuple(counts), costs, schedule=schedule, stages=stages):
        counts = list(better)
    return tuple(counts)


def _better_division(
    counts: tuple[int, ...], costs: LayerCosts, *, schedule: str, stages: int
) -> tuple[int, ...] | None:
    """Return the best division that one move makes; None if no move makes a better one.

    A move gives a block of a chunk to another chunk; the chunks between them pass a block on. A
    division is better if the largest load of a stage is smaller, or the next largest one, and so
    on. If all stages have about the same loads, the loads of the chunks are compared in this way.
    Of equally good moves, the one to the last chunk is chosen.
    """
    quantum = LOAD_QUANTUM * (sum(costs.blocks) + costs.head) / stages

    def loads_of(division: Sequence[int]) -> tuple[list[int], list[float]]:
        of_stages = stage_loads(division, costs, schedule=schedule, stages=stages)
        of_chunks = _loads_of_blocks(division, costs)
        of_chunks[-1] += costs.head
        return (
            sorted((round(load / quantum) for load in of_stages), reverse=True),
            sorted((round(load, LOAD_DIGITS) for load in of_chunks), reverse=True),
        )

    least, best = loads_of(counts), None
    for source, target in permutations(range(len(counts)), 2):
        if counts[source] > 1:
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            if (loads := loads_of(moved)) < least or (loads == least and best):
                least, best = loads, tuple(moved)
    return best


def divide_evenly(blocks: int, parts: int) -> tuple[int, ...]:
    """Return the number of blocks of each part; the first parts have one more if need be."""
    fewest, more = divmod(blocks, parts)
    return tuple(fewest + (part < more) for part in range(parts))


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return at most `most` (2 or more) numbers of 0 .. count - 1, including both ends."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def packed(items: Iterable[Item], size: Callable[[Item], int], most: int) -> list[list[Item]]:
    """Divide items, in order, into lists of a total size of at most `most`.

    A larger item gets a list of its own.
    """
    lists: list[list[Item]] = []
    total = 0
    for item in items:
        own = size(item)
        if lists and total + own <= most:
            lists[-1].append(item)
            total += own
        else:
            lists.append([item])
            total = own
    return lists


def stage_loads(
    block_counts: Sequence[int], costs: LayerCosts, *, schedule: str, stages: int
) -> list[float]:
    """Return the work of each stage, in the unit of `costs`."""
    loads = [0.0] * stages
    for virtual_stage, load in enumerate(_loads_of_blocks(block_counts, costs)):
        loads[stage_and_chunk(schedule, stages, virtual_stage)[0]] += load
    loads[last_stage(schedule, stages, len(block_counts) // stages)] += costs.head
    return loads


def _loads_of_blocks(block_counts: Sequence[int], costs: LayerCosts) -> list[float]:
    """Return the work of the blocks of each virtual stage."""
    blocks = iter(costs.blocks)
    return [sum(islice(blocks, count)) for count in block_counts]


def imbalance(
    block_counts: Sequence[int], costs: LayerCosts, *, schedule: str, stages: int
) -> float:
    """Return the work of the slowest stage, divided by the mean over all stages."""
    loads = stage_loads(block_counts, costs, schedule=schedule, stages=stages)
    return max(loads) * stages / sum(loads)


def balance_text(
    block_counts: Sequence[int], costs: LayerCosts, *, schedule: str, stages: int
) -> str:
    """Describe the division of blocks and its imbalance in a line."""
    runs = [(blocks, len(list(run))) for blocks, run in groupby(block_counts)]
    more = imbalance(block_counts, costs, schedule=schedule, stages=stages) - 1
    virtual_stages = len(block_counts) // stages
    unit = "stage" if virtual_stages == 1 else "chunk"
    parts = [
        f"{count} {unit}{'s' * (count > 1)} of {blocks} block{'s' * (blocks > 1)}"
        for blocks, count in runs
    ]
    text = f"{', '.join(parts)}; the slowest stage has {more:.1%} more work than the mean"
    return text if virtual_stages == 1 else f"{stages} stages of {virtual_stages} chunks: {text}"
