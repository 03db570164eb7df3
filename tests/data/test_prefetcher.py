"""Prefetching of the next step's micro-batches."""

import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from models.errors import UserError
from models.parallel.micro_batch_info import MicroBatchInfo
from threefold.data.dataset import MicroBatch, Prefetcher
from threefold.engine.engine import Engine


def micro_batch(number: int) -> MicroBatch:
    return MicroBatch(torch.full((1, 2), number), torch.full((1, 2), number + 1), MicroBatchInfo())


def test_the_next_step_is_fetched_while_this_one_runs() -> None:
    read: list[int] = []
    fetched = threading.Event()

    def source(step: int) -> Iterator[MicroBatch]:
        read.append(step)
        yield micro_batch(10 * step)
        yield micro_batch(10 * step + 1)
        if step == 4:
            fetched.set()

    prefetcher = Prefetcher(source, last_step=4)
    coming, waited = prefetcher.next(3)
    assert [int(each.tokens[0, 0]) for each in coming] == [30, 31] and waited > 0
    assert fetched.wait(10)  # before it is requested
    assert read == [3, 4]
    coming, waited_again = prefetcher.next(4)
    assert [int(each.labels[0, 0]) for each in coming] == [41, 42]
    assert waited_again < 1.0 and read == [3, 4]  # the last step prefetches nothing


def test_errors_are_raised_at_the_start_of_the_step() -> None:
    def source(step: int) -> Iterator[MicroBatch]:
        if step == 2:
            raise UserError("corpus.bin ends before token 9")
        yield micro_batch(step)

    prefetcher = Prefetcher(source, last_step=9)
    assert len(prefetcher.next(1)[0]) == 1
    with pytest.raises(UserError, match="ends before token 9"):
        prefetcher.next(2)


def test_a_middle_stage_gets_no_tokens() -> None:
    coming = MicroBatch(None, None, MicroBatchInfo())
    prefetcher = Prefetcher(lambda step: [coming], last_step=9, pinned=True)
    assert prefetcher.next(1)[0] == [coming]


@pytest.fixture
def pinning_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that copy tokens or labels to page-locked memory."""
    threads: list[threading.Thread] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return threads


def test_page_locked_memory_is_allocated_between_steps(
    pinning_threads: list[threading.Thread],
) -> None:
    """In the middle of a step the allocation may wait for a posted receive."""
    read = threading.Event()

    def source(step: int) -> Iterator[MicroBatch]:
        yield micro_batch(step)
        if step == 2:
            read.set()

    prefetcher = Prefetcher(source, last_step=2, pinned=True)
    for step in (1, 2):
        ((coming,), _) = prefetcher.next(step)
        assert int(coming.tokens[0, 0]) == step
        assert read.wait(10)  # the next step is read before the main thread asks for it
        assert pinning_threads == [threading.main_thread()] * 2 * step  # tokens and labels


def test_micro_batches_of_evaluations_are_pinned_on_a_gpu(
    pinning_threads: list[threading.Thread],
) -> None:
    for on_gpu in (False, True):
        engine = mock.MagicMock(spec=Engine, on_gpu=on_gpu, crumb=mock.MagicMock())
        assert len(list(Engine._from_disk(engine, [micro_batch(1), micro_batch(2)]))) == 2
        assert len(pinning_threads) == 4 * on_gpu


def test_a_run_that_rolls_back_reads_the_requested_samples() -> None:
    prefetcher = Prefetcher(lambda step: [micro_batch(step)], last_step=9)
    assert [int(prefetcher.next(step)[0][0].tokens[0, 0]) for step in (1, 2, 7, 3)] == [1, 2, 7, 3]


def test_forgotten_micro_batches_are_read_again() -> None:
    """Another branch of a run reads other samples in a step of the same number."""
    branch = 1
    prefetcher = Prefetcher(lambda step: [micro_batch(10 * branch + step)], last_step=2)
    assert int(prefetcher.next(1)[0][0].tokens[0, 0]) == 11
    prefetcher.reset()
    branch = 2
    assert int(prefetcher.next(2)[0][0].tokens[0, 0]) == 22
