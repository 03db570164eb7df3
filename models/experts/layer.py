"""The mixture-of-experts layer, which takes the place of a block's MLP, and its grouped matmuls.

s sequence, b micro-batch, h hidden, E experts, k experts per token, f hidden size of an expert, t
tensor ranks, n = s * b / t tokens that this rank routes, m rows that this rank's experts compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import GATED, Experts
from models.experts.dispatch import DeferralToExchange, begin_combine, begin_dispatch
from models.experts.routing import (
    ExpertAxis,
    RouterStatistics,
    Routing,
    choose_experts,
    gates_of,
    limit_to_groups,
    plan_routes,
    scores_of,
    with_router_losses,
)
from models.kernels.compile import Fusing, for_any_rows
from models.kernels.elementwise import ACTIVATIONS, gelu
from models.kernels.matmul import Fp8, Quantized, inner_type
from models.parallel.collectives import (
    TensorAxis,
    copy_to_tensor_axis,
    gather_from_tensor_axis,
    scatter_to_tensor_axis,
)
from models.parallel.layers import (
    Deferral,
    Deferring,
    GradientReceiver,
    ProductGradient,
    weight_gradient,
)
from models.sharding import Sharding, declared_parameter

if TYPE_CHECKING:  # it imports this module
    from models.transformer import MLP

# Matmuls and sums of groups of rows with one weight or bias per group.
#
# In this section, n is a number of rows, sorted by group; g groups; r_i rows of group i.


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
    """Return what `_multiply` does, of rows and weights in FP8.

    The weights of all experts are quantized and dequantized as one stacked weight: separate calls
    would launch several hundred kernels. No block has rows of two experts.
    """
    inner, groups = inner_type(ctx.dtype), len(ctx.weights)
    of_all = replace(ctx.fp8, outputs=ctx.fp8.outputs * groups)
    stacked = of_all.weight(stack(ctx.weights).flatten(0, 1)).dequantized(inner)  # [g * out, in]
    weights = stacked.unflatten(0, (groups, -1)).unbind()  # adjacent: no copy in `stack`
    return _multiply(x.dequantized(inner), weights, ctx.rows, transposed=transposed).to(ctx.dtype)


def _multiply(
    x: Tensor, weights: Sequence[Tensor], rows: Sequence[int], transposed: bool
) -> Tensor:
    """Return the product of each group's rows and its weight, or its transposed weight.

    On some GPUs one kernel computes all groups, in bf16 and if rows are multiples of 16 bytes. On
    others, torch's function is a loop that waits for the ends of the groups to arrive on the host,
    which has them already. On a CPU a loop has the same result and speed.
    """
    aligned = all(size % 8 == 0 for size in weights[0].shape)
    if x.dtype == torch.bfloat16 and len(x) and aligned and multiplies_groups(x.device):
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


# Generations of GPUs for which torch has a kernel of `grouped_mm` (`_grouped_mm_cuda` in torch's
# GroupedBlas.cpp): Hopper, and Blackwell in data centers.
GENERATIONS_WITH_GROUPS = (9, 10)


def multiplies_groups(device: torch.device) -> bool:
    """Return True on a GPU for which torch has a kernel that multiplies groups of rows."""
    if device.type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major in GENERATIONS_WITH_GROUPS


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


# The layer.


class MixtureOfExperts(Fusing):
    """The weighted sum of each token's experts, plus the shared experts.

    Each rank routes a different part of the tokens: those that it holds under sequence parallelism,
    otherwise its part of the tokens that all tensor ranks hold.

    Communication: forward, all-to-alls of the numbers of tokens, of the tokens and of the results
    over the expert axis, an all-reduce of the counts of each sequence over its ranks, and without
    sequence parallelism an all-gather over the tensor axis. Backward, two all-to-alls, an
    all-reduce of the router's gradient over the tensor axis, and without sequence parallelism an
    all-gather. Expert tensor parallelism adds, over the tensor axis, an all-gather of the numbers
    of tokens and in each pass two all-to-alls: one gathers tokens, and one returns partial outputs.

    Overlap: the first linear layer of the shared experts runs while the tokens are sent, and the
    second one while the results are returned; their backward passes run during the reverse
    exchanges. During the last exchange of the backward pass, the gradients of the experts' first
    matrices are computed, too, unless the schedule defers them.

    settings: number and sizes of the experts, and their router
    activation: as `ModelConfig.activation`
    bias: the router and the matrices of the experts have biases, as in GPT-OSS
    shared: the MLP of the shared experts; None: there are none
    number: number of the layer in the model
    gradient_scale: function that returns the gradient of the loss in the coming backward pass
    """

    gradient_scale: Callable[[], float] = staticmethod(lambda: 1.0)

    def __init__(
        self,
        settings: Experts,
        *,
        hidden_size: int,
        activation: str,
        tensor: TensorAxis,
        expert: ExpertAxis,
        bias: bool = False,
        shared: "MLP | None" = None,
        number: int = 0,
    ):
        super().__init__()
        self.settings, self.number = settings, number
        self.tensor, self.expert = tensor, expert
        self.router = Router(settings, hidden_size, tensor, bias=bias)
        self.experts = ExpertMLPs(settings, hidden_size, activation, expert, bias=bias)
        self.shared = shared
        self.statistics = RouterStatistics()

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] to [s, b, h]; s/t under sequence parallelism."""
        tensor, settings = self.tensor, self.settings
        own = x if tensor.sequence_parallel else scatter_to_tensor_axis(x, tensor)  # [s/t, b, h]
        logits, scores, preferences = self.router(own)  # fp32 [s/t, b, E]
        group_scores = None
        if settings.groups_per_token < settings.groups:
            preferences, group_scores = limit_to_groups(
                preferences, settings.groups, settings.groups_per_token
            )  # [s/t, b, E], [s/t, b, G]
        chosen = choose_experts(preferences.flatten(0, 1), settings.per_token)  # [n, k]
        gates = gates_of(
            scores.flatten(0, 1),
            chosen,
            sum_is_one=settings.weights_sum_to_one,
            scale=settings.output_scale,
        )  # fp32 [n, k]
        routes = plan_routes(chosen, settings.count, self.expert)
        deferral = self._deferral_to_exchange()
        arrived = begin_dispatch(
            own.flatten(0, 1), routes, self.expert, deferral=deferral, fuse=self.fuse
        )
        inner = x if self.shared is None else self.shared.activated(x)
        gates = with_router_losses(
            gates,
            Routing(logits, scores, preferences, chosen.view(*logits.shape[:2], -1), group_scores),
            settings=settings,
            axis=self.expert,
            gradient_scale=self.gradient_scale,
            statistics=self.statistics,
            computed=sum(routes.rows),
        )
        rows = arrived()
        del arrived  # which keeps the rows that were sent
        returned = begin_combine(
            self.experts(rows, routes.rows, up_deferral=deferral),
            gates,
            routes,
            self.expert,
            fuse=self.fuse,
        )
        shared = None if self.shared is None else self.shared.down(inner)
        y = returned().view_as(own)
        del returned
        if not tensor.sequence_parallel:
            y = gather_from_tensor_axis(y, tensor, dimension=0)
        return y if shared is None else y + shared

    def _deferral_to_exchange(self) -> DeferralToExchange | None:
        """Return a deferral of the gradients of `up` to the last exchange of the backward pass.

        Return None if the rank has all experts, so that nothing is exchanged, or if a zero-bubble
        schedule already defers the gradients.
        """
        experts, addition = self.experts, self.experts.deferral
        if self.expert.size == 1 or not torch.is_grad_enabled():
            return None
        if isinstance(addition, Deferral):
            return None
        weights = [getattr(experts, f"up_{number}") for number in experts.numbers]
        return DeferralToExchange(weights, addition)

    def bias_here(self) -> Tensor | None:
        """Return the output bias of the shared experts for this rank's positions.

        Those of the other experts are part of the output, because each is multiplied by a weight.
        """
        return None if self.shared is None else self.shared.bias_here()


