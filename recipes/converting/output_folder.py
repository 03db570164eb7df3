"""The output folder of a command, which appears when it is complete."""

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from models.errors import UserError
from recipes.training.run_folder.line_file import flush

RUN_FILES = ("recipe.toml", "metrics.jsonl", "events.jsonl")  # a run folder has one of them


class OutputFiles(NamedTuple):
    """The files that a command writes, by which it recognizes an earlier output of its own.

    Attributes:
        names: matches the names of all files
        marker: name of a file that every output has
        text: text that only this command's marker file contains
    """

    names: re.Pattern[str]
    marker: str
    text: str


@contextmanager
def output_folder(
    path: Path, *, reading: Path | Sequence[Path], files: OutputFiles, overwrite: bool
) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` at the end, or deleted after an error.

    Args:
        path: the output folder
        reading: the input or inputs, which must not be overwritten
        files: the files of the output
        overwrite: replace an existing output, if it has no other files

    Raises:
        UserError: The folder exists, or cannot be written.
    """
    path = path.resolve()
    for source in [reading] if isinstance(reading, Path) else reading:
        _check_source(path, source.resolve())
    _check_replaceable(path, files, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The name is unique, because another process may be writing the same output.
        with tempfile.TemporaryDirectory(
            dir=path.parent,
            prefix=f"{path.name}.",
            suffix=".incomplete",
            ignore_cleanup_errors=True,
        ) as folder:
            workspace, old = Path(folder) / "new", Path(folder) / "old"
            workspace.mkdir()
            yield workspace
            for file in (*workspace.rglob("*"), workspace):
                flush(file)
            if path.exists():
                _check_replaceable(path, files, overwrite)  # it may have changed in the meantime
                os.rename(path, old)
            os.rename(workspace, path)
            flush(path.parent)
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be written ({error.strerror or error}); use a "
            f"writable folder on a disk with free space"
        ) from None


def _check_source(path: Path, source: Path) -> None:
    """Check that the output is neither in an input nor around it."""
    if path.is_relative_to(source) or source.is_relative_to(path):
        raise UserError(f"{path} would overwrite the input {source}; use another folder")


def _check_replaceable(path: Path, files: OutputFiles, overwrite: bool) -> None:
    """Check that the output folder does not exist, or holds only an output of the same command."""
    if path.is_file():
        raise UserError(f"{path} is a file; use a folder")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{path} already exists; use another folder, or --overwrite")
    for folder in path.parents:
        run = folder.parent
        if folder.name == "checkpoints" and any((run / name).exists() for name in RUN_FILES):
            raise UserError(
                f"--overwrite does not replace {path}, which is a checkpoint of the run {run}; use "
                f"another folder"
            )
    for file in sorted(path.iterdir()):
        if file.is_symlink() or not file.is_file() or not files.names.fullmatch(file.name):
            raise UserError(
                f"--overwrite does not replace {path}, because it holds {file.name}, which this "
                f"command does not write; use another folder, or delete {path} yourself"
            )
    marker = path / files.marker
    if not marker.is_file() or files.text not in marker.read_text(
        encoding="utf-8", errors="replace"
    ):
        raise UserError(
            f"--overwrite does not replace {path}, because its {files.marker} was not written by "
            f"this command; use another folder, or delete {path} yourself"
        )
