"""Copies of a weight that must stay equal, compared bit for bit while the run goes on.

Data ranks all hold the same weights, tensor ranks the same norms, and stages that share a tied
table the same table. Each computes its own update, so a missing reduction, a bug in a library or a
faulty device makes them drift apart without a word, and the loss goes on falling for a while.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes -> the type that reads them as bits


@dataclass(frozen=True)
class CopyGroup:
    """Ranks that should hold the same values of some tensors.

    kind: what they have in common, for messages ("tensor ranks")
    group: this rank's process group
    tensors: (logical name, this rank's copy), in the same order on all ranks of the group
    """

    kind: str
    group: dist.ProcessGroup
    tensors: Sequence[tuple[str, Tensor]]


def differing_copies(groups: Iterable[CopyGroup]) -> list[str]:
    """What differs between which ranks, a sentence each; every rank gets all of them.

    Communicates: in each group an all-gather of three numbers per tensor, in the world one of one
    number, and the sentences if there are any.
    """
    found = [sentence for group in groups for sentence in _compare(group)]
    device = next((t.device for group in groups for _, t in group.tensors), torch.device("cpu"))
    count = torch.tensor(len(found), device=device)
    dist.all_reduce(count)
    if not count:
        return []
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, found)
    return sorted({sentence for sentences in everyones for sentence in sentences})


def _compare(copies: CopyGroup) -> list[str]:
    if not copies.tensors:
        return []
    own = torch.stack([fingerprint(tensor) for _, tensor in copies.tensors])  # [n, 3]
    ranks = dist.get_process_group_ranks(copies.group)
    everyones = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(everyones, own, group=copies.group)
    numbers = torch.stack(everyones).cpu()  # [ranks, n, 3]
    sentences = []
    for index in (numbers != numbers[0]).any(dim=2).any(dim=0).nonzero().flatten().tolist():
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, row in zip(ranks, numbers[:, index].tolist(), strict=True):
            holders.setdefault(tuple(row), []).append(rank)
        sides = " than on ".join(_ranks(side) for side in holders.values())
        sentences.append(f"{copies.tensors[index][0]} is different on {copies.kind} {sides}")
    return sentences


def fingerprint(tensor: Tensor) -> Tensor:
    """Three sums over the tensor's bits, plain and weighted by row and by column: int64 [3].

    Nothing of the tensor's size is made on the way.
    """
    bits = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])
    bits = bits.view(1, -1) if bits.dim() < 2 else bits.flatten(1)
    rows, columns = bits.sum(dim=1, dtype=torch.int64), bits.sum(dim=0, dtype=torch.int64)
    return torch.stack([rows.sum(), _weighted(rows), _weighted(columns)])


def _weighted(sums: Tensor) -> Tensor:
    weights = torch.arange(1, len(sums) + 1, device=sums.device) * 0x9E3779B97F4A7C1
    return (sums * weights).sum()  # wraps


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
