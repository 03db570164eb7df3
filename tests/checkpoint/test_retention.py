"""The checkpoints that a run keeps, and the disk space that it needs for them."""

import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.cost import parameter_count
from models.errors import UserError
from tests.checkpoint.test_manifest import write_checkpoint
from tests.conftest import changed
from threefold.checkpoint import retention
from threefold.checkpoint.format import Manifest
from threefold.checkpoint.retention import (
    RESERVED_DISK_BYTES,
    check_disk,
    checkpoint_bytes,
    most_checkpoints,
    most_saves,
    retain,
)
from threefold.config.loading import parse_recipe
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.run_folder.history import checkpoint_name, published, step_of

Usage = namedtuple("Usage", ["free"])


def kept(folder: Path) -> list[int]:
    assert not list(folder.glob("*.incomplete"))
    return [step_of(path) for path in published(folder)]


def plan_of(table: dict[str, Any], **checkpoint: Any) -> PhasePlan:
    settings = {f"checkpoint__{key}": value for key, value in checkpoint.items()}
    every = {"checkpoint__every": 1, "training__evaluate_every": 1}
    return PhasePlan(parse_recipe(changed(table, **every, **settings), "small"))


def test_retention_keeps_the_newest_and_every_nth_checkpoint(
    small: dict[str, Any], tmp_path: Path
) -> None:
    steps = (1, 2, 4, 5, 6, 7, 9)
    paths = {step: write_checkpoint(tmp_path, step) for step in steps}
    damaged = [paths[step] for step in (1, 6, 9)]
    settings = {"keep": 2, "keep_every": 4}
    retain(tmp_path, plan_of(small, **settings), step=7, damaged=damaged)
    assert kept(tmp_path) == [1, 4, 5, 6, 7, 9]


LOSSES = {1: None, 2: 3.0, 3: 1.0, 4: 2.0, 5: 1.0, 6: 4.0, 7: None}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"keep_best": 1}, [3, 7]),
        ({"keep_best": 2}, [3, 5, 7]),
        ({"keep_best": 9}, [2, 3, 4, 5, 6, 7]),  # only checkpoints after a validation
        ({"also_at": (1, 2, 4)}, [1, 2, 4, 7]),
        ({"keep_best": 1, "keep_every": 5, "also_at": (2,)}, [2, 3, 5, 7]),
    ],
)
def test_the_best_and_the_listed_checkpoints_are_kept(
    settings: dict[str, Any], expected: list[int], small: dict[str, Any], tmp_path: Path
) -> None:
    for step, loss in LOSSES.items():
        write_checkpoint(tmp_path, step, validation_loss=loss)
    for _ in range(2):
        retain(tmp_path, plan_of(small, keep=1, **settings), step=7, damaged=())
        assert kept(tmp_path) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data": {"validation": {"other": "data/other/validation"}}}, [6, 7]),
        ({"model": {"sequence_length": 16}}, [6, 7]),
        ({"data": {"separate_documents": True}}, [6, 7]),
        ({"optimizer": {"weight_decay": 0.2}}, [2, 7]),
        ({"layout": {"recompute": "full"}}, [2, 7]),
    ],
)
def test_only_comparable_losses_are_ranked(
    changes: dict[str, Any], expected: list[int], small: dict[str, Any], tmp_path: Path
) -> None:
    """Steps 5 to 20 are a later phase; the checkpoint of step 4 belongs to the first one."""
    plan = plan_of(
        small | {"phase": [{"name": "late", "start_step": 5} | changes]}, keep=1, keep_best=1
    )
    for step, loss in enumerate((3.0, 1.0, 2.0, 1.5), start=1):
        write_checkpoint(tmp_path, step, validation_loss=loss)
    retain(tmp_path, plan, step=4, damaged=())
    assert kept(tmp_path) == [2, 4]
    for step, loss in enumerate((5.0, 4.0, 6.0), start=5):
        write_checkpoint(tmp_path, step, validation_loss=loss)
    retain(tmp_path, plan, step=7, damaged=())
    assert kept(tmp_path) == expected


