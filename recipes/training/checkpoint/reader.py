"""Find the checkpoint that a run goes on from, verify it, and read it in any layout."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from models.config import ModelConfig
from models.errors import UserError
from recipes.training.checkpoint.manifest import Manifest, find_damages, tensor_key
from recipes.training.recipe.deepspeed_config import leaves, read_deepspeed_json
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.sections import repository_path
from recipes.training.run_folder.checkpoint_folders import (
    ABANDONED,
    NAME,
    published,
    set_aside,
    step_of,
)
from recipes.training.run_folder.history import Branch
from recipes.training.run_folder.line_file import flush
from recipes.training.run_folder.progress import Progress

# Of the model, what weights do not depend on; a run that starts from given ones may differ there.
TRAINING_ONLY = ("dropout", "attention_dropout", "initial_std")

Note = Callable[[str], object]  # is told each file before it is verified, as a sign of progress


def no_note(activity: str) -> None:
    """Tell no one about the progress."""


@dataclass(frozen=True)
class Found:
    """What a run starts or goes on from.

    path: a verified checkpoint; None: fresh weights
    weights_only: the run starts at step 0 with its weights
    skipped: damaged ones, and what is wrong with each
    """

    path: Path | None = None
    manifest: Manifest | None = None
    weights_only: bool = False
    skipped: dict[Path, str] = field(default_factory=dict)

    @property
    def progress(self) -> Progress:
        """The last step that the run has done, and what it has read."""
        return Progress() if self.path is None or self.weights_only else self.manifest.progress

    def reader(self) -> "CheckpointReader":
        """Its tensors."""
        return CheckpointReader(self.path, self.manifest)

    def changes(self, recipe: Recipe) -> dict[str, list[Any]]:
        """The keys that the recipe, or the JSON it names, has changed since: before, now."""
        if self.path is None or self.weights_only:
            return {}
        key, config = "deepspeed_json", read_deepspeed_json(recipe.deepspeed)
        before = self.manifest.recipe | {key: self.manifest.layout.get(key, config)}
        return differences(before, recipe.model_dump(mode="json") | {key: config})


@dataclass(frozen=True)
class CheckpointReader:
    """The logical tensors of a verified checkpoint, fp32, read where they lie.

    A file is mapped for as long as a tensor of it lives.
    """

    path: Path
    manifest: Manifest

    def rows(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Some rows (of dimension 0) of a weight or a moment."""
        key = tensor_key(kind, name)
        with safe_open(self.path / self.manifest.tensors[key], framework="pt") as file:
            return file.get_slice(key)[start:stop]

    def tensor(self, kind: str, name: str) -> Tensor:
        """The whole of a weight or a moment."""
        key = tensor_key(kind, name)
        with safe_open(self.path / self.manifest.tensors[key], framework="pt") as file:
            return file.get_tensor(key)


def find(
    folder: Path,
    resume: str,
    recipe: Recipe,
    data: dict[str, Any],
    *,
    branch: Branch | None = None,
    note: Note = no_note,
) -> Found:
    """Find the checkpoint to start or resume from; collective, and the same on all ranks.

    Args:
        folder: the run's checkpoints
        resume: "auto" the newest that verifies, "never" none, or the one at a path
        recipe: of the run
        data: fingerprints of corpora and tokenizer
        branch: the newest request for a certain checkpoint, which "auto" obeys
        note: is told each file before it is verified

    Raises:
        UserError: there is none at that path, none verifies, or it belongs to another experiment.
    """
    if resume in ("auto", "never"):
        candidates = _candidates(folder, branch) if resume == "auto" else []
    else:
        if not (Path(resume) / "manifest.json").is_file():
            choices = ", ".join(map(str, published(folder))) or "none here"
            raise UserError(f"--resume {resume}: no checkpoint there; use auto, never or {choices}")
        candidates = [Path(resume)]
    _agree(candidates)
    skipped: dict[Path, str] = {}
    for path in candidates:
        damage = find_damage(path, note)
        if damage is None:
            manifest = Manifest.read(path)
            check_same_run(path, manifest, recipe, data)
            return Found(path, manifest, skipped=skipped)
        skipped[path] = damage
    if resume == "auto" and not candidates and any(folder.glob(ABANDONED)):
        left = ", ".join(str(path) for path in sorted(folder.glob(ABANDONED)))
        raise UserError(
            f"all checkpoints here belong to branches that were abandoned ({left}), and the "
            f"current branch has saved none; resume one with --resume CHECKPOINT, or start again "
            f"with --resume never"
        )
    if skipped:
        found = "; ".join(f"{path}: {damage}" for path, damage in skipped.items())
        raise UserError(
            f"no checkpoint here can be trusted ({found}); use --resume with one from elsewhere, "
            f"or --resume never to start again (what is here is kept beside it)"
        )
    return find_initial_weights(recipe, run=folder.parent, note=note)


