"""The division of causal attention into tiles of queries, and of the tiles into pieces with keys.

s sequence, c context ranks, b micro-batch, a query heads, g key-value heads, d head size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from models.context_parallel.division import Lengths, Slices
from models.kernels.attention_parts import (
    Gradients,
    LargestLogits,
    Limits,
    Part,
    attend,
    attend_backward,
    merge,
    merge_sinks,
)

Index = tuple[slice, slice, slice]  # of sequences, heads and tokens


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of one document and slice.

    Each query sees the keys in `before`, and the keys of these rows up to its own, within the
    limits.

    sequences: of the micro-batch
    rows: the queries among the s/c tokens of this rank
    before: positions in the sequence of the keys that at least one query sees, in earlier rows or
        on another rank; it ends at the position of the first query
    limits: window and soft cap; None: neither
    """

    sequences: slice
    rows: slice
    before: range
    limits: Limits | None = None

    @property
    def own(self) -> Index:
        """The index of the queries in [b, a, s/c, d], and of their own keys in [b, g, s/c, d]."""
        return self.sequences, slice(None), self.rows

    @property
    def own_limits(self) -> Limits | None:
        """The limits of the queries and their own keys."""
        return self.limits and self.limits.for_part(self.rows.stop - self.rows.start, 0)

    def piece(self, number: int, keys: range, first_key: int) -> "TilePiece":
        """Return the piece with some of the keys in `before`.

        Args:
            number: of this tile
            keys: their positions in the sequence
            first_key: the row of the first key among the tokens that hold it
        """
        rows, limits = self.rows, None
        if self.limits is not None:
            count = rows.stop - rows.start
            first = self.before.stop  # position of the first query
            if self.limits.window is not None:  # later queries do not see the last key
                count = min(count, keys[-1] + self.limits.window - first)
                rows = slice(rows.start, rows.start + count)
            limits = self.limits.for_part(count, first - keys.start)
        return TilePiece(
            number,
            (self.sequences, slice(None), rows),
            (self.sequences, slice(None), slice(first_key, first_key + len(keys))),
            limits,
        )


@dataclass(frozen=True)
class TilePiece:
    """The first queries of a tile and earlier keys, of which each query sees one at least.

    tile: number of the tile
    queries: index of the queries in [b, a, s/c, d]
    keys: index of the keys in the tensor that holds them
    limits: limits of the piece; None: each query sees all keys
    """

    tile: int
    queries: Index
    keys: Index
    limits: Limits | None


@lru_cache(maxsize=256)  # all layers of all micro-batches in flight
def tiles_of(
    slices: Slices, lengths: Lengths | None, limits: Limits | None = None
) -> tuple[Tile, ...]:
    """Return the tiles of a rank: one per slice, or one per document in a slice.

    No key is visited that no query of a tile sees, and without limits no mask is needed.

    Args:
        slices: positions in the sequence of this rank's tokens
        lengths: document lengths of each sequence; None: each sequence is one document
    """
    if lengths is None:
        return tuple(_tiles_of_sequences(slice(None), slices, (slices[-1].stop,), limits))
    tiles: list[Tile] = []
    first = 0
    for documents, run in groupby(lengths):  # adjacent sequences with equal documents share tiles
        last = first + len(list(run))
        tiles += _tiles_of_sequences(slice(first, last), slices, documents, limits)
        first = last
    return tuple(tiles)


def _tiles_of_sequences(
    sequences: slice, slices: Slices, lengths: tuple[int, ...], limits: Limits | None
) -> Iterator[Tile]:
    """Yield the tiles of sequences with documents of these lengths."""
    row = 0
    for positions in slices:
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            start = end - length
            first, last = max(positions.start, start), min(positions.stop, end)
            if first < last:
                rows = slice(row, row + last - first)
                if limits is not None and limits.window is not None:
                    start = max(start, first - limits.window + 1)
                yield Tile(sequences, rows, range(start, first), limits)
                row = rows.stop


def pieces(tiles: Sequence[Tile], slices: Slices) -> Iterator[TilePiece]:
    """Yield the pieces of tiles with the keys of some tokens.

    Args:
        tiles: of the queries
        slices: positions in the sequence of the keys, in the order of the tensor that holds them
    """
    ends = list(accumulate(len(chunk) for chunk in slices))
    for number, tile in enumerate(tiles):
        for held, end in zip(slices, ends, strict=True):
            keys = range(max(held.start, tile.before.start), min(held.stop, tile.before.stop))
            if keys:
                yield tile.piece(number, keys, end - held.stop + keys.start)


# The attention of tiles to their own keys and to pieces of others, and its gradients.


