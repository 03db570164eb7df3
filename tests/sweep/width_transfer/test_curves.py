"""The models of a transfer check: widths, families, and what is rejected before any process."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from models.errors import UserError
from tests.conftest import changed, small_recipe
from threefold.config.loading import DEFAULT_RECIPE, load_recipe, parse_recipe
from threefold.sweep.width_transfer.models import (
    Models,
    at_width,
    coordinate_trials,
    curves_of,
    loss_trials,
    with_rate,
)

EXPERTS = {"count": 4, "per_token": 2, "ffn_hidden_size": 48}


def write(path: Path, **changes: Any) -> Path:
    table = changed(small_recipe(Path("absent")), name=path.stem, **changes)
    path.write_text(tomli_w.dumps(table))
    return path


def models(*recipes: Path, settings: tuple[str, ...] = (), widths: Any = None) -> Models:
    return Models(recipes=recipes, settings=settings, widths=widths, cluster={})


def test_a_width_scales_all_sizes_of_a_layer_and_keeps_the_head_size() -> None:
    recipe = load_recipe(DEFAULT_RECIPE)
    wide = at_width(recipe, 384, name="tiny").model
    assert (wide.hidden_size, wide.heads, wide.kv_heads, wide.ffn_hidden_size) == (384, 12, 4, 1024)
    assert wide.attention_head_size == recipe.model.attention_head_size
    narrow = at_width(recipe, 96, name="tiny").model
    assert (narrow.hidden_size, narrow.heads, narrow.kv_heads) == (96, 3, 1)
    assert (narrow.layers, narrow.vocab_size) == (recipe.model.layers, recipe.model.vocab_size)
    assert at_width(recipe, 192, name="tiny") is recipe


def test_a_width_scales_experts() -> None:
    recipe = parse_recipe(changed(small_recipe(Path("absent")), model__experts=EXPERTS), "small")
    experts = at_width(recipe, 128, name="small").model.experts
    assert experts is not None and (experts.count, experts.ffn_hidden_size) == (4, 96)
    with pytest.raises(UserError, match=r"experts.ffn_hidden_size = \d+ grow in proportion"):
        at_width(recipe, 65, name="small")


@pytest.mark.parametrize("width", [100, 48, 191])
def test_a_width_without_whole_numbers_of_heads_is_rejected_with_one_that_works(width: int) -> None:
    recipe = load_recipe(DEFAULT_RECIPE)
    with pytest.raises(UserError, match=rf"--widths {width}: .* multiple of 96") as problem:
        at_width(recipe, width, name="tiny")
    suggested = int(str(problem.value).split("; use ")[1].split(" ")[0].strip(","))
    assert at_width(recipe, suggested, name="tiny").model.hidden_size == suggested


def test_a_width_that_the_layout_does_not_divide_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "split.toml", layout__tensor=2)
    with pytest.raises(UserError, match=r"--widths 32: model.kv_heads = 1 is not divisible by"):
        curves_of(models(path, widths=[32]))


def test_widths_of_one_recipe_are_a_family(tmp_path: Path) -> None:
    curves = curves_of(models(write(tmp_path / "a.toml"), widths=[128, 64]))
    assert [curve.label for curve in curves] == ["width 64", "width 128"]
    assert {curve.family for curve in curves} == {""}


def test_recipes_of_different_widths_are_a_family(tmp_path: Path) -> None:
    wide = write(tmp_path / "wide.toml", model__hidden_size=128, model__heads=8)
    curves = curves_of(models(wide, write(tmp_path / "narrow.toml")))
    assert [(each.family, each.width) for each in curves] == [("", 64), ("", 128)]


def test_recipes_of_the_same_width_are_families_of_their_own(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.toml") for name in "ab"]
    curves = curves_of(models(*paths, widths=[64, 128]))
    assert [(each.family, each.width) for each in curves] == [
        ("a", 64), ("a", 128), ("b", 64), ("b", 128)
    ]  # fmt: skip


def test_settings_are_families(tmp_path: Path) -> None:
    settings = ("optimizer.kind=adamw,muon", "training.steps=7")
    curves = curves_of(models(write(tmp_path / "a.toml"), settings=settings, widths=[64, 128]))
    assert [each.label for each in curves] == [
        "optimizer.kind=adamw, width 64", "optimizer.kind=adamw, width 128",
        "optimizer.kind=muon, width 64", "optimizer.kind=muon, width 128",
    ]  # fmt: skip
    assert [each.recipe.optimizer.kind for each in curves] == ["adamw"] * 2 + ["muon"] * 2
    assert {each.recipe.training.steps for each in curves} == {7}


def test_two_models_with_one_name_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='two models are called "width 64"'):
        curves_of(models(write(tmp_path / "a.toml"), widths=[64, 64]))


def test_recipes_with_phases_are_rejected() -> None:
    staged = DEFAULT_RECIPE.with_name("tiny-phases.toml")
    with pytest.raises(UserError, match=r"use a recipe without \[\[phase\]\]"):
        curves_of(models(staged))


def test_the_minimum_learning_rate_keeps_its_ratio_to_the_peak() -> None:
    recipe = load_recipe(DEFAULT_RECIPE)  # from 4e-3 to 4e-4
    optimizer = with_rate(recipe, 1e-4, seed=7).optimizer
    assert optimizer.learning_rate == 1e-4
    assert optimizer.schedule.minimum_learning_rate == pytest.approx(1e-5)


def test_trials_differ_by_rate_seed_and_everything_that_changes_the_losses(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml")

    def keys(*settings: str) -> set[str]:
        (curve,) = curves_of(models(path, settings=settings))
        return {trial.key for trial in loss_trials(curve, [1e-3, 2e-3], 2)}

    assert len(keys()) == 4
    assert keys("name=other", "tracking.mode=offline", "checkpoint.keep=1") == keys()
    for setting in ("training.steps=9", "optimizer.kind=muon", "data.validation=x", "seed=5"):
        assert not keys(setting) & keys()


def test_the_coordinate_check_runs_in_one_process_at_a_constant_rate(tmp_path: Path) -> None:
    path = write(tmp_path / "a.toml", layout={"pipeline": 2, "tensor": 1})
    (curve,) = curves_of(models(path))
    trials = coordinate_trials(curve, 3, 2)
    assert [trial.recipe.seed - curve.recipe.seed for trial in trials] == [0, 1]
    for trial in trials:
        assert trial.workers.size == 1 and trial.recipe.layout.pipeline == 1
        assert trial.recipe.optimizer.schedule.decay == "constant"
        assert trial.recipe.optimizer.schedule.warmup_steps == 0
        assert trial.recipe.training.steps == trial.steps == 3
