"""Norms and the residual stream, with the backward pass written out.

Between two matmuls a block adds the bias of the first one, applies dropout, adds the result to the
residual stream and norms the sum: one kernel forward and one backward. RMSNorm is
computed in fp32 and rounds before and after the multiplication by its weight, as in transformers.
LayerNorm is torch's own kernel, which the compiler decomposes to fuse it. On CPUs that kernel
accumulates the gradients of weight and bias in the dtype of its input, and rounds the statistics to
the dtype of the weight. We therefore pass it fp32 copies of 16-bit tensors on CPUs.

s sequence, b micro-batch, h hidden.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.kernels.compile import Function, as_written
from models.kernels.elementwise import drop, keep_mask


class ResidualBranch(NamedTuple):
    """The output of one half of a block on its way to the residual stream.

    It is multiplier * dropout(y + bias).

    y: [s, b, h], result of a row-parallel matmul
    bias: [h]; None: no bias
    rows: int64 [s, b], the row numbers of the dropout mask; None: no dropout
    probability: probability that an element is dropped
    multiplier: factor of the output
    """

    y: Tensor
    bias: Tensor | None = None
    rows: Tensor | None = None
    probability: float = 0.0
    multiplier: float = 1.0


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, fuse: Function) -> Tensor:
    """Norm [..., h] over the last dimension.

    It is LayerNorm (arXiv 1607.06450) with a bias, and RMSNorm (arXiv 1910.07467) without.
    """
    if bias is not None and fuse is as_written and not sums_in_16_bits(x):
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)  # without a function in Python
    return _Norm.apply(x, weight, bias, epsilon, fuse)


def input_and_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, epsilon: float, fuse: Function
) -> tuple[Tensor, Tensor]:
    """Return x, for a residual connection, and its `norm`: each [s, b, h].

    Compiled, the kernel of the backward pass adds the gradients of both. In eager mode autograd
    adds them.
    """
    if fuse is as_written:
        return x, norm(x, weight, bias, epsilon, fuse)
    return _InputAndNorm.apply(x, weight, bias, epsilon, fuse)


def norm_heads(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    heads: tuple[int, int],
    epsilon: float,
    fuse: Function,
) -> Tensor:
    """Return q|k|v with RMSNorm applied to each head of q and of k, as in Qwen3: [s, b, a + 2g, d].

    Args:
        heads: a and g
    """
    return _HeadNorms.apply(qkv, q_weight, k_weight, heads, epsilon, fuse)


def add(x: Tensor, branch: ResidualBranch, fuse: Function) -> Tensor:
    """Return x + multiplier * dropout(y + bias): [s, b, h]."""
    if branch.bias is None and branch.rows is None:
        return torch.add(x, branch.y, alpha=branch.multiplier)
    return _Add.apply(x, *branch, fuse)


def add_and_norm(
    x: Tensor,
    branch: ResidualBranch,
    weight: Tensor,
    bias: Tensor | None,
    *,
    epsilon: float,
    fuse: Function,
) -> tuple[Tensor, Tensor]:
    """Return the sum of `add` and the `norm` of that sum: each [s, b, h]."""
    if bias is not None and fuse is as_written and branch.bias is None and branch.rows is None:
        total = add(x, branch, fuse)
        return total, norm(total, weight, bias, epsilon, fuse)
    return _AddAndNorm.apply(x, *branch, weight, bias, epsilon, fuse)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, epsilon, fuse):
        ctx.fuse = fuse
        normed, *statistics = fuse(_norm)(x, weight, bias, epsilon)
        ctx.save_for_backward(x, weight, bias, *statistics)
        return normed

    @staticmethod
    def backward(ctx, grad):
        return *ctx.fuse(_norm_backward)(grad, *ctx.saved_tensors), None, None


class _InputAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, epsilon, fuse):
        return x, _Norm.forward(ctx, x, weight, bias, epsilon, fuse)

    @staticmethod
    def backward(ctx, grad_x, grad):
        no_branch = (0.0, 1.0, False)  # probability, multiplier and bias, as `_Add` has them
        grad_x, _, _, grad_weight, grad_bias = ctx.fuse(_add_and_norm_backward)(
            grad_x, grad, None, no_branch, *ctx.saved_tensors
        )
        return grad_x, grad_weight, grad_bias, None, None


class _HeadNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, heads, epsilon, fuse):
        ctx.heads, ctx.fuse = heads, fuse
        normed, *inverse_rms = fuse(_head_norms)(qkv, q_weight, k_weight, heads, epsilon)
        ctx.save_for_backward(qkv, q_weight, k_weight, *inverse_rms)
        return normed

    @staticmethod
    def backward(ctx, grad):
        gradients = ctx.fuse(_head_norms_backward)(grad, *ctx.saved_tensors, ctx.heads)
        return *gradients, None, None, None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, bias, rows, probability, multiplier, fuse):
        ctx.fuse, ctx.branch = fuse, (probability, multiplier, bias is not None)
        total, keep = fuse(_add)(x, y, bias, rows, probability, multiplier)
        ctx.save_for_backward(keep)
        return total

    @staticmethod
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        grad_y, grad_bias = ctx.fuse(_branch_backward)(grad, keep, *ctx.branch)
        return grad, grad if grad_y is None else grad_y, grad_bias, None, None, None, None


class _AddAndNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, y_bias, rows, probability, multiplier, weight, bias, epsilon, fuse):
        ctx.fuse, ctx.branch = fuse, (probability, multiplier, y_bias is not None)
        branch = ResidualBranch(y, y_bias, rows, probability, multiplier)
        total, keep, normed, *statistics = fuse(_add_and_norm)(x, *branch, weight, bias, epsilon)
        ctx.save_for_backward(keep, total, weight, bias, *statistics)
        return total, normed

    @staticmethod
    def backward(ctx, grad_total, grad):
        keep, *normed = ctx.saved_tensors
        grad_x, grad_y, *others = ctx.fuse(_add_and_norm_backward)(
            grad_total, grad, keep, ctx.branch, *normed
        )
        grad_y_bias, grad_weight, grad_bias = others
        grad_y = grad_x if grad_y is None else grad_y
        return grad_x, grad_y, grad_y_bias, None, None, None, grad_weight, grad_bias, None, None


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, ...]:
    """Return the norm and each row's statistics [..., 1]: mean and 1 / std, or 1 / rms in fp32."""
    if bias is not None:
        if sums_in_16_bits(x):
            weight, bias = weight.float(), bias.float()
        return torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse_rms).to(x.dtype) * weight, inverse_rms


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight and bias."""
    if bias is not None:
        tensors = (grad, x, *statistics, weight, bias)
        if sums_in_16_bits(x):
            tensors = tuple(tensor.float() for tensor in tensors)
        gradients = _layer_norm_backward(*tensors)
        grad_x, grad_weight, grad_bias = (gradient.to(x.dtype) for gradient in gradients)
        return grad_x, grad_weight, grad_bias
    (inverse_rms,) = statistics
    normed = x.float() * inverse_rms
    grad = grad.float()
    grad_weight = (grad * normed).flatten(0, -2).sum(0)
    grad = grad * weight
    mean = (grad * normed).mean(-1, keepdim=True)
    grad_x = (inverse_rms * (grad - normed * mean)).to(x.dtype)
    return grad_x, grad_weight.to(weight.dtype), None


def _head_norms(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: tuple[int, int], epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q|k|v with normed q and k, and 1 / rms of the heads of q and of k, fp32 [..., 1]."""
    q, k, v = qkv.split([*heads, heads[1]], dim=-2)
    q, of_q = _norm(q, q_weight, None, epsilon)
    k, of_k = _norm(k, k_weight, None, epsilon)
    return torch.cat([q, k, v], dim=-2), of_q, of_k


