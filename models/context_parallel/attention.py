"""Attention with sequences divided among context ranks: ring, gathered keys, or Ulysses.

In each step, a rank attends to the keys of one rank while it sends them to the next rank (ring
attention, Liu et al. 2023, arXiv 2310.01889). Each rank has two slices of a sequence, so that
causal work is equal (Llama 3, arXiv 2407.21783, section 3.3.2).

b micro-batch, a query heads, g key-value heads, s sequence, c context ranks, d head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import Tensor

from models.context_parallel.collectives import (
    ContextAxis,
    begin_gather,
    gather,
    heads_to_sequence,
    reduce_scatter,
    sequence_to_heads,
)
from models.context_parallel.division import Division, Lengths, Order, Slices
from models.kernels.attention import Part, attend, attend_backward, merge
from models.kernels.compile import Function
from models.kernels.dropout import drop_out
from models.parallel.collectives import wait_for
from models.parallel.micro_batch_info import (
    MicroBatchInfo,
    attention_rows,
    positions_in,
    token_positions,
)

# The division of causal attention into rectangles of queries and keys.
#
# s sequence, c context ranks, b micro-batch.


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
    for documents, run in groupby(lengths):  # adjacent sequences with equal documents share tiles
        last = first + len(list(run))
        tiles += _tiles_of_sequences(slice(first, last), slices, documents)
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


# Causal attention whose keys and values are divided among context ranks.
#
# b micro-batch, a query heads, g key-value heads, s sequence, c context ranks, d head size.


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: ContextAxis, order: Order, tiles: Sequence[Tile]
) -> Tensor:
    """Return the attention of this rank's queries to all earlier keys: [b, a, s/c, d].

    Keys and values of all ranks are gathered while queries attend to the keys of their own slice.
    The backward pass gathers them again instead of keeping them, and sums their gradients in fp32
    (Llama 3, arXiv 2407.21783, section 3.3.2).

    Communication: forward, an all-gather; backward, an all-gather and a reduce-scatter.

    Args:
        q: queries of this rank, [b, a, s/c, d]
        k: keys of this rank, [b, g, s/c, d]
        v: values of this rank, [b, g, s/c, d]
        order: order of the slices, as in `Division`
        tiles: the result of `tiles_of`
    """
    return _GatheredAttention.apply(q, k, v, axis, order, tiles)


def gather_keys(k: Tensor, v: Tensor, axis: ContextAxis, order: Order) -> tuple[Tensor, Tensor]:
    """Return keys and values of whole sequences, [b, g, s, d], given [b, g, s/c, d].

    The backward pass sums the ranks' gradients.
    """
    keys, values = gather(torch.stack([k, v]), axis, order)
    return keys, values


def attend_to_own(q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> list[Part]:
    """Return the attention of each tile's queries to the keys of their own rows."""
    return [attend(q[tile.own], k[tile.own], v[tile.own], causal=True) for tile in tiles]


