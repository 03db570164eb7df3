"""Saves that go wrong: a full disk, found before or in the middle."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from recipes.training.manifest import damages, published, step_of
from tests.conftest import changed, small_recipe
from tests.ranks import start_ranks
from tests.test_pretrain import events, metrics

# pretrain.py on a file system that says it has room, as one with a quota does.
BLIND = """
from recipes import pretrain
from recipes.training.checkpoint_writer import CheckpointWriter

CheckpointWriter._lack_of_room = lambda self: None
pretrain.main()
"""
DISK_BYTES = 72 * 2**20
ROOM_BYTES = 500_000  # that is left, for less than half a checkpoint


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def recipe_file(corpus: Path, tmp_path: Path) -> Path:
    table = changed(
        small_recipe(corpus),
        layout__pipeline=2,
        training__steps=8,
        training__evaluate_every=0,
        checkpoint__every=2,
        checkpoint__keep=1,
    )
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(table))
    return file


def run(recipe: Path, folder: Path, *settings: str, code: int = 0, blind: bool = False) -> str:
    """Two ranks of the command; all they say."""
    options = [word for setting in settings for word in ("--set", setting)]
    start = ["-c", BLIND] if blind else ["recipes/pretrain.py"]
    arguments = [*start, str(recipe), "--run-dir", str(folder), *options]
    codes, outputs = start_ranks(2, arguments, folder=folder.parent, seconds=300)
    assert codes == [code, code], outputs
    assert "Traceback" not in "".join(outputs), outputs
    return "".join(outputs)


def steps_of(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there, all of them undamaged."""
    found = published(folder / "checkpoints")
    assert not [damage for path in found for damage in damages(path)]
    return [step_of(path) for path in found]


@pytest.mark.parametrize("blind", [False, True], ids=["seen before", "in the middle"])
def test_a_full_disk_costs_no_checkpoint(
    blind: bool, disk: Path, recipe_file: Path, tmp_path: Path
) -> None:
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "run"
    run(recipe_file, undisturbed)
    (disk / "checkpoints").mkdir()
    folder.mkdir()
    (folder / "checkpoints").symlink_to(disk / "checkpoints")
    run(recipe_file, folder, "training.steps=3")
    assert steps_of(folder) == [3]
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - ROOM_BYTES))
    reason = "No space left on device" if blind else "GB free and a checkpoint needs"

    stop = "checkpoint.on_failure=stop"
    output = run(recipe_file, folder, stop, code=3, blind=blind)
    assert f"step 4 is not saved: {'rank' if blind else ''}" in output and reason in output
    assert events(folder)[-1] == ("stop", 6 if blind else 4) and steps_of(folder) == [3]

    output = run(recipe_file, folder, code=3, blind=blind)
    told = events(folder)
    assert ("warning", 6) in told and told[-1] == ("stop", 8) and steps_of(folder) == [3]
    assert "step 8 is not saved" in output and reason in output
    assert not list((folder / "checkpoints").glob("*.incomplete"))
    assert metrics(folder) == metrics(undisturbed)

    ballast.unlink()
    output = run(recipe_file, folder, blind=blind)
    assert "resumed after step 3" in output and steps_of(folder) == [8]
    assert metrics(folder) == metrics(undisturbed)
