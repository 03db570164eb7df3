"""Types of command-line options, for argparse."""

import argparse
import os
from pathlib import Path


def share(text: str) -> float:
    """Return a share of the memory.

    Raises:
        ArgumentTypeError: the text is not a number that is at least 0 and below 1.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and below 1; use 0.08")
    return value


def duration_in_days(text: str) -> float:
    """Return a number of days.

    Raises:
        ArgumentTypeError: the text is not a positive number.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 10**6:
        raise argparse.ArgumentTypeError(
            f"invalid duration {text}: expected more than 0 and below 1,000,000 days, such as 30"
        )
    return value


def picture_file(text: str) -> Path:
    """Return the path of a picture that can be written.

    Raises:
        ArgumentTypeError: the format is not supported, or the file cannot be written.
    """
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is not a .png, .svg or .pdf; use plan.png")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: folder {folder} does not exist; use plan.png")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; use another name or folder")
    return path


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**6:
        raise argparse.ArgumentTypeError(f"invalid number {text}: expected 1 or more, such as 4")
    return int(text)


def counts(text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    return [count(part) for part in text.split(",")]


def seconds(text: str) -> float:
    """Parse a duration in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 10**9:
        raise argparse.ArgumentTypeError(f"invalid duration {text}: expected seconds, such as 120")
    return value
