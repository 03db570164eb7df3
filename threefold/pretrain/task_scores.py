"""Scores of a task from the log-likelihoods of its choices."""

import math
from collections.abc import Sequence

import numpy as np

from threefold.data.task_file import Item


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
    chosen = [int(np.argmax(each)) for each in of_items]
    return float(np.mean([n == item.answer for n, item in zip(chosen, items, strict=True)]))
