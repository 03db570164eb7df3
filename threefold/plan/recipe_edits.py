"""Edits of a recipe that select a plan's layout, as options or in a copy of the recipe."""

import contextlib
import json
import math
import tomllib
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeGuard

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Item, Key, Null, Table

from models.errors import FULL_DISK_ERRORS, UserError
from threefold.config.deepspeed_json import (
    different_settings,
    read_deepspeed_json,
    shipped_json,
    zero_stage,
)
from threefold.config.layout import Layout
from threefold.config.loading import apply_overrides, parse_recipe
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.config.sections import FIRST_PHASE
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.job import Machine, job_of
from threefold.plan.memory.peak import fullest_stage
from threefold.plan.search import Plan, SearchResult
from threefold.plan.software import Software


def edits(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return the recipe keys that select a plan's layout."""
    layout, section = plan.job.layout, recipe.layout
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
        "deepspeed": deepspeed_of(recipe, plan),
        **{f"layout.{name}": values[name] for name in names},
        "batch.micro_sequences": layout.micro_sequences,
    }


def deepspeed_of(recipe: Recipe, plan: Plan) -> str:
    """Return the recipe's DeepSpeed JSON if it has the plan's ZeRO stage, or else a shipped one."""
    stage = plan.job.layout.zero_stage
    if zero_stage(read_deepspeed_json(recipe.deepspeed)) == stage:
        return recipe.deepspeed
    return shipped_json(stage, plan.job.precision)


def replaced_settings(recipe: Recipe, plan: Plan) -> list[str]:
    """Return the settings of the recipe's DeepSpeed JSON of which the plan's has other values."""
    deepspeed = deepspeed_of(recipe, plan)
    return [] if deepspeed == recipe.deepspeed else different_settings(recipe.deepspeed, deepspeed)


def replacement_text(recipe: Recipe, plan: Plan, layouts: str) -> str:
    """Return a line about the settings that layouts replace; empty if there are none.

    Args:
        plan: one of the layouts
        layouts: subject of the sentence, such as "Layout 1"
    """
    replaced = replaced_settings(recipe, plan)
    if not replaced:
        return ""
    return (
        f"{layouts} replaces {recipe.deepspeed} with {deepspeed_of(recipe, plan)}, which has other "
        f"values of: {', '.join(replaced)}; to keep yours, use a copy of {recipe.deepspeed} with "
        f"zero_optimization.stage = {plan.job.layout.zero_stage}"
    )


def edits_in_phase(recipe: Recipe, plan: Plan, phase: str) -> dict[str, Any]:
    """Return `edits` with the keys that --set needs to change only a phase.

    Phases that inherit its layout change, too. The key `deepspeed` has no prefix, because the whole
    run has one DeepSpeed JSON.

    Args:
        recipe: the recipe of the phase, without [[phase]] tables
    """
    prefix = phase_prefix(phase)
    return {
        f"{prefix}{key}" if "." in key else key: value for key, value in edits(recipe, plan).items()
    }


def phase_prefix(phase: str) -> str:
    """Return the prefix of a phase's keys in --set, such as "phase.long."; empty for the first."""
    return "" if phase == FIRST_PHASE else f"phase.{phase}."


def options_of(recipe: Recipe, plan: Plan, phase: str = FIRST_PHASE) -> list[str]:
    """Return the values of --set that change the layout of a phase to a plan's.

    Args:
        recipe: the recipe of the phase, without [[phase]] tables
    """
    options = []
    for key, value in edits_in_phase(recipe, plan, phase).items():
        if value_of(recipe, key.removeprefix(phase_prefix(phase))) != value:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            options.append(f"{key}={text}")
    return options


def in_layout(whole: Recipe, plan: Plan, origin: str, phase: str = FIRST_PHASE) -> Recipe:
    """Return a copy of a recipe in which a phase, and phases that inherit it, have a plan's layout.

    Args:
        whole: the recipe with all phases
        origin: name for error messages
    """
    table = whole.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    plain = whole if phase == FIRST_PHASE else PhasePlan(whole).recipe_of(phase)
    apply_overrides(table, options_of(plain, plan, phase))
    return parse_recipe(table, origin)


