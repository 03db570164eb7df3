"""Find and verify the checkpoint from which a run starts or resumes."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from models.errors import UserError
from threefold.checkpoint.compatibility import (
    REMEDY_FOR_DAMAGED_WEIGHTS,
    check_same_model,
    check_same_run,
    differences,
    initial_weights,
    key_of_initial_weights,
)
from threefold.checkpoint.format import Manifest, find_damages
from threefold.checkpoint.reader import CheckpointReader
from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.loading import parse_recipe
from threefold.config.optimization import MAX_RATE_CHANGE, learning_rate
from threefold.config.phases import Span, StagePlan
from threefold.config.recipe import Recipe
from threefold.run_folder.history import (
    ABANDONED,
    NAME,
    Branch,
    published,
    set_aside,
    step_of,
)
from threefold.run_folder.json_lines import flush
from threefold.run_folder.progress import Progress

Note = Callable[[str], object]  # called before each file is verified, to report progress


def no_note(activity: str) -> None:
    """Ignore the report of progress."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run starts or resumes, if there is one.

    Attributes:
        checkpoint: a verified checkpoint; None for weights drawn from the seed
        weights_only: True if the run starts at step 0 with the checkpoint's weights
        skipped: damaged checkpoint -> description of the damage
    """

    checkpoint: CheckpointReader | None = None
    weights_only: bool = False
    skipped: dict[Path, str] = field(default_factory=dict)

    @property
    def progress(self) -> Progress:
        """The progress of the run so far; zero if the run starts."""
        if self.checkpoint is None or self.weights_only:
            return Progress()
        return self.checkpoint.manifest.progress

    @property
    def path(self) -> Path | None:
        """The folder of the checkpoint, if there is one."""
        return self.checkpoint.path if self.checkpoint else None

    @property
    def in_memory(self) -> bool:
        """True for a snapshot in the memory of the nodes."""
        return self.checkpoint is not None and self.checkpoint.in_memory

    def reader(self) -> CheckpointReader:
        """Return the checkpoint, which must exist."""
        assert self.checkpoint is not None
        return self.checkpoint

    @property
    def earlier_recipe(self) -> Recipe | None:
        """The recipe of the save, with the defaults of newer keys.

        None if the run does not resume, or if the recipe is no longer valid in this version.
        """
        if self.checkpoint is None or self.weights_only:
            return None
        try:
            return parse_recipe(deepcopy(self.checkpoint.manifest.recipe), str(self.path))
        except UserError:
            return None

    def changes(self, recipe: Recipe) -> dict[str, list[Any]]:
        """Return key -> [before, now] for recipe and JSON keys that changed since the save."""
        if self.checkpoint is None or self.weights_only:
            return {}
        manifest, earlier = self.checkpoint.manifest, self.earlier_recipe
        key, config = "deepspeed_json", read_deepspeed_json(recipe.deepspeed)
        before = earlier.model_dump(mode="json") if earlier else manifest.recipe
        before = before | {key: manifest.layout.get(key, config)}
        return differences(before, recipe.model_dump(mode="json") | {key: config})

    def learning_rate_jump(self, recipe: Recipe) -> str:
        """Describe a large change of the next step's learning rate since the save.

        Returns:
            A message with both values, or an empty string if they differ by at most a factor of
            MAX_RATE_CHANGE.
        """
        earlier = self.earlier_recipe
        if earlier is None:
            return ""
        step = self.progress.step + 1
        old_span, new_span = (StagePlan(plan).at(step) for plan in (earlier, recipe))
        old, new = old_span.learning_rate(step), new_span.learning_rate(step)
        if _is_near(old, new):
            return ""
        return (
            f"the learning rate changes from {old:.2e} (recipe of the checkpoint) to {new:.2e} at "
            f"step {step}; {self._advice_on_jump(recipe, old_span, new_span)}"
        )

    def _advice_on_jump(self, recipe: Recipe, old_span: Span, new_span: Span) -> str:
        """Return the setting that avoids a jump of the learning rate, or the keys that caused it.

        Args:
            recipe: the recipe of the run
            old_span: the span of the next step in the recipe of the checkpoint
            new_span: the span of the next step in the recipe of the run
        """
        step = self.progress.step + 1
        old, steps = old_span.learning_rate(step), old_span.schedule_end
        is_constant = old_span.recipe.optimizer.schedule.decay == "constant"
        if old_span.schedule_first == new_span.schedule_first == 1 and not is_constant:
            if not old:
                return (
                    "to train longer, add a [[stage]] with its own schedule, because the schedule "
                    "of the checkpoint has decayed to a learning rate of 0"
                )
            optimizer = new_span.recipe.optimizer
            schedule = optimizer.schedule.model_copy(update={"steps": steps})
            kept = optimizer.model_copy(update={"schedule": schedule})
            if _is_near(old, learning_rate(step, kept, steps)):
                return (
                    f"to keep the schedule of the checkpoint, use optimizer.schedule.steps = "
                    f"{steps}"
                )
        causes = ("optimizer.", "stage", "training.steps")
        keys = [key for key in self.changes(recipe) if key.startswith(causes)]
        return f"keys that changed: {', '.join(keys)}"


def _is_near(rate: float, other: float) -> bool:
    """Return True if two learning rates differ by at most a factor of MAX_RATE_CHANGE."""
    return max(rate, other) <= MAX_RATE_CHANGE * min(rate, other)


def find(
    folder: Path,
    resume: str,
    recipe: Recipe,
    data: dict[str, Any],
    *,
    branch: Branch | None = None,
    note: Note = no_note,
) -> ResumePoint:
    """Find the checkpoint to start or resume from; collective, and the same on all ranks.

    Args:
        folder: the run's checkpoints
        resume: "auto" for the newest undamaged checkpoint, "never" for none, or a checkpoint's path
        recipe: the recipe of the run
        data: fingerprints of corpora and tokenizer
        branch: the newest request for a certain checkpoint, which "auto" obeys
        note: called before each file is verified

    Raises:
        UserError: the path has no checkpoint, all checkpoints are damaged, or the checkpoint
            belongs to another experiment.
    """
    if resume in ("auto", "never"):
        candidates = _candidates(folder, branch) if resume == "auto" else []
    else:
        if not (Path(resume) / "manifest.json").is_file():
            choices = ", ".join(map(str, published(folder))) or "none here"
            problem = "has no checkpoint" if Path(resume).exists() else "does not exist"
            raise UserError(f"--resume {resume}: the path {problem}; use auto, never or {choices}")
        candidates = [Path(resume)]
    _agree(candidates)
    skipped: dict[Path, str] = {}
    for path in candidates:
        damage = find_damage(path, note)
        if damage is None:
            manifest = Manifest.read(path)
            check_same_run(path, manifest, recipe, data)
            return ResumePoint(CheckpointReader(path, manifest), skipped=skipped)
        skipped[path] = damage
    if resume == "auto" and not candidates and any(folder.glob(ABANDONED)):
        left = ", ".join(str(path) for path in sorted(folder.glob(ABANDONED)))
        raise UserError(
            f"the current branch has not saved a checkpoint yet, and all checkpoints here belong "
            f"to abandoned branches ({left}); resume from one with --resume CHECKPOINT, or start "
            f"again with --resume never"
        )
    if skipped:
        found = "; ".join(f"{path}: {damage}" for path, damage in skipped.items())
        raise UserError(
            f"all checkpoints here are damaged ({found}); use --resume with a checkpoint from "
            f"another folder, or --resume never to start again (this run folder is kept under "
            f"another name)"
        )
    return find_initial_weights(recipe, run=folder.parent, note=note)


def _candidates(folder: Path, branch: Branch | None) -> list[Path]:
    """Return the checkpoints of the run's current branch, newest first.

    While a request is pending, later checkpoints are excluded, because some may not have been set
    aside yet. A checkpoint from another folder is used until this run has saved its own first
    checkpoint. Checkpoints that were in the folder before belong to another run.
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


