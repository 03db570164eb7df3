"""Tasks made from the validation documents of a corpus: the next line, and the last word."""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from models.errors import UserError, counted
from threefold.data.corpus import check_part
from threefold.data.token_file import TokenFile
from threefold.prepare_data.tokenization import fast_tokenizer

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
        count: number of items

    Raises:
        UserError: the corpus is missing, or its documents make fewer items.
    """
    random = np.random.default_rng(0)
    documents = [text.split("\n") for text in validation_texts(corpus)]
    places = [(d, n) for d, lines in enumerate(documents) for n in range(1, len(lines))]
    order = (places[n] for n in random.permutation(len(places)))
    made = (make(documents[d], n, random) for d, n in order)
    items = list(islice(filter(None, made), count))
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
        lines: the lines of the document
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
        lines: the lines of the document
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


def validation_texts(corpus: Path) -> Iterator[str]:
    """Yield the text of each validation document of a corpus, without special tokens.

    Raises:
        UserError: the corpus or its tokenizer is missing.
    """
    check_part(corpus / "validation")
    file = TokenFile(corpus / "validation")
    tokenizer_file = corpus / "tokenizer" / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise UserError(f"{tokenizer_file} is missing; prepare the corpus with prepare_data.py")
    tokenizer = fast_tokenizer(tokenizer_file, False)
    for document in range(file.boundaries - 1):
        ids = file.read(*file.range_of(document))
        yield tokenizer.decode(ids.tolist(), skip_special_tokens=True)
