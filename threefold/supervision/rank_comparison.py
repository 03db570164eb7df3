"""Comparison of the replicas of a weight, which must stay equal bit for bit during the run.

All tensor ranks hold the norms, and stages with tied embeddings hold the same table. Each rank
computes its own update. A missing reduction, a bug in a library or a faulty device therefore lets
the replicas diverge silently, while the loss still falls for some time. Data ranks hold the same
weights too. ZeRO updates each shard on one data rank and gathers the shards after every step, so a
difference between data ranks means that the last gathering or the memory of a device is faulty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.runtime.processes import gathered

INTEGERS_BY_BYTES = {2: torch.int16, 4: torch.int32}  # bytes of an element -> integer type
MAX_ELEMENTS_AT_ONCE = 2**22  # of a tensor that is summed as int64
MULTIPLIER = 0x9E3779B97F4A7C1  # a large odd number, so that factors differ in all their bits


@dataclass(frozen=True)
class ReplicaGroup:
    """Ranks that should hold the same values of some tensors.

    Attributes:
        kind: name of the ranks for messages, such as "tensor ranks"
        tensors: (logical name, this rank's replica), in the same order on all ranks of the group
    """

    kind: str
    group: dist.ProcessGroup
    tensors: Sequence[tuple[str, Tensor]]


def diverged_replicas(groups: Iterable[ReplicaGroup], device: torch.device) -> list[str]:
    """Return a sentence for each tensor whose replicas diverged; the same on all ranks.

    Communicates: in each group an all-gather of three numbers per tensor; in the world an
    all-reduce of one number, and an all-gather of the sentences if there are any.

    Args:
        device: the device of the world's process group
    """
    found = [sentence for group in groups for sentence in _compare(group)]
    count = torch.tensor(len(found), device=device)
    dist.all_reduce(count)
    if not count:
        return []
    return sorted({sentence for sentences in gathered(found) for sentence in sentences})


def _compare(copies: ReplicaGroup) -> list[str]:
    if not copies.tensors:
        return []
    own = torch.stack([fingerprint(tensor) for _, tensor in copies.tensors])  # [n, 3]
    ranks = dist.get_process_group_ranks(copies.group)
    of_ranks = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(of_ranks, own, group=copies.group)
    numbers = torch.stack(of_ranks).cpu()  # [ranks, n, 3]
    sentences = []
    for index in (numbers != numbers[0]).any(dim=2).any(dim=0).nonzero().flatten().tolist():
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, row in zip(ranks, numbers[:, index].tolist(), strict=True):
            holders.setdefault(tuple(row), []).append(rank)
        sides = " against ".join(_ranks(side) for side in holders.values())
        sentences.append(f"{copies.tensors[index][0]} differs between {copies.kind}: {sides}")
    return sentences


def fingerprint(tensor: Tensor) -> Tensor:
    """Return three sums over the bits of a tensor: plain, weighted by row, weighted by column.

    They are computed a few rows at a time, so that a large matrix is never in memory twice.

    Returns:
        The sums, int64 [3].
    """
    bits = tensor.detach().contiguous().view(INTEGERS_BY_BYTES[tensor.element_size()])
    bits = bits.view(1, bits.numel()) if bits.dim() < 2 else bits.flatten(1)
    height = max(1, MAX_ELEMENTS_AT_ONCE // max(1, bits.shape[1]))
    rows, columns = [], bits.new_zeros(bits.shape[1], dtype=torch.int64)
    for part in bits.split(height):
        wide = part.to(torch.int64)
        rows.append(wide.sum(dim=1))
        columns += wide.sum(dim=0)
    every_row = torch.cat(rows)
    return torch.stack([every_row.sum(), _weighted(every_row), _weighted(columns)])


def _weighted(sums: Tensor) -> Tensor:
    weights = torch.arange(1, len(sums) + 1, device=sums.device) * MULTIPLIER  # wraps around
    return (sums * weights).sum()


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
