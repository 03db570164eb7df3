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

from models.config import Experts
from models.experts.balance import RouterStatistics, with_router_losses
from models.experts.dispatch import DeferralToExchange, begin_combine, begin_dispatch
from models.experts.grouped_matmul import grouped_matmul
from models.experts.routing import (
    ExpertAxis,
    Routing,
    choose_experts,
    gates_of,
    plan_routes,
    scores_of,
)
from models.kernels.compile import Fusing, as_written, for_any_rows
from models.kernels.elementwise import gelu, swiglu
from models.parallel.collectives import (
    TensorAxis,
    copy_to_tensor_axis,
    gather_from_tensor_axis,
    scatter_to_tensor_axis,
)
from models.parallel.layers import Deferring
from models.sharding import Sharding, declared_parameter


class SharedExperts(Protocol):
    """The MLP of the shared experts, in two parts that run during different exchanges."""

    @property
    def down(self) -> Callable[[Tensor], Tensor]:
        """The second linear layer."""

    def activated(self, x: Tensor) -> Tensor:
        """[s, b, h] to the input of `down`."""


class MixtureOfExperts(nn.Module):
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
        shared: SharedExperts | None = None,
        number: int = 0,
    ):
        super().__init__()
        self.settings, self.number = settings, number
        self.tensor, self.expert = tensor, expert
        self.router = Router(settings, hidden_size, tensor)
        self.experts = ExpertMLPs(settings, hidden_size, activation, expert)
        self.shared = shared
        self.statistics = RouterStatistics()

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] to [s, b, h]; s/t under sequence parallelism."""
        tensor, settings = self.tensor, self.settings
        own = x if tensor.sequence_parallel else scatter_to_tensor_axis(x, tensor)  # [s/t, b, h]
        logits, scores, preferences = self.router(own)  # fp32 [s/t, b, E]
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
            own.flatten(0, 1), routes, settings.per_token, self.expert, deferral=deferral
        )
        inner = x if self.shared is None else self.shared.activated(x)
        gates = with_router_losses(
            gates,
            Routing(logits, scores, preferences, chosen.view(*logits.shape[:2], -1)),
            settings=settings,
            axis=self.expert,
            gradient_scale=self.gradient_scale,
            statistics=self.statistics,
            computed=sum(routes.rows),
        )
        rows = arrived()
        del arrived  # which keeps the rows that were sent
        returned = begin_combine(
            self.experts(rows, routes.rows, up_deferral=deferral), gates, routes, self.expert
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
        experts = self.experts
        is_deferred = experts.deferral is not None
        if self.expert.size == 1 or is_deferred or not torch.is_grad_enabled():
            return None
        return DeferralToExchange([getattr(experts, f"up_{number}") for number in experts.numbers])

    def bias_here(self) -> None:
        """Return None: experts have no output bias."""


class Router(nn.Module):
    """Logits, scores and preferences of the experts, in fp32 also if the weights are in 16 bits.

    The bias has the gradient zero. The engine changes it in each step, by the numbers of tokens of
    the experts (`threefold/engine/experts.py`).
    """

    def __init__(self, settings: Experts, hidden_size: int, tensor: TensorAxis):
        super().__init__()
        self.kind, self.tensor = settings.router, tensor
        sharding = Sharding((settings.count, hidden_size), role="output")
        self.weight = declared_parameter(sharding, tensor)
        self.bias = (
            declared_parameter(Sharding((settings.count,)), tensor) if settings.has_bias else None
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, h] to three times fp32 [s, b, E]; each tensor rank has other tokens.

        Returns:
            The logits; the scores; and the preferences, without gradient, which are the scores plus
            the biases, or without biases the logits.
        """
        logits = _RouterLogits.apply(x, copy_to_tensor_axis(self.weight, self.tensor), self.bias)
        scores = scores_of(logits, self.kind)
        if self.bias is None:
            return logits, scores, logits.detach()
        return logits, scores, scores.detach() + self.bias.detach().float()


class _RouterLogits(torch.autograd.Function):
    """F.linear in fp32, which keeps x in its own precision; the bias only gets a gradient: zero."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.bias = None if bias is None else bias.new_zeros(bias.shape)
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = (grad @ weight.float()).to(x.dtype)
        grad_weight = grad.flatten(0, 1).t() @ x.flatten(0, 1).float()
        return grad_x, grad_weight.to(weight.dtype), ctx.bias


class ExpertMLPs(Deferring, Fusing):
    """This rank's experts: the same MLP as in a dense layer, without biases.

    Each weight of an expert is a parameter of its own, so that its name and logical shape do not
    depend on the layout: `experts.up_5`, `experts.down_5`. With expert tensor parallelism, this
    rank has a share of the columns of `up` and of the rows of `down`, so that its outputs are terms
    of a sum over the tensor ranks.
    """

    def __init__(self, settings: Experts, hidden_size: int, activation: str, axis: ExpertAxis):
        super().__init__()
        h, f = hidden_size, settings.ffn_hidden_size
        self.activation = activation
        blocks = (f, f) if activation == "swiglu" else (f,)  # gate|up, or up
        up = Sharding((sum(blocks), h), 0, blocks, of_expert=True, role="hidden")
        down = Sharding((h, f), 1, (f,), of_expert=True, role="hidden")
        self.numbers = axis.experts_here(settings.count)
        # All weights of a kind are adjacent in the optimizer's tensor (`grouped_matmul.stack`).
        whole_up, whole_down = replace(up, dimension=None), replace(down, dimension=None, blocks=())
        for name, split, whole in (("up", up, whole_up), ("down", down, whole_down)):
            sharding = whole if axis.columns.size == 1 else split
            for number in self.numbers:
                parameter = declared_parameter(sharding, axis.tensor)
                self.register_parameter(f"{name}_{number}", parameter)

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
        up, down = (
            [getattr(self, f"{name}_{number}") for number in self.numbers]
            for name in ("up", "down")
        )
        # m differs between micro-batches. Fewer than two rows would be compiled separately.
        fuse = for_any_rows(self.fuse) if len(x) > 1 else as_written
        x = grouped_matmul(x, up, rows, up_deferral or self.deferral)
        if self.activation == "swiglu":
            x = swiglu(x, fuse)
        else:
            x = gelu(x, None, fuse, exact=self.activation == "gelu_erf")
        return grouped_matmul(x, down, rows, self.deferral)


def expert_layers(module: nn.Module) -> list[MixtureOfExperts]:
    """Return the mixture-of-experts layers of a module, in order."""
    return [layer for layer in module.modules() if isinstance(layer, MixtureOfExperts)]
