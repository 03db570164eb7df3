"""Task files, their tokens, and the packing of a recipe's tasks into windows.

A line of a task file is one item:

    {"prompt": "The capital of France is", "choices": ["Rome", "Paris"], "answer": 1}
    {"prompt": "The capital of France", "answer": "is"}

A line with `choices` is a multiple-choice item, whose `answer` is the index of the right choice,
from 0. A line without `choices` is a cloze item, whose `answer` is the text that continues the
prompt. The optional `delimiter`, by default a space, is put between prompt and continuation, as
`target_delimiter` of lm-evaluation-harness. An optional `id` is ignored.

Attention stays within documents, so a window can hold as many requests as fit. The rest of the
window is one more document, of padding.

b micro-batch, s sequence, c context ranks.
"""

import itertools
import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from models.context_parallel.division import Lengths, Slices
from models.errors import UserError, counted, reason_of
from threefold.config.recipe import Recipe
from threefold.config.sections import repository_path
from threefold.data.corpus import document_starts

# Items of a task file.

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
        fields = json.loads(line)
        json.dumps(fields, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON ({reason_of(error)}); write {EXAMPLES}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{place} is not a JSON object; write {EXAMPLES}")
    if unknown := sorted(fields.keys() - KEYS):
        raise UserError(f"{place}: unknown key {unknown[0]!r}; write {EXAMPLES}")
    prompt = _text(fields, "prompt", place)
    delimiter = _text({"delimiter": DELIMITER} | fields, "delimiter", place)
    if "choices" not in fields:
        answer = _text(fields, "answer", place)
        if not answer:
            raise UserError(f"{place}: answer is empty; write {EXAMPLES}")
        return Item(prompt, (answer,), delimiter=delimiter)
    return _multiple_choice(fields, place, prompt=prompt, delimiter=delimiter)


def _text(fields: dict[str, Any], key: str, place: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} = {value!r} is not a text; write {EXAMPLES}")
    return value


def _multiple_choice(fields: dict[str, Any], place: str, *, prompt: str, delimiter: str) -> Item:
    choices, answer = fields["choices"], fields.get("answer")
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


# Tokens of a context and its continuation, split as lm-evaluation-harness splits them.


@dataclass(frozen=True)
class ScoringRequest:
    """A continuation whose log-likelihood is computed.

    Attributes:
        tokens: context and continuation: int32 [n + 1]; the model reads the first n tokens
        predicted: number of tokens of the continuation, which are the last ones
        is_cut: True if the start of the context was cut off
    """

    tokens: np.ndarray
    predicted: int
    is_cut: bool = False

    @property
    def length(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.tokens) - 1


class TaskTokenizer:
    """Encodes contexts and continuations with the tokenizer of a recipe.

    Args:
        name: the recipe's key that names the tokenizer, with its value, for messages
        start: tokens that begin each document in training, such as BOS

    Raises:
        UserError: the tokenizer cannot be loaded.
    """

    def __init__(self, folder: Path, name: str, start: Sequence[int]):
        self.name, self.start = name, list(start)
        self.settings = _read_settings(folder / "tokenizer_config.json")
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            if type(error) is not Exception:  # tokenizers raises Exception itself
                raise
            raise UserError(
                f"{name} cannot encode the tasks of evaluation.tasks ({reason_of(error)}); use a "
                f"tokenizer that prepare_data.py has written"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = bool(self.settings.get("split_special_tokens"))

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of each (context, continuation).

        As in `TemplateLM._encode_pair` of lm-evaluation-harness 0.4.13 (lm_eval/api/model.py),
        spaces at the end of the context belong to the continuation. If the context alone has n
        tokens, the continuation's tokens are those of the whole text without the first n. In place
        of an empty context, the model reads the BOS token, or the end-of-text token if there is no
        BOS (`TemplateLM.loglikelihood`).

        Raises:
            UserError: a context is empty, and the tokenizer has neither of the two tokens.
        """
        contexts = [context.rstrip() for context, _ in pairs]
        wholes = [context + continuation for context, continuation in pairs]
        distinct = list(dict.fromkeys(contexts))  # choices share their context
        encoded = dict(zip(distinct, self._ids(distinct), strict=True))
        requests = []
        for context, whole in zip(contexts, self._ids(wholes), strict=True):
            before = encoded[context]
            if before or self.start:
                requests.append((self.start + before, whole[len(before) :]))
            elif whole and whole[0] == self._prefix:
                requests.append((whole[:1], whole[1:]))
            else:
                requests.append(([self._prefix], whole))
        return requests

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    @property
    def _prefix(self) -> int:
        """The token that the model reads in place of an empty context."""
        for key in ("bos_token", "eos_token"):
            token = self.settings.get(key)
            content = token.get("content") if isinstance(token, dict) else token
            number = self.tokenizer.token_to_id(content) if content else None
            if number is not None:
                return number
        raise UserError(
            f"{self.name} has neither a BOS nor an end-of-text token, one of which must precede "
            f"the choices of an item with an empty prompt; give each item a prompt"
        )


def _read_settings(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json; empty if there is none.

    Raises:
        UserError: the file is not a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} is damaged ({reason_of(error)}); write the tokenizer again"
        ) from None
    if not isinstance(settings, dict):
        raise UserError(f"{file} is damaged (not a JSON object); write the tokenizer again")
    return settings


# Packing of short sequences into windows of one length.


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sequences into few windows by best-fit decreasing.

    From the longest sequence to the shortest, each is put into the fullest window that has room for
    it, or into a new window. If w windows would suffice, the result has at most 11/9 w + 4 windows
    (Johnson et al. 1974, doi 10.1137/0203025).

    Args:
        lengths: lengths of the sequences, each 1 .. capacity
        capacity: length of a window

    Returns:
        The numbers of the sequences in each window.
    """
    windows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, window), ascending
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        place = bisect_left(room, (lengths[number], -1))
        if place == len(room):
            free, window = capacity, len(windows)
            windows.append([])
        else:
            free, window = room.pop(place)
        windows[window].append(number)
        insort(room, (free - lengths[number], window))
    return windows


# The tasks of a recipe, and their windows.

PADDING = 0  # a token id of every vocabulary
UNCOUNTED = -1  # request of a padding position


@dataclass(frozen=True)
class TaskItems:
    """A task: its name and its items."""

    name: str
    items: list[Item]


@dataclass(frozen=True)
class Tasks:
    """The tasks of a recipe.

    Attributes:
        requests: a request for each choice, task by task and item by item
        sequence_length: s
    """

    tasks: list[TaskItems]
    requests: list[ScoringRequest]
    sequence_length: int

    @cached_property
    def windows(self) -> list[list[int]]:
        """The numbers of the requests in each window."""
        return pack([request.length for request in self.requests], self.sequence_length)

    @property
    def warnings(self) -> list[str]:
        """A warning for each task with requests whose start was cut off."""
        tasks, first = [], 0
        for task in self.tasks:
            count = sum(len(item.choices) for item in task.items)
            cut = sum(request.is_cut for request in self.requests[first : first + count])
            first += count
            if cut:
                tasks.append(
                    f"task {task.name}: {cut} of {counted(count, 'choice')} longer, with the "
                    f"prompt, than model.sequence_length = {self.sequence_length}; their prompts "
                    f"are cut off on the left"
                )
        return tasks

    def lengths(self, rows: Sequence[int]) -> Lengths:
        """Return the lengths of the documents in some windows; windows after the last are empty."""
        return tuple(self._window(row).lengths for row in rows)

    def tokens(self, rows: Sequence[int], slices: Slices | None) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and labels of some windows, each int64 [b, s/c].

        slices: positions of this context rank; None: all
        """
        windows = [self._window(row) for row in rows]
        chosen = positions(slices, self.sequence_length)
        tokens = np.stack([window.tokens for window in windows])[:, chosen]
        return tokens, np.stack([window.labels for window in windows])[:, chosen]

    def requests_at(self, rows: Sequence[int], slices: Slices | None) -> np.ndarray:
        """Return the request that each label of some windows belongs to: int64 [b, s/c].

        It is UNCOUNTED (-1) for labels that belong to no continuation.
        """
        chosen = positions(slices, self.sequence_length)
        return np.stack([self._window(row).requests for row in rows])[:, chosen]

    def _window(self, row: int) -> "TaskWindow":
        inside = self.windows[row] if row < len(self.windows) else []
        window = TaskWindow.empty(self.sequence_length)
        return window.filled([(number, self.requests[number]) for number in inside])


@dataclass(frozen=True)
class TaskWindow:
    """A window of s tokens.

    Attributes:
        tokens: int64 [s]
        labels: int64 [s]
        requests: the request of each label, int64 [s]
    """

    tokens: np.ndarray
    labels: np.ndarray
    requests: np.ndarray
    lengths: tuple[int, ...] = ()

    @classmethod
    def empty(cls, length: int) -> "TaskWindow":
        """Return a window of padding."""
        padding = np.full(length, PADDING, np.int64)
        return cls(padding, padding.copy(), np.full(length, UNCOUNTED, np.int64), (length,))

    def filled(self, requests: Sequence[tuple[int, ScoringRequest]]) -> "TaskWindow":
        """Write requests into this empty window, and return it with their lengths."""
        start, lengths = 0, []
        for number, request in requests:
            stop = start + request.length
            self.tokens[start:stop] = request.tokens[:-1]
            self.labels[start:stop] = request.tokens[1:]
            self.requests[stop - request.predicted : stop] = number
            lengths.append(request.length)
            start = stop
        rest = len(self.tokens) - start
        return replace(self, lengths=(*lengths, *([rest] if rest else ())))


def positions(slices: Slices | None, length: int) -> np.ndarray:
    """Return the positions in the sequence of a context rank's tokens: int64 [s/c]."""
    return np.concatenate(
        [np.arange(chunk.start, chunk.stop) for chunk in slices or (range(length),)]
    )


def open_tasks(recipe: Recipe) -> Tasks:
    """Read and tokenise the tasks of a recipe.

    Texts begin with the tokens that begin all training documents, such as BOS, as in the tokenizer
    that `convert.py to-hf` exports.

    Raises:
        UserError: a file is missing or invalid, or a choice is longer than a sequence, or has no
            token of its own.
    """
    length, settings = recipe.model.sequence_length, recipe.evaluation.tasks
    if not settings:
        return Tasks([], [], length)
    starts = document_starts(recipe)
    tokenizer = TaskTokenizer(
        repository_path(recipe.data.tokenizer),
        f'data.tokenizer = "{recipe.data.tokenizer}"',
        starts[0] if all(start == starts[0] for start in starts) else [],
    )
    tasks = [TaskItems(task.name, read_items(repository_path(task.path), task.limit))
             for task in settings]  # fmt: skip
    requests = [request for task in tasks for request in encode_task(task, tokenizer, length)]
    largest = max(int(request.tokens.max()) for request in requests)
    if largest >= recipe.model.vocab_size:
        raise UserError(
            f"evaluation.tasks have the token id {largest} and model.vocab_size is "
            f"{recipe.model.vocab_size}; use the vocabulary of the tokenizer"
        )
    return Tasks(tasks, requests, length)


def encode_task(task: TaskItems, tokenizer: TaskTokenizer, length: int) -> list[ScoringRequest]:
    """Return a request for each choice of each item of a task.

    Contexts lose their first tokens if they are too long, as in
    `HFLM._loglikelihood_tokens` of lm-evaluation-harness.

    Args:
        length: maximum number of tokens that the model reads

    Raises:
        UserError: a choice is longer than a sequence, or has no token of its own.
    """
    places = [(number, choice) for number, item in enumerate(task.items) for choice in item.choices]
    items = task.items
    encoded = tokenizer.encode(
        [(items[n].prompt, items[n].delimiter + choice) for n, choice in places]
    )
    requests = []
    for (number, choice), (context, continuation) in zip(places, encoded, strict=True):
        place = f"task {task.name}, item {number + 1}, choice {choice[:40]!r}"
        if not continuation:
            raise UserError(
                f"{place}: the tokenizer merges it into the prompt, so it has no token of its own; "
                f"change the prompt, or the delimiter of the item"
            )
        if len(continuation) > length:
            raise UserError(
                f"{place} has {len(continuation)} tokens, more than model.sequence_length = "
                f"{length}; use shorter choices or longer sequences"
            )
        tokens = np.array([*context, *continuation], np.int32)
        kept = tokens[-(length + 1) :]
        requests.append(ScoringRequest(kept, len(continuation), is_cut=len(kept) < len(tokens)))
    return requests
