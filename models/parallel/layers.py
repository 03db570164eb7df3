"""Linear layers whose weight is split over the tensor axis.

Shapes: s sequence (s/t under sequence parallelism where noted), b micro-batch, t tensor ranks.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.parallel.collectives import (
    TensorAxis,
    all_gather,
    begin_all_gather,
    begin_sum_of_copies,
    copy_to_tensor_axis,
    leave_tensor_region,
)
from models.parallel.deferral import Deferral, Deferring
from models.sharding import Sharding, declared_parameter


class ColumnParallelLinear(Deferring):
    """y = x W^T with the rows of W, the output columns, split over the tensor axis.

    Forward: no communication; backward: all-reduce. Under sequence parallelism, forward:
    all-gather; backward: all-gather of the input once more, and reduce-scatter. The backward pass
    overlaps communication with its two matmuls.

    blocks: output columns of each part that is split by itself (q|k|v, gate|up)
    """

    def __init__(self, in_size: int, blocks: tuple[int, ...], *, bias: bool, axis: TensorAxis):
        super().__init__()
        self.axis = axis
        sharding = Sharding((sum(blocks), in_size), 0, blocks, role="hidden")
        self.weight = declared_parameter(sharding, axis.size)
        self.bias = (
            declared_parameter(Sharding((sum(blocks),), 0, blocks), axis.size) if bias else None
        )

    def forward(self, x: Tensor, *, bias_gradient: bool = True) -> Tensor:
        """[s, b, in] (s/t under sequence parallelism) to [s, b, out/t].

        Args:
            bias_gradient: False leaves the gradient of the bias to the following operation
        """
        bias: Tensor | None = self.bias
        if bias is not None and not bias_gradient:
            bias = bias.detach()
        return column_parallel_matmul(x, self.weight, bias, axis=self.axis, deferral=self.deferral)


class RowParallelLinear(Deferring):
    """y = x W^T with the columns of W, the input columns, split over the tensor axis.

    The layer holds a bias but does not add it: the kernel that adds y to the residual stream does
    (`models/kernels/norms.py`).

    Forward: all-reduce; backward: no communication. Under sequence parallelism, forward:
    reduce-scatter; backward: all-gather.
    """

    def __init__(self, in_size: int, out_size: int, *, bias: bool, axis: TensorAxis):
        super().__init__()
        self.axis = axis
        sharding = Sharding((out_size, in_size), 1, (in_size,), role="hidden")
        self.weight = declared_parameter(sharding, axis.size)
        self.bias = declared_parameter(Sharding((out_size,)), axis.size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in/t] to [s, b, out] (s/t under sequence parallelism), without the bias."""
        return leave_tensor_region(matmul(x, self.weight, None, self.deferral), self.axis)

    def bias_here(self) -> Tensor | None:
        """Return the bias for this rank's positions.

        Under sequence parallelism each rank adds it to its own positions only, and its gradient is
        summed over the ranks.
        """
        if self.bias is None or not self.axis.sequence_parallel:
            return self.bias
        return copy_to_tensor_axis(self.bias, self.axis)


def column_parallel_matmul(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    *,
    axis: TensorAxis,
    deferral: Deferral | None,
) -> Tensor:
    """Return x W^T + bias with this rank's rows of W: [s, b, in] (or s/t) to [s, b, out/t]."""
    if axis.size > 1:
        return _ColumnParallelMatmul.apply(x, weight, bias, axis, deferral)
    return matmul(x, weight, bias, deferral)


def matmul(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferral: Deferral | None
) -> Tensor:
    """Return x W^T + bias without communication: [s, b, in] to [s, b, out]."""
    if deferral is None:
        return F.linear(x, weight, bias)
    return _DeferredMatmul.apply(x, weight, bias, deferral)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of W in x W^T, from [s, b, out] and [s, b, in]: [out, in]."""
    return grad.flatten(0, 1).t() @ x.flatten(0, 1)


class _DeferredMatmul(torch.autograd.Function):
    """F.linear whose backward pass defers the weight gradient.

    The weight is kept on the context itself, because under activation checkpointing
    `save_for_backward` returns another tensor, whose gradient no optimizer reads.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, deferral):
        ctx.weight, ctx.deferral = weight, deferral
        ctx.save_for_backward(x)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        # Detached, because the deferred function would otherwise keep the graph before x alive.
        ctx.deferral.put(ctx.weight, partial(weight_gradient, grad, x.detach()))
        grad_bias = grad.flatten(0, 1).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ ctx.weight, None, grad_bias, None


class _ColumnParallelMatmul(torch.autograd.Function):
    """F.linear of an input that is replicated, or split along the sequence.

    The ranks' gradients of the input are summed while the weight gradient is computed. A split
    input is gathered again for the weight gradient, during the preceding matmul, instead of being
    kept whole, which would take t times the memory (arXiv 2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, axis, deferral):
        ctx.axis, ctx.weight, ctx.deferral = axis, weight, deferral
        ctx.save_for_backward(x)
        whole = all_gather(x, axis) if axis.sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        axis, in_parts = ctx.axis, ctx.axis.sequence_parallel
        grad_weight = None
        if ctx.deferral is None:
            whole = begin_all_gather(x, axis) if in_parts else lambda: x
            grad_copy = grad @ ctx.weight
            gathered = whole()
            grad_x = begin_sum_of_copies(grad_copy, axis)
            grad_weight = weight_gradient(grad, gathered)
        else:
            grad_x = begin_sum_of_copies(grad @ ctx.weight, axis)
            own = x.detach()  # otherwise the graph before x would stay alive
            ctx.deferral.put(
                ctx.weight,
                lambda: weight_gradient(grad, all_gather(own, axis) if in_parts else own),
            )
        grad_bias = grad.flatten(0, 1).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x(), grad_weight, grad_bias, None, None
