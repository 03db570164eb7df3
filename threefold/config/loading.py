"""Load a recipe with its overrides; name what is wrong with it, and a value that works."""

import difflib
import functools
import json
import os
import re
import subprocess
import tomllib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from models.config import example_pattern
from models.errors import UserError, reason_of, suggestion, toml_line, toml_value, why_no_folder
from threefold.config.phases import RENAMED, PhasePlan, PhaseRejected, with_current_names
from threefold.config.recipe import Recipe
from threefold.config.sections import FORMER_NAMES, REPOSITORY, short

# The error messages of rejected recipes: what is wrong, and a value that works.

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
    key = ".".join(_named(location, table))
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, UserError):  # its message names the key
        message = str(raised)
        is_whole = message.startswith(key) or location[0] == "phase"  # a phase gives its name
        return message if is_whole else f"{key}.{message}"
    if isinstance(raised, Exception):
        raise raised from None
    if not location:
        return f'{problem["msg"]}; write lines such as name = "tiny"'
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        line = toml_line(key, problem["input"])
        path = ".".join(str(part) for part in location[2 if location[0] == "phase" else 0 :])
        if renamed := RENAMED.get(path):
            return f"{path} is now {renamed}; use {toml_line(renamed, problem['input'])}"
        name = "section" if isinstance(problem["input"], dict) else "key"
        return f"unknown {name} {line}; {_suggestion(location, recipe)}"
    works = _example(location, recipe, example)
    if kind.startswith("missing"):
        return f"{key} is missing; for example {works}"
    complaint = problem["msg"][0].lower() + problem["msg"][1:]
    if kind == "string_pattern_mismatch":
        pattern = problem["ctx"]["pattern"]
        complaint = CHARACTERS[pattern]
        if name := name_that_fits(problem["input"], pattern):
            works = f"{location[-1]} = {toml_value(name)}"
    if kind in ("float_type", "int_type"):  # values after --set may be text
        spelling, _ = number_in_toml(str(problem["input"])) or ("", "")
        if re.fullmatch(r"[\d_]+" if kind == "int_type" else r".*\d.*", spelling):
            works = f"{location[-1]} = {spelling}"
    for python, toml in (("True", "true"), ("False", "false"), ("an object", "a table")):
        complaint = complaint.replace(python, toml)
    value = _look_up(table, location)  # a validator may have changed the input
    written = toml_line(key, problem["input"] if value is None else value)
    return f"{written}: {complaint}; for example {works}"


def _named(location: Location, table: dict[str, Any]) -> list[str]:
    """Return the parts of a key, with a phase's name in place of its index if that is clear."""
    parts = [str(part) for part in location]
    if location[:1] == ("phase",) and len(location) > 2 and location[2] != "name":
        names = [_look_up(phase, ("name",)) for phase in table["phase"]]
        name = names[int(location[1])]
        if isinstance(name, str) and names.count(name) == 1:
            parts[1] = name
    return parts


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
    if section == ["model"] and key in THEIR_NAMES:
        return f"did you mean model.{THEIR_NAMES[key]}?"
    if close:
        return f"did you mean {'.'.join([*section, *close])}?"
    if elsewhere and section[:1] != ["phase"]:  # a phase has few keys: list them
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
        value = _look_up(OTHER_EXAMPLES, location)
    if value is None:
        value = _defaults(recipe).get(".".join(str(part) for part in location))
    if not isinstance(value, (str, int, float, list, tuple, dict)):
        return f"leave {location[-1]} out"
    return f"{location[-1]} = {toml_value(value)}"


