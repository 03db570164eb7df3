"""A folder that a command writes: it appears when everything is in it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.training.manifest import flush


@contextmanager
def output_folder(path: Path, *, reading: Path, overwrite: bool) -> Iterator[Path]:
    """The folder to write into, which is renamed to `path` at the end, or deleted.

    reading: what must not be overwritten

    Raises:
        ValueError: there is something already, or no room for it.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        ours = any((path / name).is_file() for name in ("manifest.json", "config.json"))
        if not overwrite:
            raise ValueError(f"{path} is already there; use another folder, or --overwrite")
        if not ours or (path / "checkpoints").exists() or path.resolve() == reading.resolve():
            raise ValueError(
                f"{path} is not what this command has written before; use another folder, or "
                f"delete it yourself"
            )
    workspace = path.with_name(f"{path.name}.incomplete")
    try:
        shutil.rmtree(workspace, ignore_errors=True)
        workspace.mkdir(parents=True)
        yield workspace
        for file in (*workspace.rglob("*"), workspace):
            flush(file)
        old = path.with_name(f"{path.name}.old.incomplete")
        if path.exists():
            os.rename(path, old)
        os.rename(workspace, path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ValueError(f"{error.filename or path}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