class Router(nn.Module):
    """Logits, scores and preferences of the experts, in fp32 also if the weights are in 16 bits.

    The bias of a sigmoid router counts only for the preferences and has the gradient zero. The
    engine changes it in each step, by the numbers of tokens of the experts
    (`threefold/engine/experts.py`). With `bias`, another router has an ordinary bias of its logits.
    """

    def __init__(
        self, settings: Experts, hidden_size: int, tensor: TensorAxis, *, bias: bool = False
    ):
        super().__init__()
        self.kind, self.tensor = settings.router, tensor
        assert not (bias and settings.has_bias), "a router with two kinds of biases"
        sharding = Sharding((settings.count, hidden_size), role="output")
        self.weight = declared_parameter(sharding, tensor)
        self.bias = (
            declared_parameter(Sharding((settings.count,)), tensor)
            if settings.has_bias or bias
            else None
        )
        self.is_balanced_by_bias = settings.has_bias

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, h] to three times fp32 [s, b, E]; each tensor rank has other tokens.

        Returns:
            The logits; the scores; and the preferences, without gradient, which are the scores plus
            the biases of a sigmoid router, otherwise the logits.
        """
        weight, bias = copy_to_tensor_axis(self.weight, self.tensor), self.bias
        if self.is_balanced_by_bias or bias is None:
            logits = _RouterLogits.apply(x, weight, bias, False)
        else:
            logits = _RouterLogits.apply(x, weight, copy_to_tensor_axis(bias, self.tensor), True)
        scores = scores_of(logits, self.kind)
        if self.is_balanced_by_bias and bias is not None:
            return logits, scores, scores.detach() + bias.detach().float()
        return logits, scores, logits.detach()


class _RouterLogits(torch.autograd.Function):
    """F.linear in fp32, which keeps x in its own precision.

    adds_bias: False: the bias only gets a gradient, which is zero
    """

    @staticmethod
    def forward(ctx, x, weight, bias, adds_bias):
        ctx.save_for_backward(x, weight)
        ctx.bias = None if bias is None else bias.new_zeros(bias.shape)
        ctx.adds_bias = adds_bias
        return F.linear(x.float(), weight.float(), bias.float() if adds_bias else None)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.float()).to(x.dtype)
        grad_weight = grad.flatten(0, 1).t() @ x.flatten(0, 1).float()
        grad_bias = grad.flatten(0, 1).sum(0).to(ctx.bias) if ctx.adds_bias else ctx.bias
        return grad_x, grad_weight.to(weight.dtype), grad_bias, None


class ExpertMLPs(Deferring):
    """This rank's experts: the same MLP as in a dense layer.

    Each weight and bias of an expert is a parameter of its own, so that its name and logical shape
    do not depend on the layout: `experts.up_5`, `experts.down_5`, `experts.up_5_bias`. With expert
    tensor parallelism, this rank has a share of the columns of `up` and of the rows of `down`, so
    that its outputs are terms of a sum over the tensor ranks. It then also has a share of the
    entries of the second bias, and adds them to the columns that they belong to: the sum contains
    each entry once.
    """

    def __init__(
        self,
        settings: Experts,
        hidden_size: int,
        activation: str,
        axis: ExpertAxis,
        *,
        bias: bool = False,
    ):
        super().__init__()
        h, f = hidden_size, settings.ffn_hidden_size
        self.activation, self.columns, self.has_bias = activation, axis.columns, bias
        blocks = (f, f) if activation in GATED else (f,)  # gate|up, or up
        shardings = {
            "up_{}": Sharding((sum(blocks), h), 0, blocks, of_expert=True, role="hidden"),
            "down_{}": Sharding((h, f), 1, (f,), of_expert=True, role="hidden"),
        }
        if bias:
            shardings |= {
                "up_{}_bias": Sharding((sum(blocks),), 0, blocks, of_expert=True),
                "down_{}_bias": Sharding((h,), 0, (h,), of_expert=True),
            }
        self.numbers = axis.experts_here(settings.count)
        # All weights of a kind are adjacent in the optimizer's tensor (`stack`).
        for name, sharding in shardings.items():
            if axis.columns.size == 1:
                is_first_matrix = name == "up_{}"
                sharding = replace(
                    sharding, dimension=None, blocks=blocks if is_first_matrix else ()
                )
            for number in self.numbers:
                parameter = declared_parameter(sharding, axis.tensor)
                self.register_parameter(name.format(number), parameter)

    def forward(
        self,
        x: Tensor,
        rows: Sequence[int],
        *,
        up_deferral: DeferralToExchange | None = None,
    ) -> Tensor:
        """[m, h], sorted by expert, to [m, h].

        Args:
            up_deferral: receives the gradients of `up`; None: `self.deferral` does, if it exists
        """
        fuse = for_any_rows(self.fuse)  # m differs between micro-batches
        ups, downs = self._of_all("up_{}"), self._of_all("down_{}")
        of_ups, of_downs = (self._quantization(weights[0]) for weights in (ups, downs))
        x = grouped_matmul(x, ups, rows, up_deferral or self.deferral, of_ups)
        if self.has_bias:
            x = add_to_groups(x, self._of_all("up_{}_bias"), rows)
        if self.activation in ACTIVATIONS:
            x = ACTIVATIONS[self.activation](x, fuse)
        else:
            x = gelu(x, None, fuse, exact=self.activation == "gelu_erf")
        y = grouped_matmul(x, downs, rows, self.deferral, of_downs)
        if self.has_bias:
            biases = self._of_all("down_{}_bias")
            y = add_to_groups(y, biases, rows, first_column=self.columns.rank * len(biases[0]))
        return y

    def _quantization(self, weight: nn.Parameter) -> Fp8 | None:
        """Return the quantization of the matmuls with weights like this one, for any rows."""
        fp8 = self.quantization(weight, self.columns)
        return fp8 and replace(fp8, fuse=for_any_rows(fp8.fuse))

    def _of_all(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of a kind of this rank's experts, in their order."""
        return [getattr(self, name.format(number)) for number in self.numbers]


def expert_layers(module: nn.Module) -> list[MixtureOfExperts]:
    """Return the mixture-of-experts layers of a module, in order."""
    return [layer for layer in module.modules() if isinstance(layer, MixtureOfExperts)]
