"""The models of a transfer check: a curve of the picture for each width and setting."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from models.config import ModelConfig, nearest_multiples
from models.errors import UserError
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.config.sections import short
from threefold.plan.job import recipe_on_cluster
from threefold.sweep.choice import values_of_setting

T = TypeVar("T")

SCALED_KEYS = ("hidden_size", "heads", "kv_heads", "ffn_hidden_size")
SCALED_EXPERT_KEYS = ("ffn_hidden_size",)  # the size of shared experts is a multiple of it


@dataclass(frozen=True, kw_only=True)
class Models:
    """The models that a user wants to compare.

    Attributes:
        recipes: files
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
    found: dict[str, list[T]] = {}
    for each in items:
        found.setdefault(curve_of(each).family, []).append(each)
    return found


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
        found = [
            (path, recipe) for path in models.recipes for recipe in widened(path, overrides, models)
        ]
        widths = [recipe.model.hidden_size for _, recipe in found]
        by_recipe = len(models.recipes) > 1 and len(set(widths)) < len(widths)
        for path, recipe in found:
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
        UserError: the recipe is not valid, or has several stages.
    """
    recipe, _ = recipe_on_cluster(path, overrides, **models.cluster)
    if recipe.stage:
        raise UserError(
            f"{short(path)} has {len(recipe.stage)} [[stage]] tables, and only one stage can be "
            f"trained here; use a recipe without [[stage]]"
        )
    for width in models.widths or [recipe.model.hidden_size]:
        yield at_width(recipe, width, name=str(short(path)))


def at_width(recipe: Recipe, width: int, *, name: str) -> Recipe:
    """Return a recipe with another hidden size; the sizes inside the layers grow in proportion.

    The head size stays, so that the numbers of heads grow.

    Args:
        recipe: the recipe
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
