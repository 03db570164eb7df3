"""Expert tensor parallelism: tensor ranks that divide the columns of the same experts.

Each tensor rank receives other tokens. Before the experts, the ranks gather each other's rows.
Afterwards they sum their partial outputs, and each keeps the sums of its own rows. The numbers of
rows differ between ranks, so both steps are all-to-alls.

h hidden, c tensor ranks that divide an expert, m rows of all of them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel.collectives import TensorAxis


def gather_rows(x: Tensor, rows: Sequence[int], axis: TensorAxis) -> Tensor:
    """Gather the rows of all ranks, in rank order; backward: `sum_rows`.

    Args:
        x: this rank's rows, [rows[axis.rank], h]
        rows: number of rows of each rank
        axis: the ranks that divide the experts

    Returns:
        [m, h]
    """
    return x if axis.size == 1 else _Gather.apply(x, list(rows), axis)


def sum_rows(x: Tensor, rows: Sequence[int], axis: TensorAxis) -> Tensor:
    """Sum the partial outputs of all ranks, and keep this rank's rows; backward: `gather_rows`.

    They are added in fp32, in rank order.

    Args:
        x: this rank's partial output of each row, [m, h]
        rows: number of rows of each rank
        axis: the ranks that divide the experts

    Returns:
        [rows[axis.rank], h]
    """
    return x if axis.size == 1 else _Sum.apply(x, list(rows), axis)


def _gather(x: Tensor, rows: list[int], axis: TensorAxis) -> Tensor:
    result = x.new_empty((sum(rows), x.shape[1]))
    sent = x.repeat(axis.size, 1)
    dist.all_to_all_single(result, sent, rows, [len(x)] * axis.size, group=axis.group)
    return result


def _sum(x: Tensor, rows: list[int], axis: TensorAxis) -> Tensor:
    own = rows[axis.rank]
    terms = x.new_empty((axis.size, own, x.shape[1]))
    sizes = [own] * axis.size
    dist.all_to_all_single(terms.flatten(0, 1), x.contiguous(), sizes, rows, group=axis.group)
    total = terms[0].float()
    for term in terms[1:]:  # one at a time, to save memory
        total += term
    return total.to(x.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, axis):
        ctx.rows, ctx.axis = rows, axis
        return _gather(x, rows, axis)

    @staticmethod
    def backward(ctx, grad):
        return _sum(grad, ctx.rows, ctx.axis), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, axis):
        ctx.rows, ctx.axis = rows, axis
        return _sum(x, rows, axis)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, ctx.rows, ctx.axis), None, None
