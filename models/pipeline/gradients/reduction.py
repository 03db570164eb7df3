"""Sums of flat gradients over the data ranks; each rank gets the shard that it owns.

ZeRO divides the flat tensor of an optimizer group into equal shards, one for each data rank, and
only the owner of a shard updates the weights in it. A sum is therefore needed on one rank only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.parallel.collectives import reduce_scatter_single, wait_for

# A reduction to one owner passes through n - 1 ranks one after the other. If a bucket covers more
# shards than this, one all-reduce is faster than one reduction per owner.
MAX_OWNERS_IN_BUCKET = 4


@dataclass(frozen=True)
class Slot:
    """The elements [start, stop) of a flat tensor for a parameter and the padding after it."""

    flat: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Consecutive elements [start, stop) of a flat tensor that are summed together.

    parameters: the parameters whose gradients must be complete before the sum begins
    """

    flat: int
    start: int
    stop: int
    parameters: tuple[nn.Parameter, ...]


def plan_buckets(
    slots: Mapping[nn.Parameter, Slot], chunks: Sequence[Sequence[nn.Parameter]], *, elements: int
) -> list[Bucket]:
    """Divide the parameters of a stage into buckets, in the order in which they should complete.

    Within a chunk that is the reverse order of the layers: a bucket is complete when the backward
    pass has reached its first parameter. The order depends only on the arguments, so that all data
    ranks post the same collectives in the same order, as NCCL requires.

    Args:
        slots: the slot of each parameter
        chunks: the parameters of each chunk, in the order of the last passes; within a chunk in the
            order of the layers
        elements: maximum size of a bucket, unless a single parameter is larger
    """
    buckets = []
    for parameters in chunks:
        places = {parameter: place for place, parameter in enumerate(parameters)}
        of_chunk = []
        for flat in sorted({slots[each].flat for each in parameters}):
            held = [each for each in parameters if slots[each].flat == flat]
            held.sort(key=lambda each: slots[each].start, reverse=True)
            for group in _adjacent(held, slots, elements):
                start, stop = slots[group[-1]].start, slots[group[0]].stop
                of_chunk.append(Bucket(flat, start, stop, tuple(group)))
        of_chunk.sort(key=lambda bucket: -min(places[each] for each in bucket.parameters))
        buckets += of_chunk
    return buckets


def _adjacent(
    parameters: Sequence[nn.Parameter], slots: Mapping[nn.Parameter, Slot], elements: int
) -> list[list[nn.Parameter]]:
    """Group adjacent parameters, sorted from last to first, into runs of at most `elements`."""
    groups: list[list[nn.Parameter]] = []
    for each in parameters:
        slot = slots[each]
        if groups:
            highest, lowest = slots[groups[-1][0]], slots[groups[-1][-1]]
            if slot.stop == lowest.start and highest.stop - slot.start <= elements:
                groups[-1].append(each)
                continue
        groups.append([each])
    return groups


@dataclass(frozen=True)
class _Running:
    """A sum that runs in the background.

    start: index of the first element in the flat tensor
    total: the tensor in which the sum arrives on this rank; None if another rank owns it
    in_place: `total` is a view of the flat tensor
    sent: the input of the collective, which must be kept until the sum is complete
    """

    flat: int
    start: int
    total: Tensor | None
    in_place: bool
    sent: Tensor
    work: dist.Work


