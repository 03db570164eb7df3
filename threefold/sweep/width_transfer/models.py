"""The models, trials and folder of a transfer check."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from typing_extensions import override

from models.config import ModelConfig, nearest_multiples
from models.errors import UserError
from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.config.sections import short
from threefold.plan.job import recipe_on_cluster
from threefold.sweep.choice import values_of_setting
from threefold.sweep.folder import SweepFolder, read_json
from threefold.sweep.trial import Result, Trial, data_in, digest, without_later_keys

T = TypeVar("T")

SCALED_KEYS = ("hidden_size", "heads", "kv_heads", "ffn_hidden_size")
SCALED_EXPERT_KEYS = ("ffn_hidden_size",)  # the size of shared experts is a multiple of it


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that a user wants to compare.

    Attributes:
        settings: values of --set; commas separate the values of a grid
        widths: hidden sizes to which each recipe is scaled; None for the recipes' own
        cluster: keys of the [cluster] section that replace the recipe's
    """

    recipes: Sequence[Path]
    settings: Sequence[str]
    widths: Sequence[int] | None
    cluster: dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A model whose learning rate is varied.

    Attributes:
        source: file of the recipe, as on the command line
        family: name of the family, the settings or the recipe that its widths share; "" if there
            is only one family
        recipe: the recipe, with a [cluster] section
    """

    source: str
    family: str
    recipe: Recipe

    @property
    def width(self) -> int:
        """The hidden size."""
        return self.recipe.model.hidden_size

    @property
    def label(self) -> str:
        """The name of the curve in tables and pictures."""
        return f"{self.family}, width {self.width}" if self.family else f"width {self.width}"


def by_family(items: Iterable[T], curve_of: Callable[[T], Curve]) -> dict[str, list[T]]:
    """Return items by the family of their curves, in the order of the items."""
    families: dict[str, list[T]] = {}
    for item in items:
        families.setdefault(curve_of(item).family, []).append(item)
    return families


def curves_of(models: Models) -> list[Curve]:
    """Return the curves, family by family and from the smallest width to the largest.

    Each combination of settings is a family, and the recipes are its widths. If recipes share a
    width, as with --widths, each recipe is a family of its own.

    Raises:
        UserError: a recipe or a setting is not valid, or two curves have the same name.
    """
    grid = [values_of_setting(setting) for setting in models.settings]
    varied = [len(values) > 1 for values in grid]
    curves: list[Curve] = []
    for overrides in itertools.product(*grid):
        settings = [text for text, is_varied in zip(overrides, varied, strict=True) if is_varied]
        recipes = [
            (path, recipe) for path in models.recipes for recipe in widened(path, overrides, models)
        ]
        widths = [recipe.model.hidden_size for _, recipe in recipes]
        by_recipe = len(models.recipes) > 1 and len(set(widths)) < len(widths)
        for path, recipe in recipes:
            parts = [recipe.name, *settings] if by_recipe else settings
            curves.append(Curve(str(short(path)), ", ".join(parts), recipe))
    labels = [curve.label for curve in curves]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(
            f'two models are called "{twice}"; give each recipe another `name`, and each value of '
            f"--set or --widths only once"
        )
    families = list(dict.fromkeys(curve.family for curve in curves))
    return sorted(curves, key=lambda curve: (families.index(curve.family), curve.width))


def widened(path: Path, overrides: Sequence[str], models: Models) -> Iterator[Recipe]:
    """Yield a recipe at each width.

    Raises:
        UserError: the recipe is not valid, or has several phases.
    """
    recipe, _ = recipe_on_cluster(path, overrides, **models.cluster)
    if recipe.phase:
        raise UserError(
            f"{short(path)} has {len(recipe.phase)} [[phase]] tables, and only one phase can be "
            f"trained here; use a recipe without [[phase]]"
        )
    for width in models.widths or [recipe.model.hidden_size]:
        yield at_width(recipe, width, name=str(short(path)))


def at_width(recipe: Recipe, width: int, *, name: str) -> Recipe:
    """Return a recipe with another hidden size; the sizes inside the layers grow in proportion.

    The head size stays, so that the numbers of heads grow.

    Args:
        width: the hidden size
        name: of the recipe, for messages

    Raises:
        UserError: a size would not be a whole number, or the recipe is not valid with this width.
    """
    model = recipe.model
    if width == model.hidden_size:
        return recipe
    least = smallest_width(model)
    if width % least:
        scaled = [f"{key} = {getattr(model, key)}" for key in SCALED_KEYS]
        for key in SCALED_EXPERT_KEYS if model.experts else ():
            scaled.append(f"experts.{key} = {getattr(model.experts, key)}")
        sizes = ", ".join(scaled)
        raise UserError(
            f"--widths {width}: {name} cannot have this width, because {sizes} grow in proportion "
            f"and must be whole numbers; use {nearest_multiples(width, least)}, or another "
            f"multiple of {least}"
        )
    table = recipe.model_dump(mode="json", exclude_none=True)
    for key in SCALED_KEYS:
        table["model"][key] = getattr(model, key) * width // model.hidden_size
    experts = table["model"].get("experts", {})
    for key in SCALED_EXPERT_KEYS:
        if key in experts:
            experts[key] = experts[key] * width // model.hidden_size
    table["model"]["head_size"] = model.attention_head_size
    return parse_recipe(table, f"{name} --widths {width}")


def smallest_width(model: ModelConfig) -> int:
    """Return the smallest hidden size at which all scaled sizes are whole numbers."""
    sizes = [getattr(model, key) for key in SCALED_KEYS]
    if model.experts:
        sizes += [getattr(model.experts, key) for key in SCALED_EXPERT_KEYS]
    return model.hidden_size // math.gcd(*sizes)


# The trials of a transfer check: each trains a model at one learning rate with one seed.

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
        table["model"] = without_later_keys(self.recipe.model, table["model"])
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


# The folder of a transfer check: a sweep folder whose table has one line of JSON per trial.

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
        table = {"outcome": result.outcome, "reason": result.reason}
        if result.training is None:
            return table
        if "sizes" in result.training:
            return table | {key: result.training[key] for key in ("sizes", "changes", "losses")}
        return table | {
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