def _head_norms_backward(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    of_q: Tensor,
    of_k: Tensor,
    heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q|k|v and of both weights."""
    q, k, _ = qkv.split([*heads, heads[1]], dim=-2)
    grad_q, grad_k, grad_v = grad.split([*heads, heads[1]], dim=-2)
    grad_q, grad_q_weight, _ = _norm_backward(grad_q, q, q_weight, None, of_q)
    grad_k, grad_k_weight, _ = _norm_backward(grad_k, k, k_weight, None, of_k)
    return torch.cat([grad_q, grad_k, grad_v], dim=-2), grad_q_weight, grad_k_weight


def _layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, inverse_std: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, weight.shape, mean, inverse_std, weight, bias, [True, True, True]
    )


def sums_in_16_bits(x: Tensor) -> bool:
    """Return True if torch's LayerNorm would add up the rows of x in 16 bits."""
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def _add(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    probability: float,
    multiplier: float,
) -> tuple[Tensor, Tensor | None]:
    """Return the sum and the dropout mask."""
    keep = None
    if bias is not None:
        y = y + bias
    if rows is not None:
        keep = keep_mask(rows, y.shape[-1], probability)
        y = drop(y, keep, probability)
    return torch.add(x, y, alpha=multiplier), keep


def _branch_backward(
    grad: Tensor, keep: Tensor | None, probability: float, multiplier: float, has_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of y (None if it equals the gradient of the sum) and of the bias."""
    grad_y = None if multiplier == 1 else grad * multiplier
    if keep is not None:
        grad_y = drop(grad if grad_y is None else grad_y, keep, probability)
    if not has_bias:
        return grad_y, None
    return grad_y, (grad if grad_y is None else grad_y).flatten(0, -2).sum(0)


def _add_and_norm(
    x: Tensor,
    y: Tensor,
    y_bias: Tensor | None,
    rows: Tensor | None,
    probability: float,
    multiplier: float,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor | None, ...]:
    total, keep = _add(x, y, y_bias, rows, probability, multiplier)
    return total, keep, *_norm(total, weight, bias, epsilon)


def _add_and_norm_backward(
    grad_total: Tensor,
    grad: Tensor,
    keep: Tensor | None,
    branch: tuple[float, float, bool],
    total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *statistics: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, y (None if it equals that of x), y's bias, weight and bias."""
    grad_x, grad_weight, grad_bias = _norm_backward(grad, total, weight, bias, *statistics)
    grad_x = grad_x + grad_total
    return grad_x, *_branch_backward(grad_x, keep, *branch), grad_weight, grad_bias
