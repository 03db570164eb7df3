"""Task files: JSON lines of multiple-choice or cloze items.

{"prompt": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1}
{"prompt": "The capital of France", "answer": "is"}

A line with `choices` is a multiple-choice item, whose `answer` is the index of the right choice,
from 0. A line without `choices` is a cloze item, whose `answer` is the text that continues the
prompt. The optional `delimiter`, by default a space, is put between prompt and continuation, as
`target_delimiter` of lm-evaluation-harness. An optional `id` is ignored.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import UserError, reason_of

KEYS = {"prompt", "choices", "answer", "delimiter", "id"}
DELIMITER = " "
EXAMPLES = (
    '{"prompt": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1} or '
    '{"prompt": "The capital of France", "answer": "is"}'
)


@dataclass(frozen=True)
class Item:
    """An item of a task.

    Attributes:
        prompt: the text before each choice, without the delimiter
        choices: the continuations; only one in a cloze item
        answer: number of the right choice, from 0
        delimiter: text between the prompt and a choice
    """

    prompt: str
    choices: tuple[str, ...]
    answer: int = 0
    delimiter: str = DELIMITER

    @property
    def is_cloze(self) -> bool:
        """True if the item has only the right continuation."""
        return len(self.choices) == 1


def read_items(file: Path, limit: int | None = None) -> list[Item]:
    """Read the items of a task file.

    Args:
        file: the file
        limit: maximum number of items; None: all

    Raises:
        UserError: the file is missing or empty, mixes the two kinds, or a line is not an item.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            items = [_item(line, f"{file}:{number}")
                     for number, line in itertools.islice(numbered, limit)]  # fmt: skip
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}); make a task with recipes/prepare_data.py "
            f"tasks"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 ({reason_of(error)}); write the items as UTF-8"
        ) from None
    if not items:
        raise UserError(f"{file} has no items; write lines such as {EXAMPLES}")
    if len({item.is_cloze for item in items}) > 1:
        raise UserError(
            f"{file} has lines with choices and lines without; use a file for each of the two tasks"
        )
    return items


def _item(line: str, place: str) -> Item:
    """Parse a line; `place` names it in messages."""
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({reason_of(error)}); write {EXAMPLES}") from None
    if not isinstance(found, dict):
        raise UserError(f"{place} is not a JSON object; write {EXAMPLES}")
    if unknown := sorted(found.keys() - KEYS):
        raise UserError(f"{place}: unknown key {unknown[0]!r}; write {EXAMPLES}")
    prompt = _text(found, "prompt", place)
    delimiter = _text({"delimiter": DELIMITER} | found, "delimiter", place)
    if "choices" not in found:
        answer = _text(found, "answer", place)
        if not answer:
            raise UserError(f"{place}: answer is empty; write {EXAMPLES}")
        return Item(prompt, (answer,), delimiter=delimiter)
    return _multiple_choice(found, place, prompt=prompt, delimiter=delimiter)


def _text(found: dict[str, Any], key: str, place: str) -> str:
    value = found.get(key)
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} = {value!r} is not a text; write {EXAMPLES}")
    return value


def _multiple_choice(found: dict[str, Any], place: str, *, prompt: str, delimiter: str) -> Item:
    choices, answer = found["choices"], found.get("answer")
    are_texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not are_texts or len(choices) < 2:
        raise UserError(
            f"{place}: choices = {choices!r} is not a list of two or more texts; write {EXAMPLES}"
        )
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise UserError(
            f"{place}: answer = {answer!r} is not the number of one of {len(choices)} choices; "
            f"use 0 to {len(choices) - 1}"
        )
    return Item(prompt, tuple(choices), answer, delimiter)
