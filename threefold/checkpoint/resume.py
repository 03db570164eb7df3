"""The start of a run: its folder, its branch, and the verified checkpoint to resume from.

`--resume CHECKPOINT` and `--resume never` start a new branch. The request is recorded durably, as
an event, before anything is changed. Until a process has begun to train on the new branch, every
later start carries out the request, including starts with `--resume auto`. A run that is killed at
any instant therefore continues on the branch that the user requested.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from models.errors import SharedError, UserError, a_few, why_missing
from threefold.checkpoint.compatibility import (
    REMEDY_FOR_DAMAGED_WEIGHTS,
    check_parts_read,
    check_same_model,
    check_same_run,
    differences,
    initial_weights,
    key_of_initial_weights,
)
from threefold.checkpoint.format import find_damages
from threefold.checkpoint.state import CheckpointReader, DamagedCheckpoint, newest_undamaged
from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.loading import parse_recipe
from threefold.config.optimization import is_jump, learning_rate
from threefold.config.phases import RAMP, PhasePlan, Segment
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import (
    ABANDONED,
    NAME,
    Branch,
    History,
    Progress,
    newest_abandoned,
    newest_step,
    published,
    set_aside,
    stamp_of,
    step_of,
    time_stamp,
)
from threefold.run_folder.json_lines import flush
from threefold.run_folder.lock import FolderInUse, holder_of
from threefold.runtime.processes import gathered

# Find and verify the checkpoint from which a run starts or resumes.

T = TypeVar("T")
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

    def change_of_average(self, recipe: Recipe) -> str:
        """Describe what becomes of the average of the weights if only one side has one; or "".

        The sides are the checkpoint and the recipe.
        """
        if self.checkpoint is None or self.weights_only:
            return ""
        is_kept = recipe.optimizer.average is not None
        if is_kept == self.checkpoint.manifest.has_average:
            return ""
        if is_kept:
            return f"{self.path} has no average; the average starts from the weights"
        return (
            f"the average of the weights in {self.path} is dropped, because the recipe has no "
            f"[optimizer.average]"
        )

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
        old_segment, new_segment = (PhasePlan(plan).at(step) for plan in (earlier, recipe))
        old, new = old_segment.rate_to_continue(step), new_segment.learning_rate(step)
        if not is_jump(old, new):
            return ""
        return (
            f"the learning rate changes from {old:.2e} (recipe of the checkpoint) to {new:.2e} at "
            f"step {step}; {self._advice_on_jump(recipe, old_segment, new_segment)}"
        )

    def _advice_on_jump(self, recipe: Recipe, old_segment: Segment, new_segment: Segment) -> str:
        """Return the setting that avoids a jump of the learning rate, or the keys that caused it.

        Args:
            old_segment: the segment of the next step in the recipe of the checkpoint
            new_segment: the segment of the next step in the recipe of the run
        """
        step = self.progress.step + 1
        old, steps = old_segment.rate_to_continue(step), old_segment.schedule_end
        schedule = old_segment.recipe.optimizer.schedule
        can_keep = schedule.decay != "constant" and schedule.counts == "steps"
        can_keep &= old_segment.outlasts_warmup
        if old_segment.schedule_first == new_segment.schedule_first == 1 and can_keep:
            if not old:
                return (
                    "to train longer, add a [[phase]] with its own schedule, because the schedule "
                    "of the checkpoint has decayed to a learning rate of 0"
                )
            optimizer = new_segment.recipe.optimizer
            schedule = optimizer.schedule.model_copy(update={"steps": steps})
            kept = optimizer.model_copy(update={"schedule": schedule})
            if not is_jump(old, learning_rate(step, kept, steps)):
                return (
                    f"to keep the schedule of the checkpoint, use optimizer.schedule.steps = "
                    f"{steps}"
                )
        causes = ("optimizer.", "batch.", "phase", "training.steps")
        keys = [key for key in self.changes(recipe) if key.startswith(causes)]
        return f"keys that changed: {', '.join(keys)}"


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
        data: fingerprints of corpora and tokenizer
        branch: the newest request for a certain checkpoint, which "auto" obeys

    Raises:
        UserError: the path has no checkpoint, all checkpoints are damaged, or the checkpoint
            belongs to another experiment.
    """
    if resume in ("auto", "never"):
        candidates = _agreed(lambda: _candidates(folder, branch)) if resume == "auto" else []
    else:
        if not (Path(resume) / "manifest.json").is_file():
            choices = ", ".join(map(str, published(folder)))
            problem = why_missing(Path(resume), "checkpoint")
            if saves := published(Path(resume) / "checkpoints"):
                problem, choices = "is a run folder, not a checkpoint", str(saves[-1])
            if not choices:
                raise UserError(
                    f"--resume {resume}: the path {problem}, and {folder.parent} has no "
                    f"checkpoints; omit --resume"
                )
            # Not "never", which launch.py does not support.
            raise UserError(f"--resume {resume}: the path {problem}; use auto or {choices}")
        candidates = [Path(resume)]
    skipped: dict[Path, str] = {}
    verified = partial(CheckpointReader.verified, find_damage=partial(find_damage, note=note))
    for checkpoint in newest_undamaged(candidates, verified, skipped):
        check_same_run(checkpoint.path, checkpoint.manifest, recipe, data)
        point = ResumePoint(checkpoint, skipped=skipped)
        _check_counts(point, recipe)
        return point
    if resume == "auto" and not candidates and any(folder.glob(ABANDONED)):
        left = ", ".join(str(path) for path in sorted(folder.glob(ABANDONED)))
        raise UserError(
            f"the current branch has not saved a checkpoint yet, and all checkpoints here belong "
            f"to abandoned branches ({left}); resume from one with --resume CHECKPOINT, or start "
            f"again with --resume never"
        )
    if skipped:
        raise SharedError(_damage_message(folder, resume, skipped))
    return find_initial_weights(recipe, run=folder.parent, note=note)


