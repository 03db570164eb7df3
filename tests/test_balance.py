"""Blocks are dealt so that the slowest stage is as fast as can be."""

from dataclasses import replace
from itertools import product

import pytest

from models.cost import block_multiply_adds, flops_per_token, head_multiply_adds
from models.pipeline.balance import deal_blocks, head_in_blocks, imbalance
from recipes.training.recipe import load_recipe, shipped_recipes

WITH_PIPELINE = [r for r in map(load_recipe, shipped_recipes()) if r.layout.pipeline > 1]


@pytest.mark.parametrize(
    ("blocks", "schedule", "stages", "chunks", "head", "dealt"),
    [
        (4, "1f1b", 2, 1, 0.1, (2, 2)),
        (5, "1f1b", 2, 1, 0.1, (3, 2)),
        (5, "1f1b", 2, 1, 0.0, (2, 3)),  # the last one holds fewer micro-batches
        (32, "1f1b", 4, 1, 1.2, (8, 8, 9, 7)),
        (80, "1f1b", 4, 1, 1.2, (20, 20, 21, 19)),
        (12, "interleaved", 2, 3, 1.5, (2, 2, 2, 2, 3, 1)),
        (10, "zb-v", 2, 2, 1.5, (3, 3, 3, 1)),  # the first stage has the head
    ],
)
def test_what_is_dealt(
    blocks: int, schedule: str, stages: int, chunks: int, head: float, dealt: tuple[int, ...]
) -> None:
    found = deal_blocks(blocks, schedule=schedule, stages=stages, chunks=chunks, head=head)
    assert found == dealt


@pytest.mark.parametrize(("stages", "blocks"), [(2, 5), (3, 8), (4, 9)])
@pytest.mark.parametrize("head", [0.0, 0.4, 1.3, 3.2])
def test_no_other_deal_is_better(stages: int, blocks: int, head: float) -> None:
    def slowest(dealt: tuple[int, ...]) -> float:
        return imbalance(dealt, schedule="1f1b", stages=stages, head=head)

    every = [dealt for dealt in product(range(1, blocks), repeat=stages) if sum(dealt) == blocks]
    ours = deal_blocks(blocks, schedule="1f1b", stages=stages, chunks=1, head=head)
    assert ours in every
    assert slowest(ours) == pytest.approx(min(map(slowest, every)))
    assert max(map(slowest, every)) > slowest(ours)


@pytest.mark.parametrize("recipe", WITH_PIPELINE, ids=lambda recipe: recipe.name)
def test_the_catalogue_is_balanced(recipe) -> None:
    layout = recipe.layout
    head = head_in_blocks(recipe.model, layout.recompute)
    dealt = recipe.blocks_of_positions
    assert sum(dealt) == recipe.model.layers and min(dealt) > 0
    found = imbalance(dealt, schedule=layout.schedule, stages=layout.pipeline, head=head)
    stage = (recipe.model.layers + head) / layout.pipeline
    assert 1 <= found <= (stage + 1) / stage  # less than a block from the mean


def test_the_head_costs_what_the_flops_say() -> None:
    model = WITH_PIPELINE[0].model
    without = replace(model, layers=1)
    block = flops_per_token(replace(model, layers=2)) - flops_per_token(without)
    assert block == 6 * block_multiply_adds(model)
    assert flops_per_token(without) - block == 6 * head_multiply_adds(model)
    assert head_in_blocks(model, "none") == pytest.approx(flops_per_token(without) / block - 1)
    assert head_in_blocks(model, "full") == pytest.approx(head_in_blocks(model, "none") * 3 / 4)