def find_initial_weights(
    recipe: Recipe, *, run: Path | None = None, note: Note = no_note
) -> ResumePoint:
    """Return the weights that the recipe starts from; collective.

    Args:
        recipe: the recipe of the run
        run: the folder of the new run, if it has one
        note: called before each file is verified

    Raises:
        UserError: the checkpoint is missing, damaged, or of another model.
    """
    path = initial_weights(recipe, run)
    if path is None:
        return ResumePoint()
    key = key_of_initial_weights(recipe)
    damage = find_damage(path, note)
    if damage:
        raise UserError(f"{key}: {damage}; {REMEDY_FOR_DAMAGED_WEIGHTS}")
    manifest = Manifest.read(path)
    check_same_model(key, manifest, recipe)
    return ResumePoint(CheckpointReader(path, manifest), weights_only=True)


def abandon_others(folder: Path, found: ResumePoint, *, stamp: str) -> None:
    """Set aside the checkpoints that do not belong to a new branch.

    If the branch begins at a checkpoint in this folder, the later checkpoints are set aside;
    otherwise all checkpoints are. Damaged checkpoints are not renamed.

    Args:
        folder: the run's checkpoints
        found: the checkpoint at which the branch begins
        stamp: part of the new names of the checkpoints
    """
    own = is_own(folder, found.reader().path)
    for path in published(folder):
        belongs = own and step_of(path) <= found.progress.step
        if not belongs and path not in found.skipped:
            set_aside(path, stamp)
    if folder.is_dir():
        flush(folder)


def find_damage(checkpoint: Path, note: Note = no_note) -> str | None:
    """Return the first damage found in a checkpoint; collective, each rank verifies a share."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = next(find_damages(checkpoint, share=rank, shares=ranks, note=note), None)
    everyones: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return next((damage for damage in everyones if damage), None)


def _agree(candidates: list[Path]) -> None:
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, [path.name for path in candidates])
    if any(names != everyones[0] for names in everyones):
        raise UserError(
            f"the ranks see different checkpoints ({sorted(map(tuple, everyones))}); use a "
            f"--run-dir on storage that all nodes share"
        )