def name_that_fits(name: str, pattern: str) -> str:
    """Return a name without accents, in which hyphens replace characters that a pattern forbids.

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
    defaults: dict[str, Any] = {}
    if is_dataclass(model):
        entries = [(field.name, field.type, field.default) for field in fields(model)]
    else:
        entries = [
            (name, f.annotation, f.examples[0] if f.examples else f.default)
            for name, f in model.model_fields.items()
        ]
    for name, annotation, default in entries:
        defaults[prefix + name] = default
        for section in (annotation, *get_args(annotation)):
            if is_dataclass(section) or (
                isinstance(section, type) and issubclass(section, BaseModel)
            ):
                defaults |= _defaults(section, f"{prefix}{name}.")
    return defaults


def _look_up(table: Any, location: Location) -> Any:
    for part in location:
        try:
            table = table[part]
        except (KeyError, IndexError, TypeError):
            return None
    return table


DEFAULT_RECIPE = REPOSITORY / "recipes" / "tiny.toml"
SCALING_EXAMPLE = {"type": "llama3", "factor": 8.0, "original_sequence_length": 8192}
EXPERTS_EXAMPLE = {"count": 8, "per_token": 2, "ffn_hidden_size": 1024}
OTHER_EXAMPLES = {  # of sections that cannot be combined with the others
    "model": {
        "window": {"size": 4096},
        "latent": {"key_value_rank": 512, "rotary_size": 64, "value_size": 128},
        "prediction": {"depth": 1, "loss_weight": 0.3},
    },
    "optimizer": {"average": {"decay": 0.999}},
}
RAMP_EXAMPLE = {"start_sequences": 8, "increment": 8, "samples": 1000}
PHASE_EXAMPLE = {"name": "long", "start_step": 1000, "model": {"sequence_length": 512}}
TASK_EXAMPLE = {"name": "next_line", "path": "data/tasks/next_line.jsonl"}
# Names in transformers about attention -> our keys.
THEIR_NAMES = {
    "sliding_window": "window.size", "layer_types": "attention_pattern", "head_dim": "head_size",
    "attn_logit_softcapping": "attention_soft_cap", "final_logit_softcapping": "logit_soft_cap",
    "sinks": "attention_sinks",
}  # fmt: skip
MAX_NESTING = 20  # of tables and arrays
MAX_CHARACTERS_SHOWN = 100  # of a line
# The beginnings of tomllib's messages about a key or a section that a file contains twice.
TOML_DUPLICATES = re.compile(
    "Cannot (overwrite|declare|redefine|mutate)|Duplicate inline table key"
)
TOML_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
TOML_WORD = re.compile(r"([\w.-]+)\s*=\s*([A-Za-z_~./][\w./-]*)\s*(?:#.*)?")  # key, value
TOML_VALUE = re.compile(r"([\w.-]+)\s*=\s*([^#]*[^#\s,])\s*,?\s*(?:#.*)?")  # key, value
TOML_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[^=#"'])+?)\s*=""")
CLUSTER_RECIPE = REPOSITORY / "recipes" / "llama" / "7b.toml"  # has the sections that tiny lacks


def recipes_in_repository() -> list[Path]:
    """Return the recipes in this repository, a user's own included: tiny ones first, then families.

    A user's own recipes need not be valid.
    """
    folder = REPOSITORY / "recipes"
    tiny = set(folder.glob("*.toml")) - {DEFAULT_RECIPE}
    return [DEFAULT_RECIPE, *sorted(tiny), *sorted(folder.glob("*/*.toml"))]


def untracked_files(folder: str) -> frozenset[Path]:
    """Return the files in a folder of this repository that git does not track, if there is git."""
    command = ["git", "ls-files", "--others", "-z", folder]
    try:
        listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False).stdout
    except FileNotFoundError:
        listed = b""
    return frozenset(REPOSITORY / os.fsdecode(name) for name in listed.split(b"\0") if name)


def load_recipes(paths: Iterable[Path]) -> tuple[dict[Path, Recipe], list[str]]:
    """Return the recipes that are valid, by file, and one line about each of the others."""
    recipes: dict[Path, Recipe] = {}
    problems: list[str] = []
    for path in paths:
        try:
            recipes[path] = load_recipe(path)
        except UserError as problem:
            problems.append(in_one_line(problem))
    return recipes, problems


def in_one_line(problem: UserError) -> str:
    """Return the message of an error without line breaks."""
    first, *others = (line.strip() for line in str(problem).splitlines())
    return " ".join([first, "; ".join(others)]) if others else first


def origin(path: Path, overrides: Sequence[str]) -> str:
    """Return a recipe's name for error messages: its file and its overrides."""
    return f"{short(path)}" + "".join(f" --set {override}" for override in overrides)


