"""Norms, whose weights are replicated on every tensor rank.

If each rank norms only a part (its positions under sequence parallelism, its heads in
qk_norm), the gradient of the weight is a partial sum: `copy_to_tensor_axis` on the weight sums the
parts in the backward pass.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from models.kernels.compile import Fusing
from models.kernels.norms import Branch, add_and_norm, norm
from models.parallel.collectives import TensorAxis, copy_to_tensor_axis
from models.sharding import Sharding, declared_parameter


class Norm(Fusing):
    """A norm over the last dimension: LayerNorm with a bias, RMSNorm without.

    input_is_split: each tensor rank norms only its part of the input
    """

    def __init__(
        self, size: int, epsilon: float, *, bias: bool, input_is_split: bool, axis: TensorAxis
    ):
        super().__init__()
        self.size, self.epsilon, self.axis = size, epsilon, axis
        self.input_is_split = input_is_split
        self.weight = declared_parameter(Sharding((size,)), axis.size)
        self.bias = declared_parameter(Sharding((size,)), axis.size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        return norm(x, *self._parameters_here(), self.epsilon, self.fuse)

    def of_sum(self, x: Tensor, branch: Branch) -> tuple[Tensor, Tensor]:
        """Return x + branch and its norm: each [..., size]."""
        # This is not a call of the module, so ZeRO-3's hooks do not run here. DeepSpeed's
        # ZeROOrderedDict gathers the weight when it is read, for the block that reads it.
        weight, bias = self._parameters_here()
        return add_and_norm(x, branch, weight, bias, epsilon=self.epsilon, fuse=self.fuse)

    def _parameters_here(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias; with a split input, their gradients are summed over the ranks."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.input_is_split:
            weight = copy_to_tensor_axis(weight, self.axis)
            bias = None if bias is None else copy_to_tensor_axis(bias, self.axis)
        return weight, bias


class RMSNorm(Norm):
    """x / rms(x) * weight, in fp32 (arXiv 1910.07467)."""

    def __init__(self, size: int, epsilon: float, **settings: Any):
        super().__init__(size, epsilon, bias=False, **settings)


class LayerNorm(Norm):
    """(x - mean) / std * weight + bias, in fp32 (arXiv 1607.06450)."""

    def __init__(self, size: int, epsilon: float, **settings: Any):
        super().__init__(size, epsilon, bias=True, **settings)


NORMS: dict[str, Callable[..., Norm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
