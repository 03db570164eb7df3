"""The gradients of a stage in buckets of flat tensors, and their reduction over the data axis."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from weakref import ref

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from models.experts.layer import expert_layers
from models.kernels import matmul
from models.parallel.collectives import reduce_scatter_single, wait_for
from models.parallel.layers import Deferring, ProductGradient, QuantizedGradient, WeightGradient
from threefold.pipeline.balance import packed
from threefold.pipeline.schedules import BACKWARD, WEIGHT, Kind

# Sums of buckets over the data ranks; each rank gets the shard that it owns.
#
# ZeRO divides the flat tensor of a bucket into equal shards, one for each data rank, and only the
# owner of a shard updates the weights in it. A sum is therefore needed on one rank only.

MAX_RUNNING = 2  # sums at a time with ZeRO-2 or hybrid sharding, which free their inputs
# Elements of a stage whose gradients autograd may keep until a pass ends: 64 MiB in fp32.
MAX_ELEMENTS_KEPT = 2**24


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
    divisor: number of all data ranks, by which every sum is divided. The group of an expert's
        bucket is smaller, but its gradients come from the tokens of all data ranks.
    divided_before: divisor of the gradients before the sum; the rest of the division by the number
        of ranks follows after the sum
    at_once: number of sums that may run at the same time; only with `accumulated` or `same_shard`
    accumulated: the fp32 shards to which each sum is added (ZeRO-2); None: each bucket is summed
        once in a step, and its flat tensor receives the sum if gradients are sent in fp32 (ZeRO-1)
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        *,
        dtype: torch.dtype,
        divisor: int,
        same_shard: dist.ProcessGroup | None = None,
        divided_before: float = 1.0,
        at_once: int = MAX_RUNNING,
        accumulated: Sequence[Tensor] | None = None,
    ):
        self.groups, self.dtype, self.same_shard = groups, dtype, same_shard
        self.divisor, self.divided_before = divisor, divided_before
        self.sizes = [dist.get_world_size(group) for group in groups]
        self.own_ranks = [dist.get_rank(group) for group in groups]  # in the group of each bucket
        self.at_once, self.accumulated = at_once, accumulated
        self.running: list[_Running] = []
        self.replica_sums: list[dist.Work] = []  # sums over `same_shard`
        self.shards: dict[int, Tensor] = {}  # of the buckets that have a sum in this step

    @property
    def communicates(self) -> bool:
        """True if this rank exchanges gradients with other data ranks."""
        return self.same_shard is not None or any(size > 1 for size in self.sizes)

    def begin(self, number: int, flat: Tensor, *, is_last: bool = True) -> None:
        """Begin to sum a bucket, which must not be read or changed any more.

        Args:
            is_last: no other sum of the bucket follows in the step
        """
        if self.sizes[number] == 1:
            self._take(number, flat if self.accumulated else flat.float(), is_last=is_last)
            return
        if self.divided_before != 1.0:
            flat.div_(self.divided_before)
        sent = flat.to(self.dtype)  # the same tensor if it has this type
        total = sent.chunk(self.sizes[number])[self.own_ranks[number]]
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
        while self.replica_sums:
            wait_for(self.replica_sums.pop(0))
        if self.divisor > 1:  # the shards are in fp32, so that the quotient is rounded only once
            for shard, size in zip(shards, self.sizes, strict=True):
                shard.div_(self.divisor / (self.divided_before if size > 1 else 1.0))
        return shards

    def _end(self, running: _Running) -> None:
        """Wait for a sum."""
        wait_for(running.work)
        total = running.total
        in_place = running.in_place and total.dtype == torch.float32
        if self.accumulated is None and not in_place:  # a copy frees the rest of the sent tensor
            total = total.to(torch.float32, copy=True)
        self._take(running.number, total, is_last=running.is_last)

    def _take(self, number: int, total: Tensor, *, is_last: bool) -> None:
        """Add a sum to the shard of a bucket; after the last one, begin the sum over replicas."""
        if self.accumulated is None:
            self.shards[number] = total
        elif number in self.shards:
            self.shards[number].add_(total)
        else:
            self.shards[number] = self.accumulated[number].copy_(total)
        if is_last and self.same_shard is not None:
            shard = self.shards[number]
            self.replica_sums.append(dist.all_reduce(shard, group=self.same_shard, async_op=True))


# Division of a stage's parameters into buckets, whose gradients are summed together.
#
# Each bucket is an optimizer group, and so a flat tensor of its own. ZeRO divides every flat
# tensor equally among the data ranks, so that one reduce-scatter sums a bucket and one all-gather
# returns its updated weights.


def divide_into_buckets(
    chunks: Iterable[Sequence[nn.Parameter]],
    *,
    elements: int,
    kinds: Mapping[nn.Parameter, Hashable],
    units: Mapping[nn.Parameter, Hashable],
) -> list[list[nn.Parameter]]:
    """Return the parameters of each bucket, in the order of the layers.

    A bucket has parameters of one chunk and one kind.

    Args:
        chunks: the parameters of each chunk in the order of the layers
        elements: maximum size of a bucket, unless a single unit is larger
        kinds: properties that all parameters of a bucket share
        units: maps a parameter to its unit; the parameters of a unit are adjacent in one bucket
    """
    buckets: list[list[nn.Parameter]] = []
    for parameters in chunks:
        for kind in dict.fromkeys(kinds[parameter] for parameter in parameters):
            of_kind = [parameter for parameter in parameters if kinds[parameter] == kind]
            in_units = packed(
                _units(of_kind, units), lambda unit: sum(p.numel() for p in unit), elements
            )
            buckets += [list(chain(*bucket)) for bucket in in_units]
    return buckets


def _units(
    parameters: Sequence[nn.Parameter], units: Mapping[nn.Parameter, Hashable]
) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each unit; a parameter without a key is a unit."""
    joined: dict[Hashable, list[nn.Parameter]] = {}
    for parameter in parameters:
        joined.setdefault(units.get(parameter, parameter), []).append(parameter)
    yield from joined.values()


