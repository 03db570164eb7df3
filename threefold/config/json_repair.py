"""Repair the slips of a JSON text that a person or a script has written, and locate each one."""

import json
import re
from difflib import get_close_matches

from models.errors import UserError, reason_of

MAX_SYNTAX_ERRORS = 100  # to repair in a JSON text
MAX_POSITIONS = 3  # of one message
COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
TRAILING_COMMA = re.compile(r",(?=\s*[}\]])")
SINGLE_QUOTED = re.compile(r"'[^'\"\\\n]*'")
UNQUOTED_KEY = re.compile(r"[A-Za-z_]\w*(?=\s*:)")
CONSTANTS_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
MISSING_COMMA = re.compile(r'["{\[\w-]')  # the beginning of the value after a missing comma
# A variable of a script that writes the file, such as GLOBAL_BATCH, $STAGE, ${STAGE}, {{stage}}.
PLACEHOLDER = re.compile(r"\{\{[^{}\n]*\}\}|<[^<>\n]*>|-?[A-Za-z_$%@](?:[\w$%@.]|\{\w*\})*")


def repair_json(text: str) -> tuple[list[str], str]:
    """Return messages about the syntax errors of a JSON text, and the repaired text.

    Comments, missing commas, commas before a bracket, single quotes, keys without quotes, constants
    of Python and placeholders are repaired; a placeholder becomes "auto". An error that occurs more
    than once has one message.

    Raises:
        UserError: the text has another error; the message names this one and those repaired.
        RecursionError, ValueError: as raised by `json.loads`
    """
    original, added = text, 0  # number of characters that repairs have added
    problems: dict[str, list[str]] = {}  # message -> positions
    while True:
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            repair = _repair(text, error)
            start = error.pos if repair is None else repair[0]
            before = original[: start - added]
            if repair is None or sum(map(len, problems.values())) == MAX_SYNTAX_ERRORS:
                in_original = json.JSONDecodeError(error.msg, original, len(before))
                last = f"this is not valid JSON: {reason_of(in_original)}"
                raise UserError("; ".join([last, *_located(problems)])) from None
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            position = f"line {line}, column {column}"
            start, end, replacement, message = repair
            problems.setdefault(message, []).append(position)
            text = text[:start] + replacement + text[end:]
            added += len(replacement) - (end - start)
        else:
            return _located(problems), text


def _located(problems: dict[str, list[str]]) -> list[str]:
    """Return each message with its first positions."""
    lines = []
    for message, positions in problems.items():
        shown, more = positions[:MAX_POSITIONS], len(positions) - MAX_POSITIONS
        shown += [f"{more} more"] if more > 0 else []
        lines.append(f"{' and '.join(shown)}: {message}")
    return lines


def _repair(text: str, error: json.JSONDecodeError) -> tuple[int, int, str, str] | None:
    """Return the start and end of an error, the text that replaces it, and the message.

    Return None for an error that cannot be repaired.
    """
    start = error.pos + len(text[error.pos :]) - len(text[error.pos :].lstrip())
    if found := COMMENT.match(text, start):
        blank = re.sub(r"[^\n]", " ", found[0])
        return start, found.end(), blank, "JSON has no comments; remove the comment"
    comma = text.rfind(",", 0, start + 1)
    if comma >= 0 and not text[comma + 1 : start].strip() and TRAILING_COMMA.match(text, comma):
        return comma, comma + 1, " ", "a comma before a closing bracket; remove the comma"
    before = text[:start].rstrip()
    if error.msg.startswith("Expecting ',' delimiter") and (
        MISSING_COMMA.match(text, start) if len(before) < start else text[start : start + 1] == '"'
    ):
        return len(before), len(before), ",", "a comma is missing here; add it"
    if found := SINGLE_QUOTED.match(text, start):
        double = f'"{found[0][1:-1]}"'
        return start, found.end(), double, f"{found[0]} has single quotes; use {double}"
    if error.msg.startswith("Expecting property name") and text[start - 1 : start + 1] == "{{":
        start -= 1
    elif error.msg.startswith("Expecting property name"):
        if found := UNQUOTED_KEY.match(text, start):
            double = f'"{found[0]}"'
            return start, found.end(), double, f"{found[0]} has no quotes; use {double}"
        return None
    elif not error.msg.startswith("Expecting value"):
        return None
    if not (found := PLACEHOLDER.match(text, start)):
        return None
    word = found[0]
    if word in CONSTANTS_OF_PYTHON:
        constant = CONSTANTS_OF_PYTHON[word]
        return start, found.end(), constant, f"{word} is not valid in JSON; use {constant}"
    near = get_close_matches(word.lower(), ("true", "false", "null"), 1, 0.75)
    if near and word.isalpha() and word[0].lower() == near[0][0] and len(word) != len(near[0]):
        meant = f"{word} is not valid in JSON; did you mean {near[0]}?"
        return start, found.end(), near[0], meant
    return (
        start,
        found.end(),
        '"auto"',
        f'{word} is a placeholder, for which a script fills in a value; use a value, or "auto"',
    )
