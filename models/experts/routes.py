"""The routes of a micro-batch's tokens to their experts and back.

n tokens of this rank, k experts per token, E experts, r expert ranks, c tensor ranks that divide an
expert (1 without expert tensor parallelism), m rows that this rank's experts compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from models.experts.axis import ExpertAxis
from models.parallel.collectives import all_gather_single


@dataclass(frozen=True)
class Routes:
    """The way of a micro-batch's tokens to their experts and back.

    order: for each sent row, the index in [n * k] of the pair of token and expert, int64 [n * k]
    inverse_order: for each pair of token and expert, the index of its sent row, int64 [n * k]
    sent: number of rows sent to each expert rank
    received: number of rows received from each expert rank
    gathered: number of rows that each of the c tensor ranks has received
    arrangement: for each row of this rank's experts, its index in the gathered rows; None: the
        rows are in this order
    inverse_arrangement: for each gathered row, its index in the rows of this rank's experts; None
        as `arrangement`
    rows: number of rows of each of this rank's experts
    """

    order: Tensor
    inverse_order: Tensor
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
        experts: E
        axis: the expert axis
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = count_tokens(flat, experts).view(axis.size, -1)  # [r, E/r]
    columns = axis.columns
    if axis.size == columns.size == 1:
        ((rows,),) = on_host([counts], len(flat))
        all_rows = [len(flat)]
        return Routes(order, inverse(order), all_rows, all_rows, all_rows, None, None, rows)
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
        order=order,
        inverse_order=inverse(order),
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
