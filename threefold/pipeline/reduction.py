"""Sums of buckets over the data ranks; each rank gets the shard that it owns.

ZeRO divides the flat tensor of a bucket into equal shards, one for each data rank, and only the
owner of a shard updates the weights in it. A sum is therefore needed on one rank only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel.collectives import reduce_scatter_single, wait_for

MAX_RUNNING = 2  # sums that run at the same time, because their inputs are freed afterwards


@dataclass(frozen=True)
class _Running:
    """A sum that runs in the background.

    number: number of the bucket
    is_last: no other sum of the bucket follows in the step
    total: the part of `sent` in which the sum of this rank's shard arrives
    in_place: `sent` is the flat tensor itself
    sent: the input of the collective, which must be kept until the sum is complete
    """

    number: int
    is_last: bool
    total: Tensor
    in_place: bool
    sent: Tensor
    work: dist.Work


class ShardedReduction:
    """Averages buckets over the data ranks in the background, by a reduce-scatter of each.

    Each rank sends (n - 1) / n of a bucket's bytes to the n - 1 other ranks.

    groups: the process group of the data ranks that divide each bucket
    same_shard: the group of the data ranks that hold the same shards. After the last reduce-scatter
        of a bucket in a step, its shard is all-reduced over this group in fp32, while later buckets
        are still being reduced. None: no hybrid sharding
    dtype: type in which gradients are sent and summed
    ranks: number of all data ranks, the divisor of every sum. The group of an expert's bucket is
        smaller, but its gradients come from the tokens of all data ranks.
    divided_before: divisor of the gradients before the sum; the rest of the division by the number
        of ranks follows after the sum
    at_once: number of sums that may run at the same time; only with `accumulated` or `same_shard`
    accumulated: the fp32 shards to which each sum is added (ZeRO-2); None: each bucket is summed
        once in a step, and its flat tensor receives the sum (ZeRO-1)
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        *,
        dtype: torch.dtype,
        ranks: int,
        same_shard: dist.ProcessGroup | None = None,
        divided_before: float = 1.0,
        at_once: int = MAX_RUNNING,
        accumulated: Sequence[Tensor] | None = None,
    ):
        self.groups, self.dtype, self.same_shard = groups, dtype, same_shard
        self.divisor, self.divided_before = ranks, divided_before
        self.sizes = [dist.get_world_size(group) for group in groups]
        self.ranks = [dist.get_rank(group) for group in groups]
        self.at_once, self.accumulated = at_once, accumulated
        self.running: list[_Running] = []
        self.between: list[dist.Work] = []  # sums over `same_shard`
        self.shards: dict[int, Tensor] = {}  # of the buckets that have a sum in this step

    def begin(self, number: int, flat: Tensor, *, is_last: bool = True) -> None:
        """Begin to sum a bucket, which must not be read or changed any more.

        Args:
            number: number of the bucket
            flat: its gradients on this rank
            is_last: no other sum of the bucket follows in the step
        """
        if self.sizes[number] == 1:
            self._take(number, flat if self.accumulated else flat.float(), is_last=is_last)
            return
        if self.divided_before != 1.0:
            flat.div_(self.divided_before)
        sent = flat.to(self.dtype)  # the same tensor if it has this type
        total = sent.chunk(self.sizes[number])[self.ranks[number]]
        work = reduce_scatter_single(total, sent, group=self.groups[number], async_op=True)
        self.running.append(_Running(number, is_last, total, sent is flat, sent, work))
        must_end = self.accumulated is not None or self.same_shard is not None
        if must_end and len(self.running) > self.at_once:
            self._end(self.running.pop(0))

    def finish(self) -> list[Tensor]:
        """Wait for all sums; return the average of this rank's shard of each bucket, in fp32.

        With ZeRO-1 and fp32 a shard is a part of the flat tensor, so that nothing is copied; the
        other parts hold no meaningful values afterwards.
        """
        while self.running:
            self._end(self.running.pop(0))
        shards = [self.shards.pop(number) for number in range(len(self.groups))]
        while self.between:
            wait_for(self.between.pop(0))
        if self.divisor > 1:  # the shards are in fp32, so that the quotient is rounded only once
            for shard, size in zip(shards, self.sizes, strict=True):
                shard.div_(self.divisor / (self.divided_before if size > 1 else 1.0))
        return shards

    def _end(self, each: _Running) -> None:
        """Wait for a sum."""
        wait_for(each.work)
        total = each.total
        in_place = each.in_place and total.dtype == torch.float32
        if self.accumulated is None and not in_place:  # a copy frees the rest of the sent tensor
            total = total.to(torch.float32, copy=True)
        self._take(each.number, total, is_last=each.is_last)

    def _take(self, number: int, total: Tensor, *, is_last: bool) -> None:
        """Add a sum to the shard of a bucket; after the last one, begin the sum over the groups."""
        if self.accumulated is None:
            self.shards[number] = total
        elif number in self.shards:
            self.shards[number].add_(total)
        else:
            self.shards[number] = self.accumulated[number].copy_(total)
        if is_last and self.same_shard is not None:
            shard = self.shards[number]
            self.between.append(dist.all_reduce(shard, group=self.same_shard, async_op=True))