def test_a_damaged_checkpoint_is_not_the_best(small: dict[str, Any], tmp_path: Path) -> None:
    best = write_checkpoint(tmp_path, 1, validation_loss=1.0)
    for step in (2, 3):
        write_checkpoint(tmp_path, step, validation_loss=2.0)
    (best / "manifest.json").write_text("{")
    retain(tmp_path, plan_of(small, keep=1, keep_best=1), step=3, damaged=())
    assert kept(tmp_path) == [2, 3]


def test_a_checkpoint_without_a_manifest_does_not_stop_retention(
    small: dict[str, Any], tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, validation_loss=float(step))
    (tmp_path / checkpoint_name(1) / "manifest.json").unlink()
    retain(tmp_path, plan_of(small, keep=1, keep_best=1), step=3, damaged=())
    assert kept(tmp_path) == [2, 3]


def test_a_manifest_without_a_validation_loss_is_that_of_older_versions(tmp_path: Path) -> None:
    without = write_checkpoint(tmp_path, 1)
    assert "validation_loss" not in (without / "manifest.json").read_text()
    assert Manifest.read(without).validation_loss is None
    assert Manifest.read(write_checkpoint(tmp_path, 2, validation_loss=2.5)).validation_loss == 2.5
    assert Manifest.read(write_checkpoint(tmp_path, 3, validation_loss=0.0)).validation_loss == 0


def recipe_of(table: dict[str, Any], **checkpoint: Any) -> Recipe:
    settings = {f"checkpoint__{key}": value for key, value in checkpoint.items()}
    return parse_recipe(changed(table, training__steps=100, **settings), "small")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every": 20, "keep": 2}, 3),
        ({"every": 20, "keep": 2, "keep_every": 20}, 8),
        ({"every": 20, "keep": 2, "keep_every": 30}, 6),  # steps 30, 60 and 90 are kept
        ({"every": 30, "keep": 1, "keep_every": 50}, 4),  # step 100 is the last one
        ({"every": 20, "keep": 1, "keep_best": 3}, 5),
        ({"every": 20, "keep": 1, "also_at": [1, 2, 4, 200]}, 5),
        ({"every": 20, "keep": 1, "also_at": [1, 40], "keep_every": 40}, 5),
    ],
)
def test_the_largest_number_of_checkpoints(
    settings: dict[str, Any], expected: int, small: dict[str, Any]
) -> None:
    assert most_checkpoints(recipe_of(small, **settings)) == expected


@pytest.mark.parametrize(("step", "expected"), [(0, 7), (1, 6), (20, 5), (30, 4), (90, 1)])
def test_the_most_saves_that_are_left(step: int, expected: int, small: dict[str, Any]) -> None:
    recipe = recipe_of(small, every=30, also_at=[1, 20, 30, 40, 200])
    assert most_saves(recipe, step) == expected
    late = {"name": "late", "start_step": 50, "optimizer": {"learning_rate": 1e-3}}
    staged = recipe_of(small | {"phase": [late]}, every=30, also_at=[1, 20, 30, 40, 200])
    assert most_saves(staged, step) == expected + 1
    regular = recipe_of(small, every=30, keep_every=20, also_at=[1, 20])
    due = [n for n in range(step + 1, 101) if regular.checkpoint.is_save_due(n, 100)]
    assert most_saves(regular, step) == len(due)


