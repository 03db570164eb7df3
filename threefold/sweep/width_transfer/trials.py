"""The trials of a transfer check: each trains a model at one learning rate with one seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.sweep.trial import Trial, data_in, digest
from threefold.sweep.width_transfer.models import Curve

WITHOUT_EFFECT = ("name", "tracking", "checkpoint", "supervision", "evaluation")  # on the losses
ONE_PROCESS = {"nodes": 1, "gpus_per_node": 1}
Kind = Literal["losses", "coordinates"]


@dataclass(frozen=True)
class TrainingTrial(Trial):
    """A recipe to train.

    Attributes:
        curve: name of the curve that the trial belongs to
        kind: "losses", or "coordinates" for the sizes of the activations
    """

    curve: str = ""
    kind: Kind = "losses"

    @property
    def learning_rate(self) -> float:
        """The peak learning rate."""
        return self.recipe.optimizer.learning_rate

    @cached_property
    def identity(self) -> str:
        """A hash of everything that affects the training."""
        table = self.recipe.model_dump(mode="json", exclude_none=True)
        deepspeed = read_deepspeed_json(self.recipe.deepspeed)
        kept = {key: value for key, value in table.items() if key not in WITHOUT_EFFECT}
        return digest({"kind": self.kind, "recipe": kept, "deepspeed": deepspeed})

    @cached_property
    def key(self) -> str:
        """The name of the trial in the folder."""
        return self.identity

    def request(self, corpus: Callable[[int, int], Path]) -> dict[str, Any]:
        """Return what the ranks read; see `Trial.request`.

        The losses are those of the recipe's own data. The sizes of the activations depend little
        on the data, so these trials use the synthetic corpus, and need no other.
        """
        table = self.recipe.model_dump(mode="json", exclude_none=True)
        table["tracking"] = {"mode": "disabled"}
        if self.kind == "coordinates":
            table["data"] |= data_in(corpus, self.recipe)
        return {
            "key": self.key,
            "kind": self.kind,
            "recipe": table,
            "warm_up": 0,
            "steps": self.steps,
            "split": False,
        }


def loss_trials(curve: Curve, rates: Sequence[float], seeds: int) -> list[TrainingTrial]:
    """Return the trials of a curve, by learning rate and seed."""
    return [
        TrainingTrial(
            curve.source,
            recipe := with_rate(curve.recipe, rate, seed=curve.recipe.seed + number),
            warm_up=0,
            steps=recipe.training.steps,
            curve=curve.label,
        )
        for rate in rates
        for number in range(seeds)
    ]


def with_rate(recipe: Recipe, rate: float, *, seed: int) -> Recipe:
    """Return a recipe with another peak learning rate and seed.

    The minimum learning rate keeps its ratio to the peak.
    """
    table = recipe.model_dump(mode="json", exclude_none=True)
    optimizer = table["optimizer"]
    ratio = optimizer["schedule"]["minimum_learning_rate"] / optimizer["learning_rate"]
    optimizer["schedule"]["minimum_learning_rate"] = min(rate, rate * ratio)
    optimizer["learning_rate"] = rate
    return parse_recipe(table | {"seed": seed}, recipe.name)


def coordinate_trials(curve: Curve, steps: int, seeds: int) -> list[TrainingTrial]:
    """Return the trials that measure the activations of a model, one for each seed.

    They run in one process, because layouts do not change activations, at the peak learning rate
    from the first step on.

    Raises:
        UserError: the recipe is not valid in one process.
    """
    table = curve.recipe.model_dump(mode="json", exclude_none=True)
    table["cluster"] |= ONE_PROCESS
    table["layout"] = {"pipeline": 1, "tensor": 1}
    table["batch"].pop("ramp", None)
    table["optimizer"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    table["training"] |= {"steps": steps, "evaluate_every": 0}
    table["training"].pop("initial_weights", None)
    table["tracking"] = {"mode": "disabled"}
    trials = []
    for number in range(seeds):
        recipe = parse_recipe(table | {"seed": curve.recipe.seed + number}, curve.source)
        trials.append(
            TrainingTrial(
                curve.source, recipe, warm_up=0, steps=steps, curve=curve.label, kind="coordinates"
            )
        )
    return trials
