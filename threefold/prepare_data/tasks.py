"""The command `prepare_data.py tasks`: tasks from a corpus or from lm-evaluation-harness."""

import argparse
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import FULL_DISK_ERRORS, UserError, counted, reason_of
from threefold.config.loading import name_that_fits, value_text
from threefold.config.sections import MAX_TASK_NAME, SET_NAME, output_path, repository_path
from threefold.data.corpus import check_part
from threefold.data.tasks import read_items
from threefold.data.token_file import TokenFile
from threefold.prepare_data.tokenization import fast_tokenizer
from threefold.run_folder.json_lines import write_whole
from threefold.runtime.command_line import count, filled

MAX_DOCUMENTS_IN_MEMORY = 10_000
CONTEXT_LINES = 8  # at most, in a prompt
CHOICES = 4
WORD = re.compile(r"[A-Za-z_]{4,}")  # an answer of the last-word task
MIN_LINE_CHARACTERS = 8  # of a choice without its indent; shorter lines reveal themselves

ItemMaker = Callable[[list[str], int, np.random.Generator], dict[str, Any] | None]


def make_items(corpus: Path, make: ItemMaker, *, count: int) -> list[dict[str, Any]]:
    """Return items made from the validation documents of a corpus; the same in every call.

    Args:
        corpus: folder of a corpus that prepare_data.py has written
        make: `next_line` or `last_word`

    Raises:
        UserError: the corpus is missing, or its documents make fewer items.
    """
    random = np.random.default_rng(0)
    items: list[dict[str, Any]] = []
    for texts in validation_texts(corpus):
        documents = [text.split("\n") for text in texts]
        places = [(d, n) for d, lines in enumerate(documents) for n in range(1, len(lines))]
        order = (places[n] for n in random.permutation(len(places)))
        made = (make(documents[d], n, random) for d, n in order)
        items += islice(filter(None, made), count - len(items))
        if len(items) == count:
            break
    if len(items) < count:
        raise UserError(
            f"--items {count}: the validation documents of {corpus} make "
            f"{counted(len(items), 'item')}; use --items {len(items)}, or a larger corpus"
            if items
            else f"the validation documents of {corpus} make no items; use a corpus of text with "
            f"several lines per document"
        )
    return items


def next_line(lines: list[str], number: int, random: np.random.Generator) -> dict[str, Any] | None:
    """Return an item that asks which of four lines of a document comes next.

    Args:
        number: the line that comes next, from 1
        random: chooses the wrong lines and the order

    Returns:
        None if the line is too short, or the document has too few other lines.
    """
    right = lines[number].rstrip()
    prompt = "\n".join(lines[max(0, number - CONTEXT_LINES) : number]).rstrip()
    others = {line.rstrip() for line in lines} - {right}
    wrong = sorted(line for line in others if len(line.strip()) >= MIN_LINE_CHARACTERS)
    if not prompt or len(right.strip()) < MIN_LINE_CHARACTERS or len(wrong) < CHOICES - 1:
        return None
    choices = [wrong[n] for n in random.choice(len(wrong), CHOICES - 1, replace=False)]
    answer = int(random.integers(CHOICES))
    choices.insert(answer, right)
    return {"prompt": prompt, "choices": choices, "answer": answer, "delimiter": "\n"}


def last_word(lines: list[str], number: int, random: np.random.Generator) -> dict[str, Any] | None:
    """Return an item that asks for the last word of a line, as LAMBADA (arXiv 1606.06031) does.

    Args:
        number: the line whose last word is asked for, from 1
        random: not used

    Returns:
        None if the line does not end with a word that its context contains.
    """
    begin, _, word = lines[number].rpartition(" ")
    prompt = "\n".join([*lines[max(0, number - CONTEXT_LINES) : number], begin])
    if not WORD.fullmatch(word) or not begin.strip() or word not in WORD.findall(prompt):
        return None
    return {"prompt": prompt, "answer": word, "delimiter": " "}


def validation_texts(corpus: Path) -> Iterator[list[str]]:
    """Yield the texts of the validation documents of a corpus, without special tokens.

    A list has at most MAX_DOCUMENTS_IN_MEMORY texts of documents that are spread over the corpus.

    Raises:
        UserError: the corpus or its tokenizer is missing.
    """
    check_part(corpus / "validation")
    file = TokenFile(corpus / "validation")
    tokenizer_file = corpus / "tokenizer" / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise UserError(f"{tokenizer_file} is missing; prepare the corpus with prepare_data.py")
    tokenizer = fast_tokenizer(tokenizer_file, False)
    count = file.boundaries - 1
    lists = math.ceil(count / MAX_DOCUMENTS_IN_MEMORY)
    for first in range(lists):
        documents = range(first, count, lists)
        ids = (file.read(*file.range_of(document)).tolist() for document in documents)
        yield [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]


# Tasks from the samples that lm-evaluation-harness writes with --log_samples.

ADVICE = "use a samples_*.jsonl file that lm_eval --log_samples wrote for a task of log-likelihoods"


