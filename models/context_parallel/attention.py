"""Attention with sequences divided among context ranks: ring, gathered keys, or Ulysses.

In each step, a rank attends to the keys of one rank while it sends them to the next rank (ring
attention, Liu et al. 2023, arXiv 2310.01889). Each rank has two slices of a sequence, so that
causal work is equal (Llama 3, arXiv 2407.21783, section 3.3.2). With sliding windows, a rank only
gets the keys that its windows reach, in one step.

b micro-batch, a query heads, g key-value heads, s sequence, c context ranks, d head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from models.context_parallel.collectives import (
    ContextAxis,
    begin_exchange,
    begin_gather,
    begin_return,
    gather,
    heads_to_sequence,
    reduce_scatter,
    sequence_to_heads,
)
from models.context_parallel.division import Division, Order, Slices
from models.context_parallel.tiles import (
    Merged,
    Tile,
    add_gradients_of_others,
    assemble,
    attend_to_others,
    attend_to_own,
    pieces,
    write_gradients_of_own,
)
from models.kernels.attention_parts import LargestLogits, Limits, Part, sink_gradient
from models.kernels.compile import Function
from models.kernels.elementwise import drop_out
from models.parallel.collectives import wait_for
from models.parallel.micro_batch_info import (
    MicroBatchInfo,
    attention_rows,
    positions_in,
    token_positions,
)


class Divided(NamedTuple):
    """The division of a layer's queries and keys among context ranks.

    tiles: the result of `tiles_of` for this rank's slices
    logits: notes the largest logits in the backward pass; None: they are not noted
    """

    axis: ContextAxis
    division: Division
    tiles: Sequence[Tile]
    logits: LargestLogits | None = None


# Causal attention whose keys and values are divided among context ranks.
#
# b micro-batch, a query heads, g key-value heads, s sequence, c context ranks, d head size.


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    divided: Divided,
    sinks: Tensor | None = None,
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
        sinks: logits [a] of keys without a value that all queries see; None: none
    """
    return _GatheredAttention.apply(q, k, v, sinks, divided)


def gather_keys(k: Tensor, v: Tensor, axis: ContextAxis, order: Order) -> tuple[Tensor, Tensor]:
    """Return keys and values of whole sequences, [b, g, s, d], given [b, g, s/c, d].

    The backward pass sums the ranks' gradients.
    """
    keys, values = gather(torch.stack([k, v]), axis, order)
    return keys, values


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, divided):
        axis, division, tiles, _ = divided
        gathered = begin_gather(torch.stack([k, v]), axis, division.order)
        parts = attend_to_own(q, k, v, tiles)
        keys, values = gathered()
        del gathered  # and the tensor in the order of ranks
        attend_to_others(parts, q, keys, values, pieces(tiles, division.whole))
        ctx.where = divided
        return _assembled(ctx, q, k, v, sinks, parts)

    @staticmethod
    def backward(ctx, grad):
        (axis, division, tiles, _), (k, v, sinks, merged) = ctx.where, _saved(ctx, grad)
        q = merged.q
        gathered = begin_gather(torch.stack([k, v]), axis, division.order)
        grad_q, *own = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
        write_gradients_of_own((grad_q, *own), merged, k, v, tiles)
        keys, values = gathered()
        del gathered
        totals = torch.zeros((2, *keys.shape), dtype=torch.float32, device=q.device)
        others = pieces(tiles, division.whole)
        add_gradients_of_others((grad_q, *totals), merged, keys, values, others)
        received = reduce_scatter(totals, axis, division.order)
        grad_k, grad_v = (
            (one + other).to(k.dtype) for one, other in zip(own, received, strict=True)
        )
        return grad_q.to(q.dtype), grad_k, grad_v, _of_sinks(merged, sinks), None


def _assembled(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, parts: Sequence[Part]
) -> Tensor:
    """Return the output of all tiles, and save what the backward pass needs."""
    out, logsumexp = assemble(q, ctx.where.tiles, parts, sinks)
    ctx.save_for_backward(q, k, v, out, logsumexp, sinks)
    return out


def _saved(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Merged]:
    """Return keys, values, sinks and the merged attention."""
    q, k, v, out, logsumexp, sinks = ctx.saved_tensors
    return k, v, sinks, Merged(q, grad, out, logsumexp, ctx.where.logits)


