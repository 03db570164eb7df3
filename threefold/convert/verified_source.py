"""The verified checkpoint that a command reads."""

from pathlib import Path

from models.config import ModelConfig
from models.errors import UserError
from threefold.checkpoint.format import Manifest, find_damages
from threefold.checkpoint.state import CheckpointReader
from threefold.config.phases import table_at
from threefold.config.sections import short
from threefold.data.corpus import is_corpus
from threefold.run_folder.history import no_checkpoint, published


def open_checkpoint(path: Path) -> CheckpointReader:
    """Open a checkpoint, or the newest undamaged checkpoint of a run folder.

    Raises:
        UserError: The path has no checkpoint, or only damaged ones.
    """
    _reject_corpus(path)
    if (path / "manifest.json").is_file():
        damage = next(find_damages(path), None)
        if damage:
            raise UserError(f"{damage}; {_remedy(path)}")
        return CheckpointReader(path, Manifest.read(path))
    found = saved_in(path)
    for checkpoint in reversed(found):
        if next(find_damages(checkpoint), None) is None:
            return CheckpointReader(checkpoint, Manifest.read(checkpoint))
    if found:
        damage = next(find_damages(found[-1]))
        raise UserError(f"{path}: all checkpoints here are damaged; {damage}")
    raise UserError(no_checkpoint(path))


def saved_in(path: Path) -> list[Path]:
    """Return the checkpoints of a run folder, or of a folder of checkpoints, oldest first."""
    return published(path / "checkpoints") or published(path)


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


def undamaged(run: Path, count: int) -> list[CheckpointReader]:
    """Return the newest undamaged checkpoints of a run folder, at most `count`, newest first.

    Raises:
        UserError: The folder has no checkpoint.
    """
    _reject_corpus(run)
    if not (saves := saved_in(run)):
        raise UserError(no_checkpoint(run))
    found: list[CheckpointReader] = []
    for checkpoint in reversed(saves):
        if len(found) < count and next(find_damages(checkpoint), None) is None:
            found.append(CheckpointReader(checkpoint, Manifest.read(checkpoint)))
    return found


def model_of(source: CheckpointReader) -> ModelConfig:
    """Return the architecture of a run's checkpoint or of imported weights.

    The sequence length and the rotary positions are those of the stage in which the checkpoint was
    saved, because the weights were trained with them.
    """
    manifest = source.manifest
    return ModelConfig.from_table(table_at(manifest.recipe, manifest.step)["model"])
