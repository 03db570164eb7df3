"""Slow ranks: each one's time in forward passes, beside that of the ranks with the same layers."""

import time
from collections.abc import Sequence
from contextlib import contextmanager
from statistics import median

import torch
import torch.distributed as dist

from recipes.training.topology import Topology


class Stopwatch:
    """Sums the time of what it is put around; on a GPU that of the device, read when it is done.

    Forward passes wait for nobody but their own tensor group, which is in one node.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self):
        """Count what happens inside."""
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


def find_slow(
    seconds: Sequence[float], topology: Topology, hosts: Sequence[str], limit: float
) -> list[str]:
    """The ranks that took more than `limit` times what the others of their stage did.

    seconds: in forward passes, by rank
    hosts: by rank
    """
    slow = []
    for ranks in topology.stage_groups():
        groups = {  # the ranks of a tensor group wait for each other
            group[0]: median(seconds[rank] for rank in group)
            for group in topology.tensor_groups()
            if group[0] in ranks
        }
        for first, own in groups.items():
            others = [taken for other, taken in groups.items() if other != first]
            if others and own > limit * median(others):
                last = first + topology.tensor - 1
                who = f"rank {first}" if last == first else f"ranks {first} .. {last}"
                slow.append(
                    f"{who} ({hosts[first]}) took {own / median(others):.1f} times as long as "
                    f"{'its peer' if len(others) == 1 else 'its peers'}"
                )
    return slow
