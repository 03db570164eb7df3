"""Layouts of the benchmark of bf16 that a recipe rejects."""

from pathlib import Path

from benchmarks.bf16_layouts import LAYOUTS, all_overrides, rejection


def test_layouts_that_a_recipe_rejects_are_found() -> None:
    recipe = Path("recipes/tiny-fp8.toml")
    reasons = {
        name: rejection(recipe, ranks, all_overrides([], layout, seed=1))
        for name, (ranks, layout) in LAYOUTS.items()
    }
    assert "use model.layers = 4 or more" in reasons.pop("pipeline 2, DualPipeV")
    assert set(reasons.values()) == {""}
