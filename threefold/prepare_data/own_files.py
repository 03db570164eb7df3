"""Recognise the files that prepare_data.py has written, by their content."""

import re
from pathlib import Path
from typing import IO, Any

from models.errors import UserError
from threefold.data.corpus import read_manifest, tokenizer_hash

LOCK_TEXT = "prepare_data.py works in this folder\n"
WORK = re.compile(r"pieces|corpus|tokenizer-[0-9a-f]{24}(\..*)?")  # folders in a workspace


def mark_workspace(lock: IO[str]) -> None:
    """Write LOCK_TEXT into the lock file of a workspace unless it has content."""
    if not lock.tell():  # opened for appending, so tell() is the file's size
        lock.write(LOCK_TEXT)
        lock.flush()


class OwnFiles:
    """Files of corpora, finished or unfinished. Each folder is examined once."""

    def __init__(self) -> None:
        self._workspaces: dict[Path, bool] = {}
        self._corpora: dict[Path, dict[str, Any]] = {}

    def __contains__(self, file: Path) -> bool:
        """Return whether prepare_data.py has written a file.

        Other files in the same folders belong to the user, even under the same names.
        """
        file = file.absolute()
        return any(
            self._is_work(folder, file.relative_to(folder)) or self._is_part(folder, file)
            for folder in file.parents
        )

    def _is_work(self, folder: Path, inside: Path) -> bool:
        """Return whether a file is in one of the folders that the command keeps in a workspace."""
        if folder not in self._workspaces:
            lock = folder / "lock"
            self._workspaces[folder] = lock.is_file() and _begins(lock, LOCK_TEXT)
        return (
            self._workspaces[folder]
            and len(inside.parts) > 1
            and WORK.fullmatch(inside.parts[0]) is not None
        )

    def _is_part(self, folder: Path, file: Path) -> bool:
        """Return whether a file is part of the corpus whose manifest is in a folder."""
        if folder not in self._corpora:
            self._corpora[folder] = _read_manifest(folder)
        manifest = self._corpora[folder]
        if not manifest:
            return False
        if file.parent == folder:
            is_list = file.name == "pieces.jsonl" and _begins(file, '{"files": ')
            return is_list or file.name == "manifest.json"
        if file.parent != folder / "tokenizer" or not (file.parent / "tokenizer.json").is_file():
            return False
        return tokenizer_hash(file.parent) == manifest["tokenizer_sha256"]


def _begins(file: Path, text: str) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(text)) == text.encode()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a corpus, or an empty one if the folder has none that we wrote."""
    try:
        manifest = read_manifest(folder)
    except (OSError, UserError):
        return {}
    needed = {"tokenizer_sha256", "vocab_size", "files"}
    return manifest if needed <= manifest.keys() else {}
