"""The division of causal attention into rectangles of queries and keys.

s sequence, c context ranks, b micro-batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

from models.context_parallel.division import Lengths, Slices


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of one document and slice.

    Each query sees all keys in `before`, and the keys of these rows up to its own.

    sequences: of the micro-batch
    rows: the queries among the s/c tokens of this rank
    before: positions in the sequence of the keys that all of them see, in earlier rows or on
        another rank
    """

    sequences: slice
    rows: slice
    before: range

    @property
    def own(self) -> tuple[slice, slice, slice]:
        """The index of the queries in [b, a, s/c, d], and of their own keys in [b, g, s/c, d]."""
        return self.sequences, slice(None), self.rows

    @property
    def others(self) -> tuple[slice, slice, slice]:
        """The index of the earlier keys in [b, g, s, d]."""
        return self.sequences, slice(None), slice(self.before.start, self.before.stop)


@lru_cache(maxsize=256)  # all layers of all micro-batches in flight
def tiles_of(slices: Slices, lengths: Lengths | None) -> tuple[Tile, ...]:
    """Return the tiles of a rank: one per slice, or one per document in a slice.

    No mask is needed, and no key is visited that a query does not see.

    Args:
        slices: positions in the sequence of this rank's tokens
        lengths: document lengths of each sequence; None: each sequence is one document
    """
    if lengths is None:
        return tuple(_tiles_of_sequences(slice(None), slices, (slices[-1].stop,)))
    tiles: list[Tile] = []
    first = 0
    for each, run in groupby(lengths):  # adjacent sequences with equal documents share tiles
        last = first + len(list(run))
        tiles += _tiles_of_sequences(slice(first, last), slices, each)
        first = last
    return tuple(tiles)


def _tiles_of_sequences(
    sequences: slice, slices: Slices, lengths: tuple[int, ...]
) -> Iterator[Tile]:
    """Yield the tiles of sequences with documents of these lengths."""
    row = 0
    for positions in slices:
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            start = end - length
            first, last = max(positions.start, start), min(positions.stop, end)
            if first < last:
                rows = slice(row, row + last - first)
                yield Tile(sequences, rows, range(start, first))
                row = rows.stop
