"""The error messages of rejected recipes: what is wrong, and a value that works."""

import difflib
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from models.errors import UserError, toml_line, toml_value

Location = tuple[str | int, ...]

MAX_NAME_CHARACTERS = 64  # of a proposed name
# The characters that a pattern of the schema allows, in words.
CHARACTERS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "use only the letters A to Z and a to z, digits, dots, "
    "hyphens and underscores, and begin with a letter or digit",
    r"^[A-Za-z0-9][A-Za-z0-9_-]*$": "use only the letters A to Z and a to z, digits, hyphens and "
    "underscores, and begin with a letter or digit",
    r"^[A-Za-z0-9_-]{0,128}$": "use up to 128 letters A to Z and a to z, digits, hyphens and "
    "underscores",
    r"^[^/\\#?%:]{1,128}$": "use 1 to 128 characters other than / \\ # ? % and :",
}


def value_text(value: Any, indent: int | None = None) -> str:
    """Return a value of a recipe or of a JSON file as JSON for a message.

    Letters that ASCII lacks are printed, where `json.dumps` alone would print escapes. Half of a
    surrogate pair is not a character, and remains an escape.
    """
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return text.encode(errors="backslashreplace").decode()


def explain(
    problem: ErrorDetails, table: dict[str, Any], recipe: type[BaseModel], example: dict[str, Any]
) -> str:
    """Describe one of pydantic's errors in one line.

    Args:
        problem: an entry of `ValidationError.errors()`
        table: the table of the recipe's file
        recipe: the class that the table should fit
        example: a table that fits the class

    Raises:
        Exception: the error of a validator that is not a UserError. pydantic treats every
            ValueError and AssertionError as an invalid value; such an error is a defect of the
            validator, so it keeps its class and its traceback.
    """
    location, kind = problem["loc"], problem["type"]
    key = ".".join(str(part) for part in location)
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, UserError):  # its message names the key
        message = str(raised)
        is_whole = message.startswith(key) or location[0] == "stage"  # a stage gives its name
        return message if is_whole else f"{key}.{message}"
    if isinstance(raised, Exception):
        raise raised from None
    if not location:
        return f'{problem["msg"]}; write lines such as name = "tiny"'
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        name = "section" if isinstance(problem["input"], dict) else "key"
        line = toml_line(key, problem["input"])
        return f"unknown {name} {line}; {_suggestion(location, recipe)}"
    works = _example(location, recipe, example)
    if kind.startswith("missing"):
        return f"{key} is missing; for example {works}"
    complaint = problem["msg"][0].lower() + problem["msg"][1:]
    if kind == "string_pattern_mismatch":
        pattern = problem["ctx"]["pattern"]
        complaint = CHARACTERS[pattern]
        if name := _name_that_fits(problem["input"], pattern):
            works = f"{location[-1]} = {toml_value(name)}"
    complaint = complaint.replace("True", "true").replace("False", "false")  # in TOML's spelling
    value = _look_up(table, location)  # a validator may have changed the input
    written = toml_line(key, problem["input"] if value is None else value)
    return f"{written}: {complaint}; for example {works}"


def root_causes(error: ValidationError) -> list[ErrorDetails]:
    """Return pydantic's errors, except for lists that are too short because an item is invalid."""
    problems = error.errors()
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(
            other is not problem and other["loc"][: len(problem["loc"])] == problem["loc"]
            for other in problems
        )
    ]


def _suggestion(location: Location, recipe: type[BaseModel]) -> str:
    *section, key = (part for part in location if isinstance(part, str))
    known = [path.split(".") for path in _defaults(recipe)]
    siblings = [path[-1] for path in known if path[:-1] == section]
    elsewhere = [".".join(path) for path in known if path[-1] == key]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.7)
    if close:
        return f"did you mean {'.'.join([*section, *close])}?"
    if elsewhere and section[:1] != ["stage"]:  # a stage has few keys: list them
        outermost = min(elsewhere, key=lambda path: path.count("."))
        return f"did you mean {outermost}?"
    section_name = f"[{'.'.join(section)}]" if section else "the top level"
    return f"the keys of {section_name} are {', '.join(siblings)}"


def _example(location: Location, recipe: type[BaseModel], example: dict[str, Any]) -> str:
    """Return a valid line of TOML: the example's, or the default if the example lacks the key.

    A section is an inline table, which also fits --set.
    """
    last = max(index for index, part in enumerate(location) if isinstance(part, str))
    location = tuple(part if isinstance(part, str) else 0 for part in location[: last + 1])
    value = _look_up(example, location)
    if value is None:
        value = _defaults(recipe).get(".".join(str(part) for part in location))
    if not isinstance(value, (str, int, float, list, tuple, dict)):
        return f"leave {location[-1]} out"
    return f"{location[-1]} = {toml_value(value)}"


def _name_that_fits(name: str, pattern: str) -> str:
    """Return a name without accents, in which hyphens replace characters that a pattern forbids.

    pattern: one of CHARACTERS

    Returns:
        "" if no character is left
    """
    letters = unicodedata.normalize("NFKD", name)
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    fitting = (letter if re.search(pattern, f"a{letter}") else "-" for letter in plain)
    shortened = "".join(fitting).strip("-._")[:MAX_NAME_CHARACTERS]
    return shortened if re.search(pattern, shortened) else ""


def _defaults(model: Any, prefix: str = "") -> dict[str, Any]:
    """Return "section.key" -> default for every key of a class and its sections.

    A field's own example replaces a default that does not show what the key takes, such as [].
    """
    return dict(_walk(model, prefix))


def _walk(model: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if is_dataclass(model):
        entries = [(field.name, field.type, field.default) for field in fields(model)]
    else:
        entries = [
            (name, f.annotation, f.examples[0] if f.examples else f.default)
            for name, f in model.model_fields.items()
        ]
    for name, annotation, default in entries:
        yield prefix + name, default
        for section in (annotation, *get_args(annotation)):
            if is_dataclass(section) or (
                isinstance(section, type) and issubclass(section, BaseModel)
            ):
                yield from _walk(section, f"{prefix}{name}.")


def _look_up(table: Any, location: Location) -> Any:
    for part in location:
        try:
            table = table[part]
        except (KeyError, IndexError, TypeError):
            return None
    return table
