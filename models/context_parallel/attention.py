"""Causal attention with keys and values that travel around the context ranks.

In each step, a rank attends to the keys of one rank while it sends them to the next rank (ring
attention, Liu et al. 2023, arXiv 2310.01889). Each rank has two slices of a sequence, so that
causal work is equal (Llama 3, arXiv 2407.21783, section 3.3.2).

b micro-batch, a query heads, g key-value heads, s sequence, c context ranks, d head size.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from models.context_parallel.axis import ContextAxis
from models.context_parallel.division import Division, Slices
from models.context_parallel.gathered_attention import assemble, attend_to_own
from models.context_parallel.tiles import Tile
from models.kernels.partial_attention import attend, attend_backward, merge
from models.parallel.collectives import wait_for


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
        axis: the context axis
        division: division of the sequences
        tiles: the result of `tiles_of`
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
    ends = list(accumulate(len(each) for each in slices))
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
