"""The output folder of a command, which appears when it is complete."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from models.errors import UserError
from threefold.checkpoint.format import FileRecord, sha256
from threefold.config.sections import short
from threefold.run_folder.json_lines import flush

RUN_FILES = ("recipe.toml", "metrics.jsonl", "events.jsonl")  # a run folder has one of them


class OutputFiles(NamedTuple):
    """The marks by which a command recognizes the files of an earlier output of its own.

    Attributes:
        marker: name of a file that every output has
        text: text that only this command's marker file contains
        records: returns the size and the SHA-256 of each file that the command wrote into a folder
            with the marker; raises a UserError if the marker is damaged
    """

    marker: str
    text: str
    records: Callable[[Path], Mapping[str, FileRecord | None]]


@contextmanager
def output_folder(
    path: Path, *, reading: Path | Sequence[Path], files: OutputFiles, overwrite: bool
) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` at the end, or deleted after an error.

    Args:
        path: the output folder
        reading: the input or inputs, which must not be overwritten
        files: the files of the output
        overwrite: replace an existing folder that holds only unchanged files of this command

    Raises:
        UserError: The folder exists, or cannot be written.
    """
    path = path.resolve()
    for source in [reading] if isinstance(reading, Path) else reading:
        _check_source(path, source.resolve())
    try:
        checked = _versions(path)  # first, so that a change during the check is noticed below
        _check_replaceable(short(path), files, overwrite)
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
                if _versions(path) != checked:  # it has changed in the meantime
                    _check_replaceable(short(path), files, overwrite)
                os.rename(path, old)
            os.rename(workspace, path)
            flush(path.parent)
    except OSError as error:
        raise UserError(
            f"{error.filename or short(path)} cannot be written ({error.strerror or error}); use a "
            f"writable folder on a disk with free space"
        ) from None


def _check_source(path: Path, source: Path) -> None:
    """Check that the output is neither in an input nor around it."""
    if path.is_relative_to(source) or source.is_relative_to(path):
        raise UserError(
            f"{short(path)} would overwrite the input {short(source)}; use another folder"
        )


def _check_replaceable(path: Path, files: OutputFiles, overwrite: bool) -> None:
    """Check that the folder does not exist, or holds only an unchanged output of the command."""
    if path.is_file():
        raise UserError(f"{path} is a file; use a folder")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{path} already exists; use another folder, or --overwrite")
    for folder in path.absolute().parents:
        run = folder.parent
        if folder.name == "checkpoints" and any((run / name).exists() for name in RUN_FILES):
            raise UserError(
                f"--overwrite does not replace {path}, which is a checkpoint of the run "
                f"{short(run)}; use another folder"
            )
    refusal = f"--overwrite does not replace {path}, because"
    remedy = f"use another folder, or delete this one yourself with rm -r {quote(str(path))}"
    for file in sorted(path.iterdir()):
        if file.is_symlink() or not file.is_file():
            raise UserError(
                f"{refusal} it holds {file.name}, which this command does not write; {remedy}"
            )
    marker = path / files.marker
    if not marker.is_file():
        is_export = (path / "config.json").is_file()
        older = " (an export of an earlier version has none)" if is_export else ""
        raise UserError(
            f"{refusal} it has no {marker.name}, in which this command records the files that it "
            f"writes{older}; {remedy}"
        )
    if files.text not in marker.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{refusal} its {marker.name} was not written by this command; {remedy}")
    _check_unchanged(path, files.records(path), refusal)


def _check_unchanged(path: Path, records: Mapping[str, FileRecord | None], refusal: str) -> None:
    """Check that no file of an output has changed since the command wrote it; small files first.

    Args:
        path: the output folder
        records: name -> size and SHA-256 of each file that the command wrote; None for a file that
            has already been checked
        refusal: the beginning of the message
    """
    for file in sorted(path.iterdir(), key=lambda file: file.stat().st_size):
        if file.name not in records:
            raise UserError(
                f"{refusal} it holds {file.name}, which this command did not write; move "
                f"{file.name} to another folder, or use another folder for the output"
            )
        record = records[file.name]
        if record and (file.stat().st_size != record["bytes"] or sha256(file) != record["sha256"]):
            raise UserError(
                f"{refusal} its {file.name} has changed since this command wrote it; move "
                f"{file.name} to another folder to keep it, or use another folder for the output"
            )


def _versions(path: Path) -> list[tuple[str, int, int, int]]:
    """Return name, inode, size and time of each file in a folder, to notice changes cheaply."""
    if not path.is_dir():
        return []
    states = ((file.name, file.lstat()) for file in sorted(path.iterdir()))
    return [(name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states]
