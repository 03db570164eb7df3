"""Causal attention whose keys and values are divided among context ranks.

b micro-batch, a query heads, g key-value heads, s sequence, c context ranks, d head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.context_parallel.axis import ContextAxis
from models.context_parallel.collectives import begin_gather, gather, reduce_scatter
from models.context_parallel.division import Order
from models.context_parallel.tiles import Tile
from models.kernels.partial_attention import Part, attend, attend_backward, merge


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
        axis: the context axis
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
