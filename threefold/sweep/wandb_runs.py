"""Trials of a sweep as runs of one group in Weights & Biases."""

from collections.abc import Callable, Sequence
from typing import Any

from models.errors import UserError
from threefold.sweep.folder import SweepFolder, SweepStopped
from threefold.sweep.table import row_of_result, row_of_trial
from threefold.sweep.trial import FAULTS, Result, Trial
from threefold.tracking.wandb_connection import (
    WandbStatus,
    check_variables,
    common_arguments,
    read_wandb_key,
    requested_mode,
    start_wandb,
    tear_down,
    untold,
)


def check_wandb(trials: Sequence[Trial]) -> None:
    """Check the settings of Weights & Biases before the first trial.

    Raises:
        UserError: a recipe turns tracking off, or the key or a variable is wrong.
    """
    for trial in trials:
        if trial.recipe.tracking.mode == "disabled":
            raise UserError(
                f'--wandb: {trial.source} has tracking.mode = "disabled"; use --set '
                f"tracking.mode=auto, or omit --wandb"
            )
        check_variables()
        mode, reason = requested_mode(trial.recipe.tracking.mode)
        if mode == "disabled":
            raise UserError(f"--wandb: {reason}; unset the variable, or omit --wandb")
    read_wandb_key()


def publish(
    folder: SweepFolder,
    results: Sequence[tuple[Trial, Result]],
    *,
    tell: Callable[[WandbStatus], None] = untold,
) -> tuple[int, WandbStatus | None]:
    """Publish the trials that have not been published yet.

    Trials are published after all measurements, because W&B's own work would slow the steps down.

    Args:
        folder: the folder of the sweep
        results: the trials and their results
        tell: called before the first trial waits for the server

    Returns:
        The number of these trials, and the status of their runs; None without such a trial.

    Raises:
        SweepStopped: W&B does not work, or the disk is full.
    """
    home = folder.path / "wandb"
    home.mkdir(exist_ok=True)
    published = {trial.key: home / f"published-{run_key(trial)}" for trial, _ in results}
    left = [(trial, result) for trial, result in results if not published[trial.key].exists()]
    status: WandbStatus | None = None
    offline_modes: set[str] = set()  # modes of recipes whose runs are offline
    for trial, result in left:
        # A server that has failed once is not asked again in the same mode: each attempt can take
        # half a minute. Recipes with another mode are still sent.
        is_offline = trial.recipe.tracking.mode in offline_modes
        requested = requested_mode(trial.recipe.tracking.mode)
        if is_offline:
            requested = "offline", "the server has not answered before"
        try:
            of_trial = publish_trial(
                trial, result, folder, requested, tell=untold if status else tell
            )
        except Exception as problem:  # libraries raise errors of many classes
            tear_down()
            raise SweepStopped(
                f"Weights & Biases failed ({problem}); all results are in {folder.path}; rerun "
                f"the same command to publish the other trials, or omit --wandb"
            ) from None
        status = status if is_offline else of_trial
        if of_trial.mode == "offline":
            offline_modes.add(trial.recipe.tracking.mode)
        with folder.stops_without_space():
            published[trial.key].touch()
    return len(left), status


def publish_trial(
    trial: Trial,
    result: Result,
    folder: SweepFolder,
    requested: tuple[str, str],
    *,
    tell: Callable[[WandbStatus], None],
) -> WandbStatus:
    """Publish one trial: its steps, and its row of the table as the summary.

    `requested` and `tell` are those of `start_wandb`.
    """
    run, status = start_wandb(requested, arguments_of(trial, folder), tell=tell)
    for step, seconds in enumerate(result.step_seconds, start=1):
        run.log({"step": step, "step_seconds": seconds})
    run.summary.update(row_of_trial(trial) | row_of_result(trial, result))
    run.finish(exit_code=int(result.outcome in FAULTS))
    return status


def arguments_of(trial: Trial, folder: SweepFolder) -> dict[str, Any]:
    """Return the arguments of `wandb.init` for a trial."""
    return common_arguments(trial.recipe, folder.path) | {
        "group": folder.path.name,
        "job_type": "sweep",
        "name": row_of_trial(trial)["row_id"],
        "id": f"{folder.path.name}-{run_key(trial)}",
    }


def run_key(trial: Trial) -> str:
    """Return the key of a trial's run, which has the trial's rounds in common."""
    return trial.in_round(1).key
