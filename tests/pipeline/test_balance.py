"""The division of blocks makes the slowest stage fastest, and the imbalance is reported."""

from dataclasses import replace
from itertools import product

import pytest

from models.cost import block_multiply_adds, flops_per_token, head_multiply_adds
from tests.conftest import shipped_recipes
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.recipe import Recipe
from threefold.pipeline.balance import (
    balance_text,
    divide_blocks,
    divide_evenly,
    head_in_blocks,
    imbalance,
)
from threefold.pipeline.schedules import FORWARD, SCHEDULES, Pass, Pipeline, stage_and_chunk
from threefold.pipeline.simulation import pipeline_seconds, simulate

WITH_PIPELINE = [r for r in map(load_recipe, shipped_recipes()) if r.layout.pipeline > 1]

PLACES = [
    (schedule, stages, virtual_stages, layers, head)
    for schedule, stages, layers, head in product(SCHEDULES, (2, 3, 4), (13, 24), (0.0, 0.4, 1.5))
    for virtual_stages in (
        (SCHEDULES[schedule].virtual_stages,) if SCHEDULES[schedule].virtual_stages else (2, 3)
    )
]


@pytest.mark.parametrize(("schedule", "stages", "virtual_stages", "layers", "head"), PLACES)
def test_no_other_division_has_a_faster_slowest_stage(
    schedule: str, stages: int, virtual_stages: int, layers: int, head: float
) -> None:
    dealt = divide_blocks(
        layers, schedule=schedule, stages=stages, virtual_stages=virtual_stages, head=head
    )
    assert sum(dealt) == layers and len(dealt) == stages * virtual_stages and min(dealt) >= 1
    found = imbalance(dealt, schedule=schedule, stages=stages, head=head)
    last, _ = stage_and_chunk(schedule, stages, stages * virtual_stages - 1)
    fastest = min(
        max(n + head * (stage == last) for stage, n in enumerate(blocks))
        for blocks in product(range(virtual_stages, layers + 1), repeat=stages)
        if sum(blocks) == layers
    )
    assert found == pytest.approx(fastest * stages / (layers + head))


@pytest.mark.parametrize("virtual_stages", [2, 4])
def test_the_chunk_with_the_head_has_fewer_blocks(virtual_stages: int) -> None:
    """All other chunks of an interleaved pipeline would otherwise wait for this one."""
    pipeline = Pipeline(
        stages=4, virtual_stages=virtual_stages, micro_batches=16, schedule="interleaved"
    )
    layers, head = 4 * virtual_stages * 2 - 1, 1.0

    def seconds(dealt: tuple[int, ...]) -> float:
        def of(work: Pass) -> float:
            position = pipeline.virtual_stage(work.stage, work.chunk)
            blocks = dealt[position] + head * (position == pipeline.total_virtual_stages - 1)
            return blocks if work.kind == FORWARD else 2 * blocks

        return pipeline_seconds(simulate(pipeline, of))

    dealt = divide_blocks(
        layers, schedule="interleaved", stages=4, virtual_stages=virtual_stages, head=head
    )
    assert dealt == (2,) * (4 * virtual_stages - 1) + (1,)
    others = [
        tuple(2 - (n == k) for n in range(4 * virtual_stages))
        for k in range(4 * virtual_stages - 1)
    ]
    assert all(seconds(dealt) < seconds(other) for other in others)


def test_a_head_costs_as_many_blocks_as_it_multiplies() -> None:
    model = load_recipe(REPOSITORY / "recipes" / "llama" / "70b.toml").model
    whole = head_in_blocks(model, "none")
    assert whole == pytest.approx(8192 * 128256 / (8192 * (18432 + 3 * 28672) + 2 * 8192 * 8192))
    assert head_in_blocks(model, "full") == pytest.approx(whole * 3 / 4)


def test_an_uneven_division_gives_the_first_parts_one_more() -> None:
    assert divide_evenly(126, 16) == (8,) * 14 + (7,) * 2
    assert divide_evenly(6, 3) == (2, 2, 2)


@pytest.mark.parametrize(
    ("dealt", "stages", "text", "more"),
    [
        ((20, 20, 21, 19), 4, "2 stages of 20 blocks, 1 of 21, 1 of 19", "3.7%"),
        ((2, 2, 2, 2), 2, "2 stages of 2 chunks: 4 chunks of 2 blocks", "11.1%"),
        ((1, 2), 2, "1 stage of 1 block, 1 of 2", "50.0%"),
    ],
)
def test_the_division_is_described_in_a_line(
    dealt: tuple[int, ...], stages: int, text: str, more: str
) -> None:
    schedule = "1f1b" if len(dealt) == stages else "interleaved"
    said = balance_text(dealt, schedule=schedule, stages=stages, head=1.0)
    assert said == f"{text}; the slowest stage has {more} more work than the mean"


@pytest.mark.parametrize("recipe", WITH_PIPELINE, ids=lambda recipe: recipe.name)
def test_the_catalogue_is_balanced(recipe: Recipe) -> None:
    layout = recipe.layout
    head = head_in_blocks(recipe.model, layout.recompute)
    dealt = recipe.blocks_of_virtual_stages
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