def _candidates(folder: Path, branch: Branch | None) -> list[Path]:
    """Return the checkpoints that belong to the branch that the run is on, newest first.

    While a request is pending, later checkpoints are excluded, because some may not have been set
    aside yet. A checkpoint from another folder is used until this run has saved one of its own;
    checkpoints that were already here belong to another run.
    """
    own = list(reversed(published(folder)))
    if branch is None or not branch.checkpoint:
        return own
    chosen = folder / branch.checkpoint
    if is_own(folder, chosen):
        return [path for path in own if not branch.pending or step_of(path) <= branch.step]
    return [chosen] if branch.pending else [*own, chosen]


def is_own(folder: Path, checkpoint: Path) -> bool:
    """Return True if a run has published this checkpoint in the folder."""
    path = checkpoint.resolve()
    return path.parent == folder.resolve() and NAME.fullmatch(path.name) is not None


def find_initial_weights(recipe: Recipe, *, run: Path, note: Note = no_note) -> Found:
    """Return the weights that the recipe starts from; collective.

    Args:
        recipe: of the run
        run: the folder that is about to be begun
        note: is told each file before it is verified

    Raises:
        UserError: they are not there, damaged, or of another model.
    """
    setting = recipe.training.initial_weights
    if setting is None:
        return Found()
    path = repository_path(setting)
    key = f'training.initial_weights = "{setting}"'
    if not (path / "manifest.json").is_file():
        raise UserError(
            f"{key}: no checkpoint there; use one of a run (runs/NAME/checkpoints/step-...), or "
            f"what recipes/convert.py from-hf writes"
        )
    if path.is_relative_to(run.resolve()):
        raise UserError(f"{key} is in the run's own folder; use --run-dir with another one")
    damage = find_damage(path, note)
    if damage:
        raise UserError(f"{key}: {damage}; make it again with recipes/convert.py from-hf")
    manifest = Manifest.read(path)
    theirs = _spelled_out(manifest.recipe["model"])
    ours = _spelled_out(recipe.model_dump(mode="json")["model"])
    different = {
        name: values
        for name, values in differences(theirs, ours).items()
        if name in theirs and name not in TRAINING_ONLY
    }
    if recipe.model.positions == "rope":
        different.pop("sequence_length", None)
    if different:
        raise UserError(f"{key} has {_sentence(different, 'model.')}; use that")
    return Found(path, manifest, weights_only=True)


def abandon_others(folder: Path, found: Found, *, stamp: str) -> None:
    """Set aside the checkpoints that do not belong to the branch that starts from a checkpoint.

    If that checkpoint is in this folder, the later ones are set aside; if it is elsewhere, all of
    them are. Checkpoints that were found damaged stay where they are.

    Args:
        folder: the run's checkpoints
        found: the checkpoint that the branch begins at
        stamp: for the names of those that are set aside
    """
    own = is_own(folder, found.path)
    for path in published(folder):
        belongs = own and step_of(path) <= found.progress.step
        if not belongs and path not in found.skipped:
            set_aside(path, stamp)
    if folder.is_dir():
        flush(folder)


def find_damage(checkpoint: Path, note: Note = no_note) -> str | None:
    """Return the first damage of a checkpoint's files; collective, each rank verifies some."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = next(find_damages(checkpoint, share=rank, shares=ranks, note=note), None)
    everyones: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return next((damage for damage in everyones if damage), None)


def check_same_run(
    checkpoint: Path, manifest: Manifest, recipe: Recipe, data: dict[str, Any]
) -> None:
    """Compare a checkpoint with the run that wants to resume from it.

    Raises:
        UserError: another model, seed, tokenizer or corpus; each key that differs is named.
    """
    if not manifest.has_moments or "seed" not in manifest.recipe:
        raise UserError(
            f"{checkpoint} has weights and no run to resume; start one from it with "
            f'--set training.initial_weights="{checkpoint}"'
        )
    saved, now = manifest.recipe, recipe.model_dump(mode="json")
    # Older checkpoints record neither of these keys. Corpora are compared by content in any case.
    unsaid = {"separate_documents": False, "document_starts": data.get("document_starts")}
    read = {**unsaid, **manifest.data}
    different = differences(
        {"model": _spelled_out(saved["model"]), "seed": saved["seed"], "data": read},
        {"model": _spelled_out(now["model"]), "seed": now["seed"], "data": data},
    )
    if different:
        raise UserError(
            f"{checkpoint} was trained with {_sentence(different)}; use that, --run-dir for a new "
            f"run, or --resume never to start again"
        )


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """section.key -> both values, of all that differ in two nested tables."""
    old, new = dict(leaves(before)), dict(leaves(now))
    keys = sorted(old.keys() | new.keys())
    return {key: [old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)}


def _spelled_out(model: dict[str, Any]) -> dict[str, Any]:
    """The [model] section with the head size that follows from the others."""
    return model | {"head_size": ModelConfig(**model).attention_head_size}


def _sentence(different: dict[str, list[Any]], prefix: str = "") -> str:
    return ", ".join(
        f"{prefix}{key} = {before!r} (here {now!r})" for key, (before, now) in different.items()
    )


def _agree(candidates: list[Path]) -> None:
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, [path.name for path in candidates])
    if any(names != everyones[0] for names in everyones):
        raise UserError(
            f"the ranks see different checkpoints ({sorted(map(tuple, everyones))}); use a "
            f"--run-dir on storage that all nodes share"
        )
