"""The router, its losses, the routes of tokens to experts and back, and the axis of the experts.

n tokens of this rank, E experts in G groups, k experts per token. Logits and scores are in fp32,
because rounding would change the choice of experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import Experts, Router
from models.experts.overlap import Turns
from models.parallel.collectives import TensorAxis, all_gather_single

SMALLEST_SUM = 1e-20  # of a token's weights: all sigmoids may underflow to zero


@dataclass(frozen=True)
class Routing:
    """Result of a layer's router for a micro-batch.

    Attributes:
        logits: fp32 [s, b, E]
        scores: the result of `scores_of`, fp32 [s, b, E]
        preferences: the numbers by which the experts were chosen, fp32 [s, b, E]
        chosen: numbers of the chosen experts, int64 [s, b, k]
        group_scores: the numbers by which the groups were chosen, fp32 [s, b, G]; None: a token may
            use the experts of all groups
    """

    logits: Tensor
    scores: Tensor
    preferences: Tensor
    chosen: Tensor
    group_scores: Tensor | None = None


def scores_of(logits: Tensor, router: Router) -> Tensor:
    """Return the affinities of tokens and experts, between 0 and 1: fp32, shape of the logits.

    They are the sigmoid of each logit (DeepSeek-V3, arXiv 2412.19437, equation 15) or the softmax
    over all experts.
    """
    return logits.sigmoid() if router == "sigmoid" else logits.softmax(dim=-1)


def probabilities_of(scores: Tensor, router: Router) -> Tensor:
    """Return the scores with the sum 1 over the experts (arXiv 2412.19437, equation 19)."""
    return (
        scores / (scores.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        if router == "sigmoid"
        else scores
    )


def choose_experts(preferences: Tensor, k: int) -> Tensor:
    """Return the numbers of the k experts with the largest preferences: [n, E] to int64 [n, k].

    They are in descending order of their preferences. Of equal preferences, the expert with the
    smaller number comes first, on every device; `torch.topk` does not define the order.

    Args:
        preferences: the logits, or the scores plus the biases
    """
    ranked = torch.sort(preferences, dim=-1, descending=True, stable=True).indices
    return ranked[:, :k].contiguous()  # a view would keep all E numbers for the backward pass


def limit_to_groups(preferences: Tensor, groups: int, k: int) -> tuple[Tensor, Tensor]:
    """Exclude the experts outside of each token's k best groups (DeepSeek-V3, arXiv 2412.19437).

    The score of a group is the sum of its two largest preferences, as in `DeepseekV3TopkRouter` of
    transformers. Of equal scores, the group with the smaller number comes first.

    Args:
        preferences: the scores plus the biases, [..., E]
        groups: G, the number of groups of adjacent experts

    Returns:
        The preferences, with minus infinity for excluded experts: [..., E]. The scores of the
        groups: [..., G].
    """
    by_group = preferences.unflatten(-1, (groups, -1))  # [..., G, E/G]
    group_scores = by_group.topk(2).values.sum(-1)  # [..., G]
    ranked = torch.sort(group_scores, dim=-1, descending=True, stable=True).indices
    is_excluded = torch.zeros_like(group_scores, dtype=torch.bool)
    is_excluded.scatter_(-1, ranked[..., k:], True)
    return by_group.masked_fill(is_excluded[..., None], -torch.inf).flatten(-2), group_scores


def gates_of(scores: Tensor, chosen: Tensor, *, sum_is_one: bool, scale: float = 1.0) -> Tensor:
    """Return the weights of the chosen experts' outputs: fp32 [n, k].

    With softmax, dividing by the sum gives the softmax over the chosen experts (Mixtral, arXiv
    2401.04088, section 2.1).

    Args:
        scores: [n, E], the result of `scores_of`
        chosen: [n, k], the result of `choose_experts`
        sum_is_one: divide the weights of a token by their sum (`norm_topk_prob` in transformers)
        scale: factor of all weights (`routed_scaling_factor` in transformers)
    """
    gates = scores.gather(1, chosen)
    if sum_is_one:
        gates = gates / (gates.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return gates if scale == 1.0 else gates * scale


def smallest_margin(preferences: Tensor, chosen: Tensor) -> Tensor:
    """Return the smallest difference between a last chosen and a first unchosen expert: [].

    Two layouts round differently. If a margin is below their difference, a token may get another
    expert in another layout. Infinite if every token uses all experts.

    Args:
        preferences: [n, E], from which the experts were chosen
        chosen: [n, k]
    """
    last = preferences.gather(1, chosen[:, -1:])
    others = preferences.scatter(1, chosen, -torch.inf)
    return (last - others).min()


def smallest_margin_of_groups(group_scores: Tensor, k: int) -> Tensor:
    """Return half of the smallest difference between a last chosen and a first unchosen group: [].

    A group's score is the sum of two preferences. The choice of groups therefore stays the same as
    long as no preference changes by more than half of the returned number, as for
    `smallest_margin`.

    Args:
        group_scores: [..., G], the second result of `limit_to_groups`
        k: groups per token, less than G
    """
    ranked = group_scores.sort(dim=-1, descending=True).values
    return (ranked[..., k - 1] - ranked[..., k]).min() / 2


# The expert axis: ranks that hold different experts of the same layers.


@dataclass(frozen=True)
class ExpertAxis:
    """The expert axis from the perspective of one rank.

    group: ranks of one stage, each with an equal share of the experts: `layout.expert` x
        `layout.tensor` ranks, or with expert tensor parallelism `layout.expert` ranks
    sequence_group: the ranks that hold tokens of the same sequences, over the context and the
        tensor axis; None: this rank has whole sequences
    sequence_size: number of ranks in `sequence_group`
    tensor: the tensor axis, whose ranks divide the tokens of a context rank among them
    columns: the tensor ranks that divide the columns of this rank's experts (expert tensor
        parallelism); of size 1: each rank has whole experts
    turns: switches to the paired pass before this rank waits for an exchange
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_group: dist.ProcessGroup | None = None
    sequence_size: int = 1
    tensor: TensorAxis = field(default_factory=TensorAxis)
    columns: TensorAxis = field(default_factory=TensorAxis)
    turns: Turns = field(default_factory=Turns, compare=False)

    def experts_here(self, experts: int) -> range:
        """Return the numbers of this rank's experts, of `experts` in all."""
        share = experts // self.size
        return range(self.rank * share, (self.rank + 1) * share)


