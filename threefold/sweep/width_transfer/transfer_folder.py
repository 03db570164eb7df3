"""The folder of a transfer check: a sweep folder whose table has one line of JSON per trial."""

import json
from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from threefold.sweep.folder import SweepFolder, read_json
from threefold.sweep.trial import Result, Trial
from threefold.sweep.width_transfer.trials import TrainingTrial

TABLE = "trials.jsonl"


class TransferFolder(SweepFolder):
    """The folder of a transfer check; `trials.jsonl` replaces sweep.csv."""

    @override
    def _row_of_trial(self, trial: Trial) -> dict[str, Any]:
        assert isinstance(trial, TrainingTrial)
        return {
            "trial": trial.key,
            "kind": trial.kind,
            "curve": trial.curve,
            "recipe": trial.source,
            "hidden_size": trial.recipe.model.hidden_size,
            "optimizer": trial.recipe.optimizer.kind,
            "learning_rate": trial.learning_rate,
            "seed": trial.recipe.seed,
            "steps": trial.steps,
        }

    @override
    def _row_of_result(self, trial: Trial, result: Result) -> dict[str, Any]:
        found = {"outcome": result.outcome, "reason": result.reason}
        if result.training is None:
            return found
        if "sizes" in result.training:
            return found | {key: result.training[key] for key in ("sizes", "changes", "losses")}
        return found | {
            "final_loss": final_loss(result),
            "diverged": result.training["diverged"],
            "validation": result.training["validation"],
        }

    @override
    def _is_failure(self, result: Result) -> bool:
        return result.training is None  # also without enough memory, a training has no loss

    @override
    def write_table(self) -> None:
        """Write trials.jsonl with a line for each result in the folder, sorted by trial."""
        lines = [json.dumps(row) for row in self.rows()]
        self._write(self.path / TABLE, "".join(f"{line}\n" for line in lines))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the row of each trial with a result."""
        for file in sorted((self.path / "results").glob("*.json")):
            trial, result = read_json(self._trial_file(file.stem)), read_json(file)
            if trial and result:
                yield trial["row"] | result["row"]


def final_loss(result: Result) -> float | None:
    """Return the validation loss after the last step; None if the trial diverged or failed."""
    if result.training is None or result.training["diverged"]:
        return None
    return result.training["validation"][-1][1]
