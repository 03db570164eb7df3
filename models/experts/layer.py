"""The mixture-of-experts layer, which takes the place of a block's MLP.

s sequence, b micro-batch, h hidden, E experts, k experts per token, f hidden size of an expert, t
tensor ranks, n = s * b / t tokens that this rank routes, m rows that this rank's experts compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import GATED, Experts
from models.experts.balance import RouterStatistics, with_router_losses
from models.experts.dispatch import DeferralToExchange, begin_combine, begin_dispatch
from models.experts.grouped_matmul import add_to_groups, grouped_matmul
from models.experts.routing import (
    ExpertAxis,
    Routing,
    choose_experts,
    gates_of,
    limit_to_groups,
    plan_routes,
    scores_of,
)
from models.kernels.compile import Fusing, as_written, for_any_rows
from models.kernels.elementwise import ACTIVATIONS, gelu
from models.kernels.matmul import Fp8
from models.parallel.collectives import (
    TensorAxis,
    copy_to_tensor_axis,
    gather_from_tensor_axis,
    scatter_to_tensor_axis,
)
from models.parallel.layers import Deferral, Deferring
from models.sharding import Sharding, declared_parameter


class SharedExperts(Protocol):
    """The MLP of the shared experts, in two parts that run during different exchanges."""

    @property
    def down(self) -> Callable[[Tensor], Tensor]:
        """The second linear layer."""

    def activated(self, x: Tensor) -> Tensor:
        """[s, b, h] to the input of `down`."""

    def bias_here(self) -> Tensor | None:
        """Return the output bias for this rank's positions."""


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
        shared: SharedExperts | None = None,
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
        # All weights of a kind are adjacent in the optimizer's tensor (`grouped_matmul.stack`).
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
        # m differs between micro-batches. Fewer than two rows would be compiled separately.
        fuse = for_any_rows(self.fuse) if len(x) > 1 else as_written
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