# Runs record their recipes in these files, maybe with former names of keys.
RECORDED_FILE_NAMES = ("recipe.toml", "launched.toml")


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `section.key=value` overrides (TOML values; a bare word is a string).

    Raises:
        UserError: one message for all problems, each with its key, its value and a value that
            works.
    """
    table = _read_toml(path)
    if path.name in RECORDED_FILE_NAMES:
        table = with_current_names(table)
    for former in FORMER_NAMES.keys() & table.keys():
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        match = (n for n, line in enumerate(lines, 1) if re.match(rf"\s*\[*\s*{former}\b", line))
        current = FORMER_NAMES[former]
        raise UserError(
            f"{short(path)}: line {next(match, 1)}: [[{former}]] is now [[{current}]]; write "
            f"[[{current}]]"
        )
    apply_overrides(table, overrides)
    return parse_recipe(table, origin(path, overrides))


def parse_recipe(table: dict[str, Any], name: str) -> Recipe:
    """Validate a recipe's table; error messages begin with `name`."""
    if is_nested_too_deeply(table):
        raise UserError(
            f"{name}: tables and arrays are nested more than {MAX_NESTING} levels deep, which no "
            f'key needs; write lines such as name = "tiny"'
        )
    try:
        # pydantic's strict mode accepts an array for a tuple and a table for a dataclass only in
        # JSON.
        text = json.dumps(table, default=_reject_date)
        if r"\u0000" in text:
            _reject_null_characters(table)
        recipe = Recipe.model_validate_json(text)
        PhasePlan(recipe)
        return recipe
    except ValidationError as error:
        problems = _explanations(error, table)
    except PhaseRejected as rejected:
        problems = _explanations(rejected.error, rejected.table)
        problems = [f'phase "{rejected.phase}": {problem}' for problem in problems]
    except UserError as problem:
        problems = [str(problem)]
    if len(problems) == 1:
        raise UserError(f"{name}: {problems[0]}")
    raise UserError("\n  ".join([f"{name}: {len(problems)} problems:", *problems]))


def _explanations(error: ValidationError, table: dict[str, Any]) -> list[str]:
    """Return a message for each error of pydantic about a recipe's table."""
    example, model = _complete_table(), table.get("model")
    if isinstance(model, dict) and model.get("window"):  # its pattern needs layers with a window
        layers = model.get("layers")
        pattern = example_pattern(max(layers, 1) if type(layers) is int else 2, has_window=True)
        example = example | {"model": example["model"] | {"attention_pattern": pattern}}
    return [explain(problem, table, Recipe, example) for problem in root_causes(error)]


@functools.cache
def _complete_table() -> dict[str, Any]:
    """Return the table of a recipe with a valid value for every key that an error may name."""
    example = _read_toml(CLUSTER_RECIPE) | _read_toml(DEFAULT_RECIPE)
    example["model"] |= {"rope_scaling": SCALING_EXAMPLE, "experts": EXPERTS_EXAMPLE}
    example["batch"] |= {"ramp": RAMP_EXAMPLE}
    example["evaluation"] = {"tasks": [TASK_EXAMPLE]}
    example["phase"] = [PHASE_EXAMPLE]
    return example


def is_nested_too_deeply(table: dict[str, Any]) -> bool:
    """Return True if a table would exceed Python's recursion limit in the functions that walk it.

    tomllib and --set accept dotted keys of any depth.
    """
    level: list[Any] = [table]
    for _ in range(MAX_NESTING):
        inner = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    return bool(level)


