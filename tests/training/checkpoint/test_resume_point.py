"""The point from which a run resumes, with settings that have changed since."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from recipes.training.checkpoint.compatibility import check_same_run
from recipes.training.checkpoint.reader import CheckpointReader
from recipes.training.checkpoint.resume_point import ResumePoint
from recipes.training.data.dataset import TrainingData
from recipes.training.data.fingerprint import fingerprint
from recipes.training.recipe.topology import Topology
from recipes.training.run_folder.progress import Progress
from recipes.training.run_folder.provenance import layout_of
from tests.training.checkpoint.test_compatibility import HERE, manifest_of, recipe_of


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
        return [sample for each in data.step(step) for sample in each.info.dropout.samples]

    alone = Topology(pipeline=1, data=1, tensor=1)
    before = TrainingData(recipe_of(corpus), alone, 0)
    assert samples(before, 4)[-1] == 31
    after = TrainingData(recipe_of(corpus, batch__global_sequences=16), alone, 0)
    after.resume(before.progress_after(4))
    assert samples(after, 5) == list(range(32, 48)) and samples(after, 6)[0] == 48
    assert after.progress_after(6) == Progress(step=6, samples=64)
    ((source, index),) = after.places(np.array([32]))
    window = next(after.step(5)).tokens[0]
    assert window.tolist() == after.sources()[source].read(index)[:-1].tolist()
