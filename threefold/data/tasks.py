"""The tasks of a recipe as windows of tokens: requests, packed as separate documents.

Attention stays within documents, so a window can hold as many requests as fit. The rest of the
window is one more document, of padding.

b micro-batch, s sequence, c context ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from models.context_parallel.division import Lengths, Slices
from models.errors import UserError, counted
from threefold.config.recipe import Recipe
from threefold.config.sections import repository_path
from threefold.data.corpus import document_starts
from threefold.data.task_file import Item, ScoringRequest, TaskTokenizer, pack, read_items

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
