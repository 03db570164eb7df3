"""Trials of a sweep as runs of one group in Weights & Biases."""

from collections.abc import Sequence
from typing import Any

from models.errors import UserError
from recipes.sweeping.sweep_folder import SweepFolder, SweepStopped
from recipes.sweeping.table import row_of_result, row_of_trial
from recipes.sweeping.trial import FAULTS, Result, Trial
from recipes.training.tracking.weights_and_biases.settings import (
    common_arguments,
    read_wandb_key,
    wandb_mode,
)
from recipes.training.tracking.weights_and_biases.thread import start_wandb


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
        wandb_mode(trial.recipe)
    read_wandb_key()


def publish(folder: SweepFolder, results: Sequence[tuple[Trial, Result]]) -> int:
    """Publish the trials that have not been published yet, and return their number.

    Trials are published after all measurements, because W&B's own work would slow the steps down.

    Raises:
        SweepStopped: W&B does not work, or the disk is full.
    """
    home = folder.path / "wandb"
    home.mkdir(exist_ok=True)
    published = {trial.key: home / f"published-{run_key(trial)}" for trial, _ in results}
    left = [(trial, result) for trial, result in results if not published[trial.key].exists()]
    for trial, result in left:
        try:
            publish_trial(trial, result, folder)
        except Exception as problem:  # libraries raise errors of many classes
            raise SweepStopped(
                f"Weights & Biases failed ({problem}); all results are in {folder.path}; rerun "
                f"the same command to publish the other trials, or omit --wandb"
            ) from None
        with folder.stops_without_space():
            published[trial.key].touch()
    return len(left)


def publish_trial(trial: Trial, result: Result, folder: SweepFolder) -> None:
    """Publish one trial: its steps, and its row of the table as the summary."""
    run = start_wandb(arguments_of(trial, folder))
    for step, seconds in enumerate(result.step_seconds, start=1):
        run.log({"step": step, "step_seconds": seconds})
    run.summary.update(row_of_trial(trial) | row_of_result(trial, result))
    run.finish(exit_code=int(result.outcome in FAULTS))


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
