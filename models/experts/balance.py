"""Losses that balance the experts, and counts of tokens, with values that no layout changes.

The balance loss is defined per sequence and the z-loss per token; both are averaged over the global
batch. Micro-batches and ranks therefore only divide the sums. (transformers pools all layers and
the local batch, so that its balance loss depends on the batch of a rank.)

s tokens of each sequence on this rank, b micro-batch, E experts, k experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import Experts
from models.experts.routing import (
    ExpertAxis,
    Routing,
    count_tokens,
    probabilities_of,
    smallest_margin,
    smallest_margin_of_groups,
)


@dataclass
class RouterStatistics:
    """Statistics of one layer's router on this rank, over the micro-batches of a step.

    They are noted in the backward pass, because a forward pass may be recomputed.

    counts: number of tokens of each expert, int64 [E]; None before the first micro-batch
    balance: sum of the balance losses of the micro-batches
    z: sum of the z-losses of the micro-batches
    margin: smallest difference between the preferences of a chosen and an unchosen expert, or half
        of that between the scores of a chosen and an unchosen group; None before the first
        micro-batch. Validation is included.
    computed: number of rows that this rank's experts, or shares of experts, computed
    """

    counts: Tensor | None = None
    balance: Tensor | float = 0.0
    z: Tensor | float = 0.0
    margin: Tensor | None = None
    computed: int = 0

    def note(
        self, counts: Tensor, balance: Tensor, z: Tensor, margin: Tensor, computed: int = 0
    ) -> None:
        """Add the statistics of a micro-batch, without waiting for the device."""
        self.counts = counts if self.counts is None else self.counts + counts
        self.balance, self.z = self.balance + balance, self.z + z
        self.computed += computed
        self.note_margin(margin)

    def note_margin(self, margin: Tensor) -> None:
        """Note the smallest margin of a micro-batch."""
        self.margin = margin if self.margin is None else torch.minimum(self.margin, margin)

    def reset(self) -> None:
        """Forget everything, before a step."""
        vars(self).update(vars(RouterStatistics()))


def with_router_losses(
    gates: Tensor,
    routing: Routing,
    *,
    settings: Experts,
    axis: ExpertAxis,
    gradient_scale: Callable[[], float],
    statistics: RouterStatistics,
    computed: int = 0,
) -> Tensor:
    """Return the gates; their backward pass adds the gradients of the router's losses.

    Args:
        gates: weights of the chosen experts, fp32 [s * b, k]
        settings: the router, and the factors of its losses
        gradient_scale: returns the gradient of a micro-batch's loss in the coming backward pass
        statistics: receives the statistics in the backward pass
        computed: number of rows that this rank's experts compute
    """
    chosen = routing.chosen
    margin = smallest_margin(routing.preferences.flatten(0, 1), chosen.flatten(0, 1))
    if routing.group_scores is not None:
        of_groups = smallest_margin_of_groups(routing.group_scores, settings.groups_per_token)
        margin = torch.minimum(margin, of_groups)
    if not torch.is_grad_enabled():
        statistics.note_margin(margin)
        return gates
    counts = count_by_sequence(chosen, routing.scores.shape[-1])
    weights = (settings.balance_loss, settings.z_loss)
    # Without a factor, a loss is only reported: it keeps nothing for the backward pass.
    scores = routing.scores if weights[0] else routing.scores.detach()
    probabilities = probabilities_of(scores, settings.router)
    balance = balance_loss(probabilities, counts, chosen.shape[-1], axis)
    z = z_loss(routing.logits if weights[1] else routing.logits.detach(), axis)
    return _Attach.apply(
        gates, balance, z, counts.sum(0), margin, weights, gradient_scale, statistics, computed
    )


def count_by_sequence(chosen: Tensor, experts: int) -> Tensor:
    """Count the tokens of each sequence and expert: int64 [s, b, k] to [b, E]."""
    sequences = chosen.shape[1]
    places = torch.arange(sequences, device=chosen.device)[:, None] * experts + chosen
    return count_tokens(places.flatten(), sequences * experts).view(sequences, -1)


def balance_loss(probabilities: Tensor, counts: Tensor, k: int, axis: ExpertAxis) -> Tensor:
    """Return this rank's part of the balance loss, averaged over its sequences: [].

    For a sequence it is the sum over experts of the fraction of tokens that use the expert, times
    E / k, times the mean probability of the expert (DeepSeek-V3, arXiv 2412.19437, equations 17 to
    20). It is 1 if all experts are used equally. The mean over context ranks of the sum over tensor
    ranks is the loss of the whole sequence; the fractions need the counts of all these ranks.

    Args:
        probabilities: of each token's experts, with the sum 1, fp32 [s, b, E]
        counts: tokens of each sequence and expert on this rank, [b, E]
    """
    tokens, sequences, experts = probabilities.shape
    counts = sum_over_sequence(counts, axis)
    fractions = counts.float() * (experts / (k * tokens * axis.sequence_size))
    mean = probabilities.sum(0) / (tokens * axis.tensor.size)  # [b, E]
    return (fractions * mean).sum() / sequences


def sum_over_sequence(counts: Tensor, axis: ExpertAxis) -> Tensor:
    """Return the counts of whole sequences, from those of this rank's tokens; collective."""
    if axis.sequence_size > 1:
        counts = counts.clone()
        dist.all_reduce(counts, group=axis.sequence_group)
    return counts


def z_loss(logits: Tensor, axis: ExpertAxis) -> Tensor:
    """Return this rank's part of the mean squared logsumexp of the logits [s, b, E]: [].

    Zoph et al. 2022 (arXiv 2202.08906, equation 5). Parts are added as those of the balance loss.
    """
    tokens = logits.shape[0] * logits.shape[1] * axis.tensor.size
    return logits.logsumexp(dim=-1).square().sum() / tokens


class _Attach(torch.autograd.Function):
    """The gates; backward: also the gradients of the losses, and the statistics are noted."""

    @staticmethod
    def forward(
        ctx, gates, balance, z, counts, margin, weights, gradient_scale, statistics, computed
    ):
        ctx.weights, ctx.gradient_scale = weights, gradient_scale
        ctx.statistics, ctx.computed = statistics, computed
        ctx.save_for_backward(counts, balance, z, margin)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, grad):
        counts, balance, z, margin = ctx.saved_tensors
        ctx.statistics.note(counts, balance, z, margin, ctx.computed)
        scale = ctx.gradient_scale()
        gradients = [torch.full_like(balance, weight * scale) for weight in ctx.weights]
        return grad, *gradients, None, None, None, None, None, None
