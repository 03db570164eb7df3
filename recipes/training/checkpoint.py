"""Checkpoints: written aside, published by one rename, found by name.

checkpoints/step-0000100/
  manifest.json   step, tokens, recipe, layout, files with their sizes
  deepspeed/      what DeepSpeed's engine wrote
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipes.training.recipe import Recipe
from recipes.training.run_folder import RunFolder
from recipes.training.topology import Topology

NAME = re.compile(r"step-\d{7,}")
# What a checkpoint and the recipe that resumes it share; the batch decides which samples are read.
SAME_RUN = ("model", "seed", "data", "batch")


def save(
    write: Callable[[Path], None],
    folder: RunFolder,
    step: int,
    recipe: Recipe,
    topology: Topology,
) -> None:
    """Have every rank write its part aside, then publish them together; collective.

    write: writes this rank's part into the folder it is given
    """
    name = f"step-{step:07d}"
    workspace = folder.checkpoints / f"{name}.incomplete"
    if dist.get_rank() == 0:
        shutil.rmtree(workspace, ignore_errors=True)
        workspace.mkdir(parents=True)
    dist.barrier()
    write(workspace)
    dist.barrier()
    if dist.get_rank() == 0:
        write_manifest(workspace, step, recipe, topology)
        final = folder.checkpoints / name
        shutil.rmtree(final, ignore_errors=True)
        os.rename(workspace, final)
        folder.event("save", step, checkpoint=str(final))
        retain(folder.checkpoints, recipe.checkpoint.keep)


def write_manifest(workspace: Path, step: int, recipe: Recipe, topology: Topology) -> None:
    """Write down what the checkpoint is and which files belong to it."""
    files = {
        str(file.relative_to(workspace)): file.stat().st_size
        for file in sorted(workspace.rglob("*"))
        if file.is_file()
    }
    manifest = {
        "step": step,
        "tokens": step * recipe.tokens_per_step,
        "recipe": recipe.model_dump(mode="json"),
        "layout": layout_of(recipe, topology),
        "files": files,
    }
    (workspace / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def retain(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what unfinished saves left."""
    for old in published(folder)[:-keep]:
        shutil.rmtree(old)
    for debris in folder.glob("step-*.incomplete"):
        shutil.rmtree(debris)


def abandon_after(folder: Path, step: int) -> None:
    """Move checkpoints of later steps out of the way: the run goes another way from `step`."""
    for later in published(folder):
        if int(later.name.removeprefix("step-")) > step:
            os.rename(later, folder / f"abandoned-{time.strftime('%Y%m%dT%H%M%S')}-{later.name}")


def agree(step: int) -> None:
    """Check that all ranks resume from the same step; collective.

    Raises:
        ValueError: they do not.
    """
    steps: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    if len(set(steps)) > 1:
        raise ValueError(
            f"the ranks see different newest checkpoints, of steps {sorted(set(steps))}; use a "
            f"--run-dir on storage that all nodes share"
        )


def published(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint to resume from: "auto" the newest, "never" none, or the one at a path.

    Raises:
        ValueError: there is none at that path.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return next(iter(reversed(published(folder))), None)
    if not (Path(resume) / "manifest.json").is_file():
        choices = ", ".join(map(str, published(folder))) or "none here"
        raise ValueError(f"--resume {resume}: no checkpoint there; use auto, never or {choices}")
    return Path(resume)


def read_manifest(checkpoint: Path, recipe: Recipe, topology: Topology) -> dict[str, Any]:
    """Read a checkpoint's manifest and compare it with the run that wants to resume.

    Raises:
        ValueError: a file is missing or short, or the checkpoint belongs to another experiment
            or layout.
    """
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        missing = {"step", "recipe", "layout", "files"} - manifest.keys()
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{checkpoint}: its manifest.json cannot be read ({error}); delete {checkpoint} to "
            f"resume from the one before it"
        ) from None
    for name, size in manifest["files"].items():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != size:
            raise ValueError(
                f"{file} is missing or does not have its {size} bytes; delete {checkpoint} to "
                f"resume from the one before it"
            )
    saved, now = manifest["recipe"], recipe.model_dump(mode="json")
    for key in SAME_RUN:
        if saved[key] != now[key]:
            raise ValueError(
                f"{checkpoint} was trained with {_difference(key, saved[key], now[key])}; use "
                f"that, --run-dir for a new run, or --resume never to start again"
            )
    if manifest["layout"] != layout_of(recipe, topology):
        raise ValueError(
            f"{checkpoint} was saved with {manifest['layout']}, this run has "
            f"{layout_of(recipe, topology)}; use the same layout, --run-dir for a new run, or "
            f"--resume never to start again"
        )
    return manifest


def layout_of(recipe: Recipe, topology: Topology) -> dict[str, Any]:
    """What decides which part of the model and the optimizer each rank holds."""
    return asdict(topology) | {
        "schedule": recipe.layout.schedule,
        "deepspeed": recipe.deepspeed,
    }


def _difference(key: str, saved: Any, now: Any) -> str:
    """The first setting below `key` that differs, with both values."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in saved:
            if saved[name] != now.get(name):
                return _difference(f"{key}.{name}", saved[name], now.get(name))
    return f"{key} = {saved!r}, this recipe has {now!r}"
