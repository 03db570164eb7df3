"""The provenance of a run's numbers: versions of code and libraries, and the layout."""

import platform
import subprocess
from importlib.metadata import version
from typing import Any

from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.loading import REPOSITORY
from threefold.config.parallel_dims import Topology
from threefold.config.recipe import Recipe


def code_version() -> str | None:
    """Return the repository's commit, with "-dirty" if it has changes; None outside git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of this code, of Python and of the numerical libraries."""
    libraries = {name: version(name) for name in ("torch", "deepspeed", "numpy")}
    return {"threefold": code_version(), "python": platform.python_version()} | libraries


def layout_of(recipe: Recipe, topology: Topology) -> dict[str, Any]:
    """Return the layout of a run, with the content of the DeepSpeed JSON."""
    return topology.axes | {
        "schedule": recipe.layout.schedule,
        "deepspeed": recipe.deepspeed,
        "deepspeed_json": read_deepspeed_json(recipe.deepspeed),
    }
