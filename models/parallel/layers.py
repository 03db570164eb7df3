"""Linear layers, the embedding and norms on tensor ranks, and deferred weight gradients.

Shapes: s sequence (s/t under sequence parallelism where noted), b micro-batch, t tensor ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.kernels.compile import Fusing
from models.kernels.elementwise import look_up
from models.kernels.matmul import Fp8, Quantized, add_product, adds_in_matmul, product
from models.kernels.norms import ResidualBranch, add_and_norm, input_and_norm, norm
from models.parallel.collectives import (
    TensorAxis,
    all_gather,
    begin_all_gather,
    begin_sum_of_copies,
    copy_to_tensor_axis,
    leave_tensor_region,
    sum_of_copies,
)
from models.sharding import Role, Sharding, declared_parameter, sharding_of

# Deferred weight gradients, which a pipeline computes while it would otherwise be idle.
#
# Zero bubble pipeline parallelism (Qi et al. 2023, arXiv 2401.10241): the backward pass of a
# linear layer has two parts, and the previous stage waits only for the gradient of the input.
#
# In all other schedules, the weight gradient is computed in the backward pass. On a GPU the engine
# then lets its matmul add it to the sum over the micro-batches (`models/kernels/matmul.py`).

WeightGradient = Callable[[], Tensor]


@dataclass(frozen=True)
class ProductGradient:
    """The gradient of W in x W^T: a WeightGradient that can also be added to a sum in its matmul.

    grad: [s, b, out], or rows of an expert, [r, out]
    x: [s, b, in] (s/t if it is gathered), or [r, in]
    gather: function that gathers x over the tensor ranks when the gradient is computed
    """

    grad: Tensor
    x: Tensor
    gather: Callable[[Tensor], Tensor] | None = None

    def __call__(self) -> Tensor:
        """Return the gradient, [out, in]."""
        return weight_gradient(self.grad, self._whole_x())

    def add_to(self, total: Tensor, *, replace: bool) -> None:
        """Add the gradient to a sum, or replace the sum by it."""
        whole_x = self._whole_x().flatten(0, -2)
        add_product(total, self.grad.flatten(0, -2), whole_x, replace=replace)

    def _whole_x(self) -> Tensor:
        return self.x if self.gather is None else self.gather(self.x)


@dataclass(frozen=True)
class QuantizedGradient:
    """The gradient of W in x W^T, whose two factors are quantized along the tokens.

    fp8: quantization of the layer
    grad: [out, b * s]
    x: quantized input of the layer, [s, b, in] (s/t if it is gathered)
    dtype: type of the gradient, which is that of the weight
    gather: function that gathers x over the tensor ranks when the gradient is computed
    """

    fp8: Fp8
    grad: Quantized
    x: Quantized
    dtype: torch.dtype
    gather: Callable[[Quantized], Quantized] | None = None

    def __call__(self) -> Tensor:
        """Return the gradient, [out, in]."""
        return self._product(self.dtype)

    def add_to(self, total: Tensor, *, replace: bool) -> None:
        """Add the gradient to a sum, or replace the sum by it.

        On a GPU it is not rounded to 16 bits before it is added.
        """
        wide = adds_in_matmul(total.new_empty(0, dtype=self.dtype), total.dtype)
        gradient = self._product(total.dtype if wide else self.dtype)
        if replace:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def _product(self, dtype: torch.dtype) -> Tensor:
        x = self.x if self.gather is None else self.gather(self.x)
        return product(self.grad, self.fp8.tokens(x.dequantized(self.dtype)), dtype)


class Deferral:
    """Deferred weight gradients of the linear layers that share this object, in order."""

    def __init__(self) -> None:
        self.deferred: list[tuple[nn.Parameter, WeightGradient]] = []

    def put(self, weight: nn.Parameter, gradient: WeightGradient) -> None:
        """Defer a weight gradient; the function holds its inputs."""
        self.deferred.append((weight, gradient))

    def take(self) -> list[tuple[nn.Parameter, WeightGradient]]:
        """Return all deferred gradients and forget them."""
        deferred, self.deferred = self.deferred, []
        return deferred


@dataclass(frozen=True)
class ImmediateAddition:
    """Adds the weight gradients of linear layers to sums, in the backward pass.

    put: adds the gradient of a micro-batch to the sum of a weight
    """

    put: Callable[[nn.Parameter, WeightGradient], None]


GradientReceiver = Deferral | ImmediateAddition


class Deferring(Fusing):
    """A module whose backward pass may defer the weight gradient, and whose matmuls may be in FP8.

    deferral: receives the weight gradient; None: the backward pass computes it
    fp8: the matmuls are in FP8, otherwise in the type of the weights
    """

    deferral: GradientReceiver | None = None
    fp8: bool = False

    def quantization(self, weight: nn.Parameter, tensor: TensorAxis) -> Fp8 | None:
        """Return the quantization of the matmuls with a weight; None: they are not in FP8."""
        if not self.fp8:
            return None
        parts = sharding_of(weight).matrix_parts(tensor)
        return Fp8(tuple(len(part.rows) for part in parts), self.fuse)


def defer_weights(module: nn.Module, deferral: GradientReceiver) -> None:
    """Let all linear layers of a module hand over their weight gradients."""
    for layer in module.modules():
        if isinstance(layer, Deferring):
            layer.deferral = deferral


class ColumnParallelLinear(Deferring):
    """y = x W^T with the rows of W, the output columns, split over the tensor axis.

    Forward: no communication; backward: all-reduce. Under sequence parallelism, forward:
    all-gather; backward: all-gather of the input once more, and reduce-scatter. The backward pass
    overlaps communication with its two matmuls.

    blocks: output columns of each part that is split by itself (q|k|v, gate|up)
    """

    def __init__(self, in_size: int, blocks: tuple[int, ...], *, bias: bool, tensor: TensorAxis):
        super().__init__()
        self.tensor = tensor
        sharding = Sharding((sum(blocks), in_size), 0, blocks, role="hidden")
        self.weight = declared_parameter(sharding, tensor)
        self.bias = (
            declared_parameter(Sharding((sum(blocks),), 0, blocks), tensor) if bias else None
        )

    def forward(self, x: Tensor, *, bias_gradient: bool = True) -> Tensor:
        """[s, b, in] (s/t under sequence parallelism) to [s, b, out/t].

        Args:
            bias_gradient: False leaves the gradient of the bias to the following operation
        """
        bias: Tensor | None = self.bias
        if bias is not None and not bias_gradient:
            bias = bias.detach()
        tensor, fp8 = self.tensor, self.quantization(self.weight, self.tensor)
        if fp8 is not None:
            return _QuantizedMatmul.apply(x, self.weight, bias, fp8, tensor, self.deferral)
        return column_parallel_matmul(x, self.weight, bias, tensor=tensor, deferral=self.deferral)


class RowParallelLinear(Deferring):
    """y = x W^T with the columns of W, the input columns, split over the tensor axis.

    The layer holds a bias but does not add it: the kernel that adds y to the residual stream does
    (`models/kernels/norms.py`).

    Forward: all-reduce; backward: no communication. Under sequence parallelism, forward:
    reduce-scatter; backward: all-gather.
    """

    def __init__(self, in_size: int, out_size: int, *, bias: bool, tensor: TensorAxis):
        super().__init__()
        self.tensor = tensor
        sharding = Sharding((out_size, in_size), 1, (in_size,), role="hidden")
        self.weight = declared_parameter(sharding, tensor)
        self.bias = declared_parameter(Sharding((out_size,)), tensor) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in/t] to [s, b, out] (s/t under sequence parallelism), without the bias."""
        fp8 = self.quantization(self.weight, self.tensor)
        y = matmul(x, self.weight, None, self.deferral, fp8)
        return leave_tensor_region(y, self.tensor)

    def bias_here(self) -> Tensor | None:
        """Return the bias for this rank's positions.

        Under sequence parallelism each rank adds it to its own positions only, and its gradient is
        summed over the ranks.
        """
        if self.bias is None or not self.tensor.sequence_parallel:
            return self.bias
        return copy_to_tensor_axis(self.bias, self.tensor)


