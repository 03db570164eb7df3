"""Division of sequences among context ranks: which tokens each rank has.

s sequence, c context ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    @property
    def whole(self) -> Slices:
        """Positions of all tokens, as one slice."""
        return (range(self.length),)

    def slices_of(self, rank: int) -> Slices:
        """Return the positions in the sequence of a rank's tokens."""
        n = self.length // len(self.order)
        return tuple(range(i * n, (i + 1) * n) for i in self.order[2 * rank : 2 * rank + 2])

    def rows_of(self, ranges: Slices) -> tuple[slice, ...]:
        """Return the rows of positions among the tokens of this rank; each range is in a slice."""
        n = self.length // len(self.order)
        starts = {held.start // n: row * n for row, held in enumerate(self.slices)}
        return tuple(
            slice(row + each.start % n, row + each.start % n + len(each))
            for each in ranges
            for row in (starts[each.start // n],)
        )

    def of_rank(self, rank: int) -> "Division":
        """Return the same division from the perspective of another rank."""
        return replace(self, rank=rank)


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


# Keys that sliding windows reach on other ranks.


@lru_cache(maxsize=256)
def reached_keys(division: Division, window: int) -> tuple[Slices, ...]:
    """Return the positions of the keys on each rank that the windows of this rank's queries reach.

    Documents are not considered, so that all micro-batches exchange equally many keys. Every entry
    has at most one range per slice of the other rank; the entry of this rank itself is empty.

    Args:
        division: the division of the sequence; its rank is the one that receives the keys
        window: number of keys that a query sees: its own and those before it
    """
    size = len(division.order) // 2
    return tuple(
        ()
        if rank == division.rank
        else tuple(
            reached
            for held in division.slices_of(rank)
            if (reached := _reached_part(held, division.slices, window))
        )
        for rank in range(size)
    )


def _reached_part(held: range, queries: Slices, window: int) -> range:
    """Return the positions in `held` that windows of later queries reach: its last ones."""
    first = min(
        (max(held.start, each.start - window + 1) for each in queries if each.start >= held.stop),
        default=held.stop,
    )
    return range(first, max(first, held.stop))


def received_keys(length: int, size: int, window: int) -> tuple[int, ...]:
    """Return the number of keys that each rank receives in a sequence without documents.

    Each key is received once, and so is each value; the backward pass returns their gradients.
    """
    divisions = (divide(length, rank, size) for rank in range(size))
    return tuple(
        sum(len(reached) for ranges in reached_keys(division, window) for reached in ranges)
        for division in divisions
    )
