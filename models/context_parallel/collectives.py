"""The context axis, and the collectives that turn slices of sequences into whole sequences.

The gathered tensors are in the order of the sequence. `order` has the numbers of the two slices of
rank 0, then of rank 1, ... (`Division`).

Tensors are [..., s, d]: the tokens of a head are next to each other, as attention reads them.
b micro-batch, s sequence, c context ranks, d head size.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.context_parallel.division import Division, Order, Slices, reached_keys
from models.parallel.collectives import (
    all_gather_single,
    conjugate,
    reduce_scatter_single,
    wait_for,
)

# The context axis: ranks that share their samples and divide each sequence.


@dataclass(frozen=True)
class ContextAxis:
    """The context axis from the perspective of one rank.

    group: the ranks that hold the other tokens of the same sequences
    attention: algorithm of attention: "gather", "ring" or "ulysses"
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    attention: str = "gather"


def begin_gather(x: Tensor, axis: ContextAxis, order: Order) -> Callable[[], Tensor]:
    """Begin to gather [..., s/c, d]; return a function that waits for [..., s, d]."""
    whole = x.new_empty((axis.size, *x.shape))
    running = all_gather_single(
        whole.flatten(0, 1), x.contiguous(), group=axis.group, async_op=True
    )

    def gathered() -> Tensor:
        wait_for(running)
        return from_rank_order(whole, order)

    return gathered


def reduce_scatter(x: Tensor, axis: ContextAxis, order: Order) -> Tensor:
    """Return this rank's part, [..., s/c, d], of the sum of all ranks' [..., s, d]."""
    parts = to_rank_order(x, order)
    part = torch.empty_like(parts[0])
    reduce_scatter_single(part, parts.flatten(0, 1), group=axis.group)
    return part


def gather(x: Tensor, axis: ContextAxis, order: Order) -> Tensor:
    """[..., s/c, d] to [..., s, d]; the backward pass sums the ranks' gradients."""
    return conjugate(x, lambda *x: begin_gather(*x)(), _sum_in_fp32, axis, order)


def heads_to_sequence(x: Tensor, axis: ContextAxis, order: Order) -> Tensor:
    """Exchange all heads of a slice for a share of the heads of all slices.

    [b, c, heads, s/c, d] to [b, heads, s, d], where dimension 1 is the rank that gets the heads
    (Ulysses, arXiv 2309.14509). Backward: `sequence_to_heads`.
    """
    return conjugate(x, _to_sequence, _to_heads, axis, order)


def sequence_to_heads(x: Tensor, axis: ContextAxis, order: Order) -> Tensor:
    """Reverse `heads_to_sequence`: [b, heads, s, d] to [b, c, heads, s/c, d]."""
    return conjugate(x, _to_heads, _to_sequence, axis, order)


def begin_exchange(
    x: Tensor, axis: ContextAxis, division: Division, window: int
) -> Callable[[], tuple[Tensor, Slices]]:
    """Begin to send each rank the tokens that its windows reach, of this rank's [..., s/c, d].

    The returned function waits for those of the other ranks, [..., n, d], and also returns their
    positions in the sequence. The conjugate is `begin_return`.
    """
    first = x.movedim(-2, 0)  # [s/c, ..., d]
    sent, received = _exchanged(division, window)
    tokens = torch.cat([first[rows] for ranges in sent for rows in ranges] or [first[:0]])
    running, arriving = _begin_uneven(tokens, sent, received, axis)

    def exchanged() -> tuple[Tensor, Slices]:
        wait_for(running)
        positions = reached_keys(division, window)
        return arriving.movedim(0, -2).contiguous(), tuple(itertools.chain(*positions))

    return exchanged


def begin_return(
    x: Tensor, axis: ContextAxis, division: Division, window: int
) -> Callable[[Tensor], Tensor]:
    """Begin to send gradients [..., n, d] of received tokens back to their ranks.

    The returned function waits for the gradients of this rank's tokens from the other ranks and
    adds them to a tensor [..., s/c, d].
    """
    sent, received = _exchanged(division, window)
    running, arriving = _begin_uneven(x.movedim(-2, 0).contiguous(), received, sent, axis)

    def returned(total: Tensor) -> Tensor:
        wait_for(running)
        tokens, first = total.movedim(-2, 0), 0
        for rows in itertools.chain(*sent):
            last = first + rows.stop - rows.start
            tokens[rows] += arriving[first:last]
            first = last
        return total

    return returned


Rows = tuple[tuple[slice, ...], ...]  # rows of a rank's tokens, by the rank at the other end


def _exchanged(division: Division, window: int) -> tuple[Rows, Rows]:
    """Return the rows that this rank sends to each rank and, of each rank, those that it receives.

    Both are rows among the s/c tokens of the sender.
    """
    size = len(division.order) // 2
    sent = tuple(
        division.rows_of(reached_keys(division.of_rank(rank), window)[division.rank])
        for rank in range(size)
    )
    received = tuple(
        division.of_rank(rank).rows_of(ranges)
        for rank, ranges in enumerate(reached_keys(division, window))
    )
    return sent, received


def _begin_uneven(
    x: Tensor, sent: Rows, received: Rows, axis: ContextAxis
) -> tuple[dist.Work, Tensor]:
    """Begin an all-to-all of tokens [n, ...], in the order of the ranks that they are for."""
    outgoing, incoming = (
        [sum(rows.stop - rows.start for rows in ranges) for ranges in side]
        for side in (sent, received)
    )
    arriving = x.new_empty((sum(incoming), *x.shape[1:]))
    running = dist.all_to_all_single(
        arriving, x, incoming, outgoing, group=axis.group, async_op=True
    )
    return running, arriving


def _sum_in_fp32(grad: Tensor, axis: ContextAxis, order: Order) -> Tensor:
    # Every addition in 16 bits would round the sum.
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return reduce_scatter(wide, axis, order).to(grad.dtype)


def from_rank_order(x: Tensor, order: Order) -> Tensor:
    """[c, ..., s/c, d] to [..., s, d]: put the slices of all ranks into the sequence's order."""
    halves = x.unflatten(-2, (2, -1))  # [c, ..., 2, s/2c, d]
    places = (divmod(order.index(number), 2) for number in range(len(order)))
    return torch.cat([halves[rank, ..., half, :, :] for rank, half in places], dim=-2)


def to_rank_order(x: Tensor, order: Order) -> Tensor:
    """Reverse `from_rank_order`: [..., s, d] to [c, ..., s/c, d]."""
    slices = x.chunk(len(order), dim=-2)
    *outer, length, width = x.shape
    size = len(order) // 2
    parts = x.new_empty((size, *outer, 2, length // len(order), width))
    for position, number in enumerate(order):
        rank, half = divmod(position, 2)
        parts[rank, ..., half, :, :] = slices[number]
    return parts.flatten(-3, -2)


def _all_to_all(x: Tensor, axis: ContextAxis) -> Tensor:
    """Send x[i] to rank i; return the tensors that the ranks sent to this one, in their order."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=axis.group)
    return received


def _to_sequence(x: Tensor, axis: ContextAxis, order: Order) -> Tensor:
    return from_rank_order(_all_to_all(x.movedim(1, 0).contiguous(), axis), order)


def _to_heads(x: Tensor, axis: ContextAxis, order: Order) -> Tensor:
    return _all_to_all(to_rank_order(x, order), axis).movedim(0, 1)
