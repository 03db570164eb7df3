"""Trials of a sweep as runs of one group in Weights & Biases."""

from collections.abc import Sequence
from typing import Any

from models.errors import UserError
from recipes.sweeping.sweep_folder import SweepFolder
from recipes.sweeping.table import row_of_result, row_of_trial
from recipes.sweeping.trial import FAULTS, Result, Trial
from recipes.training.run_folder.provenance import code_version
from recipes.training.tracking.wandb_settings import read_wandb_key, wandb_mode
from recipes.training.tracking.wandb_thread import start_wandb


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

    This happens after the measurements, because W&B computes on the same processors.
    """
    count = 0
    home = folder.path / "wandb"
    home.mkdir(exist_ok=True)
    for trial, result in results:
        published = home / f"published-{trial.key}"
        if not published.exists():
            run = start_wandb(arguments_of(trial, folder))
            for step, seconds in enumerate(result.step_seconds, start=1):
                run.log({"step": step, "step_seconds": seconds})
            run.summary.update(row_of_trial(trial) | row_of_result(trial, result))
            run.finish(exit_code=int(result.outcome in FAULTS))
            with folder.stops_without_space():
                published.touch()
            count += 1
    return count


def arguments_of(trial: Trial, folder: SweepFolder) -> dict[str, Any]:
    """Return the arguments of `wandb.init` for a trial."""
    tracking, mode = trial.recipe.tracking, wandb_mode(trial.recipe)
    return {
        "project": tracking.project,
        "group": folder.path.name,
        "job_type": "sweep",
        "name": row_of_trial(trial)["row_id"],
        "id": f"{folder.path.name}-{trial.key}",
        "resume": "allow" if mode == "online" else None,
        "tags": list(tracking.tags),
        "config": trial.recipe.model_dump(mode="json") | {"code_version": code_version()},
        "mode": mode,
        "dir": str(folder.path),
    }