@pytest.fixture
def with_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the free space of the disk, in bytes."""

    def set_free(free: float) -> None:
        monkeypatch.setattr(retention.shutil, "disk_usage", lambda _: Usage(int(free)))

    return set_free


def test_a_disk_is_compared_with_the_checkpoints_to_come(
    small: dict[str, Any], tmp_path: Path, with_free: Callable[[float], None]
) -> None:
    recipe, folder = recipe_of(small, every=20, keep=2), tmp_path / "checkpoints"
    size = checkpoint_bytes(recipe)
    assert size == 12 * parameter_count(recipe.model)
    with_free(RESERVED_DISK_BYTES + 3 * size)
    assert check_disk(folder, recipe, step=0) is None
    with_free(RESERVED_DISK_BYTES + 3 * size - 1)
    warning = check_disk(folder, recipe, step=0)
    assert warning and "room for 2 more checkpoints of" in warning
    assert "room for 3 (checkpoint.keep = 2, plus one that is being written);" in warning
    assert " MB, use --set checkpoint.keep=1 to keep only the newest checkpoint, or" in warning
    with_free(RESERVED_DISK_BYTES + 2 * size - 1)
    warning = check_disk(folder, recipe, step=0)
    assert warning and "checkpoint.keep=1" not in warning  # which would not be enough
    with_free(RESERVED_DISK_BYTES + 3 * size - 1)
    assert check_disk(folder, recipe, step=60) is None  # only two more will be saved
    for step in (20, 40, 60):
        (folder / checkpoint_name(step)).mkdir(parents=True)
    with_free(RESERVED_DISK_BYTES + size)
    assert check_disk(folder, recipe, step=60) is None  # the older ones will be deleted
    with_free(RESERVED_DISK_BYTES + size - 1)
    older = re.escape(str(folder / checkpoint_name(20)))
    with pytest.raises(UserError, match=f"delete the older checkpoint {older}.*, or use"):
        check_disk(folder, recipe, step=60)
    with pytest.raises(UserError, match="MB more, or use --run-dir"):
        check_disk(folder, recipe, step=20)  # the run resumes from this one
    with_free(RESERVED_DISK_BYTES + size)
    warning = check_disk(folder, recipe, step=20)  # those of an abandoned branch stay
    assert warning and "room for 1 more checkpoint of" in warning
    assert "2 (checkpoint.keep = 2, plus one that is being written, minus 1 on the disk)" in warning
    listed = recipe_of(small, every=20, keep=2, also_at=[1, 2])
    warning = check_disk(folder, listed, step=20)
    kept = "checkpoint.keep = 2, 2 because of also_at = [1, 2], plus one that is being written"
    assert warning and f"room for 4 ({kept}, minus 1 on the disk)" in warning
    many = recipe_of(small, every=20, keep=1, keep_best=1, keep_every=80)
    warning = check_disk(folder, many, step=20)
    kept = "checkpoint.keep = 1, keep_best = 1, 1 because of keep_every = 80, plus one"
    assert warning and f"room for 3 ({kept}" in warning
    warning = check_disk(tmp_path / "other", recipe, step=60)
    assert warning and "and the run saves up to 2 more; free" in warning


def test_a_disk_without_room_for_a_checkpoint_is_rejected(
    small: dict[str, Any], tmp_path: Path, with_free: Callable[[float], None]
) -> None:
    wide = {size: small["model"] | {"ffn_hidden_size": size} for size in (40_000, 400_000)}
    recipe = recipe_of(small | {"model": wide[40_000]}, every=20)
    size = checkpoint_bytes(recipe)
    with_free(RESERVED_DISK_BYTES + size - 1)
    with pytest.raises(UserError) as rejected:
        check_disk(tmp_path, recipe, step=0)
    assert str(rejected.value) == (
        f"{tmp_path} has 252.2 MB free, but a checkpoint needs 185.1 MB, and 67.2 MB are reserved "
        f"for metrics and logs; free at least 0.1 MB more, or use --run-dir with a folder on a "
        f"larger disk"
    )
    with_free(0)
    with pytest.raises(UserError, match=r"has 0\.0 MB free, .* free at least 1\.9\d\d GB"):
        check_disk(tmp_path, recipe_of(small | {"model": wide[400_000]}, every=20), step=0)


def test_a_disk_that_does_not_answer_is_left_to_the_first_save(
    small: dict[str, Any], tmp_path: Path
) -> None:
    missing = tmp_path / "missing" / "checkpoints"
    with pytest.raises(OSError):
        shutil.disk_usage(missing)
    assert check_disk(missing, recipe_of(small, every=20), step=0) is None