def deferring_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose gradients a zero-bubble schedule defers to weight passes."""
    linears = (linear for linear in module.modules() if isinstance(linear, Deferring))
    return {
        parameter
        for linear in linears
        for name, parameter in linear.named_parameters()
        if not name.endswith("bias")
    }


def units_of_experts(module: nn.Module) -> dict[nn.Parameter, Hashable]:
    """Return a key for each weight of an expert: the weights of a kind in a layer are adjacent.

    `grouped_matmul` then reads them as one tensor. Biases are kinds of their own.
    """
    return {
        parameter: (layer.number, name.split("_")[0], name.endswith("bias"))
        for layer in expert_layers(module)
        for name, parameter in layer.experts.named_parameters()
    }


@dataclass(frozen=True)
class Bucket:
    """The parameters of an optimizer group, whose gradients form one flat tensor.

    Attributes:
        starts: index of the first element of each parameter in the flat tensor
        weights: the flat tensor of the weights, which has the same size
    """

    number: int
    starts: dict[nn.Parameter, int]
    weights: Tensor

    def part_of(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        """Return the part of a flat tensor that belongs to a parameter."""
        start = self.starts[parameter]
        return flat[start : start + parameter.numel()]


@dataclass(eq=False, slots=True)
class _Sum:
    """The sum of a parameter's gradients.

    total: its place in the bucket's tensor; None until a gradient is added, and once the tensor is
        freed
    has_gradient: a gradient has been added since the bucket was last summed
    is_complete: the current pass has added its gradient
    """

    bucket: Bucket
    total: Tensor | None = None
    has_gradient: bool = False
    is_complete: bool = False


class FlatGradients(ABC):
    """One tensor for the gradients of each bucket, over several micro-batches.

    A gradient is added to its part of the tensor and freed as soon as autograd has it. The first
    gradient replaces an older one: nothing is zeroed in between. In a small model on one data rank,
    for which nothing is reduced during a pass, gradients are added after the pass, because a hook
    for each of them takes more time.

    The gradients of a chunk are reduced at the end of each group of micro-batches; with ZeRO-1 one
    group has all micro-batches of the step. A bucket is summed over the data ranks as soon as the
    last pass of the group has computed all its gradients, while that pass continues. The buckets of
    a pass begin in one fixed order, so that all data ranks post them in the same order. Tied
    weights come last: when all chunks have ended, their gradients are first summed over the stages.

    With ZeRO-2 each rank keeps only its shard of the sums. The tensor of a bucket exists from its
    first gradient in a group until its sum is complete.

    DeepSpeed's own hooks are removed, because they count the parameters of one backward pass, and
    here a backward pass may defer weight gradients.

    engine: the engine, whose optimizer has just been created
    chunks: the parameters of each chunk, without tied ones, in the order of the layers
    sharded: ZeRO-2
    """

    def __init__(
        self,
        engine: PipelineEngine,
        chunks: Mapping[int, Sequence[nn.Parameter]],
        *,
        sharded: bool,
    ):
        self.module, self.optimizer = engine.module, engine.optimizer
        for hook in getattr(self.optimizer, "_grad_acc_hooks", []):
            hook.remove()
        groups = self.optimizer.real_dp_process_group
        self.buckets = [
            Bucket(number, starts_of(parameters, weights), weights)
            for number, (parameters, weights) in enumerate(self._groups())
        ]
        self.bucket_of = {
            parameter: bucket for bucket in self.buckets for parameter in bucket.starts
        }
        kept = None if sharded else self._whole_tensors()
        self.tensors: dict[int, Tensor] = {} if kept is None else dict(enumerate(kept))
        self.sharded = sharded
        pipeline = engine.pipeline
        deferred = deferring_parameters(engine.module) if pipeline.splits else set()
        self.buckets_by_pass, self.tied = self._order_of_reduction(chunks, deferred)
        at_once = MAX_RUNNING
        if pipeline.reduce_every > 1 and pipeline.schedule == "interleaved":
            # A chunk's buckets are sent while the passes of the next chunk run.
            at_once = max([at_once, *map(len, self.buckets_by_pass.values())])
        self.reduction = ShardedReduction(
            groups,
            dtype=engine.communication_data_type,
            divisor=dist.get_world_size(engine.grid.get_data_parallel_group()),
            same_shard=engine.grid.dp_replicate_group,
            divided_before=_divided_before(engine),
            at_once=at_once,
            accumulated=self._new_shards() if sharded else None,
        )
        self.sums = {parameter: _Sum(bucket) for parameter, bucket in self.bucket_of.items()}
        self.takes_after_pass = not self.reduction.communicates and (
            sum(parameter.numel() for parameter in self.sums) <= MAX_ELEMENTS_KEPT
        )
        if not self.takes_after_pass:
            # Held weakly, because the garbage collector cannot free a cycle through a hook.
            reference = ref(self)
            for parameter, record in self.sums.items():
                parameter.register_post_accumulate_grad_hook(
                    partial(_take_if_alive, reference, record)
                )
        self.ended: set[int] = set()  # buckets without further gradients in this step
        self._end_pass()

    def _order_of_reduction(
        self, chunks: Mapping[int, Sequence[nn.Parameter]], deferred: set[nn.Parameter]
    ) -> tuple[dict[tuple[Kind, int], list[Bucket]], list[Bucket]]:
        """Return the buckets that each kind of pass through a chunk completes, and the tied ones.

        Within a chunk they are in the reverse order of the layers: a bucket is complete when the
        pass has reached its first parameter.
        """
        completed_by: dict[tuple[Kind, int], list[Bucket]] = {}
        numbers: set[int] = set()
        for chunk, parameters in chunks.items():
            places = {parameter: position for position, parameter in enumerate(parameters)}
            of_chunk = [bucket for bucket in self.buckets if places.keys() & bucket.starts.keys()]
            of_chunk.sort(key=lambda bucket: -min(places[parameter] for parameter in bucket.starts))
            for bucket in of_chunk:
                kind = WEIGHT if deferred & bucket.starts.keys() else BACKWARD
                completed_by.setdefault((kind, chunk), []).append(bucket)
            numbers |= {bucket.number for bucket in of_chunk}
        return completed_by, [bucket for bucket in self.buckets if bucket.number not in numbers]

    def _end_pass(self) -> None:
        self.coming: list[Bucket] = []  # buckets that the current pass completes, in order
        self.missing: dict[int, int] = {}  # bucket's number -> gradients that it still needs
        self.pass_buckets: list[Bucket] = []  # buckets of the current pass
        self.is_last = True  # also outside of passes, where `finish` reduces tied buckets

    @torch.no_grad()
    def take_after_pass(self) -> None:
        """Take the gradients of a backward pass from autograd, unless hooks have done it."""
        if self.takes_after_pass:
            for parameter, record in self.sums.items():
                self._take(record, parameter)

    def _take(self, record: _Sum, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None:  # otherwise it is deferred, frozen, or that of another chunk
            self._add(record, parameter, gradient)
            parameter.grad = None

    def adds_in_matmul(self) -> bool:
        """Return True if the matmuls of weight gradients can add them to the sums."""
        return matmul.adds_in_matmul(self.buckets[0].weights, self._dtype())

    def add(self, parameter: nn.Parameter, gradient: Tensor | WeightGradient) -> None:
        """Add a gradient of a micro-batch, or compute and add it."""
        self._add(self.sums[parameter], parameter, gradient)

    def _add(
        self, record: _Sum, parameter: nn.Parameter, gradient: Tensor | WeightGradient
    ) -> None:
        number = record.bucket.number
        assert number not in self.ended, "a gradient after a chunk's last pass"
        if record.total is None:
            record.total = self.sum_of(parameter).view(parameter.shape)
        if isinstance(gradient, ProductGradient | QuantizedGradient):
            gradient.add_to(record.total, replace=not record.has_gradient)
        else:
            computed = gradient if isinstance(gradient, Tensor) else gradient()
            if record.has_gradient:
                record.total.add_(computed)
            else:
                record.total.copy_(computed)
        record.has_gradient = True
        if number in self.missing and not record.is_complete:
            record.is_complete = True
            self.missing[number] -= 1
            while self.coming and not self.missing[self.coming[0].number]:
                self._reduce(self.coming.pop(0))

    def _tensor(self, bucket: Bucket) -> Tensor:
        """Return the tensor of a bucket; create it if it does not exist."""
        gradient = self.tensors.get(bucket.number)
        if gradient is None:
            gradient = torch.zeros_like(bucket.weights, dtype=self._dtype())
            self.tensors[bucket.number] = gradient
        return gradient

    def sum_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum of a parameter's gradients on this rank since it was last reduced.

        It is valid until the bucket is reduced. Afterwards, with ZeRO-1 and fp32, the shard of this
        rank is; with ZeRO-2 nothing is.
        """
        bucket = self.bucket_of[parameter]
        return bucket.part_of(parameter, self._tensor(bucket))

    def begin_reducing_pass(self, kind: Kind, chunk: int, *, is_last: bool) -> None:
        """Treat the gradients of the coming pass as complete for its group of micro-batches.

        Args:
            is_last: no other pass of this kind through the chunk follows in the step
        """
        self.is_last = is_last
        self.pass_buckets = self.buckets_by_pass.get((kind, chunk), [])
        self.coming = list(self.pass_buckets)
        self.missing = {bucket.number: len(bucket.starts) for bucket in self.coming}
        for bucket in self.coming:
            for parameter in bucket.starts:
                self.sums[parameter].is_complete = False

    def end_reducing_pass(self) -> None:
        """Reduce what the pass has not completed; a weight without gradient gets zeros."""
        for bucket in self.coming:
            self._reduce(bucket)
        if self.is_last:
            self.ended |= {bucket.number for bucket in self.pass_buckets}
        self._end_pass()

    @torch.no_grad()
    def _reduce(self, bucket: Bucket) -> None:
        """Begin to sum a bucket over the data ranks."""
        flat = self._tensor(bucket)
        for parameter in bucket.starts:
            record = self.sums[parameter]
            if not record.has_gradient:
                bucket.part_of(parameter, flat).zero_()
            record.has_gradient = False
            if self.sharded:
                record.total = None
        self.reduction.begin(bucket.number, flat, is_last=self.is_last)
        if self.sharded:
            del self.tensors[bucket.number]

    @torch.no_grad()
    def finish(self) -> None:
        """Sum tied gradients over stages, and give the optimizer its shard of the averages."""
        for weight, group in self.module.get_tied_weights_and_groups():
            if not self.sums[weight].has_gradient:
                self.sum_of(weight).zero_()
            dist.all_reduce(self.sum_of(weight), group=group)
            self.sums[weight].has_gradient = True
        for bucket in self.tied:
            self._reduce(bucket)
        self._hand_over(self.reduction.finish())
        self.ended = set()

    def _new_shards(self) -> list[Tensor]:
        """Return a fp32 tensor for this rank's shard of each bucket."""
        sizes = map(dist.get_world_size, self.optimizer.real_dp_process_group)
        return [
            torch.zeros(
                bucket.weights.numel() // size, dtype=torch.float32, device=bucket.weights.device
            )
            for bucket, size in zip(self.buckets, sizes, strict=True)
        ]

    @abstractmethod
    def _groups(self) -> Iterable[tuple[Sequence[nn.Parameter], Tensor]]:
        """Return the parameters of each optimizer group and the flat tensor of their weights."""

    @abstractmethod
    def _dtype(self) -> torch.dtype:
        """Return the type in which gradients of micro-batches are added up."""

    @abstractmethod
    def _whole_tensors(self) -> list[Tensor]:
        """Return a tensor for the gradients of each bucket, which is kept (ZeRO-1)."""

    @abstractmethod
    def _hand_over(self, shards: list[Tensor]) -> None:
        """Give the optimizer this rank's shard of each flat tensor."""


