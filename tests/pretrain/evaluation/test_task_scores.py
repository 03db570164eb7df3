"""Scores of tasks from log-likelihoods, counted by hand."""

import math

import numpy as np
import pytest

from threefold.data.tasks import Item
from threefold.pretrain.evaluation import task_scores

CHOICES = [
    Item("p", ("a", "bbbb"), 1),  # -2 and -4: right only per byte
    Item("p", ("cc", "dd", "é"), 2),  # -3, -3, -1: right in both, and two bytes long
    Item("p", ("ee", "f"), 1),  # equal: the first counts as chosen; per byte too
    Item("p", ("gggg", "h"), 0),  # -4 and -2: right only per byte, and wrong if multiplied by bytes
]
LIKELIHOODS = np.array([-2.0, -4.0, -3.0, -3.0, -1.0, -2.0, -2.0, -4.0, -2.0])


def test_multiple_choice() -> None:
    scores = task_scores(CHOICES, LIKELIHOODS, np.zeros(9, bool))
    assert scores.keys() == {"accuracy", "accuracy_per_byte", "bits_per_byte"}
    assert scores["accuracy"] == pytest.approx(1 / 4)
    assert scores["accuracy_per_byte"] == pytest.approx(3 / 4)
    # The right choices have 4 + 2 + 1 + 4 bytes and -4 - 1 - 2 - 4 nats.
    assert scores["bits_per_byte"] == pytest.approx(11 / math.log(2) / 11)


def test_cloze() -> None:
    items = [Item("p", ("word",)), Item("p", ("wörd",))]
    scores = task_scores(items, np.array([-1.0, -3.0]), np.array([True, False]))
    assert scores["accuracy"] == 0.5
    assert scores["perplexity"] == pytest.approx(math.exp(2.0))
    assert scores["bits_per_byte"] == pytest.approx(4 / math.log(2) / 9)


def test_a_new_model_may_have_an_infinite_perplexity() -> None:
    scores = task_scores([Item("p", ("word",))], np.array([-1e4]), np.array([False]))
    assert scores["perplexity"] == math.inf