def assemble(q: Tensor, tiles: Sequence[Tile], parts: Sequence[Part]) -> Part:
    """Return the output, [b, a, s/c, d], and the logsumexp, [b, a, s/c], of all tiles.

    The output has the type of q and the memory order [s/c, b, a, d], which the next matmul needs.
    """
    b, a, n, d = q.shape
    out = q.new_empty((n, b, a, d)).permute(1, 2, 0, 3)
    logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for tile, part in zip(tiles, parts, strict=True):
        out[tile.own], logsumexp[tile.own] = part
    return out, logsumexp


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, axis, order, tiles):
        gathered = begin_gather(torch.stack([k, v]), axis, order)
        parts = attend_to_own(q, k, v, tiles)
        keys, values = gathered()
        del gathered  # and the tensor in the order of ranks
        for number, tile in enumerate(tiles):
            if tile.before:
                others = attend(q[tile.own], keys[tile.others], values[tile.others], causal=False)
                parts[number] = merge(parts[number], others)
        out, logsumexp = assemble(q, tiles, parts)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.axis, ctx.order, ctx.tiles = axis, order, tiles
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, logsumexp = ctx.saved_tensors
        gathered = begin_gather(torch.stack([k, v]), ctx.axis, ctx.order)
        grad_q = torch.empty_like(q, dtype=torch.float32)
        own = [torch.empty_like(x, dtype=torch.float32) for x in (k, v)]
        for tile in ctx.tiles:
            at, whole = tile.own, (out[tile.own], logsumexp[tile.own])
            grads = attend_backward(grad[at], q[at], k[at], v[at], whole, causal=True)
            grad_q[at], own[0][at], own[1][at] = grads
        keys, values = gathered()
        del gathered
        totals = torch.zeros((2, *keys.shape), dtype=torch.float32, device=q.device)
        for tile in ctx.tiles:
            if not tile.before:
                continue
            there = keys[tile.others], values[tile.others]
            whole = out[tile.own], logsumexp[tile.own]
            grads = attend_backward(grad[tile.own], q[tile.own], *there, whole, causal=False)
            grad_q[tile.own] += grads[0]
            for total, part in zip(totals, grads[1:], strict=True):
                total[tile.others] += part
        received = reduce_scatter(totals, ctx.axis, ctx.order)
        grad_k, grad_v = (
            (one + other).to(k.dtype) for one, other in zip(own, received, strict=True)
        )
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: ContextAxis, division: Division, tiles: Sequence[Tile]
) -> Tensor:
    """Return the attention of this rank's queries to all earlier keys: [b, a, s/c, d].

    Communication: forward, c - 1 passes of keys and values; backward, the same, and c passes of
    their gradients in fp32.

    Args:
        q: queries of this rank, [b, a, s/c, d]
        k: keys of this rank, [b, g, s/c, d]
        v: values of this rank, [b, g, s/c, d]
    """
    return _RingAttention.apply(q, k, v, axis, division, tiles)


def begin_pass(x: Tensor, axis: ContextAxis) -> Callable[[], Tensor]:
    """Begin to send x to the next rank; return a function that waits for the previous rank's x.

    x must not change until then. A single all-to-all carries the messages of all ranks: with
    separate sends and receives, NCCL connects each pair at its first use, and all ranks would block
    each other.
    """
    received = torch.empty_like(x)
    following, previous = ((axis.rank + step) % axis.size for step in (1, -1))
    running = dist.all_to_all_single(
        received.view(-1),
        x.view(-1),
        [x.numel() * (rank == previous) for rank in range(axis.size)],
        [x.numel() * (rank == following) for rank in range(axis.size)],
        group=axis.group,
        async_op=True,
    )

    def passed() -> Tensor:
        wait_for(running)
        return received

    return passed


def rectangles(tiles: Sequence[Tile], slices: Slices) -> Iterator[tuple[int, tuple]]:
    """Yield the number of each tile that sees keys of a rank, and their index in [b, g, s/c, d].

    Args:
        tiles: of the queries
        slices: positions in the sequence of the keys
    """
    ends = list(accumulate(len(chunk) for chunk in slices))
    for number, tile in enumerate(tiles):
        for held, end in zip(slices, ends, strict=True):
            first = max(held.start, tile.before.start)
            last = min(held.stop, tile.before.stop)
            if first < last:
                row = end - held.stop
                yield number, (tile.sequences, slice(None), slice(row + first, row + last))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, axis, division, tiles):
        held = torch.stack([k, v])
        parts = attend_to_own(q, k, v, tiles)
        for step in range(axis.size):
            passed = begin_pass(held, axis) if step < axis.size - 1 else None
            keys, values = held
            for number, there in rectangles(tiles, _slices_at(step, axis, division)):
                part = attend(q[tiles[number].own], keys[there], values[there], causal=False)
                parts[number] = merge(parts[number], part)
            if passed is not None:
                held = passed()
        out, logsumexp = assemble(q, tiles, parts)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.axis, ctx.division, ctx.tiles = axis, division, tiles
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, logsumexp = ctx.saved_tensors
        axis, division, tiles = ctx.axis, ctx.division, ctx.tiles
        held = torch.stack([k, v])
        grad_q = torch.empty_like(q, dtype=torch.float32)
        arriving: Callable[[], Tensor] | None = None
        for step in range(axis.size):
            passed = begin_pass(held, axis) if step < axis.size - 1 else None
            total = torch.zeros(held.shape, dtype=torch.float32, device=q.device)
            if step == 0:
                for tile in tiles:
                    at, whole = tile.own, (out[tile.own], logsumexp[tile.own])
                    grads = attend_backward(grad[at], q[at], k[at], v[at], whole, causal=True)
                    grad_q[at], total[0][at], total[1][at] = grads
            keys, values = held
            for number, there in rectangles(tiles, _slices_at(step, axis, division)):
                own = tiles[number].own
                whole = out[own], logsumexp[own]
                grads = attend_backward(
                    grad[own], q[own], keys[there], values[there], whole, causal=False
                )
                grad_q[own] += grads[0]
                for sum_, part in zip(total, grads[1:], strict=True):
                    sum_[there] += part
            if arriving is not None:  # what earlier ranks have added for the same keys
                total += arriving()
            arriving = begin_pass(total, axis)
            if passed is not None:
                held = passed()
        assert arriving is not None
        grad_k, grad_v = arriving().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _slices_at(step: int, axis: ContextAxis, division: Division) -> Slices:
    """Return the positions of the keys that this rank holds after `step` passes."""
    return division.slices_of((axis.rank - step) % axis.size)


