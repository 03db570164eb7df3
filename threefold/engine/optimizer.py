"""The optimizer: groups of parameters with one update rule each, Muon, and QK-clip.

Muon updates hidden matrices, and AdamW the other parameters.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.attention import AttentionCore
from models.config import ModelConfig
from models.cost import NEWTON_SCHULZ_ITERATIONS
from models.initialization import (
    Algorithm,
    epsilon_factor,
    learning_rate_factor,
    weight_decay_factor,
)
from models.kernels.attention_parts import LargestLogits
from models.parallel.collectives import TensorAxis
from models.sharding import place_of, sharding_of
from models.transformer import Block
from threefold.checkpoint.state import STATES, TrainingState, initial_state
from threefold.config.optimization import Optimizer
from threefold.engine.experts import EXPERTS, is_marked
from threefold.pipeline.gradients import (
    deferring_parameters,
    divide_into_buckets,
    units_of_experts,
)
from threefold.pipeline.stage import Stage

# Division of the parameters into optimizer groups.


@dataclass(frozen=True)
class UpdateRule:
    """Settings of the optimizer for a parameter.

    Attributes:
        algorithm: "muon" for hidden matrices if the recipe chooses it, otherwise "adamw"
        learning_rate_factor: learning rate relative to that of the step
        weight_decay: decoupled weight decay, multiplied by the learning rate of the parameter
        epsilon: the term in AdamW's denominator
    """

    algorithm: Algorithm
    learning_rate_factor: float
    weight_decay: float
    epsilon: float


def rule_of(
    name: str, parameter: nn.Parameter, model: ModelConfig, settings: Optimizer
) -> UpdateRule:
    """Return the rule of a parameter, scaled as the model's parametrization requires.

    Args:
        name: logical name
        parameter: the parameter, whose declaration has its role
    """
    place = place_of(name, sharding_of(parameter).role)
    algorithm: Algorithm = "muon" if place.role == "hidden" and settings.kind == "muon" else "adamw"
    decay = settings.weight_decay * weight_decay_factor(model, place, algorithm)
    return UpdateRule(
        algorithm=algorithm,
        learning_rate_factor=learning_rate_factor(model, place, algorithm),
        weight_decay=0.0 if place.role == "vector" else decay,
        epsilon=settings.epsilon * epsilon_factor(model, place),
    )


def rules_of(
    parameters: Iterable[tuple[str, nn.Parameter]], model: ModelConfig, settings: Optimizer
) -> dict[nn.Parameter, UpdateRule]:
    """Return the rule of each parameter."""
    return {weight: rule_of(name, weight, model, settings) for name, weight in parameters}


def parameter_groups(
    model: nn.Module, rules: Mapping[nn.Parameter, UpdateRule], *, bucket: int
) -> list[dict[str, Any]]:
    """Divide the parameters into groups, each with one rule, in the form of torch's optimizers.

    With expert parallelism, only some data ranks hold the same experts. These experts are in groups
    of their own, which ZeRO divides among those ranks only. In a stage of a pipeline, each group is
    a bucket of gradients.

    Args:
        model: a stage of a pipeline, or a model with all layers
        bucket: maximum number of elements of a bucket
    """
    if isinstance(model, Stage):
        groups = buckets_of_stage(model, rules, elements=bucket)
    else:
        parameters = list(model.parameters())
        kinds = _kinds_of(parameters, rules, set())
        groups = divide_into_buckets([parameters], elements=sys.maxsize, kinds=kinds, units={})
    return [_group(parameters, rules[parameters[0]]) for parameters in groups]


def _group(parameters: list[nn.Parameter], rule: UpdateRule) -> dict[str, Any]:
    """Return a group; `moe` and `name` are keys of DeepSpeed."""
    group = {
        "params": parameters,
        "algorithm": rule.algorithm,
        "learning_rate_factor": rule.learning_rate_factor,
        "weight_decay": rule.weight_decay,
        "eps": rule.epsilon,
    }
    return group | ({"moe": True, "name": EXPERTS} if is_marked(parameters[0]) else {})


def buckets_of_stage(
    stage: Stage, rules: Mapping[nn.Parameter, UpdateRule], *, elements: int
) -> list[list[nn.Parameter]]:
    """Divide the parameters of a stage into buckets; tied ones are in the last buckets."""
    chunks = [list(stage.parameters_of_chunk(n)) for n in range(stage.pipeline.virtual_stages)]
    untied = {parameter for chunk in chunks for parameter in chunk}
    tied = [parameter for parameter in stage.parameters() if parameter not in untied]
    deferred = deferring_parameters(stage) if stage.pipeline.splits else set()
    kinds = _kinds_of(stage.parameters(), rules, deferred)
    return divide_into_buckets(
        [*chunks, tied], elements=elements, kinds=kinds, units=units_of_experts(stage)
    )


def _kinds_of(
    parameters: Iterable[nn.Parameter],
    rules: Mapping[nn.Parameter, UpdateRule],
    deferred: set[nn.Parameter],
) -> dict[nn.Parameter, tuple[UpdateRule, bool, bool]]:
    """Return what separates the groups: rule, experts of few ranks, deferred weight gradients."""
    return {weight: (rules[weight], is_marked(weight), weight in deferred) for weight in parameters}


# Muon, and AdamW in the same optimizer.

(MOMENTUM,) = STATES["muon"]


# Replaces logical matrices by their updates, in place: this rank's shards of the flat tensors, by
# `id` of the tensor of its weights, and a function to call while elements are exchanged.
Orthogonalize = Callable[[Mapping[int, Tensor], Callable[[], None]], None]


class Muon(torch.optim.Optimizer):
    """Muon (Moonlight, arXiv 2502.16982, equations 1 to 4) for some groups, AdamW for the others.

    Groups whose key `algorithm` is "muon" hold hidden matrices. The update of a matrix is

        momentum = beta * momentum + gradient
        update   = 0.2 * sqrt(max(rows, columns)) * orthogonalize(gradient + beta * momentum)
        weight   = weight - rate * (weight_decay * weight + update)

    where the sum in the second line is Nesterov's momentum. The factor gives the update the root
    mean square that updates of AdamW usually have. DeepSpeed passes each group as one flat tensor,
    this rank's shard, so that `exchange` has to gather the matrices.

    Like torch's fused AdamW, it divides the gradients by the attribute `grad_scale`, if it exists.

    Args:
        groups: the groups of `parameter_groups`
        betas: decay rates of AdamW's moments
        momentum: beta of Muon
    """

    grad_scale: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        momentum: float,
    ):
        # AdamW takes the groups and the state of this optimizer in each step.
        self.adamw = torch.optim.AdamW([torch.zeros(1)], lr=lr, betas=betas, fused=True)
        super().__init__(groups, self.adamw.defaults | {"momentum": momentum})
        self.exchange: Orthogonalize | None = None  # set when the flat tensors exist

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all groups that have gradients; collective within the ranks of the exchange."""
        updated = [
            (weights, group)
            for group in self.param_groups
            if group["algorithm"] == "muon"
            for weights in group["params"]
            if weights.grad is not None
        ]
        updates = {
            id(weights): self._add_momentum(weights, group["momentum"])
            for weights, group in updated
        }
        if not updates:
            self._step_adamw()
            return
        assert self.exchange is not None, "the exchange of matrices is not set"
        self.exchange(updates, self._step_adamw)
        for weights, group in updated:
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(weights.grad, alpha=-group["lr"])

    def _add_momentum(self, weights: Tensor, beta: float) -> Tensor:
        """Update the momentum, and replace the gradient by Nesterov's momentum."""
        state = initial_state(self.state, weights, (MOMENTUM,))
        gradient = weights.grad
        assert gradient is not None
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        momentum = state[MOMENTUM].mul_(beta).add_(gradient)
        state["step"] += 1
        return gradient.add_(momentum, alpha=beta)

    def _step_adamw(self) -> None:
        adamw = self.adamw
        adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        adamw.state = self.state
        adamw.grad_scale = self.grad_scale  # type: ignore[attr-defined]
        adamw.step()


