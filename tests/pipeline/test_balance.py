"""The division of blocks makes the slowest stage fastest, and the imbalance is reported."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from models.cost import block_multiply_adds, flops_per_token, head_multiply_adds
from tests.conftest import shipped_recipes
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.recipe import Recipe
from threefold.pipeline.balance import (
    LayerCosts,
    balance_text,
    divide_blocks,
    divide_evenly,
    evenly_spaced,
    imbalance,
    layer_costs,
    packed,
    stage_loads,
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
    costs = LayerCosts((1.0,) * layers, head)
    dealt = divide_blocks(costs, schedule=schedule, stages=stages, virtual_stages=virtual_stages)
    assert sum(dealt) == layers and len(dealt) == stages * virtual_stages and min(dealt) >= 1
    found = imbalance(dealt, costs, schedule=schedule, stages=stages)
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

    costs = LayerCosts((1.0,) * layers, head)
    dealt = divide_blocks(costs, schedule="interleaved", stages=4, virtual_stages=virtual_stages)
    assert dealt == (2,) * (4 * virtual_stages - 1) + (1,)
    others = [
        tuple(2 - (n == k) for n in range(4 * virtual_stages))
        for k in range(4 * virtual_stages - 1)
    ]
    assert all(seconds(dealt) < seconds(other) for other in others)


def test_a_head_costs_as_many_blocks_as_it_multiplies() -> None:
    model = load_recipe(REPOSITORY / "recipes" / "llama" / "70b.toml").model
    whole = layer_costs(model, "none").head
    assert whole == pytest.approx(8192 * 128256 / (8192 * (18432 + 3 * 28672) + 2 * 8192 * 8192))
    assert layer_costs(model, "full").head == pytest.approx(whole * 3 / 4)


def test_an_uneven_division_gives_the_first_parts_one_more() -> None:
    assert divide_evenly(126, 16) == (8,) * 14 + (7,) * 2
    assert divide_evenly(6, 3) == (2, 2, 2)


@pytest.mark.parametrize(
    ("dealt", "stages", "text", "more"),
    [
        (
            (20, 20, 21, 19),
            4,
            "2 stages of 20 blocks, 1 stage of 21 blocks, 1 stage of 19 blocks",
            "3.7%",
        ),
        ((2, 2, 2, 2), 2, "2 stages of 2 chunks: 4 chunks of 2 blocks", "11.1%"),
        ((1, 2), 2, "1 stage of 1 block, 1 stage of 2 blocks", "50.0%"),
    ],
)
def test_the_division_is_described_in_a_line(
    dealt: tuple[int, ...], stages: int, text: str, more: str
) -> None:
    schedule = "1f1b" if len(dealt) == stages else "interleaved"
    costs = LayerCosts((1.0,) * sum(dealt), 1.0)
    said = balance_text(dealt, costs, schedule=schedule, stages=stages)
    assert said == f"{text}; the slowest stage has {more} more work than the mean"


@pytest.mark.parametrize("recipe", WITH_PIPELINE, ids=lambda recipe: recipe.name)
def test_the_catalogue_is_balanced(recipe: Recipe) -> None:
    layout = recipe.layout
    costs = recipe.layer_costs
    dealt = recipe.blocks_of_virtual_stages
    assert sum(dealt) == recipe.model.layers and min(dealt) > 0
    found = imbalance(dealt, costs, schedule=layout.schedule, stages=layout.pipeline)
    stage = (sum(costs.blocks) + costs.head) / layout.pipeline
    assert 1 <= found <= (stage + 1) / stage  # less than a block from the mean


def test_the_head_costs_what_the_flops_say() -> None:
    model = WITH_PIPELINE[0].model
    without = replace(model, layers=1)
    block = flops_per_token(replace(model, layers=2)) - flops_per_token(without)
    assert block == 6 * block_multiply_adds(model)
    assert flops_per_token(without) - block == 6 * head_multiply_adds(model)
    head = layer_costs(model, "none").head
    assert head == pytest.approx(flops_per_token(without) / block - 1)
    assert layer_costs(model, "full").head == pytest.approx(head * 3 / 4)


WINDOW, FULL = 0.7, 1.0  # relative costs of blocks


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("layers", [12, 13])
@pytest.mark.parametrize("pattern", [(WINDOW, WINDOW, WINDOW, FULL), (1.6, *(11 * (FULL,)))])
def test_blocks_that_differ_are_divided_by_cost(
    schedule: str, layers: int, pattern: tuple[float, ...]
) -> None:
    """The slowest stage is as fast as possible, with several chunks within half a block."""
    costs = LayerCosts((pattern * layers)[:layers], head=0.5)
    virtual_stages = 1 if schedule == "1f1b" else 2
    shape = {"schedule": schedule, "stages": 3}
    dealt = divide_blocks(costs, **shape, virtual_stages=virtual_stages)
    assert sum(dealt) == layers and len(dealt) == 3 * virtual_stages and min(dealt) >= 1
    slowest = max(stage_loads(dealt, costs, **shape))
    best = min(
        max(stage_loads(counts, costs, **shape))
        for ends in combinations(range(1, layers), 3 * virtual_stages - 1)
        for counts in [[b - a for a, b in pairwise((0, *ends, layers))]]
    )
    assert best - 1e-6 <= slowest <= best + 1e-6 + (virtual_stages - 1) * min(pattern) / 2


def test_the_costs_of_blocks_are_relative_to_the_last_one() -> None:
    """The model has a dense layer, whose MLP is narrower than its experts together."""
    model = load_recipe(REPOSITORY / "recipes" / "dots" / "llm1.toml").model
    dense, *others = layer_costs(model, "none").blocks
    assert 0.9 < dense < 1 and set(others) == {1.0}
    without = replace(model, layers=2), replace(model, layers=3)
    of_all = flops_per_token(model) / 6 - head_multiply_adds(model)
    block = (flops_per_token(without[1]) - flops_per_token(without[0])) / 6
    assert (dense + len(others)) * block == pytest.approx(of_all)


def test_numbers_are_spaced_evenly_and_include_both_ends() -> None:
    assert evenly_spaced(5, 16) == [0, 1, 2, 3, 4]
    assert evenly_spaced(15, 8) == [0, 2, 4, 6, 8, 10, 12, 14]
    for count, most in ((64, 16), *((count, 8) for count in range(1, 100))):
        numbers = evenly_spaced(count, most)
        assert len(set(numbers)) == len(numbers) == min(count, most)
        assert (numbers[0], numbers[-1]) == (0, count - 1)


def test_items_are_packed_in_order_up_to_a_size() -> None:
    assert packed([3, 1, 4, 9, 0, 2, 2], int, 4) == [[3, 1], [4], [9], [0, 2, 2]]
    assert packed([], int, 4) == []