def items_of_samples(file: Path, delimiter: str | None) -> list[dict[str, Any]]:
    """Return the items of a task from a file of samples.

    A sample with several continuations of one context is a multiple-choice item, and one with a
    single continuation is a cloze item. If the harness has applied several filters to a sample,
    the sample is used once. The harness prepends its target_delimiter to every choice, and divides
    log-likelihoods by the length of the choices without it.

    Args:
        delimiter: delimiter at the start of each continuation; None: a space if all continuations
            of the file begin with a space, otherwise nothing

    Raises:
        UserError: the file is missing or has no samples, or its task is of another kind.
    """
    samples: dict[Any, tuple[str, dict[str, Any]]] = {}
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({reason_of(error)}); {ADVICE}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            sample = json.loads(line)
            samples.setdefault(sample["doc_id"], (place, sample))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{place} is not a sample ({reason_of(error)}); {ADVICE}") from None
    pairs = {place: _pairs(sample, place) for place, sample in samples.values()}
    if not pairs:
        raise UserError(f"{file} has no samples; {ADVICE}")
    if delimiter is None:
        texts = [continuation for pair in pairs.values() for _, continuation in pair]
        delimiter = " " if all(text.startswith(" ") for text in texts) else ""
    return [_item(sample, place, pairs[place], delimiter) for place, sample in samples.values()]


def _pairs(sample: dict[str, Any], place: str) -> list[tuple[str, str]]:
    """Return the (context, continuation) of each request of a sample."""
    try:
        requests = sample["arguments"]
        items = list(requests.values()) if isinstance(requests, dict) else requests
        pairs = [tuple(item.values()) if isinstance(item, dict) else tuple(item) for item in items]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place} has no requests ({reason_of(error)}); {ADVICE}") from None
    are_texts = all(len(pair) == 2 and all(isinstance(t, str) for t in pair) for pair in pairs)
    if not pairs or not are_texts:
        raise UserError(f"{place} has requests that are not log-likelihoods; {ADVICE}")
    return [(context, continuation) for context, continuation in pairs]


def _item(
    sample: dict[str, Any], place: str, pairs: Sequence[tuple[str, str]], delimiter: str
) -> dict[str, Any]:
    contexts = {context for context, _ in pairs}
    if len(contexts) > 1:
        raise UserError(
            f"{place} compares {len(contexts)} contexts of one continuation, which is not "
            f"supported; use a task whose choices have the same context"
        )
    choices = [continuation.removeprefix(delimiter) for _, continuation in pairs]
    if any(not continuation.startswith(delimiter) for _, continuation in pairs):
        raise UserError(
            f"{place} has a continuation that does not begin with --delimiter {delimiter!r}; use "
            f"the target_delimiter of the task"
        )
    item = {"id": str(sample["doc_id"]), "prompt": contexts.pop(), "delimiter": delimiter}
    if len(choices) == 1:
        return item | {"answer": choices[0]}
    # The harness writes the target as text: the number of the right choice, or the choice itself.
    target = str(sample.get("target"))
    numbers = {int(target)} & set(range(len(choices))) if target.isdecimal() else set()
    numbers |= {choices.index(target)} if target in choices else set()
    if not numbers:
        raise UserError(
            f"{place}: target = {sample.get('target')!r} is neither the text of one of "
            f"{counted(len(choices), 'choice')} nor its number from 0; {ADVICE}"
        )
    if len(numbers) > 1:
        raise UserError(
            f"{place}: target = {target!r} is the text of a choice and the number of another; "
            f"use a task whose choices are not numbers"
        )
    return item | {"choices": choices, "answer": numbers.pop()}


# The command `prepare_data.py tasks`, which writes task files for evaluation.tasks.

DEFAULT_ITEMS = 500
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
    output = output_path(options.output)
    if output.exists():
        raise UserError(f"--output {options.output} already exists; use another file, or delete it")
    if not re.fullmatch(SET_NAME, output.stem) or len(output.stem) > MAX_TASK_NAME:
        name = name_that_fits(output.stem, f"^{SET_NAME}$") or "task"
        raise UserError(
            f"--output {options.output}: the task takes the name of the file, which must begin "
            f"with a letter or a digit, contain only these and . _ -, and have at most "
            f"{MAX_TASK_NAME} characters; use --output {Path(options.output).with_stem(name)}"
        )
    for option, value, kinds in (
        ("--delimiter", options.delimiter, ["samples"]),
        ("--items", options.items, list(MAKERS)),
    ):
        if value is not None and options.kind not in kinds:
            raise UserError(
                f"{option} {shlex.quote(str(value))} has no effect with {options.kind}, only with "
                f"{' or '.join(kinds)}; omit it"
            )
    if options.kind == "samples":
        items = items_of_samples(Path(options.source), options.delimiter)
    else:
        corpus = repository_path(options.source)
        items = make_items(corpus, MAKERS[options.kind], count=options.items or DEFAULT_ITEMS)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, "".join(line(item) for item in items))
    except OSError as error:
        is_full = error.errno in FULL_DISK_ERRORS
        remedy = "free disk space" if is_full else "make the folder writable"
        raise UserError(
            f"--output {options.output} cannot be written ({error.strerror}); {remedy}, or use "
            f"another folder"
        ) from None
    try:
        read_items(output)
    except UserError:
        output.unlink()
        raise
    print(f"wrote {counted(len(items), 'item')} to {output}; in a recipe:")
    task = f'name = "{output.stem}", path = {value_text(options.output)}'
    print(f"\n[evaluation]\ntasks = [{{ {task} }}]")


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
        type=filled,
        help="folder of a corpus, relative to the repository's root; for samples, a file, relative "
        "to the current folder",
    )
    parser.add_argument(
        "--output",
        type=filled,
        required=True,
        help="file to write, relative to the repository's root",
    )
    parser.add_argument(
        "--items",
        type=count,
        help=f"number of items (default: {DEFAULT_ITEMS}); not for samples",
    )
    parser.add_argument(
        "--delimiter",
        help="only for samples: target_delimiter of the harness's task; default: a space if all "
        "continuations begin with one, otherwise nothing",
    )
    return parser.parse_args(arguments)
