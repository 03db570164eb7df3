"""Checkpoints on the disk: writing and detection of damage."""

import json
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from models.errors import UserError
from threefold.checkpoint import format as format_module
from threefold.checkpoint.format import Manifest, TensorFileWriter, find_damages, sha256
from threefold.checkpoint.state import AVERAGE, WEIGHTS, CheckpointReader, first_damage
from threefold.config.loading import DEFAULT_RECIPE, load_recipe
from threefold.run_folder import history

SHAPES = {"embedding.weight": (50, 8), "blocks.0.norm.weight": (8,)}


def write_checkpoint(folder: Path, step: int, **facts: Any) -> Path:
    """Write a small checkpoint with two files of tensors."""
    checkpoint = folder / history.checkpoint_name(step)
    checkpoint.mkdir(parents=True)
    generator = torch.Generator().manual_seed(step)
    files, tensors = {}, {}
    for name in ("weights-00000.safetensors", "moments-00000.safetensors"):
        shapes = SHAPES if "weights" in name else {f"exp_avg/{k}": v for k, v in SHAPES.items()}
        with TensorFileWriter(checkpoint / name, shapes, dtype="F32") as writer:
            for key, shape in shapes.items():
                writer.write(key, memoryview(torch.randn(shape, generator=generator).numpy()))
        files[name] = writer.record
        tensors |= dict.fromkeys(shapes, name)
    model = load_recipe(DEFAULT_RECIPE).model_dump(mode="json")["model"]
    nothing: dict[str, Any] = {"layout": {}, "data": {}, "versions": {}}
    Manifest(
        step=step, samples=8 * step, tokens=256 * step, updates=step, loss_scale=None,
        tensors=tensors, files=files, recipe={"model": model}, **nothing, **facts,
    ).write(checkpoint)  # fmt: skip
    return checkpoint


def flips(file: Path, *, count: int, seed: int) -> Iterator[int]:
    """Flip random bits one at a time, restoring each bit before the next flip."""
    content, chance = file.read_bytes(), random.Random(seed)
    for _ in range(count):
        bit = chance.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        yield bit
    file.write_bytes(content)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, 4)


def test_tensors_are_read_in_the_order_of_writing(checkpoint: Path) -> None:
    assert list(find_damages(checkpoint)) == []
    with safe_open(checkpoint / "weights-00000.safetensors", framework="pt") as file:
        assert {key: tuple(file.get_tensor(key).shape) for key in file.keys()} == SHAPES  # noqa: SIM118
    read = Manifest.read(checkpoint)
    assert read.has_moments and read.progress.samples == 32


def test_a_start_parses_a_manifest_once(checkpoint: Path) -> None:
    with mock.patch.object(json, "loads", side_effect=json.loads) as loads:
        reader = CheckpointReader.verified(checkpoint)
        assert reader.manifest.step == 4 and loads.call_count == 1
        text = (checkpoint / "manifest.json").read_text()
        (checkpoint / "manifest.json").write_text(text.replace('"step": 4', '"step": 5'))
        assert Manifest.read(checkpoint).step == 5


def test_every_flipped_bit_of_every_file_is_detected(checkpoint: Path) -> None:
    names = sorted(file.name for file in checkpoint.iterdir())
    assert len(names) == 4
    for number, name in enumerate(names):
        for bit in flips(checkpoint / name, count=100, seed=number):
            (damage,) = find_damages(checkpoint)
            assert damage.startswith(f"{checkpoint / name} "), (name, bit)
    assert list(find_damages(checkpoint)) == []


@pytest.mark.parametrize("left", [0, 1, -1])  # bytes
def test_truncated_and_longer_files_are_detected(checkpoint: Path, left: int) -> None:
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:left])
        (damage,) = find_damages(checkpoint)
        assert file.stem in damage
        file.write_bytes(content + b"\n")
        assert len(list(find_damages(checkpoint))) == 1
        file.write_bytes(content)


def test_missing_files_are_detected(checkpoint: Path) -> None:
    for file in sorted(checkpoint.iterdir()):
        content = file.read_bytes()
        file.unlink()
        assert list(find_damages(checkpoint)) == [f"{file} is missing"]
        file.write_bytes(content)


def test_a_folder_named_after_another_step_is_detected(checkpoint: Path) -> None:
    renamed = checkpoint.rename(checkpoint.with_name("step-0000010"))
    assert list(find_damages(renamed)) == [f"{renamed / 'manifest.json'} belongs to step 4"]
    assert list(find_damages(renamed.rename(renamed.with_name("abandoned-x")))) == []


