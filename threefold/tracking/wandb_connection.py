"""Settings of Weights & Biases: its variables, its key, and the identity of a run."""

import os
import re
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from models.errors import UserError
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import code_version
from threefold.run_folder.json_lines import write_whole

MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")  # of WANDB_MODE
OTHER_NAMES = {"dryrun": "offline", "run": "online"}  # of a mode


def check_wandb(recipe: Recipe, folder: Path, *, keeps_id: bool) -> None:
    """Check the settings of Weights & Biases before the engine is built.

    Args:
        recipe: the recipe of the run
        folder: the run folder
        keeps_id: the run continues the W&B run that the folder names

    Raises:
        UserError: a variable or the file with the run's id is wrong.
    """
    if recipe.tracking.mode == "disabled":
        return
    check_variables()
    run_id = folder / "wandb" / "run_id"
    if keeps_id and run_id.exists():
        read_run_id(run_id)


def requested_mode(mode: str) -> tuple[str, str]:
    """Return the mode that a run asks for, and the reason.

    WANDB_MODE overrides the recipe's mode for one run, except that it does not turn on what the
    recipe turns off: on many clusters it is set for all runs.

    Args:
        mode: the recipe's `tracking.mode`

    Returns:
        A mode of `wandb.init`, or "auto". The reason is empty if the recipe's mode is the default,
        or if it is the common case of a mode.
    """
    variable, own = os.environ.get("WANDB_MODE"), f'tracking.mode = "{mode}"'
    if not variable:
        return mode, own if mode == "offline" else ""
    wanted = OTHER_NAMES.get(variable, variable)
    if mode == "disabled":
        ignored = f"{own}; WANDB_MODE = {variable} does not change that"
        return mode, "" if wanted == mode else ignored
    overridden = "" if mode in ("auto", wanted) else f" overrides {own}"
    return wanted, f"WANDB_MODE = {variable}{overridden}"


def check_variables() -> None:
    """Check the variables of W&B, without importing it.

    Raises:
        UserError: WANDB_MODE is not a mode, or WANDB_BASE_URL is not a URL.
    """
    mode, url = os.environ.get("WANDB_MODE"), os.environ.get("WANDB_BASE_URL")
    if mode and mode not in MODES:
        raise UserError(f"WANDB_MODE = {mode} is not one of {', '.join(MODES)}; unset it")
    if not url:
        return
    try:
        parts = urlparse(url)
        problem = "" if parts.scheme in ("http", "https") and parts.hostname else "not a URL"
    except ValueError as error:
        problem = str(error)
    if problem:
        raise UserError(
            f"WANDB_BASE_URL = {url}: {problem}; use https://HOST:PORT, or unset it"
        ) from None


def wandb_arguments(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the arguments of `wandb.init` but the mode; a resumed folder keeps its run id."""
    home = folder / "wandb"
    home.mkdir(exist_ok=True)
    run_id = home / "run_id"
    if not run_id.exists():
        write_whole(run_id, secrets.token_hex(4))
    return common_arguments(recipe, folder) | {"name": recipe.name, "id": read_run_id(run_id)}


def common_arguments(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the arguments of `wandb.init` that follow from a recipe and a folder alone."""
    tracking = recipe.tracking
    owners = {"entity": tracking.team, "group": tracking.group}
    return {name: owner for name, owner in owners.items() if owner} | {
        "project": tracking.project,
        "tags": list(tracking.tags),
        "config": recipe.model_dump(mode="json") | {"code_version": code_version()},
        "dir": str(folder),
    }


def read_wandb_key() -> None:
    """Set WANDB_API_KEY from the file that WANDB_API_KEY_FILE names, unless it is already set.

    Raises:
        UserError: the file cannot be read, other users can read it, or it holds no key.
    """
    name = os.environ.get("WANDB_API_KEY_FILE")
    if not name or os.environ.get("WANDB_API_KEY"):
        return
    file = Path(os.path.expanduser(name))
    try:
        readers, key = file.stat().st_mode & 0o077, file.read_bytes().strip()
    except OSError as error:
        raise UserError(
            f"WANDB_API_KEY_FILE = {name} cannot be read ({error.strerror}); use a file with the "
            f"key and nothing else, or unset it"
        ) from None
    if readers:
        raise UserError(f"WANDB_API_KEY_FILE = {name} can be read by others; use chmod 600 {name}")
    if not re.fullmatch(rb"[!-~]+", key):
        raise UserError(
            f"WANDB_API_KEY_FILE = {name} does not hold a key; use a file with the key and nothing "
            f"else, or unset it"
        )
    os.environ["WANDB_API_KEY"] = key.decode()


def read_run_id(file: Path) -> str:
    """Read the id of a run folder's W&B run.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """
    try:
        run_id = file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); make it readable, or delete it for a new "
            f"W&B run"
        ) from None
    if not re.fullmatch(r"[A-Za-z0-9_-]+", run_id):
        raise UserError(
            f"{file} holds {run_id[:40]!r} instead of the id of a W&B run; write this run's id "
            f"into it, or delete it for a new W&B run"
        )
    return run_id