class ReplicatedLinear(Deferring):
    """y = x W^T with all of W on every tensor rank.

    Forward: no communication. Backward: under sequence parallelism, where each rank has other
    positions, an all-reduce of the weight gradient.
    """

    def __init__(self, in_size: int, out_size: int, *, tensor: TensorAxis):
        super().__init__()
        self.tensor = tensor
        self.weight = declared_parameter(Sharding((out_size, in_size), role="hidden"), tensor)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, in] to [s, b, out] (both s/t under sequence parallelism)."""
        tensor, deferral = self.tensor, self.deferral
        fp8 = self.quantization(self.weight, tensor)
        if not tensor.sequence_parallel or tensor.size == 1:
            return matmul(x, self.weight, None, deferral, fp8)
        if deferral is None:
            return matmul(x, copy_to_tensor_axis(self.weight, tensor), None, None, fp8)
        return matmul(x, self.weight, None, _SumOfCopies(deferral, tensor), fp8)


class _SumOfCopies(Deferral):
    """Defers weight gradients that are summed over the tensor ranks when they are computed."""

    def __init__(self, deferral: GradientReceiver, tensor: TensorAxis):
        super().__init__()
        self.deferral, self.tensor = deferral, tensor

    def put(self, weight: nn.Parameter, gradient: WeightGradient) -> None:
        self.deferral.put(weight, lambda: sum_of_copies(gradient(), self.tensor))


def column_parallel_matmul(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    *,
    tensor: TensorAxis,
    deferral: GradientReceiver | None,
) -> Tensor:
    """Return x W^T + bias with this rank's rows of W: [s, b, in] (or s/t) to [s, b, out/t]."""
    if tensor.size > 1:
        return _ColumnParallelMatmul.apply(x, weight, bias, tensor, deferral)
    return matmul(x, weight, bias, deferral)


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    deferral: GradientReceiver | None,
    fp8: Fp8 | None = None,
) -> Tensor:
    """Return x W^T + bias without communication: [s, b, in] to [s, b, out]."""
    if fp8 is not None:
        return _QuantizedMatmul.apply(x, weight, bias, fp8, TensorAxis(), deferral)
    if deferral is None:
        return F.linear(x, weight, bias)
    return _DeferredMatmul.apply(x, weight, bias, deferral)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of W in x W^T, from [..., out] and [..., in]: [out, in]."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


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
        # Detached, because the deferred gradient would otherwise keep the graph before x alive.
        ctx.deferral.put(ctx.weight, ProductGradient(grad, x.detach()))
        grad_bias = grad.flatten(0, 1).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ ctx.weight, None, grad_bias, None


