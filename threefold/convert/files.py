"""The files that convert.py reads and writes: verified checkpoints and complete output folders."""

import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import torch
from torch import Tensor

from models.config import ModelConfig
from models.errors import FULL_DISK_ERRORS, UserError, a_few, check_links
from threefold.checkpoint.format import (
    FileRecord,
    Manifest,
    TensorFileWriter,
    manifest_damage,
    sha256,
    split_by_size,
)
from threefold.checkpoint.state import (
    CheckpointReader,
    DamagedCheckpoint,
    first_damage,
    newest_undamaged,
)
from threefold.config.phases import table_at
from threefold.config.sections import short
from threefold.data.manifest import is_corpus
from threefold.run_folder.history import no_checkpoint, published
from threefold.run_folder.json_lines import flush
from threefold.run_folder.lock import NO_FLOCK

INCOMPLETE = ".incomplete"  # end of the names of temporary folders
LOCK_TEXT = "convert.py works in this folder\n"
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
        reading: the input or inputs, which must not be overwritten
        overwrite: replace an existing folder that holds only unchanged files of this command

    Raises:
        UserError: The folder exists, or cannot be written, or a run has deleted an input.
    """
    named, path = path.absolute(), path.resolve()
    sources = [reading] if isinstance(reading, Path) else reading
    for source in sources:
        own = source.resolve()
        if path.is_relative_to(own) or own.is_relative_to(path):
            raise UserError(
                f"{short(path)} would overwrite the input {short(own)}; use another folder"
            )
    try:
        check_links(named, "use another folder")
        checked = _versions(path)  # first, so that a change during the check is noticed below
        _check_replaceable(short(path), files, overwrite)
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        # The name is unique, because another process may be writing the same output.
        with (
            tempfile.TemporaryDirectory(
                dir=path.parent,
                prefix=f"{path.name}.",
                suffix=INCOMPLETE,
                ignore_cleanup_errors=True,
            ) as folder,
            _locked(Path(folder)),
        ):
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
        _check_present(sources)
        if error.errno in FULL_DISK_ERRORS:
            raise UserError(
                f"the disk of {short(path.parent)} is full ({error.strerror}); free space there, "
                f"or use an output folder on another disk"
            ) from None
        raise UserError(
            f"{error.filename or short(path)} cannot be written ({error.strerror or error}); use a "
            f"writable folder on a disk with free space"
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a temporary folder, so that `_remove_abandoned` of another process keeps it."""
    with (folder / "lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
        else:
            lock.write(LOCK_TEXT)
            lock.flush()
        yield


def _remove_abandoned(path: Path) -> None:
    """Remove the temporary folders of an output whose processes were killed.

    A folder without LOCK_TEXT stays: its process may not have locked it yet, or its file system has
    no locks.
    """
    name = re.compile(re.escape(path.name) + r"\.[a-z0-9_]{8}" + re.escape(INCOMPLETE))
    for folder in list(path.parent.glob(f"*{INCOMPLETE}")):
        if not name.fullmatch(folder.name):
            continue
        with suppress(OSError), (folder / "lock").open("rb+") as lock:  # NFS needs that
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_only_copy = (folder / "old").exists() and not path.exists()
            if lock.read() == LOCK_TEXT.encode() and not is_only_copy:
                shutil.rmtree(folder, ignore_errors=True)


def _check_present(sources: Sequence[Path]) -> None:
    """Raise a UserError if an input no longer exists: a run deletes its older checkpoints."""
    for source in sources:
        if not source.exists():
            newer = a_few([saved.name for saved in reversed(published(source.parent))])
            raise UserError(
                f"{source} was deleted while it was read, because its run keeps only the newest "
                f"checkpoints (checkpoint.keep){newer and f', now {newer}'}; run the command again"
                if source.parent.name == "checkpoints"
                else f"{source} was deleted while it was read; use another input"
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


# The verified checkpoint that a command reads.


def open_checkpoint(path: Path, kinds: Collection[str] = ()) -> CheckpointReader:
    """Open a checkpoint, or the newest undamaged checkpoint of a run folder.

    Args:
        kinds: the kinds of tensors that the caller reads, whose files are verified; (): all

    Raises:
        UserError: The path has no checkpoint, or only damaged ones.
    """
    if not (path / MANIFEST).is_file():
        return undamaged(path, 1, kinds)[0]
    _reject_corpus(path)
    try:
        return CheckpointReader.verified(path, partial(first_damage, kinds=kinds))
    except DamagedCheckpoint as damage:
        _check_present([path])
        raise UserError(f"{damage}; {_remedy(path)}") from None


def undamaged(run: Path, count: int, kinds: Collection[str] = ()) -> list[CheckpointReader]:
    """Return the newest undamaged checkpoints of a run, at most `count`, newest first.

    Print a warning for each newer checkpoint that is damaged.

    Args:
        run: a run folder, or a folder of checkpoints
        kinds: the kinds of tensors that the caller reads, whose files are verified; (): all

    Raises:
        UserError: The folder has no checkpoint, or only damaged ones.
    """
    _reject_corpus(run)
    saves = published(run / "checkpoints") or published(run)
    if not saves:
        raise UserError(no_checkpoint(run))
    damages: dict[Path, str] = {}
    verified = partial(CheckpointReader.verified, find_damage=partial(first_damage, kinds=kinds))
    newest = newest_undamaged(reversed(saves), verified, damages)
    if readers := list(islice(newest, count)):
        used = a_few([str(reader.path) for reader in readers])
        for path, damage in damages.items():
            text = f"{path} is damaged and skipped: {damage.replace(f'{path}/', '')}; using {used}"
            print(f"warning: {text}", file=sys.stderr, flush=True)
        return readers
    _check_present(saves)
    raise UserError(f"{run}: all checkpoints here are damaged; {damages[saves[-1]]}")


def _reject_corpus(path: Path) -> None:
    """Raise a UserError if the path is a corpus, which also has a manifest.json."""
    if is_corpus(path):
        raise UserError(
            f"{path} is a corpus of prepare_data.py, not a checkpoint; use a run folder such as "
            f"runs/tiny"
        )


def _remedy(damaged: Path) -> str:
    """Return what to do about a damaged checkpoint."""
    folder = damaged.absolute().parent
    if len(published(folder)) > 1:
        run = folder.parent if folder.name == "checkpoints" else folder
        return f"use another checkpoint, or name {short(run)} to use its newest undamaged one"
    return "restore it from a copy, or use another checkpoint"


def model_of(source: CheckpointReader) -> ModelConfig:
    """Return the architecture of a run's checkpoint or of imported weights.

    The sequence length and the rotary positions are those of the phase in which the checkpoint was
    saved, because the weights were trained with them.
    """
    manifest = source.manifest
    return ModelConfig.from_table(table_at(manifest.recipe, manifest.step)["model"])


# The files of the checkpoints that convert.py writes.
#
# The layout in the manifest tells which command wrote a checkpoint, so that `--overwrite` replaces
# only outputs of the same command. A checkpoint of a run has none of these marks.

MANIFEST = "manifest.json"
AVERAGED_FROM, RESHAPED_FROM = "averaged", "reshaped_from"  # keys of the layout


def recorded_files(folder: Path) -> dict[str, FileRecord | None]:
    """Return the records of the files of a checkpoint that convert.py wrote, from its manifest.

    Raises:
        UserError: the manifest has changed since it was written.
    """
    if damage := manifest_damage(folder):
        raise UserError(f"--overwrite does not replace {folder}: {damage}; use another folder")
    return {MANIFEST: None, "manifest.sha256": None, **Manifest.read(folder).files}


IMPORTED = OutputFiles(MANIFEST, '"layout": {}', recorded_files)
AVERAGED = OutputFiles(MANIFEST, f'"{AVERAGED_FROM}": [', recorded_files)
RESHAPED = OutputFiles(MANIFEST, f'"{RESHAPED_FROM}": ', recorded_files)


def require_finite(tensor: Tensor, place: str) -> Tensor:
    """Reject a tensor with NaN or infinite values; return any other tensor unchanged.

    place: file and name of the tensor in an imported checkpoint

    Raises:
        UserError: the tensor has such values.
    """
    if not all(torch.isfinite(limit) for limit in torch.aminmax(tensor)):
        count = int((~torch.isfinite(tensor)).sum())
        raise UserError(
            f"{place}: {count:,} of the {tensor.numel():,} values are NaN or infinite; "
            f"copy the files again from their source, or use another checkpoint"
        )
    return tensor


def write_weights(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], weight: Callable[[str], Tensor]
) -> tuple[dict[str, FileRecord], dict[str, str]]:
    """Write weights as fp32, one at a time, divided over files of a limited size.

    Args:
        shapes: name -> shape of each logical weight
        weight: returns the weight with a name, fp32

    Returns:
        The records of the files, and name -> file, for the manifest.
    """
    files: dict[str, FileRecord] = {}
    tensors: dict[str, str] = {}
    for number, names in enumerate(split_by_size(shapes, dtype="F32")):
        file = f"weights-{number:05d}.safetensors"
        own = {name: shapes[name] for name in names}
        with TensorFileWriter(folder / file, own, dtype="F32") as writer:
            for name in names:
                writer.write(name, weight(name).numpy().data)
        files[file] = writer.record
        tensors |= dict.fromkeys(names, file)
    return files, tensors
