"""Edits of a recipe that select a plan's layout, as options or in a copy of the recipe."""

import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, TypeGuard

import tomlkit
from tomlkit.items import Table

from models.errors import FULL_DISK_ERRORS, UserError
from threefold.config.deepspeed_json import read_deepspeed_json, shipped_json, zero_stage
from threefold.config.layout import Layout
from threefold.config.loading import current_text, load_recipe, parse_recipe
from threefold.config.recipe import Recipe
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.search import Plan, SearchResult


def edits(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return the recipe keys that select a plan's layout.

    The recipe's DeepSpeed JSON is kept if it has the plan's ZeRO stage.
    """
    layout, section = plan.job.layout, recipe.layout
    deepspeed = recipe.deepspeed
    if zero_stage(read_deepspeed_json(deepspeed)) != layout.zero_stage:
        deepspeed = shipped_json(layout.zero_stage, plan.job.precision)
    optional = {
        "virtual_stages": SCHEDULES[layout.schedule].virtual_stages is None
        or "virtual_stages" in section.model_fields_set,
        # An option can change this key, but not remove it.
        "layers_per_stage": section.layers_per_stage is not None,
        # Other values are invalid without context ranks.
        "context_attention": layout.context > 1 or section.context_attention != "gather",
        # Plans have the default, unless the layout is the recipe's own.
        "reduce_every": section.reduce_every,
        "dp_shard": section.dp_shard or layout.dp_shard,
    }
    values = vars(layout) | layout.layout_keys
    values["layers_per_stage"] = list(plan.job.blocks_of_virtual_stages)
    if layout.context == 1:
        values["context_attention"] = "gather"
    names = [name for name in Layout.model_fields if optional.get(name, True)]
    return {
        "deepspeed": deepspeed,
        **{f"layout.{name}": values[name] for name in names},
        "batch.micro_sequences": layout.micro_sequences,
    }


def changes(recipe: Recipe, plan: Plan) -> str:
    """Return the options of pretrain.py that change the recipe's layout to a plan's."""
    return " ".join(f"--set {option}" for option in options_of(recipe, plan))


def options_of(recipe: Recipe, plan: Plan) -> list[str]:
    """Return the values of --set that change the recipe's layout to a plan's."""
    options = []
    for key, value in edits(recipe, plan).items():
        if value_of(recipe, key) != value:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            options.append(f"{key}={text}")
    return options


def in_layout(recipe: Recipe, plan: Plan, origin: str) -> Recipe:
    """Return a copy of the recipe in a plan's layout.

    Args:
        origin: name for error messages
    """
    table = recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    for key, value in edits(recipe, plan).items():
        section, _, name = key.rpartition(".")
        (table.setdefault(section, {}) if section else table)[name] = value
    return parse_recipe(table, origin)


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of `section.key` or `key`."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(recipe, section) if section else recipe, name)


def check_file(path: Path) -> None:
    """Raise a UserError if a recipe cannot be written to a file because of its name."""
    if path.exists() or path.is_symlink():
        raise UserError(f"--write {path}: the file exists; use another name")
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"--write {path}: folder {path.absolute().parent} does not exist; create it"
        )


def write_recipe(recipe: Recipe, result: SearchResult, path: Path, source: Path) -> None:
    """Write a copy of the recipe with layout 1, which keeps the order and comments of its file.

    Args:
        recipe: the recipe with all changes, on the cluster of the plans
        path: of the copy
        source: the recipe's file

    Raises:
        UserError: no layout fits, or the file exists or cannot be written.
    """
    if not result.plans:
        reasons = "; ".join(
            f"{count:,} {reason}" for reason, count in result.rejected.most_common()
        )
        raise UserError(
            f"--write {path}: no layout is left; rejected: {reasons}; use another number of nodes, "
            f"a larger GPU or a smaller --headroom"
        )
    best = in_layout(recipe, result.plans[0], str(path))
    # A pipe can be read only once.
    text = edited_text(source, best) if source.is_file() else best.toml()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"# {recipe.name} with layout 1 of plan.py.\n\n")
            file.write(text)
    except FileExistsError:
        raise UserError(f"--write {path}: the file exists; use another name") from None
    except OSError as error:
        path.unlink(missing_ok=True)  # leaves no incomplete file behind
        is_full = error.errno in FULL_DISK_ERRORS
        remedy = "free disk space" if is_full else "make the folder writable"
        raise UserError(
            f"--write {path} cannot be written ({error.strerror}); {remedy}, or use another folder"
        ) from None


def edited_text(source: Path, recipe: Recipe) -> str:
    """Return the file's text, changed to express `recipe`; comments and order are kept."""
    before = load_recipe(source)
    document = tomlkit.parse(current_text(source))
    _edit(
        document,
        before.model_dump(mode="json", exclude_none=True),
        recipe.model_dump(mode="json", exclude_none=True),
        recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
    )
    return tomlkit.dumps(document)


def _edit(
    table: MutableMapping[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
    without_defaults: dict[str, Any],
) -> None:
    """Apply the differences to a parsed TOML table, in which default values may be absent."""
    for key in before.keys() - after.keys():
        table.pop(key, None)
    for key, value in after.items():
        former, inner = before.get(key), without_defaults.get(key, {})
        if value == former:
            continue
        if isinstance(value, dict) and isinstance(former, dict):
            _edit(table.setdefault(key, {}), former, value, inner)
        elif _are_tables(value) and _are_tables(former) and len(value) == len(former):
            for pair in zip(table[key], former, value, inner, strict=True):
                _edit(*pair)
        elif value == [] and key not in without_defaults:  # [[phase]] in the recipe of a phase
            table.pop(key, None)
        else:
            _set(table, key, inner if isinstance(value, dict) else value)


def _are_tables(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return True for a list of tables."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _set(table: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set a key of a parsed TOML table; a new one before trailing comments.

    Such comments usually describe the next section.
    """
    comments = []
    if isinstance(table, Table) and key not in table:
        comments = _cut_trailing_comments(table)
    if _are_tables(value):  # as in data.train: a list on its line, not sections of its own
        tables, value = value, tomlkit.array()
        for item in tables:
            value.append(tomlkit.inline_table())
            value[-1].update(item)
    table[key] = value
    if isinstance(table, Table):
        table.value.body.extend(comments)


def _cut_trailing_comments(table: Table) -> list[Any]:
    """Remove the comments and empty lines at the end of a section, and return them."""
    body = table.value.body
    end = max((n for n, (name, _) in enumerate(body, 1) if name is not None), default=0)
    if end == len(body) and body and isinstance(body[-1][1], Table):
        return _cut_trailing_comments(body[-1][1])
    comments = body[end:]
    del body[end:]
    return comments
