"""The next step's micro-batches, one step ahead."""

import threading
from collections.abc import Iterator

import pytest
import torch

from recipes.training.feed import Batch, Feed


def batch(number: int) -> Batch:
    return torch.full((1, 2), number), torch.full((1, 2), number + 1)


def test_the_next_step_is_fetched_while_this_one_runs() -> None:
    read: list[int] = []
    fetched = threading.Event()

    def source(step: int) -> Iterator[Batch]:
        read.append(step)
        yield batch(10 * step)
        yield batch(10 * step + 1)
        if step == 4:
            fetched.set()

    feed = Feed(source, last_step=4)
    batches, waited = feed.take(3)
    assert [int(tokens[0, 0]) for tokens, _ in batches] == [30, 31] and waited > 0
    assert fetched.wait(10)  # nobody has asked for it yet
    assert read == [3, 4]
    batches, waited_again = feed.take(4)
    assert [int(labels[0, 0]) for _, labels in batches] == [41, 42]
    assert waited_again < 1.0 and read == [3, 4]  # none after the last


def test_what_goes_wrong_is_raised_where_the_step_begins() -> None:
    def source(step: int) -> Iterator[Batch]:
        if step == 2:
            raise ValueError("corpus.bin ends before token 9")
        yield batch(step)

    feed = Feed(source, last_step=9)
    assert len(feed.take(1)[0]) == 1
    with pytest.raises(ValueError, match="ends before token 9"):
        feed.take(2)


def test_a_run_that_goes_back_reads_what_it_asks_for() -> None:
    feed = Feed(lambda step: [batch(step)], last_step=9)
    assert [int(feed.take(step)[0][0][0][0, 0]) for step in (1, 2, 7, 3)] == [1, 2, 7, 3]