# The routes of a micro-batch's tokens to their experts and back.
#
# n tokens of this rank, k experts per token, E experts, r expert ranks, c tensor ranks that divide
# an expert (1 without expert tensor parallelism), m rows that this rank's experts compute.


@dataclass(frozen=True)
class Routes:
    """The way of a micro-batch's tokens to their experts and back.

    tokens: for each sent row, the index of its token, int64 [n * k]
    sent_rows: for each token and each of its experts, the index of the sent row, int64 [n, k]
    sent: number of rows sent to each expert rank
    received: number of rows received from each expert rank
    gathered: number of rows that each of the c tensor ranks has received
    arrangement: for each row of this rank's experts, its index in the gathered rows; None: the
        rows are in this order
    inverse_arrangement: for each gathered row, its index in the rows of this rank's experts; None
        as `arrangement`
    rows: number of rows of each of this rank's experts
    """

    tokens: Tensor
    sent_rows: Tensor
    sent: list[int]
    received: list[int]
    gathered: list[int]
    arrangement: Tensor | None
    inverse_arrangement: Tensor | None
    rows: list[int]


def plan_routes(chosen: Tensor, experts: int, axis: ExpertAxis) -> Routes:
    """Return the routes of tokens; collective over the expert group and the tensor group.

    It waits for the device, because the counts determine shapes.

    Args:
        chosen: numbers of the experts of each token, int64 [n, k]
    """
    flat = chosen.flatten()
    # Computed before the host waits, so that the device has less to wait for afterwards.
    order = flat.argsort(stable=True)
    tokens, sent_rows = order // chosen.shape[1], inverse(order).view(chosen.shape)
    counts = count_tokens(flat, experts).view(axis.size, -1)  # [r, E/r]
    columns = axis.columns
    if axis.size == columns.size == 1:
        ((rows,),) = on_host([counts], len(flat))
        all_rows = [len(flat)]
        return Routes(tokens, sent_rows, all_rows, all_rows, all_rows, None, None, rows)
    counts_here = counts  # of this rank's experts, from each rank
    if axis.size > 1:
        counts_here = torch.empty_like(counts)
        dist.all_to_all_single(counts_here, counts, group=axis.group)
    tables = counts_here.unsqueeze(0)  # [c, r, E/r]
    if columns.size > 1:
        tables = counts_here.new_empty((columns.size, *counts_here.shape))
        all_gather_single(tables.flatten(0, 1), counts_here, group=columns.group)
    to_ranks, *from_ranks = on_host([counts, *tables], len(flat))
    gathered = [sum(map(sum, of_column)) for of_column in from_ranks]
    arrangement = _by_expert(tables.flatten(0, 1), sum(gathered))
    return Routes(
        tokens=tokens,
        sent_rows=sent_rows,
        sent=[sum(of_rank) for of_rank in to_ranks],
        received=[sum(of_rank) for of_rank in from_ranks[columns.rank]],
        gathered=gathered,
        arrangement=arrangement,
        inverse_arrangement=inverse(arrangement),
        rows=[sum(of_expert) for of_expert in zip(*chain(*from_ranks), strict=True)],
    )


def inverse(permutation: Tensor) -> Tensor:
    """Return the inverse of a permutation of 0 .. n - 1, int64 [n]."""
    places = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


def count_tokens(numbers: Tensor, count: int) -> Tensor:
    """Count how often each of the numbers 0 .. count - 1 occurs: int64 [n] to [count].

    On a GPU, `torch.bincount` would copy the largest number to the host.
    """
    return numbers.new_zeros(count).scatter_add_(0, numbers, torch.ones_like(numbers))


def on_host(counts: Sequence[Tensor], total: int) -> list[list[list[int]]]:
    """Copy counts of rows to the host, where they determine shapes; this waits for the device.

    A trace, whose tensors have no values, replaces this function by equal counts.

    Args:
        counts: tables [r, E/r]
        total: number of rows that this rank sends

    Returns:
        The tables, as lists [r][E/r].
    """
    return torch.stack(list(counts)).tolist()


def _by_expert(counts: Tensor, total: int) -> Tensor:
    """Return the indices that sort rows by expert, then by tensor and expert rank: int64 [m].

    Args:
        counts: gathered rows by tensor and expert rank, and by expert, [c * r, E/r]
        total: m
    """
    ranks, experts = counts.shape
    numbers = torch.arange(experts, device=counts.device).repeat(ranks)
    of_rows = numbers.repeat_interleave(counts.flatten(), output_size=total)
    return of_rows.argsort(stable=True)


# Losses that balance the experts, and counts of tokens, with values that no layout changes.
#
# The balance loss is defined per sequence and the z-loss per token; both are averaged over the
# global batch. Micro-batches and ranks therefore only divide the sums. (transformers pools all
# layers and the local batch, so that its balance loss depends on the batch of a rank.)
#
# s tokens of each sequence on this rank, b micro-batch, E experts, k experts per token.


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
