"""Random numbers for dropout: equal on tensor ranks where activations are replicated, different
where they are split.

Both are functions of the CPU generator's state, which tensor ranks share. The engine seeds it
from (seed, step, stage, data rank) before every step, so a resumed run drops what the
uninterrupted run drops, and activation checkpointing, which restores it, replays the same mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from models.parallel.collectives import TensorAxis


@contextmanager
def split_region_random(axis: TensorAxis, device: torch.device) -> Iterator[None]:
    """Within it the device's default generator differs between tensor ranks."""
    shared = int(torch.randint(2**62, (), device="cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(shared + axis.rank)
        yield


def dropout(x: Tensor, probability: float, *, training: bool, axis: TensorAxis) -> Tensor:
    """Dropout on the residual stream: [s, b, h], or [s/t, b, h] under sequence parallelism."""
    if not training or probability == 0:
        return x
    if not axis.sequence_parallel:
        return F.dropout(x, probability)
    with split_region_random(axis, x.device):
        return F.dropout(x, probability)
