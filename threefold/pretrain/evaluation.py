"""Validation and scoring of tasks, with the parallel model itself.

Each rank that computes losses adds the losses of its labels in float64 into a table with a row for
each window or request. The tables are summed over all ranks, and all further sums run over the
complete table in a fixed order. A result therefore depends on the layout only through the rounding
of the forward pass.

b micro-batch, s sequence, c context ranks.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from threefold.data.dataset import MicroBatch, TrainingData
from threefold.data.tasks import UNCOUNTED, Item, positions
from threefold.engine.engine import Engine
from threefold.run_folder.json_lines import AVERAGED

# Scores of a task from the log-likelihoods of its choices.


def task_scores(
    items: Sequence[Item], log_likelihoods: np.ndarray, are_greedy: np.ndarray
) -> dict[str, float]:
    """Return the scores of a task by name.

    Multiple choice, as `ConfigurableTask.process_results` of lm-evaluation-harness 0.4.13
    (lm_eval/api/task.py):

    - `accuracy`: share of the items whose right choice has the highest log-likelihood (acc)
    - `accuracy_per_byte`: the same, with log-likelihoods divided by the choice's bytes of UTF-8
      (acc_bytes; for ASCII also acc_norm, which divides by characters)

    Cloze, as the harness's tasks `lambada_openai` and `lambada_standard`:

    - `accuracy`: share of the items whose continuation greedy decoding would generate (acc)
    - `perplexity`: exp of the mean negative log-likelihood of a continuation (perplexity)

    Both kinds: `bits_per_byte` of the right choices, without delimiters, which is smoother than an
    accuracy.

    Args:
        items: the items of the task, all of one kind
        log_likelihoods: of each choice of each item, in nats
        are_greedy: True for each choice whose every token is the most likely one at its position
    """
    firsts = np.cumsum([0, *(len(item.choices) for item in items)])
    right = firsts[:-1] + [item.answer for item in items]
    sizes = np.array([len(choice.encode()) for item in items for choice in item.choices])
    scores = {"accuracy": 0.0}
    if items[0].is_cloze:
        scores["accuracy"] = float(are_greedy.mean())
        with np.errstate(over="ignore"):  # infinite for a model that knows nothing
            scores["perplexity"] = float(np.exp(-log_likelihoods.mean()))
    else:
        scores["accuracy"] = _accuracy(items, log_likelihoods, firsts)
        scores["accuracy_per_byte"] = _accuracy(items, log_likelihoods / sizes, firsts)
    bits = -log_likelihoods[right].sum() / math.log(2)
    return scores | {"bits_per_byte": float(bits / sizes[right].sum())}


def _accuracy(items: Sequence[Item], values: np.ndarray, firsts: np.ndarray) -> float:
    """Return the share of items whose right choice has the largest value; of equal, the first.

    It is not a number if a value is none, as with a diverged model.
    """
    if np.isnan(values).any():
        return math.nan
    of_items = np.split(values, firsts[1:-1])
    chosen = [int(np.argmax(scores)) for scores in of_items]
    return float(np.mean([n == item.answer for n, item in zip(chosen, items, strict=True)]))


class Evaluator:
    """Computes the metrics of validation and of tasks."""

    def __init__(self, engine: Engine, data: TrainingData):
        self.engine, self.data = engine, data
        self.expects_documents = data.separate_documents

    def validate(self) -> dict[str, Any]:
        """Return the metrics of all validation sets; collective.

        A single set has `validation_loss`, in nats per token, `validation_bits_per_byte`, and
        `validation_position_losses` if the recipe asks for them; a set in a table has
        `validation/<name>/loss` and so on. Bits per byte are those of The Pile (arXiv 2101.00027,
        section 3.1), the loss of all predicted tokens in bits divided by the bytes of text that
        these tokens stand for (`token_bytes`); they are left out if that number is not known.

        With an average of the weights, its metrics follow, under the same names after `averaged_`.
        """
        metrics = self._validate_sets()
        if self.engine.average is not None:
            with self.engine.averaged_weights():
                averaged = self._validate_sets()
            metrics |= {AVERAGED + key: value for key, value in averaged.items()}
        return metrics

    def _validate_sets(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for name in self.data.validation:
            prefix = f"validation/{name}/" if name else "validation_"
            metrics |= {prefix + key: value for key, value in self._validate_set(name).items()}
        return metrics

    def _validate_set(self, name: str) -> dict[str, Any]:
        windows, length = len(self.data.validation_windows(name)), self.data.sequence_length
        parts = self.data.recipe.training.position_losses
        table = np.zeros((windows, (parts or 1) + 1))  # losses of each part; bytes of the labels
        sizes = self.data.token_bytes
        for rows, micro_batch, scores in self._scored(self.data.evaluation(name), windows):
            assert micro_batch.labels is not None
            part = positions(micro_batch.info.slices, length) * (parts or 1) // length
            for row, losses, labels in zip(rows, scores[0], micro_batch.labels, strict=True):
                if row < windows:
                    table[row, :-1] += np.bincount(part, losses, minlength=parts or 1)
                    table[row, -1] += 0 if sizes is None else sizes[labels.numpy()].sum()
        *losses_of_parts, read = self._summed(table).sum(axis=0).tolist()
        loss = sum(losses_of_parts)
        metrics: dict[str, Any] = {"loss": loss / (windows * length)}
        if read:
            metrics["bits_per_byte"] = loss / math.log(2) / read
        if parts:
            tokens = windows * length // parts
            metrics["position_losses"] = [loss / tokens for loss in losses_of_parts]
        return metrics

    def score_tasks(self) -> dict[str, float]:
        """Return the scores of all tasks, as `tasks/<name>/accuracy` and so on; collective."""
        log_likelihoods, are_greedy = self.score_requests()
        metrics: dict[str, float] = {}
        first = 0
        for task in self.data.tasks.tasks:
            stop = first + sum(len(item.choices) for item in task.items)
            scores = task_scores(task.items, log_likelihoods[first:stop], are_greedy[first:stop])
            metrics |= {f"tasks/{task.name}/{key}": value for key, value in scores.items()}
            first = stop
        return metrics

    def score_requests(self) -> tuple[np.ndarray, np.ndarray]:
        """Score all continuations of the tasks; collective.

        Returns:
            The log-likelihood of each continuation in nats, and True for each continuation that
            greedy decoding would generate.
        """
        tasks = self.data.tasks
        count = len(tasks.requests)
        if not self.expects_documents:  # unlike in training, each window may have several documents
            self.engine.warm_up_for(self.data.two_documents())
            self.expects_documents = True
        table = np.zeros((count, 2))  # losses; labels that are the most likely tokens
        for rows, micro_batch, scores in self._scored(self.data.task_windows(), len(tasks.windows)):
            requests = tasks.requests_at(rows, micro_batch.info.slices).ravel()
            counted = requests != UNCOUNTED
            for column, values in enumerate(scores):
                table[:, column] += np.bincount(
                    requests[counted], values.ravel()[counted], minlength=count
                )
        losses, matches = self._summed(table).T
        return -losses, matches == [request.predicted for request in tasks.requests]

    def _scored(
        self, micro_batches: Iterable[MicroBatch], count: int
    ) -> Iterator[tuple[range, MicroBatch, np.ndarray]]:
        """Yield the numbers of the sequences, the micro-batch and the scores of its labels.

        Only ranks whose scores count get any; the scores are fp32 [2, b, s/c].
        """
        scored = self.engine.token_scores(micro_batches)
        rows_of_batches = self.data.evaluation_samples(count)
        for rows, (micro_batch, scores) in zip(rows_of_batches, scored, strict=True):
            if scores is not None:
                yield rows, micro_batch, scores.numpy()

    def _summed(self, table: np.ndarray) -> np.ndarray:
        return self.engine.sum_over_ranks(torch.from_numpy(table)).numpy()