def _of_sinks(merged: Merged, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks, from the queries of this rank."""
    if sinks is None:
        return None
    return sink_gradient(merged.grad, (merged.out, merged.logsumexp), sinks)


def windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    divided: Divided,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of this rank's queries within a sliding window: [b, a, s/c, d].

    Each rank sends every other rank the keys and values that windows of the latter reach, while
    queries attend to the keys of this rank. The window must be shorter than the sequence.

    Communication: forward, an all-to-all of keys and values; backward, the same, and an all-to-all
    of their gradients in fp32. `division.received_keys` returns the number of keys.

    Args:
        q: queries of this rank, [b, a, s/c, d]
        k: keys of this rank, [b, g, s/c, d]
        v: values of this rank, [b, g, s/c, d]
        divided: the division, with a window in the limits of the tiles
        sinks: as in `gathered_attention`
    """
    return _WindowedAttention.apply(q, k, v, sinks, divided)


class _WindowedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, divided):
        axis, division, tiles, _ = divided
        exchanged = begin_exchange(torch.stack([k, v]), axis, division, _window(tiles))
        parts = attend_to_own(q, k, v, tiles)
        attend_to_others(parts, q, k, v, pieces(tiles, division.slices))
        (keys, values), received = exchanged()
        attend_to_others(parts, q, keys, values, pieces(tiles, received))
        ctx.where = divided
        return _assembled(ctx, q, k, v, sinks, parts)

    @staticmethod
    def backward(ctx, grad):
        (axis, division, tiles, _), (k, v, sinks, merged) = ctx.where, _saved(ctx, grad)
        q = merged.q
        exchanged = begin_exchange(torch.stack([k, v]), axis, division, _window(tiles))
        grad_q = torch.empty_like(q, dtype=torch.float32)
        own = torch.empty((2, *k.shape), dtype=torch.float32, device=k.device)
        write_gradients_of_own((grad_q, *own), merged, k, v, tiles)
        (keys, values), received = exchanged()
        totals = torch.zeros((2, *keys.shape), dtype=torch.float32, device=k.device)
        others = pieces(tiles, received)
        add_gradients_of_others((grad_q, *totals), merged, keys, values, others)
        returned = begin_return(totals, axis, division, _window(tiles))
        add_gradients_of_others((grad_q, *own), merged, k, v, pieces(tiles, division.slices))
        grad_k, grad_v = returned(own).to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, _of_sinks(merged, sinks), None


def _window(tiles: Sequence[Tile]) -> int:
    limits = tiles[0].limits
    assert limits is not None and limits.window is not None
    return limits.window


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    divided: Divided,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of this rank's queries to all earlier keys: [b, a, s/c, d].

    Communication: forward, c - 1 passes of keys and values; backward, the same, and c passes of
    their gradients in fp32.

    Args:
        q: queries of this rank, [b, a, s/c, d]
        k: keys of this rank, [b, g, s/c, d]
        v: values of this rank, [b, g, s/c, d]
        sinks: as in `gathered_attention`
    """
    return _RingAttention.apply(q, k, v, sinks, divided)


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


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, divided):
        axis, division, tiles, _ = divided
        held = torch.stack([k, v])
        parts = attend_to_own(q, k, v, tiles)
        for step in range(axis.size):
            passed = begin_pass(held, axis) if step < axis.size - 1 else None
            keys, values = held
            others = pieces(tiles, slices_at(step, axis, division))
            attend_to_others(parts, q, keys, values, others)
            if passed is not None:
                held = passed()
        ctx.where = divided
        return _assembled(ctx, q, k, v, sinks, parts)

    @staticmethod
    def backward(ctx, grad):
        (axis, division, tiles, _), (k, v, sinks, merged) = ctx.where, _saved(ctx, grad)
        q = merged.q
        held = torch.stack([k, v])
        grad_q = torch.empty_like(q, dtype=torch.float32)
        arriving: Callable[[], Tensor] | None = None
        for step in range(axis.size):
            passed = begin_pass(held, axis) if step < axis.size - 1 else None
            total = torch.zeros(held.shape, dtype=torch.float32, device=q.device)
            if step == 0:
                write_gradients_of_own((grad_q, *total), merged, k, v, tiles)
            keys, values = held
            others = pieces(tiles, slices_at(step, axis, division))
            add_gradients_of_others((grad_q, *total), merged, keys, values, others)
            if arriving is not None:  # what earlier ranks have added for the same keys
                total += arriving()
            arriving = begin_pass(total, axis)
            if passed is not None:
                held = passed()
        assert arriving is not None
        grad_k, grad_v = arriving().to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, _of_sinks(merged, sinks), None


def slices_at(step: int, axis: ContextAxis, division: Division) -> Slices:
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
    limits: Limits | None = None,
    sinks: Tensor | None = None,
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
        limits: window and soft cap; None: neither
        sinks: logits [a] of keys without a value that all queries see; None: none
    """
    (b, a, n, d), (g, s) = q.shape, k.shape[1:3]
    assert info.dropout is not None
    q = q.reshape(b * g, (a // g) * n, d)  # each group's heads under its key and value
    k, v = k.reshape(b * g, s, d), v.reshape(b * g, s, -1)
    # The scores are scaled before they are rounded, because fp16 ends at 65504.
    scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
    scores = scores.view(b, a, n, s)
    everywhere = token_positions((range(s),), q.device)
    here = everywhere if info.slices is None else token_positions(info.slices, q.device)
    hidden = here[:, None] < everywhere  # the future, [n, s]
    if limits is not None and limits.soft_cap is not None:
        scores = torch.tanh(scores / limits.soft_cap) * limits.soft_cap
    if limits is not None and limits.window is not None:
        hidden = hidden | (here[:, None] - everywhere >= limits.window)
    if info.documents is not None:
        starts = everywhere - positions_in(info.documents, q.device).t()  # of documents, [b, s]
        hidden = hidden | (starts[:, None, here, None] != starts[:, None, None, :])  # [b, 1, n, s]
    scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        probabilities = scores.softmax(dim=-1)
    else:
        logits = sinks.to(scores.dtype).view(a, 1, 1).expand(b, a, n, 1)
        probabilities = torch.cat([scores, logits], dim=-1).softmax(dim=-1)[..., :-1].contiguous()
    rows = attention_rows(
        probabilities,
        key=info.dropout,
        layer=layer,
        first_head=first_head,
        fuse=fuse,
        slices=info.slices,
    )
    probabilities = drop_out(probabilities, rows, probability, fuse)
    return torch.bmm(probabilities.view(b * g, -1, s), v).view(b, a, n, -1)