class _ColumnParallelMatmul(torch.autograd.Function):
    """F.linear of an input that is replicated, or split along the sequence.

    The ranks' gradients of the input are summed while the weight gradient is computed. A split
    input is gathered again for the weight gradient, during the preceding matmul, instead of being
    kept whole, which would take t times the memory (arXiv 2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, tensor, deferral):
        ctx.tensor, ctx.weight, ctx.deferral = tensor, weight, deferral
        ctx.save_for_backward(x)
        whole = all_gather(x, tensor) if tensor.sequence_parallel else x
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        tensor, in_parts = ctx.tensor, ctx.tensor.sequence_parallel
        grad_weight = None
        if not isinstance(ctx.deferral, Deferral):
            whole = begin_all_gather(x, tensor) if in_parts else lambda: x
            grad_copy = grad @ ctx.weight
            gathered = whole()
            grad_x = begin_sum_of_copies(grad_copy, tensor)
            gradient = ProductGradient(grad, gathered)
            if ctx.deferral is None:
                grad_weight = gradient()
            else:
                ctx.deferral.put(ctx.weight, gradient)
        else:
            grad_x = begin_sum_of_copies(grad @ ctx.weight, tensor)
            gather = (lambda own: all_gather(own, tensor)) if in_parts else None
            # Detached, because the graph before x would otherwise stay alive.
            ctx.deferral.put(ctx.weight, ProductGradient(grad, x.detach(), gather))
        grad_bias = grad.flatten(0, 1).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x(), grad_weight, grad_bias, None, None


class _QuantizedMatmul(torch.autograd.Function):
    """x W^T + bias whose three products are in FP8, with the communication of the other layers.

    The input is kept in FP8, and under sequence parallelism it is gathered in FP8, whose tiles lie
    within one token. Its gradient is summed over the ranks in the type of the weights. The two
    factors of the weight gradient are quantized along the tokens; both have all tokens that the
    context rank has of a sequence.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, fp8, tensor, deferral):
        own = fp8.rows(x)
        ctx.weight, ctx.where = weight, (fp8, tensor, deferral)
        ctx.save_for_backward(own.values, own.scales)
        whole = _begin_gather(own, tensor)()
        y = product(whole, fp8.weight(weight), x.dtype)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad):
        fp8, tensor, deferral = ctx.where
        values, scales = ctx.saved_tensors
        own = Quantized(values, scales, (values.shape[-1],))
        defers = isinstance(deferral, Deferral)
        gathered = None if defers else _begin_gather(own, tensor)
        weight = fp8.weight(ctx.weight).transposed()
        grad_copy = product(fp8.outputs_of(grad), weight, grad.dtype)
        whole = own if gathered is None else gathered()
        grad_x = begin_sum_of_copies(grad_copy, tensor)
        gather = (lambda part: _begin_gather(part, tensor)()) if defers else None
        gradient = QuantizedGradient(fp8, fp8.tokens(grad), whole, ctx.weight.dtype, gather)
        grad_weight = None
        if deferral is None:
            grad_weight = gradient()
        else:
            deferral.put(ctx.weight, gradient)
        grad_bias = grad.flatten(0, 1).sum(0) if ctx.needs_input_grad[2] else None
        return grad_x(), grad_weight, grad_bias, None, None, None


