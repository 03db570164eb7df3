"""Documents as a source has them: rows with a text, or with what is wrong with them."""

import json
import reprlib
from dataclasses import dataclass
from typing import Any

KINDS = ("empty", "utf-8", "json", "column")  # of what can be wrong with a row


@dataclass(frozen=True)
class Problem:
    """Why a row is not a document.

    kind: one of KINDS
    """

    kind: str
    reason: str


@dataclass(frozen=True)
class Row:
    """A document, or a problem in its place.

    position: where it is: the byte of a file where its line begins, or a number of rows
    """

    position: int
    content: str | Problem


def document(value: Any, column: str) -> str | Problem:
    """The text of a document from what a column holds."""
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
    """The text that bytes are in UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return Problem("utf-8", f"byte {error.start} is {content[error.start]:#04x}, not UTF-8")


def json_document(line: bytes, column: str) -> str | Problem:
    """The text in a column of a line of JSON."""
    text = decoded(line)
    if isinstance(text, Problem):
        return text
    try:
        item = json.loads(text)
    except (ValueError, RecursionError) as error:  # a plain ValueError for 4,301 digits
        return Problem("json", f"not valid JSON: {error}")
    return field(item, column)


def field(item: Any, column: str) -> str | Problem:
    """The text in a column of a parsed JSON object."""
    if not isinstance(item, dict):
        shown = shortened(reprlib.repr(item))  # which may be nested to any depth
        return Problem("json", f"{shown} is not a JSON object")
    if column not in item:
        names = shortened(", ".join(item)) or "none"
        return Problem("column", f"no column {column}; its columns: {names}")
    return document(item[column], column)


def shortened(text: str) -> str:
    """At most 60 characters of a text, such that it can be printed."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 60 else text[:57] + "..."