def _check_counts(point: ResumePoint, recipe: Recipe) -> None:
    """Reject a recipe with another batch if a setting counts the samples read so far.

    Raises:
        UserError: a setting would take effect at other steps; the message names it.
    """
    if (earlier := point.earlier_recipe) is None:
        return
    step, plan, earlier_plan = point.progress.step, PhasePlan(recipe), PhasePlan(earlier)
    before, now = earlier_plan.samples_before(step + 1), plan.samples_before(step + 1)
    counting = plan.counting_after(step)
    if not counting and earlier_plan.counting_after(step) == RAMP:
        counting = RAMP  # the changed ramp has ended, and that of the checkpoint has not
    if before != now and counting:
        change = f", and change the batch in a [[phase]] with start_step = {step + 1}"
        raise UserError(
            f"{point.path}: this recipe reads {now:,} samples in {step:,} steps, and that of the "
            f"checkpoint {before:,}; {counting} counts what the run has read, and would therefore "
            f"take effect at other steps; use the [batch] and [[phase]] tables of the checkpoint"
            f"{'' if counting == RAMP else change}"
        )


def _damage_message(folder: Path, resume: str, damages: Mapping[Path, str]) -> str:
    """Return the message for a run all of whose candidate checkpoints are damaged.

    damages: checkpoint -> what is wrong with it
    """
    restart = "start again with --resume never (this run folder is kept under another name)"
    texts = {path: damage.replace(f"{path}/", "") for path, damage in damages.items()}
    if resume == "auto":
        own = [path for path in published(folder) if path in damages][::-1]
        listed = "; ".join(f"{path.name}: {texts[path]}" for path in own)
        problem = f"all checkpoints in {folder} are damaged ({listed})"
        begin = next((path for path in damages if path not in own), None)
        if begin is None:
            return f"{problem}; use --resume with a checkpoint from another folder, or {restart}"
        text = f"is damaged ({texts[begin]})" if begin.exists() else "does not exist any more"
        return (
            f"{f'{problem}, and ' if own else ''}the current branch of this run begins at {begin}, "
            f"which {text}; put that checkpoint back, use --resume with another one"
            f"{_example(begin, folder, damages)}, or {restart}"
        )
    (text,) = texts.values()
    others = [path for path in published(folder) if path.resolve() != Path(resume).resolve()]
    remedy = f"--resume auto or --resume {others[-1]}" if others else "another checkpoint"
    return f"--resume {resume}: this checkpoint is damaged ({text}); use {remedy}, or {restart}"