def _begin_gather(own: Quantized, tensor: TensorAxis) -> Callable[[], Quantized]:
    """Begin to gather positions under sequence parallelism; return a function that waits for them.

    Not all backends of torch.distributed have E4M3, so that its bytes are sent.
    """
    if not tensor.sequence_parallel or tensor.size == 1:
        return lambda: own
    values = begin_all_gather(own.values.view(torch.uint8), tensor)
    scales = begin_all_gather(own.scales, tensor)
    return lambda: Quantized(values().view(own.values.dtype), scales(), own.columns)


# The token embedding with its vocabulary split over the tensor axis.


class VocabParallelEmbedding(nn.Module):
    """One [v/t, h] part of the embedding table; serves as the output layer too.

    s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor ranks. `embed` communicates
    as a row-parallel linear layer does, `logits` as a column-parallel one.

    Rows beyond `vocab_size` are zero and are never looked up. A table that is tied to the output
    layer is an input matrix.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        padded_vocab_size: int,
        tensor: TensorAxis,
        role: Role = "input",
    ):
        super().__init__()
        self.tensor = tensor
        shape = (vocab_size, hidden_size)
        sharding = Sharding(shape, 0, (vocab_size,), padded_vocab_size, role=role)
        self.weight = declared_parameter(sharding, tensor)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up [b, s] token ids: [s, b, h] (s/t under sequence parallelism)."""
        tokens = tokens.t()  # [s, b]
        if self.tensor.size == 1:
            return look_up(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.tensor.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        x = look_up(local.masked_fill(elsewhere, 0), self.weight)
        return leave_tensor_region(x.masked_fill_(elsewhere.unsqueeze(-1), 0), self.tensor)

    def logits(self, x: Tensor) -> Tensor:
        """Project [s, b, h] (s/t under sequence parallelism) to [s, b, v/t]."""
        return column_parallel_matmul(x, self.weight, None, tensor=self.tensor, deferral=None)


# Norms, whose weights are replicated on every tensor rank.
#
# If each rank norms only a part (its positions under sequence parallelism, its heads in qk_norm),
# the gradient of the weight is a partial sum: `copy_to_tensor_axis` on the weight sums the parts
# in the backward pass.


class Norm(Fusing):
    """A norm over the last dimension: LayerNorm with a bias, RMSNorm without.

    input_is_split: each tensor rank norms only its part of the input
    """

    def __init__(
        self, size: int, epsilon: float, *, bias: bool, input_is_split: bool, tensor: TensorAxis
    ):
        super().__init__()
        self.size, self.epsilon, self.tensor = size, epsilon, tensor
        self.input_is_split = input_is_split
        self.weight = declared_parameter(Sharding((size,)), tensor)
        self.bias = declared_parameter(Sharding((size,)), tensor) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        return norm(x, *self.parameters_here(), self.epsilon, self.fuse)

    def with_input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x, for a residual connection, and its norm: each [..., size]."""
        weight, bias = self.parameters_here()
        return input_and_norm(x, weight, bias, epsilon=self.epsilon, fuse=self.fuse)

    def of_sum(self, x: Tensor, branch: ResidualBranch) -> tuple[Tensor, Tensor]:
        """Return x + branch and its norm: each [..., size]."""
        weight, bias = self.parameters_here()
        return add_and_norm(x, branch, weight, bias, epsilon=self.epsilon, fuse=self.fuse)

    def parameters_here(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias; with a split input, their gradients are summed over the ranks."""
        # Outside of a call of the module ZeRO-3's hooks do not run. DeepSpeed's ZeROOrderedDict
        # then gathers the weight when it is read, for the block that reads it.
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.input_is_split:
            weight = copy_to_tensor_axis(weight, self.tensor)
            bias = None if bias is None else copy_to_tensor_axis(bias, self.tensor)
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