def test_shares_of_the_ranks_cover_all_files(checkpoint: Path) -> None:
    for name in ("weights-00000.safetensors", "moments-00000.safetensors"):
        (checkpoint / name).write_bytes(b"")
    found = [len(list(find_damages(checkpoint, share=share, shares=2))) for share in range(2)]
    assert found == [1, 1] and len(list(find_damages(checkpoint))) == 2


def test_progress_is_reported_before_each_file_is_verified(checkpoint: Path) -> None:
    noted: list[str] = []
    assert list(find_damages(checkpoint, note=noted.append)) == []
    files = ("moments-00000.safetensors", "weights-00000.safetensors")
    assert noted == [f"verifying {checkpoint.name}/{file}" for file in files]


def test_a_checkpoint_of_a_later_format_is_rejected(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(
        UserError, match="format = 2, but this version of Threefold reads format = 1"
    ):
        Manifest.read(checkpoint)


def test_a_manifest_of_an_older_version_has_the_former_names_of_keys(tmp_path: Path) -> None:
    manifest = Manifest.read(write_checkpoint(tmp_path, 4))
    layout = {"schedule": "interleaved", "chunks": 3, "shard_group": 2}
    manifest = replace(manifest, recipe=manifest.recipe | {"layout": layout})
    read = Manifest.parse(manifest.text().encode(), tmp_path / "manifest.json")
    now = {"schedule": "interleaved", "virtual_stages": 3, "dp_shard": 2}
    assert read.recipe["layout"] == now


def test_a_checkpoint_below_a_path_that_is_not_valid_utf8_is_read(tmp_path: Path) -> None:
    path = "/runs/caf\udce9/step-0000004"  # as Python decodes the byte 0xE9
    manifest = Manifest.read(write_checkpoint(tmp_path, 4, parent={"checkpoint": path}))
    assert manifest.parent == {"checkpoint": path}
    recipe = manifest.recipe | {"training": {"initial_weights": path}}
    manifest = replace(manifest, recipe=recipe, layout={"averaged": [path]})
    assert Manifest.parse(manifest.text().encode(), tmp_path / "manifest.json") == manifest


def test_damage_without_a_key_is_described_alone(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    deep = "[" * 300 + "]" * 300
    file.write_text(file.read_text().replace('"layout": {}', f'"layout": {{"deep": {deep}}}'))
    with pytest.raises(UserError, match=r"json is damaged \(Invalid JSON: recursion limit[^=]*;"):
        Manifest.read(checkpoint)


def test_a_damaged_checkpoint_of_the_same_step_is_set_aside(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, 4)
    workspace = tmp_path / "step-0000004.0a1b.incomplete"
    shutil.copytree(checkpoint, workspace)
    (checkpoint / "manifest.json").unlink()
    history.publish(workspace, checkpoint)
    assert list(find_damages(checkpoint)) == []
    (aside,) = tmp_path.glob("abandoned-*")
    assert not (aside / "manifest.json").exists()


def test_an_incomplete_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    (tmp_path / "step-0000008.0a1b.incomplete").mkdir()
    (tmp_path / "abandoned-20260101T000000-step-0000006").mkdir()
    (tmp_path / "step-0000009").write_text("a file")
    assert [path.name for path in history.published(tmp_path)] == ["step-0000004"]
    history.remove_debris(tmp_path)
    assert not list(tmp_path.glob("*.incomplete"))


def test_a_process_alone_hashes_several_files_at_the_same_time(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)  # broken if the files are hashed one after the other

    def hashed(file: Path) -> str:
        if file.suffix == ".safetensors":
            both.wait(timeout=60)
        return sha256(file)

    monkeypatch.setattr(format_module, "sha256", hashed)
    assert first_damage(checkpoint) is None


@pytest.mark.parametrize(
    ("kinds", "verified"),
    [
        ((), ["moments-00000.safetensors", "weights-00000.safetensors"]),
        ((WEIGHTS,), ["weights-00000.safetensors"]),
        (("exp_avg", AVERAGE), ["moments-00000.safetensors"]),
        ((AVERAGE,), []),
    ],
)
def test_the_files_of_some_kinds_are_verified(
    kinds: tuple[str, ...], verified: list[str], checkpoint: Path
) -> None:
    notes = list[str]()
    assert not list(find_damages(checkpoint, kinds=kinds, note=notes.append))
    assert notes == [f"verifying {checkpoint.name}/{name}" for name in verified]
    for name in ("moments-00000.safetensors", "weights-00000.safetensors"):
        file, content = checkpoint / name, (checkpoint / name).read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        damage = f"{file} has changed since the save (SHA-256)"
        assert first_damage(checkpoint, kinds) == (damage if name in verified else None)
        file.write_bytes(content)
