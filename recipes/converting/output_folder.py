"""The output folder of a command, which appears when it is complete."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from models.errors import UserError
from recipes.training.run_folder.line_file import flush

OUTPUT_MARKERS = (
    "manifest.json",
    "config.json",
)  # each output of this command has one of them


@contextmanager
def output_folder(path: Path, *, reading: Path | Sequence[Path], overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` at the end, or deleted after an error.

    Args:
        path: the output folder
        reading: the input or inputs, which must not be overwritten
        overwrite: replace an existing output

    Raises:
        UserError: The folder exists, or cannot be written.
    """
    path = path.resolve()
    for each in [reading] if isinstance(reading, Path) else reading:
        _check(path, each.resolve(), overwrite)
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
                os.rename(path, old)
            os.rename(workspace, path)
            flush(path.parent)
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be written ({error.strerror or error}); use a "
            f"writable folder on a disk with free space"
        ) from None


def _check(path: Path, reading: Path, overwrite: bool) -> None:
    if path.is_relative_to(reading) or reading.is_relative_to(path):
        raise UserError(f"{path} would overwrite the input {reading}; use another folder")
    if path.is_file():
        raise UserError(f"{path} is a file; use a folder")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{path} already exists; use another folder, or --overwrite")
    if (
        not any((path / name).is_file() for name in OUTPUT_MARKERS)
        or (path / "checkpoints").exists()
    ):
        raise UserError(
            f"{path} was not written by this command and is not overwritten; use another folder, "
            f"or delete it"
        )
