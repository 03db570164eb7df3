"""Comparison of the replicas of a weight, which must stay equal bit for bit during the run.

All tensor ranks hold the norms, and stages with tied embeddings hold the same table. Each rank
computes its own update. A missing reduction, a bug in a library or a faulty device therefore lets
the replicas diverge silently, while the loss still falls for some time. Data ranks hold the same
weights too. ZeRO updates each shard on one data rank and gathers the shards after every step, so a
difference between data ranks means that the last gathering or the memory of a device is faulty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from models.errors import a_few
from threefold.runtime.processes import gathered

INTEGERS_BY_BYTES = {2: torch.int16, 4: torch.int32}  # bytes of an element -> integer type
MAX_SENTENCES = 8  # that a rank reports, and that all ranks return
MAX_SIDES = 4  # in a sentence, of ranks with the same values
MAX_RANKS_IN_SIDE = 8
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
    """Return sentences for tensors whose replicas diverged; the same on all ranks.

    There are at most MAX_SENTENCES, each about one tensor in one group. The last one ends with the
    number of further ones, if there are any.

    Communicates: in each group an all-gather of a number per tensor; in the world an all-reduce of
    one number, and an all-gather of at most MAX_SENTENCES of each rank if there are any.

    Args:
        device: the device of the world's process group
    """
    number, sentences = 0, []
    for group in groups:
        diverged = _compare(group)
        number += len(diverged)
        first = sorted(diverged, key=lambda tensor: tensor.name)[:MAX_SENTENCES]
        sentences += [tensor.sentence(group.kind) for tensor in first]
    count = torch.tensor(number, device=device)
    dist.all_reduce(count)
    if not count:
        return []
    of_ranks = gathered(sorted(sentences)[:MAX_SENTENCES])
    shown = sorted(sentence for few in of_ranks for sentence in few)[:MAX_SENTENCES]
    if (more := int(count) - len(shown)) > 0:
        shown[-1] += f" (and {more} more)"
    return shown


class DivergedTensor(NamedTuple):
    """A tensor that differs between the ranks of a group.

    Attributes:
        ranks: the ranks of the group
        fingerprints: the fingerprint of each rank's replica
    """

    name: str
    ranks: Sequence[int]
    fingerprints: Tensor

    def sentence(self, kind: str) -> str:
        """Return a sentence with the ranks that hold the same values, as one side each."""
        holders: dict[int, list[int]] = {}
        for rank, number in zip(self.ranks, self.fingerprints.tolist(), strict=True):
            holders.setdefault(number, []).append(rank)
        sides = list(holders.values())
        texts = [_ranks(side) for side in sides[:MAX_SIDES]]
        if len(sides) > MAX_SIDES:
            texts.append(f"{sum(map(len, sides[MAX_SIDES:]))} more ranks")
        return f"{self.name} differs between {kind}: {' against '.join(texts)}"


def _compare(copies: ReplicaGroup) -> list[DivergedTensor]:
    """Return the diverged tensors of a group on its first rank, and none on the others."""
    if not copies.tensors:
        return []
    own = torch.stack([fingerprint(tensor) for _, tensor in copies.tensors])  # [n]
    ranks = dist.get_process_group_ranks(copies.group)
    of_ranks = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(of_ranks, own, group=copies.group)
    if dist.get_rank() != ranks[0]:  # all ranks know the same, so one report is enough
        return []
    numbers = torch.stack(of_ranks).cpu()  # [ranks, n]
    differ = (numbers != numbers[0]).any(dim=0).nonzero().flatten().tolist()
    return [DivergedTensor(copies.tensors[i][0], ranks, numbers[:, i]) for i in differ]


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
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {a_few(list(map(str, ranks)), most=MAX_RANKS_IN_SIDE)}"