def problem_in_run(
    whole: Recipe,
    machine: Machine,
    software: Software,
    phase: str = FIRST_PHASE,
    *,
    limit: float = math.inf,
) -> Callable[[Plan], str]:
    """Return a function that says why a run rejects a plan's layout in a phase; "" if it does not.

    The search knows the general rules of layouts, but not those of every key of a recipe.

    Args:
        limit: largest memory of a GPU in any phase, in bytes
    """
    return lambda plan: problem_in_any_step(
        lambda: in_layout(whole, plan, whole.name, phase), machine, software, limit=limit
    )


def problem_in_any_step(
    change: Callable[[], Recipe], machine: Machine, software: Software, *, limit: float = math.inf
) -> str:
    """Return why a step of a changed recipe is not valid; empty if all are.

    Args:
        change: returns the changed recipe
        limit: largest memory of a GPU, in bytes
    """
    try:
        phases = PhasePlan(change())
        for segment in phases.segments:
            with phases.naming(segment):
                job = job_of(segment.recipe, machine, software)
            if limit < math.inf and fullest_stage(job).total > limit:
                return f'phase "{segment.phase}" needs too much memory'
    except UserError as problem:
        return str(problem)
    return ""


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of `section.key` or `key`."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(recipe, section) if section else recipe, name)


def check_file(path: Path) -> None:
    """Raise a UserError if a recipe cannot be written to a file because of its name."""
    try:
        exists = path.exists() or path.is_symlink()
    except OSError as error:  # such as a name that is too long
        raise UserError(f"--write {path}: {error.strerror}; use another name") from None
    if exists:
        raise UserError(f"--write {path}: the file exists; use another name")
    if path.suffix != ".toml":
        raise UserError(
            f"--write {path}: the file name of a recipe must end in .toml; use "
            f"{path.with_suffix('.toml')}"
        )
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"--write {path}: folder {path.absolute().parent} does not exist; create it"
        )


def write_recipe(
    recipe: Recipe,
    result: SearchResult,
    path: Path,
    source: Path,
    *,
    phase: str = FIRST_PHASE,
) -> None:
    """Write a copy of a recipe's file with layout 1 in a phase and those after it.

    The copy keeps the order and the comments of the file.

    Args:
        recipe: the whole recipe after --set and the options of the cluster
        path: file of the copy
        source: file of the recipe

    Raises:
        UserError: no layout fits, or the copy exists or cannot be written.
    """
    if not result.plans and result.problem:
        raise UserError(f"--write {path}: no layout is valid in the whole run: {result.problem}")
    if not result.plans:
        reasons = "; ".join(
            f"{count:,} {reason}" for reason, count in result.rejected.most_common()
        )
        raise UserError(
            f"--write {path}: no layout is left; rejected: {reasons}; use another number of nodes, "
            f"a larger GPU or a smaller --headroom"
        )
    best = in_layout(recipe, result.plans[0], str(path), phase)
    heading, text = f"# {recipe.name} with layout 1 of plan.py", edited_text(source, best)
    name = str(source) if str(source).isprintable() else ascii(str(source))
    if text is None:
        heading += f", without the comments of {name}."
        text = best.toml()
    else:
        heading += f".\n# The comments below are those of {name}, whose values may differ."
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"{heading}\n\n{text}")
    except FileExistsError:
        raise UserError(f"--write {path}: the file exists; use another name") from None
    except OSError as error:
        # Leave no incomplete file. On a read-only disk, there is none, and unlink fails, too.
        with contextlib.suppress(OSError):
            path.unlink()
        is_full = error.errno in FULL_DISK_ERRORS
        remedy = "free disk space" if is_full else "make the folder writable"
        raise UserError(
            f"--write {path} cannot be written ({error.strerror}); {remedy}, or use another folder"
        ) from None


