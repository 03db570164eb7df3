"""Norms, whose weights every tensor rank holds.

Where each rank norms only a part (its positions under sequence parallelism, its heads in
qk_norm), the weight's gradient is a partial sum: `copy_to_tensor_axis` on the weight adds the
parts up in the backward pass.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from models.kernels.elementwise import rms_norm, sum_rms_norm
from models.kernels.fusing import Fusing
from models.parallel.collectives import TensorAxis, copy_to_tensor_axis
from models.sharding import Sharding, declared_parameter


class RMSNorm(Fusing):
    """x / rms(x) * weight over the last dimension, in fp32 (arXiv 1910.07467).

    input_is_split: the input is only this tensor rank's part
    """

    def __init__(self, size: int, epsilon: float, *, input_is_split: bool, axis: TensorAxis):
        super().__init__()
        self.size, self.epsilon, self.axis = size, epsilon, axis
        self.input_is_split = input_is_split
        self.weight = declared_parameter(Sharding((size,)), axis.size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        return rms_norm(x, self._weight(), self.epsilon, self.fuse)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y and its norm: twice [..., size] to twice [..., size]."""
        # No call of the module: under ZeRO-3 the weight is gathered as it is read, for the block
        # that reads it (DeepSpeed's ZeROOrderedDict).
        return sum_rms_norm(x, y, self._weight(), self.epsilon, self.fuse)

    def _weight(self) -> Tensor:
        return copy_to_tensor_axis(self.weight, self.axis) if self.input_is_split else self.weight


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dimension (arXiv 1607.06450).

    torch computes it in fp32 and keeps the input as it is.

    input_is_split: the input is only this tensor rank's part
    """

    def __init__(self, size: int, epsilon: float, *, input_is_split: bool, axis: TensorAxis):
        super().__init__()
        self.size, self.epsilon, self.axis = size, epsilon, axis
        self.input_is_split = input_is_split
        self.weight = declared_parameter(Sharding((size,)), axis.size)
        self.bias = declared_parameter(Sharding((size,)), axis.size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        weight, bias = self.weight, self.bias
        if self.input_is_split:
            weight = copy_to_tensor_axis(weight, self.axis)
            bias = copy_to_tensor_axis(bias, self.axis)
        return F.layer_norm(x, (self.size,), weight, bias, eps=self.epsilon)

    def of_sum(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y and its norm: twice [..., size] to twice [..., size]."""
        total = x + y
        return total, self(total)


NORMS: dict[str, type[nn.Module]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
