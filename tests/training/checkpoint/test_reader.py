"""Checkpoints from which a run may resume, and the settings that may have changed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import UserError
from recipes.training.checkpoint.manifest import Manifest
from recipes.training.checkpoint.reader import CheckpointReader, ResumePoint, check_same_run
from recipes.training.data.dataset import TrainingData
from recipes.training.data.fingerprint import fingerprint
from recipes.training.recipe.loading import parse_recipe
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.progress import Progress
from recipes.training.run_folder.provenance import layout_of
from tests.conftest import changed, small_recipe

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
    assert f"was trained with {named}; use the same values, --run-dir" in str(refused.value)


def test_other_data_are_rejected_and_moved_data_are_accepted(corpus: Path, tmp_path: Path) -> None:
    saved = manifest_of(recipe_of(corpus))
    moved = shutil.copytree(corpus, tmp_path / "moved")
    now = recipe_of(moved)
    check_same_run(HERE, saved, now, fingerprint(now))
    for file, key in (
        ("train.bin", "data.train.0.content"),
        ("train.idx", "data.train.0.content"),
        ("tokenizer/tokenizer.json", "data.tokenizer"),
    ):
        content = (moved / file).read_bytes()
        (moved / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match=key):
            check_same_run(HERE, saved, now, fingerprint(now))
        (moved / file).write_bytes(content)
    heavier = changed(small_recipe(moved), data__train=[
        {"path": str(moved / "train"), "weight": 2.0}])  # fmt: skip
    other = parse_recipe(heavier, "small")
    with pytest.raises(UserError, match=r"weight = 1\.0 \(here 2\.0\)"):
        check_same_run(HERE, saved, other, fingerprint(other))


def test_separate_documents_cannot_change_on_resume(corpus: Path) -> None:
    across, separate = recipe_of(corpus), recipe_of(corpus, data__separate_documents=True)
    before = manifest_of(across)
    older = replace(before, data={k: v for k, v in before.data.items() if k in OLDER_DATA_KEYS})
    assert older.data != before.data
    for saved in (before, older):
        check_same_run(HERE, saved, across, fingerprint(across))
        with pytest.raises(UserError, match=r"data\.separate_documents = False \(here True\)"):
            check_same_run(HERE, saved, separate, fingerprint(separate))
    with pytest.raises(UserError, match=r"data\.separate_documents = True \(here False\)"):
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


def test_permitted_changes_are_accepted_and_reported(corpus: Path) -> None:
    saved = recipe_of(corpus)
    now = recipe_of(
        corpus,
        layout__tensor=2,
        batch__global_sequences=16,
        optimizer__learning_rate=1e-3,
        training__steps=99,
        deepspeed="ds_configs/zero1_bf16.json",
    )
    check_same_run(HERE, manifest_of(saved), now, fingerprint(now))
    told = ResumePoint(CheckpointReader(HERE, manifest_of(saved))).changes(now)
    assert told == {
        "batch.global_sequences": [8, 16],
        "deepspeed": ["ds_configs/zero1_fp32.json", "ds_configs/zero1_bf16.json"],
        "layout.tensor": [1, 2],
        "optimizer.learning_rate": [0.004, 0.001],
        "training.steps": [20, 99],
    }


def test_an_edited_deepspeed_json_is_reported(corpus: Path, tmp_path: Path) -> None:
    config = json.loads(Path("ds_configs/zero1_fp32.json").read_text())
    file = tmp_path / "own.json"
    file.write_text(json.dumps(config))
    recipe = recipe_of(corpus, deepspeed=str(file))
    layout = layout_of(recipe, Topology(pipeline=1, data=1, tensor=1))
    saved = replace(manifest_of(recipe), layout=layout)
    assert ResumePoint(CheckpointReader(HERE, saved)).changes(recipe) == {}
    file.write_text(json.dumps(config | {"bf16": {"enabled": True}}))
    assert ResumePoint(CheckpointReader(HERE, saved)).changes(recipe) == {
        "deepspeed_json.bf16.enabled": [None, True]
    }


def test_a_new_batch_size_resumes_at_the_next_sample(corpus: Path) -> None:
    def samples(data: TrainingData, step: int) -> list[int]:
        return [sample for each in data.step(step) for sample in each.context.dropout.samples]

    alone = Topology(pipeline=1, data=1, tensor=1)
    before = TrainingData(recipe_of(corpus), alone, 0)
    assert samples(before, 4)[-1] == 31
    after = TrainingData(recipe_of(corpus, batch__global_sequences=16), alone, 0)
    after.resume(before.progress_after(4))
    assert samples(after, 5) == list(range(32, 48)) and samples(after, 6)[0] == 48
    assert after.progress_after(6) == Progress(step=6, samples=64)
    ((source, index),) = after.places(np.array([32]))
    window = next(after.step(5)).tokens[0]
    assert window.tolist() == after.sources[source].read(index)[:-1].tolist()