# Attention with whole sequences and a share of the heads on each context rank (Ulysses).
#
# Jacobs et al. 2023 (arXiv 2309.14509). An all-to-all before attention gives each rank whole
# sequences with a share of the heads; another one after attention reverses it. The backward pass
# has the same two.
#
# b micro-batch, a query heads, g key-value heads, s sequence, c context ranks, d head size.


def with_whole_sequences(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: ContextAxis,
    order: Order,
) -> Tensor:
    """Return the attention of this rank's queries, computed head by head: [b, a, s/c, d].

    Args:
        attend: function of q [b, a/c, s, d] and k, v [b, g/c, s, d] that returns [b, a/c, s, d]
        q: queries of this rank, [b, a, s/c, d]
        k: keys of this rank, [b, g, s/c, d]
        v: values of this rank, [b, g, s/c, d]
        axis: the context axis, whose size divides a and g
        order: order of the slices, as in `Division`
    """
    shares = [x.unflatten(1, (axis.size, -1)) for x in (q, k, v)]  # [b, c, heads, s/c, d]
    counts = [share.shape[2] for share in shares]
    qkv = heads_to_sequence(torch.cat(shares, dim=2), axis, order)  # [b, (a + 2 g) / c, s, d]
    y = attend(*qkv.split(counts, dim=1))
    return sequence_to_heads(y, axis, order).flatten(1, 2)


# Attention whose probabilities are dropped, with masks that do not depend on the layout.
#
# b micro-batch, a query heads, g key-value heads, n queries, s sequence, d head size.


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    probability: float,
    info: MicroBatchInfo,
    layer: str,
    first_head: int,
    fuse: Function,
) -> Tensor:
    """Return the attention of q [b, a, n, d] to k and v [b, g, s, d]: [b, a, n, d].

    The probabilities [b, a, n, s] are materialised, because the masks of a fused kernel would
    depend on the layout.

    Args:
        q: queries of the tokens in `info.slices`
        k: keys of whole sequences
        v: values of whole sequences
        info: dropout key, documents and slices of the micro-batch
        first_head: number of the first query head within the logical model
        fuse: compiles element-wise functions
    """
    (b, a, n, d), (g, s) = q.shape, k.shape[1:3]
    assert info.dropout is not None
    q = q.reshape(b * g, (a // g) * n, d)  # each group's heads under its key and value
    k, v = k.reshape(b * g, s, d), v.reshape(b * g, s, d)
    # The scores are scaled before they are rounded, because fp16 ends at 65504.
    scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
    scores = scores.view(b, a, n, s)
    everywhere = token_positions((range(s),), q.device)
    here = everywhere if info.slices is None else token_positions(info.slices, q.device)
    hidden = here[:, None] < everywhere  # the future, [n, s]
    if info.documents is not None:
        starts = everywhere - positions_in(info.documents, q.device).t()  # of documents, [b, s]
        hidden = hidden | (starts[:, None, here, None] != starts[:, None, None, :])  # [b, 1, n, s]
    probabilities = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
    rows = attention_rows(
        probabilities,
        key=info.dropout,
        layer=layer,
        first_head=first_head,
        fuse=fuse,
        slices=info.slices,
    )
    probabilities = drop_out(probabilities, rows, probability, fuse)
    return torch.bmm(probabilities.view(b * g, -1, s), v).view(b, a, n, d)
