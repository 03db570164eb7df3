"""Linear layers whose weight is split over the tensor axis.

Shapes: s sequence (s/t under sequence parallelism where noted), b micro-batch, t tensor ranks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.parallel.collectives import (
    TensorAxis,
    all_gather,
    copy_to_tensor_axis,
    leave_tensor_region,
    reduce_scatter,
)
from models.sharding import Sharding, declared_parameter


class ColumnParallelLinear(nn.Module):
    """y = x W^T with the rows of W, the output columns, split over the tensor axis.

    Forward: no communication; backward: all-reduce. Under sequence parallelism, forward:
    all-gather; backward: all-gather of the input once more, and reduce-scatter.

    blocks: output columns of each part that is split by itself (q|k|v, gate|up)
    """

    def __init__(self, in_size: int, blocks: tuple[int, ...], *, bias: bool, axis: TensorAxis):
        super().__init__()
        self.axis = axis
        self.weight = declared_parameter(Sharding((sum(blocks), in_size), 0, blocks), axis.size)
        self.bias = (
            declared_parameter(Sharding((sum(blocks),), 0, blocks), axis.size) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in] (s/t under sequence parallelism) to [s, b, out/t]."""
        return column_parallel_product(x, self.weight, self.bias, axis=self.axis)


class RowParallelLinear(nn.Module):
    """y = x W^T + bias with the columns of W, the input columns, split over the tensor axis.

    Forward: all-reduce; backward: no communication. Under sequence parallelism, forward:
    reduce-scatter; backward: all-gather.
    """

    def __init__(self, in_size: int, out_size: int, *, bias: bool, axis: TensorAxis):
        super().__init__()
        self.axis = axis
        self.weight = declared_parameter(Sharding((out_size, in_size), 1, (in_size,)), axis.size)
        self.bias = declared_parameter(Sharding((out_size,)), axis.size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in/t] to [s, b, out] (s/t under sequence parallelism)."""
        y = leave_tensor_region(F.linear(x, self.weight), self.axis)
        if self.bias is None:
            return y
        # Split along the sequence, each rank adds the bias to its own positions only.
        split = self.axis.sequence_parallel
        return y + (copy_to_tensor_axis(self.bias, self.axis) if split else self.bias)


def column_parallel_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, axis: TensorAxis
) -> Tensor:
    """x W^T + bias with this rank's rows of W: [s, b, in] (or s/t) to [s, b, out/t]."""
    if axis.sequence_parallel and axis.size > 1:
        return _SequenceProduct.apply(x, weight, bias, axis)
    return F.linear(copy_to_tensor_axis(x, axis), weight, bias)


class _SequenceProduct(torch.autograd.Function):
    """F.linear of an input that is split along the sequence.

    Forward: all-gather; backward: all-gather once more, instead of keeping t times the input
    between the two, and reduce-scatter (arXiv 2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, axis):
        ctx.axis = axis
        ctx.save_for_backward(x, weight)
        return F.linear(all_gather(x, axis), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, 1)  # [s b, out/t]
        grad_x = reduce_scatter(grad @ weight, ctx.axis)
        grad_weight = rows.t() @ all_gather(x, ctx.axis).flatten(0, 1)
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None