def attend_to_own(q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> list[Part]:
    """Return the attention of each tile's queries to the keys of their own rows."""
    return [
        attend(q[tile.own], k[tile.own], v[tile.own], causal=True, limits=tile.own_limits)
        for tile in tiles
    ]


def attend_to_others(
    parts: list[Part], q: Tensor, keys: Tensor, values: Tensor, others: Iterable[TilePiece]
) -> None:
    """Merge the attention to the keys of some pieces into the parts of their tiles."""
    for piece in others:
        there = keys[piece.keys], values[piece.keys]
        part = attend(q[piece.queries], *there, causal=False, limits=piece.limits)
        out, logsumexp = parts[piece.tile]
        count = part[1].shape[-1]
        if count == logsumexp.shape[-1]:
            parts[piece.tile] = merge(parts[piece.tile], part)
            continue
        first = out[:, :, :count], logsumexp[..., :count]
        for rows, merged in zip(first, merge(first, part), strict=True):
            rows.copy_(merged)


def assemble(
    q: Tensor, tiles: Sequence[Tile], parts: Sequence[Part], sinks: Tensor | None = None
) -> Part:
    """Return the output, [b, a, s/c, d], and the logsumexp, [b, a, s/c], of all tiles.

    The output has the type of q and the memory order [s/c, b, a, d], which the next matmul needs.

    Args:
        parts: the attention of each tile to all of its keys
        sinks: merged into each part; None: none
    """
    (b, a, n, _), d = q.shape, parts[0][0].shape[-1]  # of the values
    out = q.new_empty((n, b, a, d)).permute(1, 2, 0, 3)
    logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for tile, part in zip(tiles, parts, strict=True):
        whole = part if sinks is None else merge_sinks(part, sinks)
        out[tile.own], logsumexp[tile.own] = whole
    return out, logsumexp


class Merged(NamedTuple):
    """The queries of a rank, their merged attention, and the gradient of its output.

    q, grad, out: [b, a, s/c, d]
    logsumexp: [b, a, s/c]
    logits: notes the logits of each part whose gradients are computed; None: they are not noted
    """

    q: Tensor
    grad: Tensor
    out: Tensor
    logsumexp: Tensor
    logits: LargestLogits | None = None

    def gradients(
        self, at: Index, k: Tensor, v: Tensor, *, causal: bool, limits: Limits | None
    ) -> Gradients:
        """Return the gradients that pass through the keys k and values v of the queries at `at`."""
        if self.logits is not None:
            self.logits.note(self.q[at], k, causal=causal, limits=limits)
        whole = self.out[at], self.logsumexp[at]
        return attend_backward(self.grad[at], self.q[at], k, v, whole, causal=causal, limits=limits)


def write_gradients_of_own(
    grads: Sequence[Tensor], merged: Merged, k: Tensor, v: Tensor, tiles: Sequence[Tile]
) -> None:
    """Write the gradients that pass through the keys of the queries' own rows, in fp32.

    Args:
        grads: of all queries, keys and values of this rank
    """
    for tile in tiles:
        at = tile.own
        found = merged.gradients(at, k[at], v[at], causal=True, limits=tile.own_limits)
        for total, part in zip(grads, found, strict=True):
            total[at] = part


def add_gradients_of_others(
    grads: Sequence[Tensor],
    merged: Merged,
    keys: Tensor,
    values: Tensor,
    others: Iterable[TilePiece],
) -> None:
    """Add the gradients that pass through the keys of some pieces, in fp32.

    Args:
        grads: of the queries of this rank, and of `keys` and `values`
    """
    for piece in others:
        at, there = piece.queries, piece.keys
        found = merged.gradients(at, keys[there], values[there], causal=False, limits=piece.limits)
        for total, part, index in zip(grads, found, (at, there, there), strict=True):
            total[index] += part


# The largest logits of attention that does not divide keys among context ranks.


def noting_logits(
    q: Tensor, k: Tensor, tiles: Sequence[Tile], logits: LargestLogits, *, head: int
) -> Tensor:
    """Return the queries; their backward pass notes the logits.

    The forward pass may be recomputed, or belong to a validation.

    Args:
        q: queries in the slices of the tiles, [b, a, n, d]
        k: keys of whole sequences, [b, g, s, d]
        head: number of the first head in q
    """
    return _NotingLogits.apply(q, k, tiles, logits, head)


class _NotingLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, tiles, logits, head):
        ctx.save_for_backward(q, k)
        ctx.where = tiles, logits, head
        return q.view_as(q)

    @staticmethod
    def backward(ctx, grad):
        (q, k), (tiles, logits, head) = ctx.saved_tensors, ctx.where
        for tile in tiles:
            first, count = tile.before.stop, tile.rows.stop - tile.rows.start
            keys = k[tile.sequences, :, first : first + count]
            logits.note(q[tile.own], keys, causal=True, limits=tile.own_limits, head=head)
        for piece in pieces(tiles, (range(k.shape[2]),)):
            keys, queries = k[piece.keys], q[piece.queries]
            logits.note(queries, keys, causal=False, limits=piece.limits, head=head)
        return grad, None, None, None, None