# Orthogonalization of matrices by Newton-Schulz iterations.

# From Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/); Moonlight uses them, too.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7  # added to the norm


@torch.no_grad()
def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices with the same singular vectors, whose singular values are close to 1.

    Each iteration replaces X by a X + (b A + c A^2) X with A = X X^T. With these coefficients, the
    singular values end between about 0.7 and 1.2. Computes in the type of the input; Muon's
    authors use bf16.

    Args:
        matrices: [n, rows, columns]

    Returns:
        Tensor of the same shape and type.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # [n, short, long]
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPSILON)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT  # [n, short, short]
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b A + c A^2
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


# QK-clip: rescale queries and keys of heads whose attention logits exceed a limit (Kimi K2, Kimi
# Team 2025, arXiv 2507.20534, section 2.1 and algorithm 1). Muon lets the logits of a few heads
# grow without bound. After an update, the weights of each head whose largest logit S of the step
# exceeds `optimizer.qk_clip` = t are rescaled so that the same tokens would have logits t / S times
# as large. The rescaling has no state: the next step begins without a maximum.


class QueryKeyClip:
    """Finds the largest logit of each head in a step, and rescales the heads above the limit.

    L layers with attention, prediction modules last; a heads.

    Args:
        module: this rank's part of the model; its attention begins to note logits
        limit: `optimizer.qk_clip`
        tensor: the tensor axis, which divides the heads
    """

    def __init__(self, module: nn.Module, model: ModelConfig, *, limit: float, tensor: TensorAxis):
        self.limit, self.tensor = limit, tensor
        self.shape = model.layers + model.prediction_depth, model.heads
        self.layers: dict[int, AttentionCore] = {
            block.number: block.attention for block in module.modules() if isinstance(block, Block)
        }
        self._largest: Tensor | None = None  # of this step
        for layer in self.layers.values():
            layer.largest_logits = LargestLogits(layer.heads)

    def reset(self) -> None:
        """Forget the logits, before a step."""
        self._largest = None
        for layer in self.layers.values():
            assert layer.largest_logits is not None
            layer.largest_logits.reset()

    def largest(self, device: torch.device) -> Tensor:
        """Return the largest logit of each head in the global batch, fp32 [L, a], on the host.

        The first call of a step is collective: an all-reduce over all ranks, of which each knows
        the maxima of its stage's layers, its heads and its tokens.
        """
        if self._largest is None:
            largest = torch.full(self.shape, float("-inf"), device=device)
            for number, layer in self.layers.items():
                assert layer.largest_logits is not None
                if layer.largest_logits.values is not None:
                    largest[number, self._heads(layer)] = layer.largest_logits.values
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self._largest = largest.cpu()
        return self._largest

    def _heads(self, layer: AttentionCore) -> slice:
        return slice(self.tensor.rank * layer.heads, (self.tensor.rank + 1) * layer.heads)

    @torch.no_grad()
    def rescale(self, optimizer: torch.optim.Optimizer, state: TrainingState) -> None:
        """Rescale the fp32 weights that an optimizer step has just updated.

        DeepSpeed calls the optimizer with some groups at a time, or with all of them. Each flat is
        in one of these calls, so that it is rescaled once. Afterwards DeepSpeed copies the weights
        into the model and to the other data ranks.
        """
        flats = state.weights
        factors = self._factors(flats[0].device)
        if not factors:
            return
        updated = {id(flat) for group in optimizer.param_groups for flat in group["params"]}
        for fragment in state.fragments:
            parameter, flat = state.parameters[fragment.name], flats[fragment.flat]
            rows = factors.get(id(parameter))
            if rows is None or id(flat) not in updated:
                continue
            columns = prod(sharding_of(parameter).shape[1:])
            first, last = fragment.elements.start // columns, -(-fragment.elements.stop // columns)
            start = fragment.elements.start - first * columns
            own = rows[first:last].repeat_interleave(columns)[start:][: len(fragment.elements)]
            flat[fragment.offset :][: len(own)] *= own

    def _factors(self, device: torch.device) -> dict[int, Tensor]:
        """Return the factors of the rows of the parameters to rescale, by `id`; collective."""
        largest = self.largest(device)
        factors: dict[int, Tensor] = {}
        for number, layer in self.layers.items():
            logits = largest[number, self._heads(layer)]
            exceeds = logits > self.limit
            if exceeds.any():
                of_heads = torch.where(exceeds, self.limit / logits, 1.0)
                for parameter, rows in layer.rescaled_rows(of_heads):
                    factors[id(parameter)] = rows.to(device)
        return factors
