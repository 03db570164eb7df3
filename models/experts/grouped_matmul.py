"""Matmuls and sums of groups of rows with one weight or bias per group.

n rows, sorted by group; g groups; r_i rows of group i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.parallel.layers import GradientReceiver, ProductGradient, weight_gradient


def grouped_matmul(
    x: Tensor,
    weights: Sequence[nn.Parameter],
    rows: Sequence[int],
    deferral: GradientReceiver | None,
) -> Tensor:
    """Multiply the rows of each group by the transpose of the group's weight.

    A weight without rows gets a gradient of zeros, because ZeRO waits for every gradient.

    Args:
        x: [n, in]
        weights: g weights [out, in]
        rows: r_i of each group; their sum is n
        deferral: receives the weight gradients; None: the backward pass computes them

    Returns:
        [n, out]
    """
    return _GroupedMatmul.apply(x, tuple(rows), deferral, *weights)


class _GroupedMatmul(torch.autograd.Function):
    """The weights are kept on the context itself.

    Under activation checkpointing `save_for_backward` would return other tensors, and ZeRO-3
    gathers the weights of a module again for its backward pass.
    """

    @staticmethod
    def forward(ctx, x, rows, deferral, *weights):
        ctx.rows, ctx.deferral, ctx.weights = rows, deferral, weights
        ctx.save_for_backward(x)
        return _multiply(x, weights, rows, transposed=True)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _multiply(grad, ctx.weights, ctx.rows, transposed=False)
        pairs = zip(grad.split(ctx.rows), x.detach().split(ctx.rows), strict=True)
        if ctx.deferral is None:
            return grad_x, None, None, *(weight_gradient(*pair) for pair in pairs)
        for weight, pair in zip(ctx.weights, pairs, strict=True):
            ctx.deferral.put(weight, ProductGradient(*pair))
        return grad_x, None, None, *(None for _ in ctx.weights)


def _multiply(
    x: Tensor, weights: Sequence[Tensor], rows: Sequence[int], transposed: bool
) -> Tensor:
    """Return the product of each group's rows and its weight, or its transposed weight.

    On a GPU one kernel computes all groups, in bf16 and if rows are multiples of 16 bytes. On a CPU
    a loop has the same result and speed.
    """
    aligned = all(size % 8 == 0 for size in weights[0].shape)
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and len(x) and aligned:
        stacked = stack(weights)  # [g, out, in]
        ends = torch.tensor(rows, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(
            x,
            stacked.transpose(1, 2) if transposed else stacked,
            offs=ends.to(x.device, non_blocking=True),
        )
    width = weights[0].shape[0 if transposed else 1]
    y = x.new_empty((len(x), width))
    for part, weight, out in zip(x.split(rows), weights, y.split(rows), strict=True):
        torch.mm(part, weight.t() if transposed else weight, out=out)
    return y


def stack(weights: Sequence[Tensor]) -> Tensor:
    """Return the weights as one tensor, [g, out, in], without a copy if they are adjacent.

    ZeRO keeps the weights of an optimizer group in one tensor, in the order of the layers.
    """
    first = weights[0].detach()
    size = first.numel()
    storage = first.untyped_storage().data_ptr()
    adjacent = all(
        weight.is_contiguous()
        and weight.untyped_storage().data_ptr() == storage
        and weight.storage_offset() == first.storage_offset() + number * size
        for number, weight in enumerate(weights)
    )
    if not adjacent:
        return torch.stack([weight.detach() for weight in weights])
    shape = (len(weights), *first.shape)
    return first.as_strided(shape, (size, *first.stride()), first.storage_offset())


def add_to_groups(
    y: Tensor, biases: Sequence[Tensor], rows: Sequence[int], *, first_column: int = 0
) -> Tensor:
    """Add the bias of each group to its rows, in place; no other operation may need y.

    A bias without rows gets a gradient of zeros, as a weight of `grouped_matmul` does.

    Args:
        y: [n, out]
        biases: g biases of consecutive columns, [out] or fewer
        rows: r_i of each group; their sum is n
        first_column: column of the first entry of the biases
    """
    return _AddToGroups.apply(y, tuple(rows), first_column, *biases)


class _AddToGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, rows, first_column, *biases):
        ctx.rows, ctx.columns = rows, slice(first_column, first_column + len(biases[0]))
        ctx.mark_dirty(y)
        for part, bias in zip(y[:, ctx.columns].split(rows), biases, strict=True):
            part.add_(bias)
        return y

    @staticmethod
    def backward(ctx, grad):
        parts = grad[:, ctx.columns].split(ctx.rows)
        return grad, None, None, *(part.sum(0) for part in parts)
