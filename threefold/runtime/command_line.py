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
        add_options: declares the options
    """

    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class MovedFlag:
    """An option of earlier versions that is a command now.

    Attributes:
        command: the command that replaces it
        value: the option that takes the flag's value; "": it is positional; None: it had no value
    """

    command: str
    value: str | None = None


def parse_subcommand(
    script: str,
    description: str,
    commands: Mapping[str, Subcommand],
    moved: Mapping[str, MovedFlag],
) -> argparse.Namespace:
    """Return the options of the command that the first argument names, with `command` to call.

    Args:
        script: file name of the script
        description: the script's docstring: a summary and, after an empty line, examples
        commands: by name; "" is the command without a name
        moved: flags of earlier versions, which are rejected with the new command line
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
        parser = parser_with_examples(description)
        if lines := _without_moved_flags(script, arguments, moved):
            parser.exit(2, f"{script}: this option is a command now: use {' and '.join(lines)}\n")
        if misplaced := next((word for word in arguments if word in commands), ""):
            arguments.remove(misplaced)
            words = shlex.join([script, misplaced, *arguments])
            parser.exit(2, f"{script}: {misplaced} must be the first argument: use {words}\n")
    command.add_options(parser)
    options = parser.parse_args(arguments)
    options.command = command.run
    return options


def _without_moved_flags(
    script: str, arguments: list[str], moved: Mapping[str, MovedFlag]
) -> list[str]:
    """Return a command line for each moved flag among the arguments, with the other arguments."""
    kept, flags = [], []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if (flag := moved.get(name)) is None:
            kept.append(word)
        else:
            has_more = flag.value is not None and not has_value
            flags.append((flag, next(words, "") if has_more else value))
    return [
        shlex.join(
            [
                script,
                flag.command,
                *([value] if value and flag.value == "" else []),
                *kept,
                *([flag.value, value] if value and flag.value else []),
            ]
        )
        for flag, value in flags
    ]


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


def parser_with_examples(description: str) -> argparse.ArgumentParser:
    """Return a parser whose help ends with the examples of a command's docstring.

    Args:
        description: a summary and, after an empty line, examples
    """
    summary, _, examples = description.partition("\n\n")
    return argparse.ArgumentParser(
        description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


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


def duration_in_days(text: str) -> float:
    """Return a number of days.

    Raises:
        ArgumentTypeError: the text is not a positive number.
    """
    value = number(text)
    if not 0 < value < 10**6:
        raise argparse.ArgumentTypeError(
            f"invalid duration {text}: expected more than 0 and below 1,000,000 days, such as 30"
        )
    return value


def link_rate(text: str) -> float:
    """Return the rate of a link in GB/s.

    Raises:
        ArgumentTypeError: the text is not a number between 0.001 and 1,000,000.
    """
    value = number(text)
    if not 1e-3 <= value <= 1e6:
        raise argparse.ArgumentTypeError(
            f"invalid rate {text}: expected a number from 0.001 to 1,000,000 without its unit, for "
            f"example 50 for 50 GB/s"
        )
    return value


def latency_in_microseconds(text: str) -> float:
    """Return a latency in microseconds.

    Raises:
        ArgumentTypeError: the text is not a number of at least 0.
    """
    value = number(text)
    if not 0 <= value < 10**9:
        raise argparse.ArgumentTypeError(
            f"invalid latency {text}: expected microseconds, for example 30"
        )
    return value


def imbalance(text: str) -> float:
    """Return the rows of the busiest expert rank relative to the mean.

    Raises:
        ArgumentTypeError: the text is not a number from 1 to 1,000.
    """
    value = number(text)
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(
            f"invalid ratio {text}: expected 1 (equal tokens) to 1,000, for example 1.3"
        )
    return value


def failures_per_day(text: str) -> float:
    """Return a number of failures per day.

    Raises:
        ArgumentTypeError: the text is not a positive number up to 100,000.
    """
    value = number(text)
    if not 0 < value <= 1e5:
        raise argparse.ArgumentTypeError(
            f"invalid number {text}: expected more than 0 and up to 100,000 failures per day, such "
            f"as 8"
        )
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
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written; use another name or folder")
    return path


def count(text: str, most: int | None = None) -> int:
    """Parse a whole number of at least 1.

    most: the largest number; None: a million, which only catches typing errors
    """
    if not text.isdecimal() or not 1 <= int(text) <= (most or 10**6):
        expected = "1 or more, such as 4" if most is None else f"1 to {most}, for example 4"
        raise argparse.ArgumentTypeError(f"invalid number {text}: expected {expected}")
    return int(text)


def counts(text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    return [count(part) for part in text.split(",")]


def seconds(text: str) -> float:
    """Parse a duration in seconds."""
    value = number(text)
    if not 0 < value < 10**9:
        raise argparse.ArgumentTypeError(f"invalid duration {text}: expected seconds, such as 120")
    return value


def number(text: str) -> float:
    """Return the number that a text contains, or -1 if it contains none."""
    try:
        return float(text)
    except ValueError:
        return -1.0
