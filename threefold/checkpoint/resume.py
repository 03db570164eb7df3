"""The start of a run: its folder, its current branch, and the checkpoint to resume from.

`--resume CHECKPOINT` and `--resume never` start a new branch. The request is recorded durably, as
an event, before anything is changed. Until a process has begun to train on the new branch, every
later start carries out the request, including starts with `--resume auto`. A run that is killed at
any instant therefore continues on the branch that the user requested.
"""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from models.errors import UserError
from threefold.checkpoint import resume_point
from threefold.checkpoint.compatibility import check_parts_read
from threefold.checkpoint.resume_point import ResumePoint
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import (
    Branch,
    History,
    published,
    stamp_of,
    step_of,
    time_stamp,
)
from threefold.run_folder.lock import FolderInUse
from threefold.run_folder.progress import Progress

SECONDS_BETWEEN_TRIES = 1.0
SECONDS_BETWEEN_MESSAGES = 30.0


class FindInMemory(Protocol):
    """Finds the newest snapshot in memory that is not older than a step."""

    def __call__(self, *, history: History, at_least: int) -> ResumePoint:
        """Return the snapshot."""


@dataclass(frozen=True)
class Request:
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
    request: Request
    branch: Branch | None
    parent: dict[str, Any] | None = None


def hold_together(folder: RunFolder, *, wait_seconds: float) -> str:
    """Lock the run folder on rank 0, and wait for a holder that may be dead; collective.

    The ranks synchronize after each try, so that no collective waits for longer than a second.

    Args:
        folder: the run folder
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
            raise UserError(message)
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
    request: Request,
    recipe: Recipe,
    data: dict[str, Any],
    *,
    find_in_memory: FindInMemory | None = None,
    note: resume_point.Note = resume_point.no_note,
) -> Start:
    """Find the point at which the run starts or resumes, without changing files; collective.

    Args:
        folder: the run folder
        request: the `--resume` option
        recipe: the recipe of the run
        data: fingerprints of corpora and tokenizer
        find_in_memory: finds the newest snapshot in the memory of the nodes, not older than a step;
            None without snapshots
        note: called before each file of a checkpoint is verified

    Raises:
        UserError: the events cannot be read, or `resume_point.find` raised the error.
    """
    history = _agree_on_history(folder)
    if (request.once, request.resume) in history.requests:
        request = Request()
    pending = history.branch if history.branch and history.branch.pending else None
    snapshot = ResumePoint()
    if find_in_memory and request.resume == "auto" and not pending:
        newest = max(map(step_of, published(folder.checkpoints)), default=0)
        snapshot = find_in_memory(history=history, at_least=newest)
    if snapshot.checkpoint:
        # Only checkpoints on the disk end the count of rollbacks.
        saved = max((step for step in history.saved if step <= snapshot.progress.step), default=0)
        return _at(snapshot, history, data, saved=saved)
    found = resume_point.find(
        folder.checkpoints, request.resume, recipe, data, branch=history.branch, note=note
    )
    found = replace(found, skipped=snapshot.skipped | found.skipped)
    progress = found.progress
    if request.resume != "auto":
        parent = found.reader().manifest.parent if found.checkpoint else None
        if found.path and not resume_point.is_own(folder.checkpoints, found.path):
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
        found: the checkpoint
        history: the history of the run
        data: fingerprints of corpora and tokenizer
        saved: step of the newest checkpoint on the disk that the run has passed through
        pending: a request of an earlier start that has not been carried out

    Raises:
        UserError: the data of a stage from which the run has rolled back has changed.
    """
    progress = found.progress
    samples = history.rolled_back.get(progress.step)
    if progress.step and samples is not None:
        progress = history.progress_at(progress.step, samples)
        parts = history.data_parts.get((progress.step, samples), [])
        check_parts_read(progress, parts, data.get("parts", ()))
    parent = history.parent or (found.checkpoint.manifest.parent if found.checkpoint else None)
    return Start(found, progress, history.rollbacks(saved), Request(), pending, parent)


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
    own = resume_point.is_own(folder.checkpoints, found.path)
    path = _absolute_path(found.path)
    name = path.name if _is_inside(folder, path) else str(path)
    stamp = branch.stamp if branch else time_stamp()
    if branch is None or branch.checkpoint != name:
        _record(folder, request, found, checkpoint=name, stamp=stamp)
    source = folder.metrics if own else _metrics_of(folder, path)
    try:
        resume_point.abandon_others(folder.checkpoints, found, stamp=stamp)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder.checkpoints} cannot be renamed ({error.strerror}); make "
            f"it writable, or use --run-dir with another folder"
        ) from None
    folder.restore_metrics(source, found.progress.step, stamp=stamp)


def _record(folder: RunFolder, request: Request, found: ResumePoint, **fields: str) -> None:
    facts: dict[str, Any] = found.progress.record() | {"resume": request.resume}
    if request.once:
        facts["once"] = request.once
    if found.checkpoint and Path(fields["checkpoint"]).is_absolute():
        facts["parent"] = parent_of(found, fields["checkpoint"])
    folder.durable_event("branch", found.progress.step, **facts, **fields)


def parent_of(found: ResumePoint, checkpoint: str) -> dict[str, Any]:
    """Return the record of the checkpoint of another run at which a run begins."""
    manifest = found.reader().manifest
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
        raise UserError(found[1])
    return found[0]