def edited_text(source: Path, recipe: Recipe) -> str | None:
    """Return the text of a recipe's file, changed to express `recipe`.

    Comments stay, except those in a value or a section that is replaced or removed.

    Returns:
        None if the file is a pipe, which can be read only once, or if it cannot be edited so that
        it expresses `recipe`, for example because of an unusual form of TOML.
    """
    if not source.is_file():
        return None
    try:
        # If the last line has no newline, tomlkit puts no empty line before a new section.
        document = tomlkit.parse(f"{source.read_text(encoding='utf-8-sig').rstrip()}\n")
        comments, _ = _cut_comments(document.body, (document.body, 0))
        _edit(
            document,
            recipe.model_dump(mode="json", exclude_none=True),
            recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
        )
        for section, lines in comments:
            section.trivia.indent = lines + section.trivia.indent
        text = tomlkit.dumps(document)
        return text if parse_recipe(tomllib.loads(text), str(source)) == recipe else None
    except (TOMLKitError, tomllib.TOMLDecodeError, UserError, OSError, UnicodeDecodeError):
        return None


def _edit(
    table: MutableMapping[str, Any], wanted: dict[str, Any], without_defaults: dict[str, Any]
) -> None:
    """Give a parsed TOML table the wanted values. Keys with default values are not added."""
    for key in list(table):
        value, short = wanted.get(key), without_defaults.get(key, {})
        if table[key] == value:
            continue
        if value is None or (value == [] and key not in without_defaults):
            table.pop(key)
        elif isinstance(value, dict) and isinstance(table[key], dict):
            _edit(table[key], value, short)
        elif _are_tables(value) and _are_tables(table[key]) and len(value) == len(table[key]) > 0:
            for inner, inner_wanted, inner_short in zip(table[key], value, short, strict=True):
                _edit(inner, inner_wanted, inner_short)
        else:
            table[key] = _item(value, table)
    for key, value in without_defaults.items():
        if key not in table:
            table[key] = _item(value, table)


def _are_tables(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _item(value: Any, table: MutableMapping[str, Any]) -> Any:
    """Return a value for a parsed TOML table, in the form that recipes have.

    Lists of tables are written in one line, as in data.train. A table is a section, unless the keys
    around it are dotted (`optimizer.learning_rate = 1e-4`), which may not follow a section.
    """
    has_header = isinstance(table, TOMLDocument) or (
        isinstance(table, Table) and not table.is_super_table()
    )
    if isinstance(value, dict) and not has_header:
        item = tomlkit.inline_table()
        item.update(value)
        return item
    if _are_tables(value):
        array = tomlkit.array()
        for each in value:
            array.append(tomlkit.inline_table())
            array[-1].update(each)
        return array
    return value


Body = list[tuple[Key | None, Item]]


def _cut_comments(body: Body, above: tuple[Body, int]) -> tuple[list[tuple[Table, str]], Body]:
    """Cut the comments and empty lines above each header.

    tomlkit has them at the end of the section above, where new keys would follow them.

    Args:
        body: keys and values of a table; those without a key are comments and empty lines
        above: the body with the lines above the first header, and their end in it

    Returns:
        each section with the lines above its header, and the body of the last section
    """
    cut: list[tuple[Table, str]] = []
    lines, end = above
    for index, (key, item) in enumerate(body):
        if key is None or key.is_dotted() or not isinstance(item, AoT | Table):
            continue
        for table in item.body if isinstance(item, AoT) else [item]:
            end = index if lines is body else end if lines is above[0] else len(lines)
            if not table.is_super_table():
                start = end
                while start > 0 and lines[start - 1][0] is None:
                    start -= 1
                cut.append((table, "".join(line.as_string() for _, line in lines[start:end])))
                lines[start:end] = [(None, Null())] * (end - start)  # positions of keys stay
                lines, end = table.value.body, 0
            more, lines = _cut_comments(table.value.body, (lines, end))
            cut += more
    return cut, lines