def _example(begin: Path, folder: Path, damages: Mapping[Path, str]) -> str:
    """Return ", for example CHECKPOINT" with a checkpoint that is not known to be damaged, or "".

    It is the newest one of the run that has saved `begin`, or else of this folder.
    """
    saves = [newest_abandoned(folder), *published(folder), *published(begin.parent)]
    others = [path for path in saves if path and path not in damages]
    return f", for example {others[-1]}" if others else ""


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

    Raises:
        UserError: the checkpoint is missing, damaged, or of another model.
    """
    path = initial_weights(recipe, run)
    if path is None:
        return ResumePoint()
    key = key_of_initial_weights(recipe)
    try:
        checkpoint = CheckpointReader.verified(path, partial(find_damage, note=note))
    except DamagedCheckpoint as damage:
        raise UserError(f"{key}: {damage}; {REMEDY_FOR_DAMAGED_WEIGHTS}") from None
    check_same_model(key, checkpoint.manifest, recipe)
    return ResumePoint(checkpoint, weights_only=True)


def abandon_others(folder: Path, point: ResumePoint, *, stamp: str) -> list[Path]:
    """Set aside the checkpoints that do not belong to a new branch, and return their new paths.

    If the branch begins at a checkpoint in this folder, the later checkpoints are set aside;
    otherwise all checkpoints are. Damaged checkpoints are not renamed.

    Args:
        folder: the run's checkpoints
        point: the checkpoint at which the branch begins
        stamp: part of the new names of the checkpoints
    """
    own = is_own(folder, point.reader().path)
    moved = []
    for path in published(folder):
        belongs = own and step_of(path) <= point.progress.step
        if not belongs and path not in point.skipped:
            moved.append(set_aside(path, stamp))
    if folder.is_dir():
        flush(folder)
    return moved


def find_damage(checkpoint: Path, note: Note = no_note) -> str | None:
    """Return the first damage found in a checkpoint; collective, each rank verifies a share.

    A share with a damage is read again by a distant rank, usually of another node. If that rank
    finds none, the node of the first one cannot read the files, and the checkpoint is undamaged.

    Raises:
        RuntimeError: another rank can read this rank's share.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def damage_in(share: int) -> str | None:
        return next(find_damages(checkpoint, share=share, shares=ranks, note=note), None)

    damages = gathered(damage_in(rank))
    if not any(damages):
        return None
    distance = ranks // 2
    again = (rank + distance) % ranks
    confirmed = gathered(damage_in(again) if damages[again] else None)
    if any(confirmed):
        return next(filter(None, confirmed))
    if damages[rank]:
        reader = f"rank {(rank - distance) % ranks}" if distance else "a second attempt"
        raise RuntimeError(f"{damages[rank]}; but {reader} has read the file without an error")
    return None


def check_folder_is_shared(folder: Path, names: Sequence[str]) -> None:
    """Check that all ranks see the run folder that rank 0 has locked; collective.

    Ranks with another folder under the same path would train, but could not save their part of a
    checkpoint.

    Args:
        names: the ranks' names, for the message

    Raises:
        UserError: a rank sees another folder, or none.
    """
    holders = _read_until_equal(partial(holder_of, folder), "the ranks see different run folders")
    other = _first_different(holders)
    if other:
        raise SharedError(
            f"{folder} on {names[other]} is not the folder that {names[0]} has locked; use a "
            f"--run-dir on storage that all nodes share"
        )


def _agreed(candidates: Callable[[], list[Path]]) -> list[Path]:
    """Return the candidates once all ranks find the same ones; collective."""
    listing: list[Path] = []

    def names() -> list[str]:
        listing[:] = candidates()
        return [path.name for path in listing]

    everyones = _read_until_equal(names, "the ranks see different checkpoints")
    other = _first_different(everyones)
    if not other:
        return listing
    differing = sorted(set(everyones[0]) ^ set(everyones[other]))
    raise SharedError(
        f"the ranks see different checkpoints (only one of rank 0 and rank {other} sees "
        f"{a_few(differing)}); use a --run-dir on storage that all nodes share"
    )


def _read_until_equal(read: Callable[[], T], problem: str) -> list[T]:
    """Return what each rank reads, once it is the same on all or the time is up; collective.

    NFS may show a folder as it was up to a minute ago, differently on each node.

    Args:
        problem: what the ranks see, for a message
    """
    for number in range(MAX_LISTINGS):
        everyones = gathered(read())
        if not _first_different(everyones):
            break
        if number == 0 and dist.get_rank() == 0:
            seconds = f"{MAX_LISTINGS * SECONDS_BETWEEN_TRIES:.0f} s"
            print(f"{problem}; trying again for up to {seconds}", file=sys.stderr, flush=True)
        time.sleep(SECONDS_BETWEEN_TRIES)
    return everyones


def _first_different(everyones: Sequence[object]) -> int:
    """Return the first rank with another value than rank 0; 0 if there is none."""
    return next((rank for rank, own in enumerate(everyones) if own != everyones[0]), 0)


MAX_LISTINGS = 90  # one a second; NFS keeps a listing for up to a minute
SECONDS_BETWEEN_TRIES = 1.0
SECONDS_BETWEEN_MESSAGES = 30.0


