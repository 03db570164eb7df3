"""Names in tables of published runs: of models without their shapes, and of training stacks."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from models.config import Experts, ModelConfig, Prediction
from models.errors import UserError
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.plan.software import PUBLISHED_STACKS, Software, load_software, stacks

SHAPES = PUBLISHED_STACKS.with_name("shapes.toml")
WITHOUT_PREDICTIONS = re.compile(r"(?<![a-z])(w/o|without|no)[\s_-]*mtp(?![a-z])", re.IGNORECASE)
RELEASE = re.compile(r"(?<![\d.])(?:20)?(\d\d)[.-](\d\d)(?!\d)")
# Words of a framework's name, and the modelled stack that is nearest: first the most specific ones.
# The last entry is for all others.
NEAREST_STACKS = (
    (r"deepspeed.*zero-?3|zero-?3.*deepspeed", "deepspeed-zero3-2022"),
    (r"deepspeed", "megatron-deepspeed"),
    (r"maxtext|jax", "maxtext"),
    (r"automodel|fms-fsdp|fsdp|metaseq|kempner|pytorch|torch", "torchtitan"),
    (r"nanotron", "nanotron"),
    (r"", "megatron-core"),
)


def simplified(name: str) -> str:
    """Return a model's name in lower case, without words in brackets and without "w/o MTP"."""
    return with_spaces(WITHOUT_PREDICTIONS.sub("", re.sub(r"\(.*?\)", "", name)))


def with_spaces(text: str) -> str:
    """Return a text in lower case, with one space for underscores, hyphens and spaces."""
    return " ".join(re.sub(r"[_\-\s]+", " ", text).lower().split())


def without_spaces(text: str) -> str:
    """Return a text in lower case without underscores, hyphens and spaces."""
    return with_spaces(text).replace(" ", "")


@cache
def named_models() -> dict[str, dict[str, Any]]:
    """Return the entries of `shapes.toml` by simplified name."""
    if not SHAPES.exists():
        return {}
    tables = tomllib.loads(SHAPES.read_text(encoding="utf-8"))["models"]
    return {simplified(name): table for table in tables for name in table["names"]}


@cache
def model_of_name(name: str) -> ModelConfig:
    """Return the shape of the model that a table names.

    Raises:
        UserError: the name is not in `shapes.toml`, or the model is not supported.
    """
    table = named_models().get(simplified(name))
    if table is None:
        raise UserError(
            f"model {name or 'empty'} has no shape; add it to {SHAPES.relative_to(REPOSITORY)}, "
            f"or add columns layers, hidden, heads and ffn"
        )
    if reason := table.get("unsupported"):
        raise UserError(f"model {name} has {reason}, which Threefold does not have")
    model = load_recipe(REPOSITORY / "recipes" / table["recipe"]).model
    experts: Experts | None = model.experts
    if experts is not None:
        experts = replace(experts, **table.get("experts", {}))
    model = replace(model, **table.get("model", {}), experts=experts)
    if depth := table.get("predictions"):
        none = WITHOUT_PREDICTIONS.search(name)
        model = replace(model, prediction=None if none else Prediction(depth=depth))
    return model


def stack_of(cells: Mapping[str, str], stage: int | None) -> tuple[Software, bool]:
    """Return the stack of a row's framework, and True if it is only the nearest one.

    The stack has the longest prefix of the framework's name, then the most conditions
    (`first_release` and the columns of `row_words`), and then the first place in `stacks`. Case,
    spaces, hyphens and underscores do not count.

    Args:
        cells: by column; "release" may be a release or a date, such as "2026-03"
        stage: ZeRO stage of the row; None if it is not stated
    """
    stated = f"{cells['framework']} {cells.get('release', '')}"
    name = without_spaces(stated)
    known = {
        (len(prefix), len(stack.row_words) + bool(stack.first_release)): stack
        for stack in reversed(stacks())
        for prefix in map(without_spaces, stack.framework)
        if name.startswith(prefix) and (stage is None or stage in stack.zero_stages)
        if has_words(cells, stack.row_words) and has_release(stated, stack.first_release)
    }
    if known:
        return known[max(known)], False
    words = cells["framework"].lower()
    nearest = next(name for pattern, name in NEAREST_STACKS if re.search(pattern, words))
    if nearest == "megatron-core" and stage == 3:
        nearest = "torchtitan"
    if nearest == "megatron-deepspeed" and stage == 3:
        nearest = "deepspeed-zero3-2022"
    return load_software(nearest), True


def has_words(cells: Mapping[str, str], row_words: Mapping[str, Sequence[str]]) -> bool:
    """Return True if the row's cell has one of the words in every column."""
    return all(
        any(without_spaces(word) in without_spaces(cells.get(column, "")) for word in words)
        for column, words in row_words.items()
    )


def has_release(name: str, first_release: str) -> bool:
    """Return True if a name has a release, such as "26.08", that is `first_release` or later.

    If `first_release` is empty, every name has.
    """
    releases = [f"{match[1]}.{match[2]}" for match in RELEASE.finditer(name)]
    return not first_release or any(release >= first_release for release in releases)
