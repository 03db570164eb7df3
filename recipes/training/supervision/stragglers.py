"""Slow ranks: each one's time in forward passes, beside that of the ranks with the same layers."""

import time
from collections.abc import Sequence
from contextlib import contextmanager
from statistics import median

import torch
import torch.distributed as dist

from recipes.training.recipe.topology import Topology


class Stopwatch:
    """Sums the time of what it is put around; on a GPU that of the device, read when it is done.

    Forward passes wait for nobody but their own tensor group, which is in one node; under ZeRO-3
    they gather weights from all data ranks, and all look alike.
    """

    def __init__(self, device: torch.device, *, off: bool = False):
        self.on_gpu, self.off = device.type == "cuda", off
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self):
        """Count what happens inside."""
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
        """The seconds since the last call."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


def gather(seconds: float) -> list[float]:
    """Every rank's seconds, by rank; collective."""
    everyones = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyones, seconds)
    return everyones


def ratios(seconds: Sequence[float], topology: Topology) -> dict[int, float]:
    """First rank of each tensor group -> its time over that of the other groups of its stage.

    The ranks of a group wait for each other, so the group counts as one; alone it has no ratio.

    seconds: in forward passes, by rank
    """
    found = {}
    size = topology.tensor
    for ranks in topology.stage_groups():
        taken = {
            first: median(seconds[first : first + size])
            for first in range(ranks[0], ranks[-1] + 1, size)
        }
        usual = median(taken.values())
        for first, own in taken.items():
            if len(taken) == 2:
                usual = next(other for rank, other in taken.items() if rank != first)
            if len(taken) > 1:
                found[first] = own / usual
    return found


def find_slow(
    relative: dict[int, float], topology: Topology, hosts: Sequence[str], limit: float
) -> list[str]:
    """The ranks that took more than `limit` times what the others of their stage did.

    relative: as `ratios` gives it
    hosts: by rank
    """
    slow = []
    for first, ratio in relative.items():
        if ratio > limit:
            last = first + topology.tensor - 1
            who = f"rank {first}" if last == first else f"ranks {first} .. {last}"
            slow.append(f"{who} ({hosts[first]}) took {ratio:.1f} times as long as usual there")
    return slow
