"""The mean of the weights of several checkpoints: exact, verified, and usable as any other."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.errors import UserError
from models.layer_specs import logical_shapes
from tests.commands import run_here
from tests.conftest import changed, small_recipe
from threefold.checkpoint.compatibility import check_same_model, check_same_run
from threefold.checkpoint.format import Manifest, TensorFileWriter, find_damages, tensor_key
from threefold.checkpoint.state import KINDS
from threefold.commands.convert import main
from threefold.config.loading import parse_recipe
from threefold.convert import reshape
from threefold.convert.files import open_checkpoint
from threefold.convert.reshape import average, new_recipe, sources_of
from threefold.run_folder.history import published, set_aside

STEPS = (10, 20, 30)


def write_checkpoint(run: Path, corpus: Path, step: int, **changes: Any) -> Path:
    """Write a checkpoint of random weights and moments, as a run of one rank does."""
    recipe = parse_recipe(changed(small_recipe(corpus), **changes), "test")
    folder = run / "checkpoints" / f"step-{step:07d}"
    folder.mkdir(parents=True)
    shapes = logical_shapes(recipe.model)
    own = {tensor_key(kind, name): shape for kind in KINDS for name, shape in shapes.items()}
    generator = torch.Generator().manual_seed(step)
    with TensorFileWriter(folder / "all.safetensors", own, dtype="F32") as writer:
        for key, shape in own.items():
            writer.write(key, torch.randn(shape, generator=generator).numpy().data)
    Manifest(
        step=step,
        samples=8 * step,
        tokens=8 * 32 * step,
        updates=step,
        loss_scale=None,
        tensors=dict.fromkeys(own, "all.safetensors"),
        files={"all.safetensors": writer.record},
        recipe=recipe.model_dump(mode="json"),
        layout={"tensor": 1},
        data={"tokenizer": "0" * 64, "document_starts": [[]]},
        versions={},
    ).write(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Path:
    for step in STEPS:
        write_checkpoint(tmp_path / "run", corpus, step)
    return tmp_path / "run"


def test_the_mean_is_exact_and_starts_runs(run: Path, corpus: Path, tmp_path: Path) -> None:
    done = run_here(main, "average", run, "--last", 2, "--output", tmp_path / "mean")
    assert done.returncode == 0, done.stderr
    assert "averaged 2 checkpoints, steps 20, 30, into" in done.stdout
    assert list(find_damages(tmp_path / "mean")) == []
    mean, (older, newer) = open_checkpoint(tmp_path / "mean"), sources_of([run], 2)
    manifest = mean.manifest
    assert not manifest.has_moments and (manifest.step, manifest.tokens) == (30, 8 * 32 * 30)
    assert manifest.layout == {"averaged": [str(older.path), str(newer.path)]}
    for name in logical_shapes(parse_recipe(small_recipe(corpus), "test").model):
        both = np.stack([each.tensor("weights", name).double() for each in (older, newer)])
        assert (mean.tensor("weights", name).numpy() == both.mean(axis=0).astype("f4")).all()
    recipe = parse_recipe(
        changed(small_recipe(corpus), training__initial_weights=str(tmp_path / "mean")), "test"
    )
    check_same_model("training.initial_weights", manifest, recipe)
    with pytest.raises(UserError, match="has only weights and no run to resume"):
        check_same_run(tmp_path / "mean", manifest, recipe, manifest.data)


def test_the_mean_is_exported(run: Path, tmp_path: Path) -> None:
    average(sources_of([run], 3), make(tmp_path / "mean"))
    source = open_checkpoint(tmp_path / "mean")
    model_only = {"model": source.manifest.recipe["model"]}  # the tokenizer of the run is a dummy
    replace(source.manifest, recipe=model_only).write(tmp_path / "mean")
    done = run_here(main, "to-hf", tmp_path / "mean", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "training loss" not in card  # that of the run's weights, which are others
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert torch.equal(theirs["lm_head.weight"], source.tensor("weights", "head.weight"))


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_large_tensors_are_averaged_in_blocks(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    average(sources_of([run], 3), make(tmp_path / "whole"))
    monkeypatch.setattr(reshape, "BLOCK_ELEMENTS", 1000)
    average(sources_of([run], 3), make(tmp_path / "blocks"))
    whole, blocks = (json.loads((tmp_path / n / "manifest.json").read_text())["files"]
                     for n in ("whole", "blocks"))  # fmt: skip
    assert whole == blocks


def test_a_checkpoint_of_an_abandoned_branch_is_named(run: Path) -> None:
    for path in published(run / "checkpoints"):
        set_aside(path, "20261130T101500.0a")
    with pytest.raises(
        UserError, match=r"has not saved a checkpoint yet; .*, for example .*0030$"
    ) as raised:
        open_checkpoint(run)
    assert open_checkpoint(Path(str(raised.value).split()[-1])).manifest.step == 30


def test_damaged_checkpoints_are_skipped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert open_checkpoint(run).manifest.step == 30
    assert capsys.readouterr().err == ""
    file = run / "checkpoints" / "step-0000030" / "all.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert open_checkpoint(run).manifest.step == 20
    skipped = (
        f"warning: {file.parent} is damaged and skipped: {file.name} has changed since the save "
        f"(SHA-256); using {run}/checkpoints/step-0000020"
    )
    assert capsys.readouterr() == ("", f"{skipped}\n")
    assert [source.manifest.step for source in sources_of([run], 2)] == [10, 20]
    assert capsys.readouterr().err == f"{skipped}, {run}/checkpoints/step-0000010\n"
    with pytest.raises(UserError, match=r"--last 3: .* has 2 undamaged checkpoints; use --last 2"):
        sources_of([run], 3)
    with pytest.raises(UserError, match="has changed since the save"):
        sources_of([file.parent, run / "checkpoints" / "step-0000010"], None)


def test_checkpoints_are_named_in_any_order(run: Path) -> None:
    named = [run / "checkpoints" / f"step-{step:07d}" for step in (30, 10)]
    assert [source.manifest.step for source in sources_of(named, None)] == [10, 30]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__ffn_hidden_size": 112}, r"model\.ffn_hidden_size = 96 and 112"),
        ({"model__norm_epsilon": 1e-6}, r"model\.norm_epsilon = 1e-05 and 1e-06"),
        (
            {"model__parametrization": "mup", "model__base_hidden_size": 32},
            r'model\.parametrization = "standard" and "mup"',
        ),
        ({"model__dropout": 0.1}, ""),  # only in training
    ],
)
def test_different_models_are_rejected(
    changes: dict[str, Any], message: str, run: Path, corpus: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", corpus, 40, **changes)
    sources = [run / "checkpoints" / "step-0000030", other]
    if not message:
        assert len(sources_of(sources, None)) == 2
        return
    with pytest.raises(UserError, match=f"have different models: {message}"):
        sources_of(sources, None)


def test_different_tokenizers_are_rejected(run: Path) -> None:
    paths = [run / "checkpoints" / f"step-{step:07d}" for step in (20, 30)]
    manifest = Manifest.read(paths[1])
    replace(manifest, data=manifest.data | {"tokenizer": "1" * 64}).write(paths[1])
    with pytest.raises(UserError, match="SHA-256 of the tokenizer"):
        sources_of(paths, None)


def test_mistakes_on_the_command_line_are_named(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step-0000030"
    for words, message in {
        (run,): "a mean needs two or more different checkpoints",
        (checkpoint, checkpoint): "a mean needs two or more different checkpoints",
        (run, checkpoint, "--last", 2): "--last 2 needs one run folder, but 2 folders are given",
        (run, "--last", 1): "a mean needs two or more different checkpoints",
        (run, "--last", 4): "--last 4: ",
    }.items():
        done = run_here(main, "average", *words, "--output", tmp_path / "mean")
        assert done.returncode == 2 and message in done.stderr
    done = run_here(main, "average", run, "--last", 2, "--output", checkpoint / "mean")
    assert done.returncode == 2 and "would overwrite the input" in done.stderr
    assert not (tmp_path / "mean").exists()


def test_a_mean_has_no_run_to_reshape(run: Path, tmp_path: Path) -> None:
    average(sources_of([run], 2), make(tmp_path / "mean"))
    with pytest.raises(UserError, match="has only weights, so there is no run to reshape"):
        new_recipe(open_checkpoint(tmp_path / "mean"), [], ranks=1)