class MixedPrecisionGradients(FlatGradients):
    """The fp32 tensors of BF16_Optimizer."""

    def __init__(
        self,
        engine: PipelineEngine,
        chunks: Mapping[int, Sequence[nn.Parameter]],
        *,
        sharded: bool,
    ):
        optimizer: BF16_Optimizer = engine.optimizer
        super().__init__(engine, chunks, sharded=sharded)
        # Nothing has to be zeroed: the first gradients of the next step replace these.
        optimizer.clear_hp_grads = lambda: None
        if sharded:
            forget_whole_gradients(optimizer)
            optimizer.fp32_groups_gradient_flat_partition = list(self.reduction.accumulated or [])

    def _groups(self) -> Iterable[tuple[Sequence[nn.Parameter], Tensor]]:
        return zip(self.optimizer.bf16_groups, self.optimizer.bf16_groups_flat, strict=True)

    def _dtype(self) -> torch.dtype:
        return torch.float32

    def _whole_tensors(self) -> list[Tensor]:
        return self.optimizer.fp32_groups_gradients_flat

    def _hand_over(self, shards: list[Tensor]) -> None:
        """Copy what the optimizer does not read in place: sums that were sent in 16 bits."""
        places = self.optimizer.fp32_groups_gradient_flat_partition
        for place, shard in zip(places, shards, strict=True):
            if place.untyped_storage()._cdata != shard.untyped_storage()._cdata:
                place.copy_(shard)


