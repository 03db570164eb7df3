import time

import torch

from threefold.engine.engine import Stopwatch


def test_a_stopwatch_that_is_off_counts_nothing() -> None:
    watch = Stopwatch(torch.device("cpu"), off=True)
    with watch.running():
        time.sleep(0.01)
    assert watch.take() == 0.0


def test_a_stopwatch_sums_the_time_of_its_contexts() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(3):
        with watch.running():
            time.sleep(0.05)
        time.sleep(0.1)
    assert 0.15 <= watch.take() < 0.3
    assert watch.take() == 0.0
