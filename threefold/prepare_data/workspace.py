"""The workspace of a preparation: a folder with its lock, its tokenizer and its finished pieces."""

import contextlib
import fcntl
import math
import re
import shutil
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from models.errors import FULL_DISK_ERRORS, UserError, counted
from threefold.data.manifest import read_manifest, tokenizer_hash
from threefold.prepare_data.documents import EmptyPart
from threefold.run_folder.lock import NO_FLOCK

# Recognise the files that prepare_data.py has written, by their content.

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


@contextlib.contextmanager
def full_disk_explained(workspace: Path) -> Iterator[None]:
    """Turn the error of a full disk into a message, with the notes of `lock_workspace`.

    Raises:
        UserError: A disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS:
            raise
        folder = Path(error.filename or workspace).parent
        full = UserError(
            f"the disk of {folder} is full ({error.strerror}); free space there and rerun the same "
            f"command, or use an --output on another disk"
        )
        for note in getattr(error, "__notes__", []):
            full.add_note(note)
        raise full from None


@dataclass
class FinishedPieces:
    """The finished pieces that a workspace has from earlier commands.

    Attributes:
        outdated: names of finished pieces of an earlier source or earlier options; None before they
            are compared with the pieces of this command
    """

    outdated: Set[str] | None = None


@contextlib.contextmanager
def lock_workspace(workspace: Path, *, shared: bool) -> Iterator[FinishedPieces]:
    """Lock the workspace against other processes; keep its finished pieces after an error.

    Args:
        shared: take a shared lock, as the processes of all shards do

    Yields:
        the finished pieces; the caller sets `outdated` once it is known

    Raises:
        UserError: Another process uses the workspace, or the file system does not support flock.
        OSError: The lock fails for another reason, such as an I/O error.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    with (workspace / "lock").open(
        "a+", encoding="utf-8"
    ) as lock:  # NFS needs a readable file for LOCK_SH
        _lock(lock, workspace, shared=shared)
        mark_workspace(lock)
        if not shared:  # remove unfinished folders of killed processes
            for leftover in (
                *workspace.glob("*.incomplete"),
                *workspace.glob("pieces/*.incomplete"),
            ):
                shutil.rmtree(leftover, ignore_errors=True)
        earlier = FinishedPieces()
        try:
            yield earlier
        except BaseException as error:
            kept = _keep_finished(workspace, error, earlier.outdated, shared=shared)
            if isinstance(error, KeyboardInterrupt):
                nothing = "nothing is finished yet; rerun the same command to start again"
                error.add_note(kept or nothing)  # for the command's message
            elif kept:
                error.add_note(kept)
            raise


def _lock(lock: IO[str], workspace: Path, *, shared: bool) -> None:
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{workspace} is in use by another process; wait for it if it prepares the same "
            f"source, otherwise use another --output"
        ) from None
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise OSError(error.errno, error.strerror, lock.name) from None
        raise UserError(
            f"{workspace} cannot be locked ({error.strerror}): its file system has no flock; "
            f"use an --output on another one, for example a local disk, and copy the result"
        ) from None


def _keep_finished(
    workspace: Path, error: BaseException, outdated: Set[str] | None, *, shared: bool
) -> str:
    """Remove the unfinished corpus, and return a message about what is left to resume from.

    Args:
        error: the reason why the command ends
        outdated: names of finished pieces of a source or options that have changed; None if it is
            not known yet which these are
        shared: True if other processes may be using the folder

    Returns:
        "" if nothing is left
    """
    shutil.rmtree(workspace / "corpus", ignore_errors=True)
    pieces = [path for path in workspace.glob("pieces/*") if not path.suffix]
    finished = [path for path in pieces if path.name not in (outdated or ())]
    trained = [path for path in workspace.glob("tokenizer-*") if not path.suffix]
    if pieces or trained:
        kept = (
            counted(len(finished), "finished piece")
            if finished
            else "the tokenizer and no finished piece"
        )
        if isinstance(error, OSError) and error.errno in FULL_DISK_ERRORS:  # it says to rerun
            if not finished:
                return f"{workspace} keeps {kept}"
            size = sum(file.stat().st_size for piece in pieces for file in piece.rglob("*"))
            return (
                f"{workspace} keeps {kept}, {math.ceil(size / 1e6)} MB in total; the disk needs "
                f"room for the other pieces and for a second copy of all pieces"
            )
        advice = "rerun the same command to resume"
        if finished and outdated is None:
            kept += " (those of an earlier source or earlier options cannot be used again)"
        if others := len(pieces) - len(finished):
            advice += (
                f" ({counted(others, 'more piece')} from an earlier source or earlier options will "
                f"then be deleted)"
            )
        if isinstance(error, EmptyPart):
            advice = f"add documents and rerun the command to use them, or delete {workspace.name}"
        elif isinstance(error, UserError):
            advice = "rerun the command afterwards to resume"
        return f"{workspace} keeps {kept}; {advice}"
    if not shared:
        clear_workspace(workspace)
    return ""


def clear_workspace(workspace: Path) -> None:
    """Remove this command's files from the workspace, and the folder if it is then empty."""
    for name in ("pieces", "corpus", *(path.name for path in workspace.glob("tokenizer-*"))):
        shutil.rmtree(workspace / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        (workspace / "lock").unlink()
        workspace.rmdir()
