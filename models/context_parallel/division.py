"""Division of sequences among context ranks: which tokens each rank has.

s sequence, c context ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

Slices = tuple[range, ...]
Order = tuple[int, ...]
Lengths = tuple[tuple[int, ...], ...]  # document lengths of each sequence


@dataclass(frozen=True)
class Division:
    """A sequence of s tokens in 2c equal slices, two for each context rank.

    order: numbers of the two slices of rank 0, then of rank 1, ...
    rank: this rank's index on the context axis
    length: s
    """

    order: Order
    rank: int
    length: int

    @property
    def slices(self) -> Slices:
        """Positions in the sequence of this rank's tokens."""
        return self.slices_of(self.rank)

    def slices_of(self, rank: int) -> Slices:
        """Return the positions in the sequence of a rank's tokens."""
        n = self.length // len(self.order)
        return tuple(range(i * n, (i + 1) * n) for i in self.order[2 * rank : 2 * rank + 2])


def divide(length: int, rank: int, size: int, lengths: Lengths | None = None) -> Division:
    """Return a division that balances the ranks' work in attention by pairing slices.

    Of the slices sorted by work, rank i has the one at i and the one at 2c - 1 - i. Without
    documents, the later slices have more work, and all ranks have the same (Llama 3, arXiv
    2407.21783, section 3.3.2).

    Args:
        length: s, divisible by 2c
        rank: this rank's index on the context axis
        size: c
        lengths: document lengths of each sequence; None: each sequence is one document
    """
    assert length % (2 * size) == 0
    return Division(_order(length, size, lengths or ((length,),)), rank, length)


@lru_cache(maxsize=256)
def rank_work(length: int, size: int, lengths: Lengths) -> tuple[int, ...]:
    """Return the number of query-key pairs of each rank; the busiest rank decides the time."""
    order, work = _order(length, size, lengths), slice_work(length, 2 * size, lengths)
    return tuple(work[i] + work[j] for i, j in zip(order[::2], order[1::2], strict=True))


@lru_cache(maxsize=256)
def slice_work(length: int, count: int, lengths: Lengths) -> tuple[int, ...]:
    """Return the number of query-key pairs of each of `count` slices.

    A document of n tokens has n (n + 1) / 2 pairs.
    """
    bounds = range(0, length + 1, length // count)
    totals = [0] * (count + 1)
    for document_lengths in lengths:
        for i, pairs in enumerate(_pairs_before(document_lengths, bounds)):
            totals[i] += pairs
    return tuple(after - before for before, after in pairwise(totals))


@lru_cache(maxsize=256)
def _order(length: int, size: int, lengths: Lengths) -> Order:
    work = slice_work(length, 2 * size, lengths)
    by_work = sorted(range(2 * size), key=lambda i: (work[i], i))
    pairs = (sorted((by_work[i], by_work[-1 - i])) for i in range(size))
    return tuple(i for pair in pairs for i in pair)


def _pairs_before(lengths: Sequence[int], bounds: Sequence[int]) -> list[int]:
    """Return the pairs of query and key of all queries before each of the ascending bounds."""
    documents = iter(zip(accumulate(lengths, initial=0), lengths, strict=False))
    start, length = next(documents)
    found, complete = [], 0  # pairs in the documents that end at or before the bound
    for bound in bounds:
        while start + length < bound:
            complete += _triangle(length)
            start, length = next(documents)
        found.append(complete + _triangle(bound - start))
    return found


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
