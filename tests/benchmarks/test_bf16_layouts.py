"""Layouts of the benchmark of bf16 that a recipe rejects."""

from pathlib import Path

import pytest

from benchmarks import bf16_layouts
from models.errors import UserError


def test_layouts_that_a_recipe_rejects_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path("recipes/tiny-fp8.toml")
    allowed = {
        name
        for name, (ranks, layout) in bf16_layouts.LAYOUTS.items()
        if bf16_layouts.is_allowed(recipe, name, ranks, bf16_layouts.settings([], layout, 1))
    }
    assert bf16_layouts.LAYOUTS.keys() - allowed == {"pipeline 2, DualPipeV"}
    assert "use model.layers = 4 or more" in capsys.readouterr().err
    with pytest.raises(UserError, match="global_sequences"):
        bf16_layouts.is_allowed(
            recipe, "one process", 1, bf16_layouts.settings(["batch.global_sequences=3"], [], 1)
        )