def forget_whole_gradients(optimizer: BF16_Optimizer) -> None:
    """Free the gradients of the whole stage that BF16_Optimizer has allocated."""
    for name in ("fp32_groups_gradients_flat", "fp32_groups_actual_gradients_flat"):
        getattr(optimizer, name).clear()
    optimizer.non_expert_gradients.clear()
    for gradients in getattr(optimizer, "expert_gradients", {}).values():
        gradients.clear()
    for views in optimizer.fp32_groups_gradients:  # also the values of fp32_groups_gradient_dict
        views.clear()


class ZeroGradients(FlatGradients):
    """Tensors for DeepSpeedZeroOptimizer, which by itself would let autograd accumulate gradients.

    The type is the JSON's `grad_accum_dtype`, by default that of the weights. For fp16 weights the
    default is fp32: sums over micro-batches neither overflow nor lose digits, and need no
    conversion before they are summed over the data ranks.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        chunks: Mapping[int, Sequence[nn.Parameter]],
        *,
        sharded: bool,
    ):
        optimizer: DeepSpeedZeroOptimizer = engine.optimizer
        self.dtype = optimizer.gradient_accumulation_dtype
        if optimizer.dtype == torch.float16 and engine._config.grad_accum_dtype is None:
            self.dtype = torch.float32
        super().__init__(engine, chunks, sharded=sharded)

    def _groups(self) -> Iterable[tuple[Sequence[nn.Parameter], Tensor]]:
        optimizer = self.optimizer
        return zip(optimizer.round_robin_bit16_groups, optimizer.bit16_groups_flat, strict=True)

    def _dtype(self) -> torch.dtype:
        return self.dtype

    def _whole_tensors(self) -> list[Tensor]:
        return [torch.zeros_like(bucket.weights, dtype=self.dtype) for bucket in self.buckets]

    def _hand_over(self, shards: list[Tensor]) -> None:
        """Let the optimizer read the gradients from the shards."""
        for number, shard in enumerate(shards):
            parts = [part_of_shard(parameter, shard) for parameter in self._owned(number)]
            self.optimizer.averaged_gradients[number] = InOneTensor(parts, shard)

    def _owned(self, number: int) -> list[nn.Parameter]:
        """Return the parameters that this rank owns at least partly."""
        return self.optimizer.params_in_partition[number]


class InOneTensor(list):
    """Gradients, and the tensor that they are parts of; DeepSpeed asks for its `flat_partition`."""

    def __init__(self, gradients: Iterable[Tensor], flat: Tensor):
        super().__init__(gradients)
        self.flat_partition = flat


def gradients_of(
    engine: PipelineEngine, chunks: Mapping[int, Sequence[nn.Parameter]], *, sharded: bool
) -> FlatGradients:
    """Return the kind of flat gradients that an engine's optimizer needs.

    Args:
        chunks: the parameters of each chunk, without tied ones, in the order of the layers
        sharded: ZeRO-2
    """
    is_mixed = isinstance(engine.optimizer, BF16_Optimizer)
    kind = MixedPrecisionGradients if is_mixed else ZeroGradients
    return kind(engine, chunks, sharded=sharded)


def starts_of(parameters: Iterable[nn.Parameter], weights: Tensor) -> dict[nn.Parameter, int]:
    """Return the index of the first element of each parameter in the flat tensor of weights."""
    return {
        parameter: int(parameter.storage_offset() - weights.storage_offset())
        for parameter in parameters
    }


def part_of_shard(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """Return the part of a shard that belongs to a parameter; the shard must hold some of it."""
    address = vars(parameter)["_hp_mapping"].hp_fragment_address  # set by DeepSpeed
    return shard[address.start : address.start + address.numel]


def _take_if_alive(reference: "ref[FlatGradients]", record: _Sum, parameter: nn.Parameter) -> None:
    """Take a gradient from autograd for an object that may have been freed.

    Autograd also calls this hook when a gradient is deferred.
    """
    gradients = reference()
    if gradients is not None:
        gradients._take(record, parameter)


def _divided_before(engine: PipelineEngine) -> float:
    """Return the divisor that the JSON applies to gradients before they are summed."""
    if engine._config.prescale_gradients:
        return float(dist.get_world_size(engine.grid.get_data_parallel_group()))
    return float(engine._config.gradient_predivide_factor)
