"""The time that a rank spends in forward passes, to find slow ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Stopwatch:
    """Sum of the times of forward passes; on a GPU, measured by events of the device.

    A forward pass waits only for the tensor and context ranks that work on the same sequences.
    Under ZeRO-3 it gathers weights from all data ranks, so a slow rank slows all of them equally
    and is not found.
    """

    def __init__(self, device: torch.device, *, off: bool = False):
        self.on_gpu, self.off = device.type == "cuda", off
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of this context."""
        if self.off:
            yield
            return
        if self.on_gpu:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._events.append((first, last))
            return
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """Return the seconds since the last call."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds

    def take_of_all_ranks(self) -> list[float]:
        """Return the seconds since the last call on every rank, by rank; collective."""
        of_ranks = [0.0] * dist.get_world_size()
        dist.all_gather_object(of_ranks, self.take())
        return of_ranks
