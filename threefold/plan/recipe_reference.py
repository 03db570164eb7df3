"""Print the reference of all recipe keys, generated from the docstrings of the recipe's fields.

python -m threefold.plan.recipe_reference > docs/recipe-reference.md
"""

import ast
import inspect
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from models import config
from threefold.config import layout, optimization, recipe, sections
from threefold.config.recipe import Recipe

INTRODUCTION = """# Recipe reference

This page lists every key of a recipe, section by section. It is generated from the docstrings of
the source code with `python -m threefold.plan.recipe_reference`. Keys that a recipe does
not set take their default. Unknown keys are rejected. `--set section.key=value` changes a key for
one run.
"""
TABLE_HEAD = "| key | type | default | meaning |\n|---|---|---|---|"
MAX_BOUND_SHOWN = 10**6  # larger bounds only catch typing errors

Schema = dict[str, Any]


def reference() -> str:
    """Return the page as Markdown."""
    root = Recipe.model_json_schema()
    docstrings = docstrings_of_fields()
    for section in (root, *root["$defs"].values()):
        for key, text in docstrings[section["title"]].items():
            section["properties"][key]["description"] = text
    return "\n".join([INTRODUCTION, *section_lines("", root, root["$defs"])])


def docstrings_of_fields() -> dict[str, dict[str, str]]:
    """Return class -> field -> docstring of the sections, from their source code.

    pydantic could read the docstrings (`use_attribute_docstrings`), but would parse the source code
    at every import, which takes a third of the time in which a command starts.
    """
    return {
        section.name: {
            field.target.id: inspect.cleandoc(str(text.value.value))
            for field, text in pairwise(section.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
        for module in (sections, layout, optimization, recipe, config)
        for section in ast.parse(inspect.getsource(module)).body
        if isinstance(section, ast.ClassDef)
    }


def section_lines(path: str, section: Schema, definitions: Schema) -> Iterator[str]:
    """Yield the table of a section, followed by those of the sections that it contains."""
    keys = {key: resolved(value, definitions) for key, value in section["properties"].items()}
    nested = {key: value for key, value in keys.items() if "properties" in value}
    entries = {
        key: value["items"] for key, value in keys.items() if "properties" in value.get("items", {})
    }
    yield f"## `[{path}]`" if path else "## Top level"
    yield f"\n{one_paragraph(section.get('description', ''))}\n"
    rows = [
        row(key, value, required=key in section.get("required", ()))
        for key, value in keys.items()
        if key not in nested
    ]
    if rows:
        yield "\n".join([TABLE_HEAD, *rows]) + "\n"
    for key, value in (nested | entries).items():
        yield from section_lines(f"{path}.{key}" if path else key, value, definitions)


def resolved(field: Schema, definitions: Schema) -> Schema:
    """Return the schema of a field without null, with references replaced by their content.

    TOML has no null: a key without a value is left out.
    """
    choices = [choice for choice in field.get("anyOf", ()) if choice.get("type") != "null"]
    if len(choices) == 1:
        field = {key: value for key, value in field.items() if key != "anyOf"} | choices[0]
    elif choices:
        field = field | {"anyOf": choices}
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        field = {key: value for key, value in field.items() if key != "$ref"} | definitions[name]
    if "$ref" in field.get("items", {}):
        field = field | {"items": resolved(field["items"], definitions)}
    return field


def row(key: str, field: Schema, *, required: bool) -> str:
    """Return a key's row of the table."""
    default = "required" if required else default_text(field.get("default"))
    meaning = one_paragraph(field.get("description", ""))
    cells = [f"`{key}`", type_text(field), default, meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def default_text(value: object) -> str:
    """Return a default as a recipe would set it; empty for None, which has no TOML value."""
    return "" if value is None else f"`{json.dumps(value)}`"


def type_text(field: Schema) -> str:
    """Return the type of a field with its range, in words."""
    if "enum" in field:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in field["enum"])
    if "anyOf" in field:
        return " or ".join(type_text(choice) for choice in field["anyOf"])
    if "properties" in field:
        return f"table of {', '.join(f'`{key}`' for key in field['properties'])}"
    if isinstance(field.get("additionalProperties"), dict):
        return f"table of one {type_text(field['additionalProperties'])} per name"
    if field["type"] == "array":
        parts = field.get("prefixItems") or [field["items"]]
        size = f"{len(parts)} values" if "prefixItems" in field else "list"
        return f"{size}, each: {type_text(parts[0])}"
    name = "table" if field["type"] == "object" else field["type"]
    return ", ".join([name, *bounds(field)])


def bounds(field: Schema) -> Iterator[str]:
    """Yield the limits of a number, without those that only catch typing errors."""
    for limit, words in (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    ):
        value = field.get(limit)
        if value is not None and math.fabs(value) <= MAX_BOUND_SHOWN:
            yield f"{words} {value:g}"


def one_paragraph(docstring: str) -> str:
    """Return the text of a docstring before its Args and Raises sections, on one line."""
    text = docstring.partition("\n\nRaises:")[0].partition("\n\nArgs:")[0]
    return " ".join(text.split())


if __name__ == "__main__":
    print(reference(), end="")
