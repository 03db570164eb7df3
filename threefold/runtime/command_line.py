"""Command lines for argparse: commands of a script, options that scripts share, and types."""

import argparse
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Options = argparse.ArgumentParser | argparse._ArgumentGroup


@dataclass(frozen=True)
class Subcommand:
    """A command of a script that has several, such as `plan.py trace`.

    Attributes:
        run: returns the exit code; its docstring is the description in --help
    """

    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None]


def parse_subcommand(
    script: str,
    description: str,
    commands: Mapping[str, Subcommand],
    moved: Mapping[str, str],
) -> argparse.Namespace:
    """Return the options of the command that the first argument names, with `command` to call.

    Args:
        script: file name of the script
        description: the script's docstring: a summary and, after an empty line, examples
        commands: by name; "" is the command without a name
        moved: flags of earlier versions, which are rejected, and the commands that replace them
    """
    arguments = sys.argv[1:]
    name = arguments[0] if arguments and arguments[0] in commands else ""
    command = commands[name]
    if name:
        arguments = arguments[1:]
        parser = argparse.ArgumentParser(
            prog=f"{script} {name}",
            description=inspect.getdoc(command.run),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    else:
        summary, _, examples = description.partition("\n\n")
        parser = argparse.ArgumentParser(
            description=summary,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        flags = [flag for word in arguments if (flag := word.partition("=")[0]) in moved]
        if flags:
            use = " and ".join(f"{script} {moved[flag]}" for flag in flags)
            parser.exit(
                2, f"{script}: {' and '.join(flags)}: now a command of its own; use {use}\n"
            )
        if misplaced := next((word for word in arguments if word in commands), ""):
            arguments.remove(misplaced)
            words = shlex.join([script, misplaced, *arguments])
            parser.exit(2, f"{script}: {misplaced} must be the first argument: use {words}\n")
    command.add_options(parser)
    options = parser.parse_args(arguments)
    options.command = command.run
    return options


def add_overrides(parser: Options, text: str = "as for pretrain.py") -> None:
    """Add --set, whose help is `text`."""
    parser.add_argument(
        "--set", type=override, action="append", default=[], metavar="SECTION.KEY=VALUE", help=text
    )


def add_cluster_options(parser: Options, *, several: bool = False) -> None:
    """Add --nodes, --gpus-per-node and --gpu; with `several`, the sizes are lists of numbers."""
    size, end = (counts, ", such as 1,2,4") if several else (count, "")
    parser.add_argument("--nodes", type=size, metavar="N", help=f"number of nodes{end}")
    parser.add_argument(
        "--gpus-per-node", type=size, metavar="N", help=f"number of GPUs in each node{end}"
    )
    parser.add_argument("--gpu", help="name of a GPU in threefold/gpus/datasheets/, such as H100")


def add_json(parser: Options) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def filled(text: str) -> str:
    """Return the value of an option that must not be empty.

    Raises:
        ArgumentTypeError: the text is empty, for example because a shell variable is unset.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "the value is empty, perhaps because a shell variable is unset; give a value"
        )
    return text


def file_path(text: str) -> Path:
    """Return the path of a file or folder. An empty text, which means the current one, is rejected.

    Raises:
        ArgumentTypeError: the text is empty.
    """
    return Path(filled(text))


def override(text: str) -> str:
    """Return the value of --set.

    Raises:
        ArgumentTypeError: the text has no value, for example because of spaces around the "=".
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not value:
        empty = f"; an empty text is --set '{key} = \"\"'" if equals else ""
        raise argparse.ArgumentTypeError(
            f"{text} has no value; write --set {key}=VALUE without spaces, or quote the whole: "
            f"--set '{key} = VALUE'{empty}"
        )
    return text


def share(text: str) -> float:
    """Return a share of the memory.

    Raises:
        ArgumentTypeError: the text is not a number that is at least 0 and below 1.
    """
    value = number(text)
    if not 0 <= value < 1:
        example = f"for {text} % use {value / 100:g}" if 1 <= value < 100 else "use 0.08"
        raise argparse.ArgumentTypeError(f"{text} is not at least 0 and below 1; {example}")
    return value


def picture_file(text: str) -> Path:
    """Return the path of a picture that can be written.

    Raises:
        ArgumentTypeError: the format is not supported, or the file cannot be written.
    """
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is not a .png, .svg or .pdf; use picture.png")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: folder {folder} does not exist; use picture.png")
    needed = [folder, path] if path.exists() else [folder]  # the folder gets a temporary file
    if path.is_dir() or not all(os.access(file, os.W_OK) for file in needed):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; use another name or folder")
    return path


def count(text: str, most: int = 10**6) -> int:
    """Parse a whole number of at least 1.

    most: the largest number; the default of a million only catches typing errors
    """
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"invalid number {text}: expected 1 to {most}, for example 4"
        )
    return int(text)


def counts(text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    return [count(part) for part in text.split(",")]


def number(text: str) -> float:
    """Return the number that a text contains, or -1 if it contains none."""
    try:
        return float(text)
    except ValueError:
        return -1.0


def number_type(
    name: str, accepts: Callable[[float], bool], expected: str
) -> Callable[[str], float]:
    """Return a parser of numbers that a condition accepts; `name` and `expected` are for errors."""

    def parse(text: str) -> float:
        value = number(text)
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"invalid {name} {text}: expected {expected}")
        return value

    return parse


duration_in_days = number_type(
    "duration", lambda days: 0 < days < 10**6, "more than 0 and below 1,000,000 days, such as 30"
)
link_rate = number_type(
    "rate",
    lambda rate: 1e-3 <= rate <= 1e6,
    "a number from 0.001 to 1,000,000 without its unit, for example 50 for 50 GB/s",
)
latency_in_microseconds = number_type(
    "latency", lambda latency: 0 <= latency < 10**9, "microseconds, for example 30"
)
imbalance = number_type(  # rows of the busiest expert rank relative to the mean
    "ratio", lambda ratio: 1 <= ratio <= 1000, "1 (equal tokens) to 1,000, for example 1.3"
)
failures_per_day = number_type(
    "number",
    lambda failures: 0 < failures <= 1e5,
    "more than 0 and up to 100,000 failures per day, such as 8",
)
seconds = number_type("duration", lambda duration: 0 < duration < 10**9, "seconds, such as 120")
seconds_to_wait = number_type(
    "duration", lambda duration: 0 <= duration < 10**9, "0 to 999999999 seconds, such as 300"
)
