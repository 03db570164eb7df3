"""The command `prepare_data.py tasks`, which writes task files for evaluation.tasks."""

import argparse
import json
from pathlib import Path
from typing import Any

from models.errors import UserError, counted
from threefold.config.sections import repository_path
from threefold.data.task_file import read_items
from threefold.prepare_data.harness_samples import items_of_samples
from threefold.prepare_data.tasks import last_word, make_items, next_line
from threefold.run_folder.json_lines import write_whole
from threefold.runtime.command_line import count

MAKERS = {"next-line": next_line, "last-word": last_word}
DESCRIPTION = """Write a task for evaluation.tasks of a recipe.

    python recipes/prepare_data.py tasks next-line data/stdlib --output data/tasks/next_line.jsonl
    python recipes/prepare_data.py tasks last-word data/stdlib --output data/tasks/last_word.jsonl
    python recipes/prepare_data.py tasks samples samples_arc.jsonl --output data/tasks/arc.jsonl

next-line: multiple choice, which of four lines of a validation document comes next
last-word: cloze, the last word of a line of a validation document
samples: the samples of a task that lm-evaluation-harness has written with --log_samples
"""


def write_task(arguments: list[str]) -> None:
    """Run the command.

    Raises:
        UserError: the source or the output cannot be used.
    """
    options = parse_options(arguments)
    output = repository_path(options.output)
    if output.exists():
        raise UserError(f"--output {options.output} already exists; use another file, or delete it")
    if options.kind == "samples":
        items = items_of_samples(Path(options.source), options.delimiter)
    else:
        corpus = repository_path(options.source)
        items = make_items(corpus, MAKERS[options.kind], count=options.items)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, "".join(line(item) for item in items))
    try:
        read_items(output)
    except UserError:
        output.unlink()
        raise
    print(f"wrote {counted(len(items), 'item')} to {output}; in a recipe:")
    print(f'\n[evaluation]\ntasks = [{{ name = "{output.stem}", path = "{options.output}" }}]')


def line(item: dict[str, Any]) -> str:
    """Return the line of an item."""
    return json.dumps(item) + "\n"


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py tasks",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=[*MAKERS, "samples"], help="kind of the task, see above")
    parser.add_argument(
        "source",
        help="folder of a corpus, relative to the repository's root; for samples, a file, relative "
        "to the current folder",
    )
    parser.add_argument(
        "--output", required=True, help="file to write, relative to the repository's root"
    )
    parser.add_argument(
        "--items",
        type=count,
        default=500,
        help="number of items (default: 500); has no effect with samples",
    )
    parser.add_argument(
        "--delimiter",
        help="only for samples: target_delimiter of the harness's task; default: a space if all "
        "continuations begin with one, otherwise nothing",
    )
    return parser.parse_args(arguments)
