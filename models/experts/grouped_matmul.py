"""Matmuls and sums of groups of rows with one weight or bias per group.

n rows, sorted by group; g groups; r_i rows of group i.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.kernels.matmul import Fp8, Quantized, inner_type
from models.parallel.layers import GradientReceiver, ProductGradient, weight_gradient


def grouped_matmul(
    x: Tensor,
    weights: Sequence[nn.Parameter],
    rows: Sequence[int],
    deferral: GradientReceiver | None,
    fp8: Fp8 | None = None,
) -> Tensor:
    """Multiply the rows of each group by the transpose of the group's weight.

    A weight without rows gets a gradient of zeros, because ZeRO waits for every gradient.

    Args:
        x: [n, in]
        weights: g weights [out, in]
        rows: r_i of each group; their sum is n
        deferral: receives the weight gradients; None: the backward pass computes them
        fp8: quantization of all groups; None: the matmuls have the type of the weights

    Returns:
        [n, out]
    """
    if fp8 is not None:
        return _QuantizedGroups.apply(x, tuple(rows), fp8, deferral, *weights)
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
        return grad_x, None, None, *_weight_gradients(ctx, grad, x.detach())


def _weight_gradients(ctx: Any, grad: Tensor, x: Tensor) -> list[Tensor | None]:
    """Return the weight gradients of all groups, or None for each if they are deferred."""
    pairs = zip(grad.split(ctx.rows), x.split(ctx.rows), strict=True)
    if ctx.deferral is None:
        return [weight_gradient(*pair) for pair in pairs]
    for weight, pair in zip(ctx.weights, pairs, strict=True):
        ctx.deferral.put(weight, ProductGradient(*pair))
    return [None for _ in ctx.weights]


class _QuantizedGroups(torch.autograd.Function):
    """The matmuls of all groups with inputs, weights and gradients in FP8.

    No kernel of torch multiplies groups with tiles of 1 x 128, so that the product is one of
    dequantized matrices, which are exact in bf16. For the weight gradient, the gradient of the
    output is not quantized, because tiles along the tokens of an expert would depend on the ranks
    whose tokens arrive together.
    """

    @staticmethod
    def forward(ctx, x, rows, fp8, deferral, *weights):
        ctx.rows, ctx.fp8, ctx.deferral, ctx.weights = rows, fp8, deferral, weights
        quantized = fp8.rows(x)
        ctx.save_for_backward(quantized.values, quantized.scales)
        ctx.dtype = x.dtype
        return _multiply_dequantized(quantized, ctx, transposed=True)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        grad_x = _multiply_dequantized(ctx.fp8.outputs_of(grad), ctx, transposed=False)
        values, scales = ctx.saved_tensors
        x = Quantized(values, scales, (values.shape[-1],)).dequantized(ctx.dtype)
        return grad_x, None, None, None, *_weight_gradients(ctx, grad, x)


def _multiply_dequantized(x: Quantized, ctx: Any, *, transposed: bool) -> Tensor:
    """Return what `_multiply` does, of rows and weights in FP8."""
    inner = inner_type(ctx.dtype)
    weights = [ctx.fp8.weight(weight).dequantized(inner) for weight in ctx.weights]
    return _multiply(x.dequantized(inner), weights, ctx.rows, transposed=transposed).to(ctx.dtype)


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
