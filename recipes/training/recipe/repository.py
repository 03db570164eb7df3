"""The root of the repository, from which relative paths of a recipe start."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def repository_path(path: str) -> Path:
    """Return a path of a recipe as an absolute path; relative ones start at the repository root."""
    return (REPOSITORY / path).resolve()
