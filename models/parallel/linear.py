"""Linear layers whose weight is split over the tensor axis.

Shapes: s sequence (s/t under sequence parallelism where noted), b micro-batch, t tensor ranks.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from models.parallel.collectives import (
    TensorAxis,
    copy_to_tensor_axis,
    enter_tensor_region,
    leave_tensor_region,
)
from models.sharding import Sharding, declared_parameter


class ColumnParallelLinear(nn.Module):
    """y = x W^T with the rows of W, the output columns, split over the tensor axis.

    Forward: no communication; backward: all-reduce. Under sequence parallelism, forward:
    all-gather; backward: reduce-scatter.

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
        return F.linear(enter_tensor_region(x, self.axis), self.weight, self.bias)


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