class ShardedReduction:
    """Averages flat tensors over the data ranks in the background, bucket by bucket.

    Traffic per link for a bucket of B bytes over n ranks: B if it is reduced to the owners of its
    elements, (n - 1) / n * B for the reduce-scatter of a whole flat tensor, and 2 (n - 1) / n * B
    for an all-reduce, which is used only for flat tensors with small shards.

    flats: one flat tensor per optimizer group, padded to a multiple of the number of data ranks
    groups: the process group of the data ranks of each flat tensor
    dtype: type in which gradients are sent and summed
    ranks: number of all data ranks, the divisor of every sum. The group of an expert's flat tensor
        is smaller, but its gradients come from the tokens of all data ranks.
    divided_before: divisor of the gradients before the sum; the rest of the division by the number
        of ranks follows after the sum
    """

    def __init__(
        self,
        flats: Sequence[Tensor],
        groups: Sequence[dist.ProcessGroup],
        *,
        dtype: torch.dtype,
        ranks: int,
        divided_before: float = 1.0,
    ):
        self.flats, self.groups, self.dtype = flats, groups, dtype
        self.divisor, self.divided_before = ranks, divided_before
        self.sizes = [dist.get_world_size(group) for group in groups]
        self.ranks = [dist.get_rank(group) for group in groups]
        self.running: list[_Running] = []

    def begin(self, bucket: Bucket) -> None:
        """Begin to sum a bucket; its gradients must not change any more."""
        flat = self.flats[bucket.flat]
        if self.sizes[bucket.flat] == 1:
            return
        part = flat[bucket.start : bucket.stop]
        if self.divided_before != 1.0:
            part.div_(self.divided_before)
        sent = part.to(self.dtype)  # the same tensor if it has this type
        shard = self._shard_size(bucket.flat)
        owners = range(bucket.start // shard, (bucket.stop - 1) // shard + 1)
        if sent.numel() == flat.numel():
            self._reduce_scatter(bucket.flat, sent)
        elif len(owners) > MAX_OWNERS_IN_BUCKET:
            self._all_reduce(bucket, sent)
        else:
            for owner in owners:
                first = max(bucket.start, owner * shard)
                last = min(bucket.stop, (owner + 1) * shard)
                self._reduce(
                    bucket.flat, sent[first - bucket.start : last - bucket.start], first, owner
                )

    def finish(self) -> list[Tensor]:
        """Wait for all sums; return the average of this rank's shard of each flat tensor, in fp32.

        A flat tensor in fp32 has the average in its own place, so that nothing is copied; the
        elements of other ranks' shards hold no meaningful values afterwards.
        """
        shards = [self._own_shard(number) for number in range(len(self.flats))]
        for each in self.running:
            wait_for(each.work)
            if each.total is not None and not each.in_place:
                first = each.start - self.ranks[each.flat] * self._shard_size(each.flat)
                shards[each.flat][first : first + each.total.numel()] = each.total
        self.running = []
        if self.divisor > 1:  # the shards are in fp32, so that the quotient is rounded only once
            for shard, size in zip(shards, self.sizes, strict=True):
                shard.div_(self.divisor / (self.divided_before if size > 1 else 1.0))
        return shards

    def _own_shard(self, number: int) -> Tensor:
        """Return this rank's shard of a flat tensor, or an empty fp32 tensor for its average."""
        size = self._shard_size(number)
        shard = self.flats[number].narrow(0, self.ranks[number] * size, size)
        if self.divisor == 1 or shard.dtype == torch.float32:
            return shard
        if self.sizes[number] == 1:  # no sum arrives
            return shard.float()
        return torch.empty_like(shard, dtype=torch.float32)

    def _shard_size(self, number: int) -> int:
        return self.flats[number].numel() // self.sizes[number]

    def _is_in_place(self, number: int) -> bool:
        """Return True if sums arrive in the flat tensor itself, because everything is in fp32."""
        return self.flats[number].dtype == self.dtype == torch.float32

    def _reduce(self, number: int, sent: Tensor, start: int, owner: int) -> None:
        group = self.groups[number]
        work = dist.reduce(sent, group_dst=owner, group=group, async_op=True)
        total = sent if owner == self.ranks[number] else None
        self.running.append(_Running(number, start, total, self._is_in_place(number), sent, work))

    def _reduce_scatter(self, number: int, sent: Tensor) -> None:
        size = self._shard_size(number)
        total = sent.new_empty(size)
        work = reduce_scatter_single(total, sent, group=self.groups[number], async_op=True)
        start = self.ranks[number] * size
        self.running.append(_Running(number, start, total, False, sent, work))

    def _all_reduce(self, bucket: Bucket, sent: Tensor) -> None:
        work = dist.all_reduce(sent, group=self.groups[bucket.flat], async_op=True)
        size = self._shard_size(bucket.flat)
        own = self.ranks[bucket.flat] * size
        first, last = max(bucket.start, own), min(bucket.stop, own + size)
        total = sent[first - bucket.start : last - bucket.start] if first < last else None
        in_place = self._is_in_place(bucket.flat)
        self.running.append(_Running(bucket.flat, first, total, in_place, sent, work))