@dataclass(frozen=True)
class ResumeRequest:
    """The `--resume` option of a command.

    Attributes:
        resume: "auto", "never", or the path of a checkpoint
        once: name of the request; later starts with the same name and `resume` resume automatically
    """

    resume: str = "auto"
    once: str = ""


@dataclass(frozen=True)
class Start:
    """The point at which a run starts or resumes.

    Attributes:
        found: the checkpoint to start or resume from
        progress: the last completed step, and the first sample to read next
        rollbacks: number of rollbacks since the checkpoint was saved
        request: the `--resume` request to carry out before training; "auto" for none
        branch: a pending request of an earlier start; None if there is none
        parent: the checkpoint of another run at which the run began (`parent_of`), if there is one
    """

    found: ResumePoint
    progress: Progress
    rollbacks: int
    request: ResumeRequest
    branch: Branch | None
    parent: dict[str, Any] | None = None


def lock_run_folder(folder: RunFolder, *, wait_seconds: float) -> str:
    """Lock the run folder on rank 0, and wait for a holder that may be dead; collective.

    The ranks synchronize after each try, so that no collective waits for longer than a second.

    Args:
        wait_seconds: time to wait for a holder that shows no sign of life

    Returns:
        A message, the same on all ranks, if the folder is in use; empty if it is now locked.

    Raises:
        UserError: the folder cannot be written; raised on all ranks.
    """
    started, told = time.monotonic(), -SECONDS_BETWEEN_MESSAGES
    while True:
        answer = [("held", "")]
        if dist.get_rank() == 0:
            waited = time.monotonic() - started
            answer = [_try_to_hold(folder, over=waited >= wait_seconds)]
            if answer[0][0] == "wait":
                if waited - told >= SECONDS_BETWEEN_MESSAGES:
                    text = f"{answer[0][1]}; waiting up to {wait_seconds:.0f} s for its lock"
                    print(text, file=sys.stderr, flush=True)
                    told = waited
                time.sleep(SECONDS_BETWEEN_TRIES)
        dist.broadcast_object_list(answer)
        kind, message = answer[0]
        if kind == "rejected":
            raise SharedError(message)
        if kind != "wait":
            return message


def _try_to_hold(folder: RunFolder, *, over: bool) -> tuple[str, str]:
    """Try once; return "held", "wait", "busy" or "rejected", and a message."""
    try:
        folder.hold()
    except FolderInUse as problem:
        return "busy" if problem.alive or over else "wait", str(problem)
    except UserError as problem:
        return "rejected", str(problem)
    return "held", ""


def find_start(
    folder: RunFolder,
    request: ResumeRequest,
    recipe: Recipe,
    data: dict[str, Any],
    *,
    find_in_memory: Callable[[History, int], ResumePoint] | None = None,
    note: Note = no_note,
) -> Start:
    """Find the point at which the run starts or resumes, without changing files; collective.

    Args:
        find_in_memory: finds the newest snapshot in the memory of the nodes, not older than a step;
            None without snapshots

    Raises:
        UserError: the events cannot be read, or `find` rejects the request.
    """
    history = _agree_on_history(folder)
    if (request.once, request.resume) in history.requests:
        request = ResumeRequest()
    pending = history.branch if history.branch and history.branch.pending else None
    snapshot = ResumePoint()
    if find_in_memory and request.resume == "auto" and not pending:
        snapshot = find_in_memory(history, newest_step(folder.checkpoints))
    if snapshot.checkpoint:
        # Only checkpoints on the disk end the count of rollbacks.
        saved = max((step for step in history.saved if step <= snapshot.progress.step), default=0)
        return _at(snapshot, history, data, saved=saved)
    found = find(folder.checkpoints, request.resume, recipe, data, branch=history.branch, note=note)
    found = replace(found, skipped=snapshot.skipped | found.skipped)
    progress = found.progress
    if request.resume != "auto":
        parent = found.reader().manifest.parent if found.checkpoint else None
        if found.path and not is_own(folder.checkpoints, found.path):
            parent = parent_of(found, str(_absolute_path(found.path)))
        return Start(found, progress, 0, request, None, parent)
    if history.saved and (found.path is None or found.weights_only):
        raise UserError(
            f"{folder.checkpoints} has no checkpoint, but {folder.events} records that step "
            f"{max(history.saved)} was saved there; restore the folder (for example, mount its "
            f"disk), or start again with --resume never"
        )
    return _at(found, history, data, saved=progress.step, pending=pending)


