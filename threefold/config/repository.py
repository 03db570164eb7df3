"""The root of the repository, from which relative paths of a recipe start."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def repository_path(path: str) -> Path:
    """Return a path of a recipe as an absolute path; relative ones start at the repository root.

    If the locale's encoding lacks a character of the path, the path is encoded in UTF-8.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        path = os.fsdecode(path.encode("utf-8", "surrogateescape"))
    return (REPOSITORY / path).resolve()


def short(path: Path) -> Path:
    """Return a path relative to the current folder if it is inside, as a user would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