def _reject_null_characters(value: Any, key: str = "") -> None:
    """Raise a UserError if a string contains a character that no path may contain."""
    if isinstance(value, dict):
        for name, content in value.items():
            _reject_null_characters(content, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for content in value:
            _reject_null_characters(content, key)
    elif isinstance(value, str) and "\0" in value:
        raise UserError(f"{key} = {value_text(value)} contains a null character; remove \\u0000")


def _reject_date(value: Any) -> Any:
    raise UserError(f'{value} is a date in TOML, and no key expects one; write "{value}"')


def _read_toml(path: Path) -> dict[str, Any]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except IsADirectoryError:
        files = [*sorted(path.glob("*.toml")), *sorted(path.glob("*/*.toml"))]
        remedy = suggestion("", [str(short(file)) for file in files or recipes_in_repository()])
        raise UserError(f"{short(path)}: this is a folder; {remedy}") from None
    except FileNotFoundError:
        problem = why_no_folder(path) if path.is_symlink() else "no such recipe"
        raise UserError(f"{short(path)}: {problem}; {_existing_recipe(path)}") from None
    except OSError as error:
        raise UserError(
            f"{short(path)} cannot be read ({error.strerror}); use a file that you can read"
        ) from None
    except (ValueError, RecursionError) as error:  # a plain ValueError for 4,301 digits
        if TOML_DUPLICATES.match(str(error)):
            raise UserError(f"{short(path)}: {_duplicate(text, str(error))}") from None
        raise UserError(f"{short(path)}: {_invalid_line(text, error)}") from None


def _invalid_line(text: str, error: Exception) -> str:
    """Return a message about a TOML text that tomllib rejects, with the line and advice for it."""
    number = re.search(r"at line (\d+)", str(error))
    line = text.split("\n")[int(number[1]) - 1].strip() if number else ""
    if len(line) > MAX_CHARACTERS_SHOWN:
        line = ""
    pair = TOML_VALUE.fullmatch(line)
    if pair and (spelling := number_in_toml(pair[2])):
        advice = f"{spelling[1]}: {pair[1]} = {spelling[0]}"
    elif "Invalid value" in str(error) and (word := TOML_WORD.fullmatch(line)):
        advice = _advice_on_word(word[1], word[2])
    elif value := re.fullmatch(r"([\w.]+\s*=\s*[^\[{#,]*[^\[{#,\s])\s*,\s*(#.*)?", line):
        advice = f"remove the comma after the value: {value[1]}"
    elif re.fullmatch(r"\[[^\]]*", line):
        brackets = len(line) - len(line.lstrip("["))
        advice = f"a section needs closing brackets: {line}{']' * brackets}"
    else:
        shown = f": {line}" if line else ""
        return (
            f'this is not valid TOML: {reason_of(error)}{shown}; write lines such as name = "tiny"'
        )
    return f"line {number[1] if number else 1}: {line}: {advice}"


def _advice_on_word(key: str, word: str) -> str:
    """Return advice about a value that is a word without quotes."""
    if (value := word.lower()) in ("true", "false"):
        return f"true and false are lowercase: {key} = {value}"
    if value in ("none", "null", "nil"):
        return f"TOML has no {word}; remove this line if {key} may be missing"
    return f'text needs quotes: {key} = "{word}"'


def number_in_toml(text: str) -> tuple[str, str] | None:
    """Return the valid spelling of a number that TOML rejects, and the rule that it breaks.

    Returns:
        None if the text is not such a number
    """
    sign = text[: text.startswith(("+", "-"))]
    digits = text[len(sign) :]
    if re.fullmatch(r"[1-9]\d{0,2}([ ,]\d{3})+", digits):
        return sign + re.sub("[ ,]", "_", digits), "a number has no spaces or commas"
    if re.fullmatch(r"\d+,\d+", digits):
        return sign + digits.replace(",", "."), "use a decimal point, not a comma"
    if parts := re.fullmatch(r"(\d+\.|\.\d+)([eE][+-]?\d+)?", digits):
        point = f"0{parts[1]}" if parts[1].startswith(".") else f"{parts[1]}0"
        return (
            f"{sign}{point}{parts[2] or ''}",
            "the point needs digits on both sides",
        )
    if digits.lower() in ("inf", "infinity", "nan"):
        return sign + digits.lower()[:3], "TOML writes them inf and nan"
    return None


def _duplicate(text: str, error: str) -> str:
    """Return a message about a key or a section that a TOML text contains twice.

    error: message of tomllib, which has only the line in which the second value ends
    """
    end = re.search(r"at line (\d+)", error)
    lines: dict[str, list[int]] = {}  # key or section -> numbers of the lines that begin with it
    section, name = "", "a key"
    for number, line in enumerate(text.split("\n")[: int(end[1]) if end else None], start=1):
        if header := TOML_HEADER.match(line):
            section = name = f"[{header[2]}]"
            if header[1] == "[[":  # another table with the same keys
                lines = {key: value for key, value in lines.items() if section[1:-1] not in key}
        elif key := TOML_KEY.match(line):
            name = ".".join(filter(None, [section[1:-1], key[1]]))
        else:
            continue
        lines.setdefault(name, []).append(number)
    *before, last = lines.get(name, [number])
    first = f", first in line {before[-1]}" if before else ""
    if inner := re.match(r"Duplicate inline table key '(.*)'", error):
        name, first = f"{name}.{inner[1]}", ""
    return f"line {last}: {name} is given twice{first}; remove one of them"


def _existing_recipe(path: Path) -> str:
    """Return the recipe that resembles a missing one, as a question; otherwise a few recipes."""
    files = [*recipes_in_repository(), *sorted(path.parent.glob("*.toml"))]
    files = [file for file in files if file.is_file()]
    by_name = {_family_and_size(file): str(short(file)) for file in files}
    if close := difflib.get_close_matches(_family_and_size(path), by_name, n=1, cutoff=0.7):
        return f"did you mean {by_name[close[0]]}?"
    return suggestion("", list(by_name.values()))


def _family_and_size(path: Path) -> str:
    """Return the part of a recipe's path that distinguishes it, such as tiny or llama/7b."""
    *_, folder, name = ("recipes", *path.parts)
    return f"{folder}/{name}".removeprefix("recipes/").removesuffix(".toml")


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set keys of a recipe's table, as --set does.

    An override of the schedule also removes the virtual stages and the layers per stage, which
    belong to the old schedule: the recipe in a run folder has every default written out.
    """
    for override in overrides:
        apply_override(table, override)
    given = {override.partition("=")[0].strip() for override in overrides}
    if "layout.schedule" in given:
        for key in ("virtual_stages", "layers_per_stage"):
            if f"layout.{key}" not in given and isinstance(table["layout"], dict):
                table["layout"].pop(key, None)


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one key of a recipe's table; `phase.NAME.section.key` is a key of the phase NAME."""
    override = text_of_override(override)
    name, equals, text = override.partition("=")
    *sections, key = (part.strip() for part in name.split("."))
    if not equals or not key or not all(sections):
        raise UserError(f"--set {override}: write it as --set section.key=value")
    if current := FORMER_NAMES.get(name.split(".")[0].strip()):
        former, dot, rest = name.partition(".")
        raise UserError(
            f"--set {override}: {former.strip()} is now {current}; write --set "
            f"{current}{dot}{rest}={text}"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()  # a bare word
    for depth, section in enumerate(sections, start=1):
        if depth == 1 and section == "phase" and len(sections) > 1:
            table = _phases_by_name(table.get("phase", []), override)
            if sections[1] not in table:
                raise UserError(
                    f"--set {override}: the recipe has no phase {sections[1]}; use a name of a "
                    f"[[phase]] table: {', '.join(table) or 'it has none'}"
                )
            continue
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            path = ".".join(sections[:depth])
            raise UserError(
                f"--set {override}: {path} is a value, not a section; write --set {path}=..."
            )
    table[key] = value


def text_of_override(override: str) -> str:
    """Return the text of an override from the command line.

    Python decodes arguments in the encoding of the locale. In an ASCII locale such as C, each byte
    of another character becomes half of a surrogate pair, which neither JSON nor UTF-8 allows.

    Raises:
        UserError: the bytes of the argument are not UTF-8.
    """
    if not any("\ud800" <= character <= "\udfff" for character in override):
        return override
    try:
        return os.fsencode(override).decode("utf-8")
    except UnicodeError:
        raise UserError(
            f"--set {override}: this is not UTF-8 text; write it in UTF-8, or use TOML's escapes, "
            f'for example "\\u00e9"'
        ) from None


def _phases_by_name(phases: Any, override: str) -> dict[str, Any]:
    """Return the tables of a recipe's phases by name; those without a name are rejected later."""
    if not isinstance(phases, list) or not all(isinstance(phase, dict) for phase in phases):
        raise UserError(
            f"--set {override}: the recipe's phase is not an array of tables; write [[phase]] in "
            f"double brackets"
        )
    return {name: phase for phase in phases if isinstance(name := phase.get("name"), str)}
