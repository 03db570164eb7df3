"""The checkpoint folders of a run: naming, publishing and setting aside.

A folder named `step-0000100` is a complete checkpoint: it was written as `step-0000100.incomplete`
and then renamed. A folder whose name begins with `abandoned-` belongs to an abandoned branch.
"""

import os
import re
import secrets
import shutil
import time
from pathlib import Path

from models.errors import a_few, suggestion
from threefold.config.sections import REPOSITORY, short
from threefold.run_folder.json_lines import flush

NAME = re.compile(r"step-\d{7,}")
INCOMPLETE = "step-*.incomplete"
ABANDONED_PREFIX = "abandoned-"
ABANDONED = ABANDONED_PREFIX + "*"


def publish(workspace: Path, checkpoint: Path) -> None:
    """Publish a complete checkpoint with one rename."""
    if checkpoint.exists():  # a damaged checkpoint, which the run has skipped
        set_aside(checkpoint)
    os.rename(workspace, checkpoint)
    flush(checkpoint.parent)


def remove_debris(folder: Path) -> None:
    """Delete the folders of unfinished saves."""
    for debris in folder.glob(INCOMPLETE):
        shutil.rmtree(debris, ignore_errors=True)


def set_aside(checkpoint: Path, stamp: str | None = None) -> None:
    """Rename a checkpoint so that it is kept, but no longer found by a resuming run.

    Args:
        checkpoint: folder of the checkpoint
        stamp: part of the new name, shared by all checkpoints and the metrics of a branch; None for
            the current time
    """
    name = f"{ABANDONED_PREFIX}{stamp or time_stamp()}-{checkpoint.name}"
    os.rename(checkpoint, checkpoint.with_name(name))


def stamp_of(abandoned: Path) -> str | None:
    """Return the stamp in an abandoned checkpoint's name; None if it is not abandoned."""
    match = re.fullmatch(rf"{ABANDONED_PREFIX}(.+)-{NAME.pattern}", abandoned.name)
    return match[1] if match else None


def time_stamp() -> str:
    """Return the time and a random number, as part of a unique file name."""
    return f"{time.strftime('%Y%m%dT%H%M%S')}.{secrets.token_hex(4)}"


def published(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def no_checkpoint(path: Path) -> str:
    """Say that a path has no checkpoint: what was looked for, where, and what exists there."""
    if not path.exists():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        problem = f"{path} does not exist{where}"
    elif path.is_dir():
        problem = f"{path} has no checkpoint: neither manifest.json nor checkpoints/step-..."
    else:
        problem = f"{path} is a file, not a run folder or a checkpoint"
    parent = next(folder for folder in path.absolute().parents if folder.is_dir())
    for folder in (parent, parent / "checkpoints"):
        if saves := published(folder):
            newest_first = [save.name for save in reversed(saves)]
            return f"{problem}; {short(folder)} has {a_few(newest_first)}"
    for folder in (path, parent / "runs", parent, REPOSITORY / "runs"):
        runs = [run for run in sorted(folder.glob("*")) if published(run / "checkpoints")]
        if runs:
            wanted = "" if path.exists() else str(path)
            return f"{problem}; {suggestion(wanted, [str(short(run)) for run in runs])}"
    return f"{problem}; train a run first, for example with python recipes/pretrain.py"


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:07d}"


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))
