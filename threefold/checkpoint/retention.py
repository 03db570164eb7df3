"""The checkpoints that a run keeps, and the disk space that they need.

The newest `checkpoint.keep` checkpoints are kept, the `checkpoint.keep_best` with the lowest
comparable validation loss, those of steps that are multiples of `checkpoint.keep_every`, and those
of the steps in `checkpoint.also_at`.
"""

import json
import math
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from models.cost import checkpoint_elements
from models.errors import UserError, counted
from threefold.checkpoint.format import BYTES, Manifest
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.run_folder.history import published, step_of

RESERVED_DISK_BYTES = 64 * 2**20  # for the manifest, metrics and logs
RESERVED_BYTES_AT_THE_END = 2**20  # likewise, during a save after which no step follows
LACK_OF_ROOM = "free, but a checkpoint needs"
TO_FREE = "; free at least "


def retain(folder: Path, plan: PhasePlan, *, step: int, damaged: Collection[Path]) -> None:
    """Delete the checkpoints that are not kept.

    Args:
        folder: the run's checkpoints
        plan: the phases of the run, whose recipe says which checkpoints are kept
        step: step of the newest checkpoint; those of later steps are neither deleted nor counted
        damaged: these checkpoints are neither deleted nor counted

    Raises:
        OSError: a checkpoint cannot be read or renamed.
    """
    sound = [path for path in published(folder) if path not in damaged and step_of(path) <= step]
    settings = plan.recipe.checkpoint
    kept = {*sound[-settings.keep :], *best(sound, settings.keep_best, plan, step=step)}
    for old in sound:
        if old not in kept and not settings.is_always_kept(step_of(old)):
            # Renamed first, so that a partly deleted checkpoint is never taken for a complete one.
            doomed = old.with_name(f"{old.name}.incomplete")
            os.rename(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def best(checkpoints: Sequence[Path], count: int, plan: PhasePlan, *, step: int) -> list[Path]:
    """Return the checkpoints with the lowest validation losses; of equal ones, the oldest.

    Only those whose losses are comparable with the loss after `step` are ranked.
    """
    if not count:
        return []
    validated = _validated_on(plan.at(step).recipe)
    losses = {
        path: validation_loss(path)
        for path in checkpoints
        if _validated_on(plan.at(step_of(path)).recipe) == validated
    }
    known = [(loss, path) for path, loss in losses.items() if loss is not None]
    return [path for _, path in sorted(known, key=lambda pair: pair[0])[:count]]


def _validated_on(recipe: Recipe) -> tuple[dict[str, str], int, bool]:
    """Return the settings of a phase that decide on which text its losses are measured."""
    data = recipe.data
    return data.validation_sets, recipe.model.sequence_length, data.separate_documents


def validation_loss(checkpoint: Path) -> float | None:
    """Return the validation loss in a checkpoint's manifest; None if it has none or is damaged."""
    try:
        return Manifest.read(checkpoint).validation_loss
    except (UserError, OSError):
        return None


def checkpoint_bytes(recipe: Recipe) -> int:
    """Return the size of a checkpoint's tensors, which is the same in every layout."""
    has_average = recipe.optimizer.average is not None
    return BYTES["F32"] * checkpoint_elements(
        recipe.model, recipe.optimizer.kind, has_average=has_average
    )


def lack_of_room(folder: Path, recipe: Recipe, *, reserve: int = RESERVED_DISK_BYTES) -> str | None:
    """Return a message if the disk has no room for one more checkpoint; None if it has.

    Args:
        folder: a folder on the disk
        reserve: bytes that have to stay free

    Raises:
        OSError: the free space of the folder's disk cannot be determined.
    """
    free, size = shutil.disk_usage(folder).free, checkpoint_bytes(recipe)
    if free >= size + reserve:
        return None
    return (
        f"{folder} has {_size(free)} {LACK_OF_ROOM} {_size(size)}, and {_size(reserve)} are "
        f"reserved for metrics and logs{TO_FREE}{_size(size + reserve - free)} more"
    )


def room_of_a_start(recipe: Recipe) -> str:
    """Return the free space that `check_disk` requires when a run starts."""
    return _size(checkpoint_bytes(recipe) + RESERVED_DISK_BYTES)


def _size(size: int) -> str:
    """Return a size in MB or GB, rounded up so that freeing this much is enough."""
    if size < 1e9:
        return f"{math.ceil(size / 1e5) / 10} MB"
    return f"{math.ceil(size / 1e6) / 1e3:.3f} GB"


def check_disk(folder: Path, recipe: Recipe, *, step: int) -> str | None:
    """Compare the free disk space with the space that the run's checkpoints will need.

    Args:
        folder: the run's checkpoints; if it does not exist yet, its parent's disk counts
        step: the last completed step; the checkpoints up to this step are on the disk

    Returns:
        A warning if the disk has no room for all of them; None if it has.

    Raises:
        UserError: the disk has no room for a single one.
    """
    disk = folder if folder.exists() else folder.parent
    try:
        if lack := lack_of_room(disk, recipe):
            is_kept = recipe.checkpoint.is_always_kept
            steps = {path: step_of(path) for path in published(folder)}
            older = [path for path, its in steps.items() if its < step and not is_kept(its)]
            delete = f" (for example, delete the older checkpoint {older[0]})" if older else ""
            raise UserError(f"{lack}{delete}, or use --run-dir with a folder on a larger disk")
        free = shutil.disk_usage(disk).free - RESERVED_DISK_BYTES
    except OSError:  # the first save reports a disk that cannot be used
        return None
    size = checkpoint_bytes(recipe)
    present = sum(step_of(path) <= step for path in published(folder))
    kept, saves = most_checkpoints(recipe) - present, most_saves(recipe, step)
    needed = min(max(1, kept), saves)
    if needed * size <= free:
        return None
    use = f"saves up to {saves} more"
    if kept <= saves:
        use = f"needs room for {needed} ({_summands(recipe, present)})"
    keep = recipe.checkpoint.keep
    fewer = ""
    if kept <= saves and keep > 1 and (needed - keep + 1) * size <= free:
        fewer = "use --set checkpoint.keep=1 to keep only the newest checkpoint, "
    return (
        f"{folder} has room for {counted(free // size, 'more checkpoint')} of {_size(size)}, and "
        f"the run {use}; free at least {_size(needed * size - free)}, {fewer}or use --run-dir with "
        f"a folder on a larger disk"
    )


def _summands(recipe: Recipe, present: int) -> str:
    """Return the numbers whose sum is `most_checkpoints`, less the checkpoints on the disk."""
    settings, always = recipe.checkpoint, _always_kept(recipe)
    keys = [
        f"{key} = {json.dumps(value)}"
        for key in ("keep_every", "also_at")
        if (value := getattr(settings, key)) not in (0, ())
    ]
    summands = [f"checkpoint.keep = {settings.keep}"]
    if settings.keep_best:
        summands.append(f"keep_best = {settings.keep_best}")
    if always:
        summands.append(f"{always} because of {' and '.join(keys)}")
    summands.append("plus one that is being written")
    if present:
        summands.append(f"minus {present} on the disk")
    return ", ".join(summands)


def most_checkpoints(recipe: Recipe) -> int:
    """Return the largest number of checkpoints on the disk at a time, including an unfinished one.

    A checkpoint that is kept for two reasons may be counted twice.
    """
    return _always_kept(recipe) + recipe.checkpoint.keep_best + recipe.checkpoint.keep + 1


def _always_kept(recipe: Recipe) -> int:
    """Return the number of checkpoints that `keep_every` and `also_at` keep until the end."""
    settings, steps = recipe.checkpoint, recipe.training.steps
    kept_every = settings.keep_every or steps + 1
    others = {step for step in settings.also_at if step <= steps and step % kept_every}
    return steps // kept_every + len(others)


def most_saves(recipe: Recipe, step: int) -> int:
    """Return the largest number of checkpoints that a run saves after a step.

    The end of each phase is counted, although it is saved only if the next one needs other ranks.
    """
    settings, steps = recipe.checkpoint, recipe.training.steps
    every, kept_every = settings.every, settings.keep_every or steps + 1
    both = math.lcm(every, kept_every)
    regular, regular_before = (n // every + n // kept_every - n // both for n in (steps, step))
    others = {
        n for n in (*settings.also_at, steps) if step < n <= steps and n % every and n % kept_every
    }
    return regular - regular_before + len(others) + len(recipe.phase)
