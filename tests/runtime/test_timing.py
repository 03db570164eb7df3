"""Timing of an operation: the warm-up does not count, and the calls are averaged."""

from collections.abc import Callable, Sequence
from itertools import chain

import pytest
import torch

from threefold.runtime import timing
from threefold.runtime.timing import Repetitions


@pytest.mark.parametrize(("choose", "seconds"), [(min, 1.0), (max, 3.0)])
def test_the_warm_up_does_not_count(
    choose: Callable[[Sequence[float]], float], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    durations = [0.5, 12.0, 4.0, 8.0]  # of four calls each; the first one is the warm-up
    clock = iter(chain.from_iterable((0.0, duration) for duration in durations))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls: list[None] = []
    repetitions = Repetitions(count=3, calls=4, choose=choose)
    assert timing.timed(lambda: calls.append(None), torch.device("cpu"), repetitions) == seconds
    assert len(calls) == 4 * len(durations)
