"""Layouts for the nodes that are left."""

import pytest

from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.launch.replanning import Replanner
from threefold.plan.memory.peak import limit_after_shortage

SEVEN_B = REPOSITORY / "recipes/llama/7b.toml"
SMALL_NODES = ["cluster.gpus_per_node=4"]  # whose layouts are found sooner
TINY = ["cluster.nodes=4", "cluster.gpus_per_node=1", "cluster.gpu=cpu", "layout.pipeline=1"]


def test_the_recipes_own_nodes_have_its_own_layout() -> None:
    replanner = Replanner(SEVEN_B, [])
    nodes = replanner.cluster.nodes
    placement = replanner.best(nodes + 3, 1)
    assert placement is not None
    assert (placement.nodes, placement.overrides) == (nodes, [f"cluster.nodes={nodes}"])


@pytest.mark.parametrize(
    "file",
    [
        "llama/7b.toml",
        pytest.param("llama/70b.toml", marks=pytest.mark.long),
        pytest.param("qwen3/32b.toml", marks=pytest.mark.long),
    ],
)
def test_every_placement_is_a_valid_recipe(file: str) -> None:
    replanner = Replanner(REPOSITORY / "recipes" / file, SMALL_NODES)
    size = replanner.cluster.gpus_per_node
    found = 0
    nodes = replanner.cluster.nodes
    numbers = {1, nodes // 4, nodes // 2, nodes - 1, nodes}  # each search takes seconds
    for available in sorted(numbers - {0}):
        placement = replanner.best(available, 1)
        if placement is None:
            continue
        found += 1
        recipe = load_recipe(REPOSITORY / "recipes" / file, [*SMALL_NODES, *placement.overrides])
        assert recipe.cluster is not None
        assert recipe.cluster.nodes == placement.nodes <= available
        dims = recipe.parallel_dims(LaunchEnvironment(size=placement.nodes * size, local_size=size))
        assert f"data {dims.data}" in placement.layout
        assert recipe.batch.global_sequences == replanner.recipe.batch.global_sequences
    assert found > len(numbers) // 2


def test_a_placement_needs_the_minimum_and_a_layout_that_fits() -> None:
    replanner = Replanner(REPOSITORY / "recipes/llama/70b.toml", [])
    assert replanner.best(1, 1) is None  # 70B do not fit on 8 GPUs
    half = replanner.cluster.nodes // 2
    assert replanner.best(half, half + 1) is None
    assert replanner.best(0, 1) is None


def test_a_similar_layout_is_preferred_to_the_fastest() -> None:
    """With micro-batches of 8, tiny.toml's own layout is within the error of the fastest."""
    placement = Replanner(
        REPOSITORY / "recipes/tiny.toml", [*TINY, "batch.micro_sequences=8"]
    ).best(2, 1)
    assert placement is not None
    assert placement.overrides == ["cluster.nodes=2"]
    assert placement.layout.startswith("pipeline 1 x data 2 x tensor 1")


def test_numbers_of_nodes_without_a_layout_are_skipped() -> None:
    replanner = Replanner(
        REPOSITORY / "recipes/tiny.toml",
        [*TINY, "cluster.nodes=8", "batch.global_sequences=8", "batch.micro_sequences=1",
         "model.layers=1", "model.sequence_length=257"],
    )  # fmt: skip
    placement = replanner.best(7, 1)  # neither 7, 6 nor 5 ranks divide 8 sequences
    assert placement is not None
    assert placement.nodes == 4


def test_after_memory_ran_out_the_next_layout_needs_less() -> None:
    replanner = Replanner(SEVEN_B, SMALL_NODES)
    nodes = replanner.cluster.nodes
    own = replanner.placement_on(nodes)
    assert own is not None and not own.chosen
    first = replanner.placement_on(nodes - 1)
    assert first is not None and first.chosen and first.memory.counted > 0
    replanner.exclude(first)
    second = replanner.placement_on(nodes - 1)
    assert second is not None and second.chosen
    assert second.memory.total <= limit_after_shortage(first.memory)
    assert second.overrides != first.overrides
    assert replanner.placement_on(nodes) == own  # the recipe's layout is not excluded
    replanner.exclude(second)
    third = replanner.placement_on(nodes - 1)
    assert third is None or third.memory.total <= limit_after_shortage(second.memory)


def test_layouts_that_need_as_much_memory_on_other_numbers_of_nodes_are_excluded_too() -> None:
    replanner = Replanner(SEVEN_B, SMALL_NODES)
    first = replanner.placement_on(replanner.cluster.nodes - 1)
    assert first is not None
    replanner.exclude(first)
    for nodes in range(1, replanner.cluster.nodes):
        other = replanner.placement_on(nodes)
        assert other is None or other.memory.total <= limit_after_shortage(first.memory)
