"""The router, the routes of tokens to experts and back, and the axis of the experts.

n tokens of this rank, E experts in G groups, k experts per token. Everything here is in fp32,
because rounding would change the choice of experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from models.config import Router
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
