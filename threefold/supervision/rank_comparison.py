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
# Of a tensor that is summed as int64, by kind of device; on a CPU, they fit into its cache.
MAX_ELEMENTS_AT_ONCE = {"cpu": 2**18, "cuda": 2**22}
ROW = 2**12  # elements of a tensor that have the same factor of their row
FIRST_OF_ROWS = 2**40  # number of the first row's factor; positions in rows have other factors
# Large odd numbers below 2^63, so that products with small numbers have many random bits.
MULTIPLIERS = (0x9E3779B97F4A7C1, 0x4CF5AD432745937F)


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

    Communicates: in each group an all-gather of a number per tensor; in the world an
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
    own = torch.stack([fingerprint(tensor) for _, tensor in copies.tensors])  # [n]
    ranks = dist.get_process_group_ranks(copies.group)
    of_ranks = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(of_ranks, own, group=copies.group)
    numbers = torch.stack(of_ranks).cpu()  # [ranks, n]
    sentences = []
    for index in (numbers != numbers[0]).any(dim=0).nonzero().flatten().tolist():
        holders: dict[int, list[int]] = {}
        for rank, number in zip(ranks, numbers[:, index].tolist(), strict=True):
            holders.setdefault(number, []).append(rank)
        sides = " against ".join(_ranks(side) for side in holders.values())
        sentences.append(f"{copies.tensors[index][0]} differs between {copies.kind}: {sides}")
    return sentences


def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum over the bits of a tensor, weighted by two pseudo-random factors.

    The elements, in the order of memory, fill rows of ROW elements. One factor depends on the row
    and one on the position in the row. The factors of neighbours are unrelated and odd. Otherwise
    regular changes would cancel, such as 1, -2 and 1 at three neighbours, or 1, -1, -1 and 1 at the
    corners of a rectangle. Integers wrap around, so the result does not depend on the order of the
    additions. The sum is computed a few rows at a time, so that a large tensor is never in memory
    twice.

    Returns:
        The sum, int64 [].
    """
    bits = tensor.detach().contiguous().view(-1)
    bits = bits.view(INTEGERS_BY_BYTES[tensor.element_size()])
    count = bits.numel() // ROW
    whole, rest = bits[: count * ROW].view(count, ROW), bits[count * ROW :].view(1, -1)
    factors = _factors(0, ROW, bits.device)
    height = max(1, MAX_ELEMENTS_AT_ONCE[bits.device.type] // ROW)
    sums = [
        (rows * factors[: rows.shape[1]]).sum(dim=1)  # int64, also the products
        for rows in (*whole.split(height), rest)
    ]
    return (torch.cat(sums) * _factors(FIRST_OF_ROWS, count + 1, bits.device)).sum()


def _factors(first: int, count: int, device: torch.device) -> Tensor:
    """Return pseudo-random odd factors of the numbers from `first` on, int64 [count].

    The steps are those of splitmix64 (Steele et al., OOPSLA 2014, section 5), with the multipliers
    of MULTIPLIERS, signed shifts and one round fewer.
    """
    numbers = torch.arange(first + 1, first + count + 1, device=device) * MULTIPLIERS[0]
    numbers = (numbers ^ (numbers >> 29)) * MULTIPLIERS[1]
    return numbers ^ (numbers >> 32) | 1


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
