"""Every legal layout of a recipe: those that the recipe's own checks accept, on up to N ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from recipes.training.deepspeed_config import build_deepspeed_config
from recipes.training.recipe import Recipe, parse_recipe
from recipes.training.topology import Topology, World

ZERO_STAGES = (1, 2, 3)
SCHEDULES = ("1f1b", "dualpipev")
RECOMPUTE = (
    {"recompute": "none"},
    {"recompute": "selective"},
    {"recompute": "full", "recompute_interval": 2},
)


@dataclass(frozen=True)
class Variant:
    """A recipe spread in one way."""

    recipe: Recipe
    topology: Topology
    zero_stage: int

    @property
    def world_size(self) -> int:
        """Ranks it takes."""
        return self.topology.world_size

    @property
    def axes(self) -> str:
        """Its sizes: "tensor 2 x pipeline 2 x data 2"."""
        sizes = self.topology
        return f"tensor {sizes.tensor} x pipeline {sizes.pipeline} x data {sizes.data}"

    @property
    def method(self) -> str:
        """How these axes are used: "zero1 1f1b, selective, micro-batch 2"."""
        layout = self.recipe.layout
        parts = [f"zero{self.zero_stage}"]
        if layout.pipeline > 1:
            parts.append(layout.schedule)
        if layout.sequence_parallel:
            parts.append("sequence-parallel")
        if layout.recompute != "none":
            parts.append(f"recompute {layout.recompute}")
        return ", ".join([*parts, f"micro-batch {self.recipe.batch.micro_sequences}"])


def reference(recipe: Recipe) -> Variant:
    """What the others are compared with: one process, ZeRO-1, fp32, nothing split or recomputed."""
    return _variant(recipe, Topology(1, 1, 1), 1, {}, recipe.batch.micro_sequences)


def legal_variants(
    recipe: Recipe, *, ranks: int, micro_sequences: tuple[int, ...]
) -> list[Variant]:
    """Every variant that is legal on 1 .. ranks ranks, smallest worlds first."""
    found = []
    for topology in topologies(ranks):
        for zero, layout, micro in product(ZERO_STAGES, layouts(topology), micro_sequences):
            try:
                found.append(_variant(recipe, topology, zero, layout, micro))
            except ValueError:  # refused, as it would be in a run
                continue
    return found


def topologies(ranks: int) -> Iterator[Topology]:
    """All sizes of the three axes with up to so many ranks."""
    sizes = range(1, ranks + 1)
    every = [Topology(p, d, t) for t, p, d in product(sizes, repeat=3) if t * p * d <= ranks]
    return iter(sorted(every, key=lambda topology: topology.world_size))


def layouts(topology: Topology) -> Iterator[dict[str, Any]]:
    """The [layout] sections that differ in more than name on these axes."""
    schedules = SCHEDULES if topology.pipeline > 1 else SCHEDULES[:1]
    splits = (False, True) if topology.tensor > 1 else (False,)
    for schedule, split, recompute in product(schedules, splits, RECOMPUTE):
        yield {"schedule": schedule, "sequence_parallel": split, **recompute}


def _variant(
    recipe: Recipe, topology: Topology, zero_stage: int, layout: dict[str, Any], micro: int
) -> Variant:
    table = recipe.model_dump(mode="json", exclude_none=True)
    table["layout"] = layout | {"tensor": topology.tensor, "pipeline": topology.pipeline}
    table["batch"]["micro_sequences"] = micro
    table["deepspeed"] = f"ds_configs/zero{zero_stage}_fp32.json"
    variant = parse_recipe(table, recipe.name)
    world = World(size=topology.world_size, local_size=topology.world_size)
    build_deepspeed_config(variant, variant.topology(world))
    return Variant(variant, topology, zero_stage)
