"""Checkpoints from which a run may resume, and checkpoints of other experiments."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from tests.conftest import changed, small_recipe
from threefold.checkpoint.compatibility import (
    changed_positions,
    check_same_model,
    check_same_run,
)
from threefold.checkpoint.format import Manifest
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.data.corpus import fingerprint

HERE = Path("step-0000004")
OLDER_DATA_KEYS = ("tokenizer", "train")  # keys of `data` in manifests of older versions


def recipe_of(corpus: Path, **changes: Any) -> Recipe:
    return parse_recipe(changed(small_recipe(corpus), **changes), "small")


def manifest_of(recipe: Recipe) -> Manifest:
    return Manifest(
        step=4, samples=32, tokens=1024, updates=4, loss_scale=None, layout={}, versions={},
        recipe=recipe.model_dump(mode="json"), data=fingerprint(recipe), files={},
        tensors={"exp_avg/embedding.weight": "moments-00000.safetensors"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 5}, "seed = 1234 (here 5)"),
        ({"model__layers": 3}, "model.layers = 2 (here 3)"),
        ({"model__dropout": 0.1}, "model.dropout = 0.0 (here 0.1)"),
        (
            {"model__norm_epsilon": 1e-6, "seed": 5},
            "model.norm_epsilon = 1e-05 (here 1e-06), seed = 1234 (here 5)",
        ),
    ],
)
def test_a_checkpoint_of_another_experiment_is_rejected_with_each_key(
    changes: dict[str, Any], named: str, corpus: Path
) -> None:
    saved, now = recipe_of(corpus), recipe_of(corpus, **changes)
    with pytest.raises(UserError) as refused:
        check_same_run(HERE, manifest_of(saved), now, fingerprint(now))
    assert f"was trained with {named}; use the same values, another --run-dir" in str(refused.value)


def test_other_data_are_rejected_and_moved_data_are_accepted(corpus: Path, tmp_path: Path) -> None:
    saved = manifest_of(recipe_of(corpus))
    moved = shutil.copytree(corpus, tmp_path / "moved")
    now = recipe_of(moved)
    check_same_run(HERE, saved, now, fingerprint(now))
    for file, at, key in (
        ("train.bin", -1, "other data: the content of data.train.0 differs "),
        ("train.idx", -16, r"\[\[phase\]\] that begins after step "),  # the last document's start
        ("tokenizer/tokenizer.json", -1, "another tokenizer, which cannot change during a run; "),
    ):
        content = (moved / file).read_bytes()
        changed_bytes = bytearray(content)
        changed_bytes[at] ^= 1
        (moved / file).write_bytes(changed_bytes)
        with pytest.raises(UserError, match=key):
            check_same_run(HERE, saved, now, fingerprint(now))
        (moved / file).write_bytes(content)
    heavier = changed(small_recipe(moved), data__train=[
        {"path": str(moved / "train"), "weight": 2.0}])  # fmt: skip
    other = parse_recipe(heavier, "small")
    with pytest.raises(UserError, match=r"weight = 1\.0 \(here 2\.0\)"):
        check_same_run(HERE, saved, other, fingerprint(other))


def test_an_imported_checkpoint_resumes_on_any_data(corpus: Path) -> None:
    now = recipe_of(corpus, data__separate_documents=True)
    foreign = replace(manifest_of(recipe_of(corpus)), data={})
    check_same_run(HERE, foreign, now, fingerprint(now))
    with pytest.raises(UserError, match=r"seed = 1234 \(here 5\)"):
        check_same_run(HERE, foreign, recipe_of(corpus, seed=5), fingerprint(now))


def test_separate_documents_cannot_change_on_resume(corpus: Path) -> None:
    across, separate = recipe_of(corpus), recipe_of(corpus, data__separate_documents=True)
    before = manifest_of(across)
    older = replace(before, data={k: v for k, v in before.data.items() if k in OLDER_DATA_KEYS})
    assert older.data != before.data
    for saved in (before, older):
        check_same_run(HERE, saved, across, fingerprint(across))
        with pytest.raises(UserError, match=r"data\.separate_documents = false \(here true\)"):
            check_same_run(HERE, saved, separate, fingerprint(separate))
    with pytest.raises(UserError, match=r"data\.separate_documents = true \(here false\)"):
        check_same_run(HERE, manifest_of(separate), across, fingerprint(across))


def test_a_change_in_the_middle_of_a_corpus_is_detected(corpus: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(corpus, tmp_path / "moved")
    before = fingerprint(recipe_of(moved))
    content = bytearray((moved / "train.bin").read_bytes())
    middle = len(content) // 2
    content[middle - 200 : middle + 200] = bytes(400)
    (moved / "train.bin").write_bytes(content)
    assert fingerprint(recipe_of(moved)) != before


def test_spelling_out_a_default_gives_the_same_model(corpus: Path) -> None:
    saved, now = recipe_of(corpus), recipe_of(corpus, model__head_size=16)
    assert saved.model.head_size is None and saved.model.attention_head_size == 16
    check_same_run(HERE, manifest_of(saved), now, fingerprint(now))


BASE_KEYS = ("parametrization", "base_hidden_size", "base_layers", "base_head_size")


def test_an_older_checkpoint_has_the_defaults_of_later_keys(corpus: Path) -> None:
    """It has only the keys that every recipe sets."""
    now = recipe_of(corpus)
    manifest = manifest_of(now)
    required = small_recipe(corpus)["model"].keys()
    older = {key: manifest.recipe["model"][key] for key in required}
    assert older.keys() < manifest.recipe["model"].keys()
    before = replace(manifest, recipe=manifest.recipe | {"model": older})
    check_same_run(HERE, before, now, fingerprint(now))
    check_same_model("training.initial_weights", before, now)
    other = recipe_of(corpus, model__qk_norm=True)
    with pytest.raises(UserError, match=r"model\.qk_norm = false \(here true\)"):
        check_same_run(HERE, before, other, fingerprint(other))
    with pytest.raises(UserError, match=r"model\.qk_norm = false \(here true\)"):
        check_same_model("training.initial_weights", before, other)


WINDOWS = {"model__attention_pattern": ["window", "full"], "model__window": {"size": 16}}
SCALED = {"model__rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        (WINDOWS | {"model__layers": 2, "model__z_loss": 1e-5}, ""),
        (WINDOWS | {"model__attention_pattern": ["window", "full"]}, ""),
        (
            {**WINDOWS, "model__window": {"size": 16, "rope_theta": 5e4}},
            "model.window.rope_theta = not set (here 50000.0)",
        ),
        (
            {**WINDOWS, **SCALED, "model__window": {"size": 16, "rope_scaled": False}},
            "model.window.rope_scaled = true (here false)",
        ),
        # Without scaling, the key has no effect.
        ({**WINDOWS, "model__window": {"size": 16, "rope_scaled": False}}, ""),
    ],
)
def test_rotary_positions_of_windows_may_change(
    changes: dict[str, Any], described: str, corpus: Path
) -> None:
    saved = manifest_of(recipe_of(corpus, **WINDOWS))
    now = recipe_of(corpus, **changes)
    check_same_model("training.initial_weights", saved, now)
    found = changed_positions(saved, now)
    assert described in found and bool(described) == bool(found)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({**WINDOWS, "model__window": {"size": 8}}, "model.window.size = 16 (here 8)"),
        (
            WINDOWS | {"model__attention_pattern": ["full", "window"]},
            'model.attention_pattern = ["window", "full"] (here ["full", "window"])',
        ),
        ({}, 'model.attention_pattern = ["window", "full"] (here ["full"])'),
        (
            WINDOWS | {"model__partial_rotary_factor": 0.5},
            "model.partial_rotary_factor = 1.0 (here 0.5)",
        ),
        (WINDOWS | {"model__attention_sinks": True}, "model.attention_sinks = false (here true)"),
        (WINDOWS | {"model__qkv_bias": True}, "model.qkv_bias = false (here true)"),
    ],
)
def test_other_attention_is_another_model(
    changes: dict[str, Any], named: str, corpus: Path
) -> None:
    saved = manifest_of(recipe_of(corpus, **WINDOWS))
    now = recipe_of(corpus, **changes)
    with pytest.raises(UserError, match=re.escape(named)):
        check_same_model("training.initial_weights", saved, now)
    with pytest.raises(UserError, match=re.escape(named)):
        check_same_run(HERE, saved, now, fingerprint(now))


def test_equal_patterns_are_the_same_model(corpus: Path) -> None:
    saved = manifest_of(recipe_of(corpus, **{**WINDOWS, "model__layers": 4}))
    longer = {"model__attention_pattern": ["window", "full", "window", "full"], "model__layers": 4}
    now = recipe_of(corpus, **{**WINDOWS, **longer, "model__qkv_bias": False})
    check_same_run(HERE, saved, now, fingerprint(now))


def test_a_checkpoint_without_a_parametrization_is_of_the_standard_one(corpus: Path) -> None:
    now = recipe_of(corpus)
    mup = recipe_of(corpus, model__parametrization="mup", model__base_hidden_size=32)
    manifest = manifest_of(now)
    older = {key: value for key, value in manifest.recipe["model"].items() if key not in BASE_KEYS}
    before = replace(manifest, recipe=manifest.recipe | {"model": older})
    check_same_run(HERE, before, now, fingerprint(now))
    check_same_model("training.initial_weights", before, now)
    named = r'model\.parametrization = "standard" \(here "mup"\)'
    for saved in (before, manifest):
        with pytest.raises(UserError, match=named):
            check_same_run(HERE, saved, mup, fingerprint(mup))
        with pytest.raises(UserError, match=named):
            check_same_model("training.initial_weights", saved, mup)


def test_other_base_sizes_are_another_model(corpus: Path) -> None:
    saved = recipe_of(corpus, model__parametrization="mup", model__base_hidden_size=32)
    same, other = (
        recipe_of(corpus, model__parametrization="mup", **sizes)
        for sizes in (
            {"model__base_hidden_size": 32, "model__base_head_size": 16},  # the default
            {"model__base_hidden_size": 64},
        )
    )
    for check in (
        lambda now: check_same_run(HERE, manifest_of(saved), now, fingerprint(now)),
        lambda now: check_same_model("training.initial_weights", manifest_of(saved), now),
    ):
        check(same)
        with pytest.raises(UserError, match=r"base_hidden_size = 32 \(here 64\)"):
            check(other)


@pytest.mark.parametrize(("saved", "now"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_another_optimizer_is_rejected(saved: str, now: str, corpus: Path) -> None:
    before, after = (recipe_of(corpus, optimizer__kind=kind) for kind in (saved, now))
    check_same_run(HERE, manifest_of(before), before, fingerprint(before))
    message = f'optimizer.kind = "{saved}", not of "{now}"; use optimizer.kind = "{saved}", or'
    with pytest.raises(UserError, match=message):
        check_same_run(HERE, manifest_of(before), after, fingerprint(after))


def test_an_older_checkpoint_has_the_state_of_adamw(corpus: Path) -> None:
    recipe = recipe_of(corpus)
    saved = manifest_of(recipe)
    del saved.recipe["optimizer"]["kind"]
    check_same_run(HERE, saved, recipe, fingerprint(recipe))
    muon = recipe_of(corpus, optimizer__kind="muon")
    with pytest.raises(UserError, match=r'the optimizer state of optimizer\.kind = "adamw"'):
        check_same_run(HERE, saved, muon, fingerprint(muon))
