"""Checkpoints: written aside, hashed, published by one rename; verified before they are used.

checkpoints/step-0000100/
  manifest.json     step, tokens, recipe, layout, every file with its size and SHA-256
  manifest.sha256   of manifest.json
  deepspeed/        what DeepSpeed's engine wrote
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipes.training.recipe import Checkpoint, Recipe
from recipes.training.run_folder import RunFolder
from recipes.training.topology import Topology

NAME = re.compile(r"step-\d{7,}")
# What a checkpoint and the recipe that resumes it share; the batch decides which samples are read.
SAME_RUN = ("model", "seed", "data", "batch")


@dataclass(frozen=True)
class Found:
    """What a run resumes from.

    path: a verified checkpoint; None: the run starts from its beginning
    manifest: what it says of itself
    skipped: damaged ones that are newer, and what is wrong with each
    """

    path: Path | None
    manifest: dict[str, Any]
    skipped: dict[Path, str]

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return self.manifest["step"] if self.path else 0

    def changes(self, recipe: Recipe) -> dict[str, list[Any]]:
        """The keys that the recipe has changed since: before, now."""
        if not self.path:
            return {}
        before = dict(_leaves(self.manifest["recipe"]))
        now = dict(_leaves(recipe.model_dump(mode="json")))
        keys = sorted(before.keys() | now.keys())
        return {
            key: [before.get(key), now.get(key)] for key in keys if before.get(key) != now.get(key)
        }


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
    files = hash_files(workspace)
    if dist.get_rank() == 0:
        write_manifest(workspace, files, step, recipe, topology)
        final = folder.checkpoints / name
        if final.exists():  # a damaged one, which was skipped
            _set_aside(final)
        os.rename(workspace, final)
        flush(folder.checkpoints)
        folder.event("save", step, checkpoint=str(final))
        retain(folder.checkpoints, recipe.checkpoint, step)


def hash_files(workspace: Path) -> dict[str, dict[str, Any]]:
    """Flush every file to the disk and hash it; collective, each rank takes some of them."""
    names = sorted(str(f.relative_to(workspace)) for f in workspace.rglob("*") if f.is_file())
    own = {}
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        flush(workspace / name)
        own[name] = {"bytes": (workspace / name).stat().st_size, "sha256": sha256(workspace / name)}
    everyones: list[dict[str, dict[str, Any]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, own)
    together = {name: facts for files in everyones for name, facts in files.items()}
    return {name: together[name] for name in names}


def write_manifest(
    workspace: Path,
    files: dict[str, dict[str, Any]],
    step: int,
    recipe: Recipe,
    topology: Topology,
) -> None:
    """Write down what the checkpoint is and which files belong to it."""
    manifest = {
        "step": step,
        "tokens": step * recipe.tokens_per_step,
        "recipe": recipe.model_dump(mode="json"),
        "layout": layout_of(recipe, topology),
        "files": files,
    }
    file = workspace / "manifest.json"
    file.write_text(json.dumps(manifest, indent=2) + "\n")
    file.with_suffix(".sha256").write_text(sha256(file) + "\n")
    for path in (file, file.with_suffix(".sha256"), *workspace.glob("**/")):
        flush(path)


def sha256(file: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Wait until a file's or a folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def retain(folder: Path, settings: Checkpoint, step: int) -> None:
    """Delete checkpoints beyond the newest `keep` and every `keep_every`-th step's.

    What unfinished saves left goes too. Checkpoints of later steps than this one are damaged ones
    that the run has skipped; they neither go nor count.
    """
    for old in [path for path in published(folder) if step_of(path) <= step][: -settings.keep]:
        if not settings.keep_every or step_of(old) % settings.keep_every:
            shutil.rmtree(old)
    for debris in folder.glob("step-*.incomplete"):
        shutil.rmtree(debris)


def abandon_after(folder: Path, found: Found) -> None:
    """Move later checkpoints out of the way: the run goes another way from there.

    Damaged ones stay where they are.
    """
    for later in published(folder):
        if step_of(later) > found.step and later not in found.skipped:
            _set_aside(later)


def _set_aside(checkpoint: Path) -> None:
    stamp = time.strftime("%Y%m%dT%H%M%S")
    os.rename(checkpoint, checkpoint.with_name(f"abandoned-{stamp}-{checkpoint.name}"))


def published(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name.removeprefix("step-"))


def find(folder: Path, resume: str, recipe: Recipe, topology: Topology) -> Found:
    """The checkpoint to resume from; collective, and the same on all ranks.

    resume: "auto" the newest that verifies, "never" none, or the one at a path

    Raises:
        ValueError: there is none at that path, none verifies, or it belongs to another experiment
            or layout.
    """
    if resume == "never":
        return Found(None, {}, {})
    candidates = list(reversed(published(folder)))
    if resume != "auto":
        if not (Path(resume) / "manifest.json").is_file():
            choices = ", ".join(map(str, reversed(candidates))) or "none here"
            raise ValueError(
                f"--resume {resume}: no checkpoint there; use auto, never or {choices}"
            )
        candidates = [Path(resume)]
    _agree(candidates)
    skipped: dict[Path, str] = {}
    for path in candidates:
        damage = find_damage(path)
        if damage is None:
            manifest = json.loads((path / "manifest.json").read_text())
            check_same_run(path, manifest, recipe, topology)
            return Found(path, manifest, skipped)
        skipped[path] = damage
    if skipped:
        found = "; ".join(f"{path}: {damage}" for path, damage in skipped.items())
        raise ValueError(
            f"no checkpoint here can be trusted ({found}); use --resume with one from elsewhere, "
            f"or --resume never to start again (what is here is kept beside it)"
        )
    return Found(None, {}, {})


def _agree(candidates: list[Path]) -> None:
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, [path.name for path in candidates])
    if any(names != everyones[0] for names in everyones):
        raise ValueError(
            f"the ranks see different checkpoints ({sorted(map(tuple, everyones))}); use a "
            f"--run-dir on storage that all nodes share"
        )


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files; collective, each rank verifies some of them."""
    own = next(_damages(checkpoint, dist.get_rank(), dist.get_world_size()), None)
    everyones: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return next((damage for damage in everyones if damage), None)


def _damages(checkpoint: Path, rank: int, ranks: int) -> Iterator[str]:
    manifest, digest = checkpoint / "manifest.json", checkpoint / "manifest.sha256"
    if not manifest.is_file() or not digest.is_file():
        yield f"{manifest if digest.is_file() else digest} is missing"
        return
    if sha256(manifest) + "\n" != digest.read_text(errors="replace"):
        yield f"{manifest} has changed since it was written"
        return
    files = json.loads(manifest.read_text())["files"]
    for name, facts in sorted(files.items())[rank::ranks]:
        file = checkpoint / name
        if not file.is_file():
            yield f"{file} is missing"
        elif file.stat().st_size != facts["bytes"]:
            yield f"{file} has {file.stat().st_size} bytes instead of {facts['bytes']}"
        elif sha256(file) != facts["sha256"]:
            yield f"{file} has changed since it was written"


def check_same_run(
    checkpoint: Path, manifest: dict[str, Any], recipe: Recipe, topology: Topology
) -> None:
    """Compare a checkpoint with the run that wants to resume from it.

    Raises:
        ValueError: it belongs to another experiment or layout.
    """
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


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.key, value) of a recipe's table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
