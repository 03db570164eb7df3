"""Attention with whole sequences and a share of the heads on each context rank (Ulysses).

Jacobs et al. 2023 (arXiv 2309.14509). An all-to-all before attention gives each rank whole
sequences with a share of the heads; another one after attention reverses it. The backward pass has
the same two.

b micro-batch, a query heads, g key-value heads, s sequence, c context ranks, d head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.context_parallel.axis import ContextAxis
from models.context_parallel.collectives import heads_to_sequence, sequence_to_heads
from models.context_parallel.division import Order


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