def _at(
    found: ResumePoint,
    history: History,
    data: dict[str, Any],
    *,
    saved: int,
    pending: Branch | None = None,
) -> Start:
    """Return the start of a run that resumes by itself.

    Args:
        saved: step of the newest checkpoint on the disk that the run has passed through
        pending: a request of an earlier start that has not been carried out

    Raises:
        UserError: the data of a phase from which the run has rolled back has changed.
    """
    progress = found.progress
    samples = history.rolled_back.get(progress.step)
    if progress.step and samples is not None:
        progress = history.progress_at(progress.step, samples)
        parts = history.data_parts.get((progress.step, samples), [])
        check_parts_read(progress, parts, data.get("parts", ()))
    parent = history.parent or (found.checkpoint.manifest.parent if found.checkpoint else None)
    return Start(found, progress, history.rollbacks(saved), ResumeRequest(), pending, parent)


def begin_branch(folder: RunFolder, start: Start) -> None:
    """Abandon the current branch of the run, if a new one is requested; on rank 0.

    If this process is killed here, the next start finds the event and completes the request. No
    file is deleted: the folder, or the later checkpoints and their metrics, are renamed.

    Raises:
        UserError: the run folder cannot be written.
    """
    request, found, branch = start.request, start.found, start.branch
    if request.resume == "never":
        folder.move_aside()
        _record(folder, request, found, checkpoint="", stamp=time_stamp())
        return
    if found.path is None or found.weights_only or (request.resume == "auto" and branch is None):
        return
    own = is_own(folder.checkpoints, found.path)
    path = _absolute_path(found.path)
    name = path.name if _is_inside(folder, path) else str(path)
    stamp = branch.stamp if branch else time_stamp()
    if branch is None or branch.checkpoint != name:
        _record(folder, request, found, checkpoint=name, stamp=stamp)
    source = folder.metrics if own else _metrics_of(folder, path)
    try:
        moved = abandon_others(folder.checkpoints, found, stamp=stamp)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder.checkpoints} cannot be renamed ({error.strerror}); make "
            f"it writable, or use --run-dir with another folder"
        ) from None
    if moved:
        names = a_few([path.name for path in moved])
        print(f"the later checkpoints of the run are kept as {names}", flush=True)
    folder.restore_metrics(source, found.progress.step, stamp=stamp)


def _record(folder: RunFolder, request: ResumeRequest, found: ResumePoint, **fields: str) -> None:
    facts: dict[str, Any] = found.progress.record() | {"resume": request.resume}
    if request.once:
        facts["once"] = request.once
    if found.checkpoint and Path(fields["checkpoint"]).is_absolute():
        facts["parent"] = parent_of(found, fields["checkpoint"])
    folder.durable_event("branch", found.progress.step, **facts, **fields)


def parent_of(point: ResumePoint, checkpoint: str) -> dict[str, Any]:
    """Return the record of the checkpoint of another run at which a run begins."""
    manifest = point.reader().manifest
    run = Path(checkpoint).parent.parent
    return {
        "checkpoint": checkpoint,
        "run": str(run) if run.name else "",
        "name": manifest.recipe.get("name", ""),
        "step": manifest.step,
    }


def _metrics_of(folder: RunFolder, path: Path) -> Path:
    """Return the metrics that belong to a checkpoint of another run or of an abandoned branch."""
    metrics = path.parent.parent / "metrics.jsonl"
    if _is_inside(folder, path):  # from an abandoned branch
        metrics = folder.path / f"metrics.{stamp_of(path)}.jsonl"
    if metrics.exists():
        return metrics
    print(
        f"warning: {metrics} does not exist; for the steps before {path}, metrics.jsonl keeps this "
        f"run's own lines",
        file=sys.stderr,
    )
    return folder.metrics


def _absolute_path(checkpoint: Path) -> Path:
    """Return the absolute path of a checkpoint, resolving a link to it, which may later change.

    Links among the parent folders are kept: if a run's folder of checkpoints is a link to a larger
    disk, the metrics are in the folder that holds the link.
    """
    return checkpoint.resolve() if checkpoint.is_symlink() else checkpoint.absolute()


def _is_inside(folder: RunFolder, checkpoint: Path) -> bool:
    """Return True if a checkpoint is in the run's folder of checkpoints, which may be a link."""
    return checkpoint.parent.resolve() == folder.checkpoints.resolve()


def _agree_on_history(folder: RunFolder) -> History:
    """Return the run's history as read by rank 0; collective.

    Raises:
        UserError: rank 0 cannot read the events; raised on all ranks.
    """
    found: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            found[0] = folder.history()
        except UserError as problem:
            found[1] = str(problem)
    dist.broadcast_object_list(found)
    if found[1]:
        raise SharedError(found[1])
    return found[0]
