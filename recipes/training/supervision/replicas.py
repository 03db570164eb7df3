"""Copies of a weight that must stay equal, compared bit for bit while the run goes on.

Tensor ranks all hold the norms, and stages that share a tied table hold the same table. Each
computes its own update, so a missing reduction, a bug in a library or a faulty device makes them
drift apart without a word, and the loss goes on falling for a while. Data ranks hold the same
weights too; ZeRO updates each piece on one of them and gathers the pieces after every step, so a
difference there means that the last gathering, or a device's memory, is not to be trusted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes -> the type that reads them as bits
WIDENED = 2**22  # elements of a tensor that are summed, as int64, at a time
MULTIPLIER = 0x9E3779B97F4A7C1  # any large odd number: weights that differ in all their bits


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


def differing_copies(groups: Iterable[CopyGroup], device: torch.device) -> list[str]:
    """What differs between which ranks, a sentence each; every rank gets all of them.

    Communicates: in each group an all-gather of three numbers per tensor, in the world an
    all-reduce of one number, and the sentences if there are any.

    device: what the world's process group communicates on
    """
    found = [sentence for group in groups for sentence in _compare(group)]
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
        sides = " against ".join(_ranks(side) for side in holders.values())
        sentences.append(f"{copies.tensors[index][0]} differs between {copies.kind}: {sides}")
    return sentences


def fingerprint(tensor: Tensor) -> Tensor:
    """Three sums over the tensor's bits, plain and weighted by row and by column: int64 [3].

    Takes a few rows at a time, so that a large matrix is never there a second time.
    """
    bits = tensor.detach().contiguous().view(INTEGERS[tensor.element_size()])
    bits = bits.view(1, bits.numel()) if bits.dim() < 2 else bits.flatten(1)
    height = max(1, WIDENED // max(1, bits.shape[1]))
    rows, columns = [], bits.new_zeros(bits.shape[1], dtype=torch.int64)
    for part in bits.split(height):
        wide = part.to(torch.int64)
        rows.append(wide.sum(dim=1))
        columns += wide.sum(dim=0)
    every_row = torch.cat(rows)
    return torch.stack([every_row.sum(), _weighted(every_row), _weighted(columns)])


def _weighted(sums: Tensor) -> Tensor:
    weights = torch.arange(1, len(sums) + 1, device=sums.device) * MULTIPLIER  # wraps, as all does
    return (sums * weights).sum()


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
