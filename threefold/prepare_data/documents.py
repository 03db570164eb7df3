"""Rows of a source: documents, or problems in their place."""

import json
import reprlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import UserError, counted, reason_of

USUAL_COLUMNS = ("text", "content", "contents", "document", "body", "article", "story", "code")
MAX_CHARACTERS_SHOWN = 60
PROBLEM_KINDS = ("empty", "utf-8", "json", "column")  # of --skip
BLANK = "blank"  # kind of a blank line of a text file, which is always skipped


@dataclass(frozen=True)
class Problem:
    """The reason why a row is not a document.

    kind: one of PROBLEM_KINDS, or BLANK
    """

    kind: str
    reason: str


@dataclass(frozen=True)
class Row:
    """A document, or a problem in its place.

    position: byte at which the line begins in its file, or index of the row
    """

    position: int
    content: str | Problem


class EmptyPart(UserError):
    """The training or the validation part of a corpus would have no documents.

    Args:
        part: train or validation
        first_skipped: the reason why the first skipped row was skipped
        fraction: the option --validation-fraction
        validation_option: the option that names the source of the validation part, if it has one
    """

    def __init__(
        self,
        part: str,
        *,
        documents: int,
        skipped_rows: int,
        first_skipped: str,
        fraction: float,
        validation_option: str = "",
    ):
        skipped = f" ({counted(skipped_rows, 'row')} skipped)" if skipped_rows else ""
        reason = f"; the first skipped row: {first_skipped}" if skipped_rows else ""
        if validation_option and (documents or part == "validation"):
            option = "--source" if part == "train" else validation_option
            empty = f"so the {part} part would be empty"
            message = f"{option} has no documents, {empty}{skipped}{reason}"
        elif not documents:
            message = f"the source has no documents{skipped}{reason}"
        else:
            message = (
                f"the {part} part has no tokens: --validation-fraction {fraction} leaves none of "
                f"the {counted(documents, 'document')}{skipped} for it, and equal documents are in "
                f"the same part; use a {'larger' if part == 'validation' else 'smaller'} fraction, "
                f"more documents, name those of the validation part with --validation-source, or "
                f"use --validation-fraction 0 for no validation part"
            )
        super().__init__(message)


def document(value: Any, column: str) -> str | Problem:
    """Return the value of a column if it is the text of a document, or the problem with it."""
    if not isinstance(value, str):
        return Problem("column", f"{column} = {shortened(repr(value))} is not a text")
    if not value.strip():
        return Problem("empty", "the document is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Problem("utf-8", f"half of a surrogate pair at character {error.start}")
    return value


def decoded(content: bytes) -> str | Problem:
    """Decode UTF-8, or return the problem with it."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return Problem("utf-8", f"byte {error.start} is {content[error.start]:#04x}, not UTF-8")


def json_document(line: bytes, column: str) -> str | Problem:
    """Return the text in a column of a line of JSON, or the problem with it."""
    text = decoded(line)
    if isinstance(text, Problem):
        return text
    try:
        item = json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: an integer of more than 4,300 digits
        return Problem("json", f"not valid JSON: {reason_of(error)}")
    return field(item, column)


def field(item: Any, column: str) -> str | Problem:
    """Return the text in a column of a parsed JSON object, or the problem with it."""
    if not isinstance(item, dict):
        shown = shortened(reprlib.repr(item))  # limits the depth of nested values
        return Problem("json", f"{shown} is not a JSON object")
    if column not in item:
        names = shortened(", ".join(item)) or "none"
        return Problem("column", f'no column "{column}"; its columns: {names}{advice(item)}')
    return document(item[column], column)


def advice(row: Mapping[str, Any]) -> str:
    """Return the end of a message that names the likeliest column for texts; "" if none is."""
    texts = {name: value for name, value in row.items() if isinstance(value, str) and name.strip()}
    usual = [name for usual in USUAL_COLUMNS for name in texts if name.lower() == usual]
    longest = max(texts, key=lambda name: len(texts[name]), default=None)
    likely = usual[0] if usual else longest
    if likely is None or not likely.isprintable() or len(likely) > MAX_CHARACTERS_SHOWN:
        return ""
    return f" (use --column {shlex.quote(likely)})"


def shortened(text: str) -> str:
    """Return at most 60 characters of a text; escapes replace those that cannot be printed."""
    limit = MAX_CHARACTERS_SHOWN
    shown = printable(text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def printable(text: str) -> str:
    """Return a text in which escapes replace control characters and halves of surrogate pairs."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )
