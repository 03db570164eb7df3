"""The exception class of mistakes that a user can correct, and parts of its messages."""

import difflib
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
MAX_NAMES_IN_MESSAGE = 4  # of a list of existing files


class UserError(ValueError):
    """An invalid recipe, option, file or environment, with a message that says how to correct it.

    Every command catches UserError once and prints its message without a traceback. Any other
    exception, a plain ValueError of a library included, is a defect and keeps its traceback.
    """


class SharedError(UserError):
    """An error that all ranks of a run raise together, so that rank 0 alone prints it."""


def reason_of(error: Exception) -> str:
    """Say why a file could not be read or parsed, in words that do not name Python's classes.

    Args:
        error: raised by the operating system, a parser or a library, or by reading a key of parsed
            content
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    message = lines[0]
    if message.endswith(":") and len(lines) > 1:  # huggingface_hub: the reason, with its class
        message = lines[1].partition("Error: ")[2] or lines[1]
    match error:
        case UserError():
            return message
        case json.JSONDecodeError() if not error.doc.strip():
            return "it is empty"
        case json.JSONDecodeError() if error.pos >= len(error.doc.rstrip()):
            return "it ends too early"
        case json.JSONDecodeError():
            line = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
            message = error.msg.replace("Unterminated string starting at", "this string has no end")
            return f"{line}column {error.colno}: {message}"
        case UnicodeDecodeError():
            return f"byte {error.start} is {error.object[error.start]:#04x}, not UTF-8"
        case RecursionError():
            return "its values are nested too deeply"
        case KeyError() if len(error.args) == 1 and " " in str(error.args[0]):  # a sentence
            return str(error.args[0])
        case KeyError() if len(error.args) == 1:
            return f'it has no "{error.args[0]}"'
        case TypeError() | AttributeError():
            return "a value has another type than expected"
        case OSError() if error.strerror:
            return error.strerror + (f": {error.filename}" if error.filename else "")
        case ValueError() if "int_max_str_digits" in message:  # Python's limit
            return "a number has more than 4,300 digits"
    return message


def why_no_folder(path: Path) -> str:
    """Return what is wrong with a path that should be a folder, such as "does not exist"."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which does not exist"
    if path.exists():
        return "is a file, not a folder"
    file = next((parent for parent in path.parents if parent.is_file()), None)
    if file:
        return f"does not exist, because {file} is a file"
    return "does not exist" + ("" if path.is_absolute() else f" in {Path.cwd()}")


def check_links(path: Path, remedy: str) -> None:
    """Reject dangling symbolic links in the path of an output.

    Otherwise a link to a disk that is not mounted would get a new, empty folder as its target.

    Args:
        remedy: what a user can do instead of mounting the disk

    Raises:
        UserError: a link is dangling.
    """
    path = path.absolute()
    for folder in (*reversed(path.parents), path):
        if folder.is_symlink() and not folder.exists():
            raise UserError(
                f"{folder} {why_no_folder(folder)}; mount the disk or create the folder, or "
                f"{remedy}"
            )


def why_missing(folder: Path, content: str) -> str:
    """Return why a folder does not have a content: it lacks it, or is not a folder."""
    return f"has no {content}" if folder.is_dir() else why_no_folder(folder)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, for example "1 document" or "2,048 tokens"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def a_few(names: Sequence[str], *, most: int = MAX_NAMES_IN_MESSAGE, separator: str = ", ") -> str:
    """Return the first names of a list, and the number of the others."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")


def suggestion(name: str, existing: Sequence[str], folder: str = "") -> str:
    """Return the existing name that resembles a missing one, as a question; otherwise a few names.

    Args:
        name: the missing name; "" if nothing resembles it
        existing: at least one name
        folder: put before the names in the message
    """
    if close := difflib.get_close_matches(name, existing, n=1, cutoff=0.7):
        return f"did you mean {folder}{close[0]}?"
    return f"use for example {a_few([folder + one for one in existing])}"


# How pydantic reads a recipe's [model] section and the sections in it: unknown keys and values of
# other types are errors.
STRICT_SECTION = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


def toml_line(key: str, value: Any) -> str:
    """Return a key and its value as a line of TOML, or the header of a section."""
    return f"[{key}]" if isinstance(value, dict) else f"{key} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """Return a value as TOML in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {toml_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)  # TOML's escapes of strings include JSON's
    return str(value)
