"""The checkpoint folders of a run: their names, and how they appear, move and disappear.

A folder named `step-0000100` is a complete checkpoint: it was written as `step-0000100.incomplete`
and then renamed. A folder whose name begins with `abandoned-` belongs to a branch that was left.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from recipes.training.recipe.sections import Checkpoint
from recipes.training.run_folder.line_file import flush

NAME = re.compile(r"step-\d{7,}")
INCOMPLETE = "step-*.incomplete"
ABANDONED_PREFIX = "abandoned-"
ABANDONED = ABANDONED_PREFIX + "*"


def publish(workspace: Path, checkpoint: Path) -> None:
    """Make a complete checkpoint exist, by one rename."""
    if checkpoint.exists():  # a damaged one, which the run has skipped
        set_aside(checkpoint)
    os.rename(workspace, checkpoint)
    flush(checkpoint.parent)


def retain(folder: Path, settings: Checkpoint, *, step: int, damaged: Collection[Path]) -> None:
    """Delete checkpoints beyond the newest `keep` up to a step and every `keep_every`-th step's.

    damaged: these neither go nor count
    """
    sound = [path for path in published(folder) if path not in damaged and step_of(path) <= step]
    for old in sound[: -settings.keep]:
        if not settings.keep_every or step_of(old) % settings.keep_every:
            doomed = old.with_name(f"{old.name}.incomplete")  # never half a checkpoint
            os.rename(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def remove_debris(folder: Path) -> None:
    """Delete what unfinished saves have left."""
    for debris in folder.glob(INCOMPLETE):
        shutil.rmtree(debris, ignore_errors=True)


def set_aside(checkpoint: Path, stamp: str | None = None) -> None:
    """Rename a checkpoint that is to be kept, but no longer to be found.

    Args:
        checkpoint: its folder
        stamp: part of the new name; checkpoints of one branch share it with its metrics
    """
    name = f"{ABANDONED_PREFIX}{stamp or time_stamp()}-{checkpoint.name}"
    os.rename(checkpoint, checkpoint.with_name(name))


def stamp_of(abandoned: Path) -> str | None:
    """Return the stamp in the name of an abandoned checkpoint; None if the name is another."""
    match = re.fullmatch(rf"{ABANDONED_PREFIX}(.+)-{NAME.pattern}", abandoned.name)
    return match[1] if match else None


def time_stamp() -> str:
    """Return the time and a random number, for a name that does not exist yet."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}.{secrets.token_hex(4)}"


def published(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def checkpoint_name(step: int) -> str:
    """Of the checkpoint after a step."""
    return f"step-{step:07d}"


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(checkpoint.name.removeprefix("step-"))
