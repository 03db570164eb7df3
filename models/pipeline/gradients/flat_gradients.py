"""The gradients of a stage in flat tensors, and their reduction over the data axis."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from models.pipeline.gradients.reduction import ShardedReduction, Slot, plan_buckets


class FlatGradients(ABC):
    """One tensor for all gradients of an optimizer group, over all micro-batches of a step.

    A gradient is added to its part of the tensor and freed as soon as autograd has it. The first
    gradient of a step replaces the last step's: nothing is zeroed in between.

    The last pass of a chunk computes the final gradients of its weights in the step. A bucket is
    summed over the data ranks as soon as all its gradients are final, while the backward pass
    continues. Buckets begin in one fixed order, so that all data ranks post them in the same order.
    Tied weights come last: when all chunks have ended, their gradients are first summed over the
    stages.

    DeepSpeed's own hooks are removed, because they count the parameters of one backward pass, and
    here a backward pass may defer weight gradients.

    engine: the engine, whose optimizer has just been created
    flats: the tensor of each optimizer group
    slots: the slot of each parameter in its flat tensor
    chunks: the parameters of each chunk, without tied ones, in the order of the last passes
    """

    def __init__(
        self,
        engine: PipelineEngine,
        flats: Sequence[Tensor],
        slots: Mapping[nn.Parameter, Slot],
        chunks: Mapping[int, Sequence[nn.Parameter]],
    ):
        self.module, self.optimizer = engine.module, engine.optimizer
        for hook in getattr(self.optimizer, "_grad_acc_hooks", []):
            hook.remove()
        self.chunks = chunks
        self.reduction = ShardedReduction(
            flats,
            self.optimizer.real_dp_process_group,
            dtype=engine.communication_data_type,
            ranks=dist.get_world_size(engine.grid.get_data_parallel_group()),
            divided_before=_divided_before(engine),
        )
        self.totals = {
            parameter: flats[slot.flat][slot.start : slot.start + parameter.numel()]
            for parameter, slot in slots.items()
        }
        untied = {parameter for parameters in chunks.values() for parameter in parameters}
        tied = [parameter for parameter in slots if parameter not in untied]
        elements = int(engine.zero_reduce_bucket_size())
        self.buckets = plan_buckets(slots, list(chunks.values()), elements=elements)
        self.tied_buckets = plan_buckets(slots, [tied], elements=elements)
        for parameter in slots:
            parameter.register_post_accumulate_grad_hook(self._take)
        self._forget()

    def _forget(self) -> None:
        """Reset the state of the step; the next gradients are the first of a new step."""
        self.has_gradient: set[nn.Parameter] = set()
        self.complete: set[nn.Parameter] = set()
        self.begun = 0  # buckets whose sum has begun
        self.ending: frozenset[nn.Parameter] = frozenset()

    def _take(self, parameter: nn.Parameter) -> None:
        """Take a gradient from autograd, which also calls this hook when a gradient is deferred."""
        if parameter.grad is not None:
            self.add(parameter, parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient of a micro-batch."""
        assert parameter not in self.complete, "a gradient after a chunk's last pass"
        total = self.totals[parameter]
        accumulate = total.add_ if parameter in self.has_gradient else total.copy_
        accumulate(gradient.view(total.shape))
        self.has_gradient.add(parameter)
        if parameter in self.ending:
            self._complete([parameter])

    def of(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum of a parameter's gradients; after `finish`, valid only on its owner."""
        return self.totals[parameter]

    @contextmanager
    def last_of(self, chunk: int) -> Iterator[None]:
        """Treat the gradients of a chunk as final if they arrive within this context."""
        self.ending = frozenset(self.chunks[chunk])
        yield
        self.ending = frozenset()

    def complete_chunk(self, chunk: int) -> None:
        """Treat all gradients of a chunk as final; a weight without any gets zeros."""
        self._complete([each for each in self.chunks[chunk] if each not in self.complete])

    @torch.no_grad()
    def _complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Mark parameters as final, and begin to sum the buckets that are complete."""
        self._zero_missing(parameters)
        self.complete.update(parameters)
        for bucket in self.buckets[self.begun :]:
            if not self.complete.issuperset(bucket.parameters):
                break
            self.reduction.begin(bucket)
            self.begun += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Sum tied gradients over stages, and give the optimizer its shard of the averages."""
        for chunk in self.chunks:
            self.complete_chunk(chunk)
        self._zero_missing(self.totals)
        for weight, group in self.module.get_tied_weights_and_groups():
            dist.all_reduce(self.of(weight), group=group)
        for bucket in self.tied_buckets:
            self.reduction.begin(bucket)
        self._hand_over(self.reduction.finish())
        self._forget()

    def _zero_missing(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter not in self.has_gradient:
                self.totals[parameter].zero_()

    @abstractmethod
    def _hand_over(self, shards: list[Tensor]) -> None:
        """Give the optimizer this rank's shard of each flat tensor."""


class MixedPrecisionGradients(FlatGradients):
    """The fp32 tensors of BF16_Optimizer."""

    def __init__(self, engine: PipelineEngine, chunks: Mapping[int, Sequence[nn.Parameter]]):
        optimizer: BF16_Optimizer = engine.optimizer
        flats = optimizer.fp32_groups_gradients_flat
        firsts = [
            [view.storage_offset() for view in views] for views in optimizer.fp32_groups_gradients
        ]
        slots = slots_of(optimizer.bf16_groups, firsts, flats)
        super().__init__(engine, flats, slots, chunks)
        # Nothing has to be zeroed: the first gradients of the next step replace these.
        optimizer.clear_hp_grads = lambda: None

    def _hand_over(self, shards: list[Tensor]) -> None:
        """Do nothing: the optimizer reads the shards where they are."""


class ZeroGradients(FlatGradients):
    """Tensors for DeepSpeedZeroOptimizer, which by itself would let autograd accumulate gradients.

    The type is the JSON's `grad_accum_dtype`, by default that of the weights. For fp16 weights the
    default is fp32: sums over micro-batches neither overflow nor lose digits, and need no
    conversion before they are summed over the data ranks.
    """

    def __init__(self, engine: PipelineEngine, chunks: Mapping[int, Sequence[nn.Parameter]]):
        optimizer: DeepSpeedZeroOptimizer = engine.optimizer
        dtype = optimizer.gradient_accumulation_dtype
        if optimizer.dtype == torch.float16 and engine._config.grad_accum_dtype is None:
            dtype = torch.float32
        weights = optimizer.bit16_groups_flat
        flats = [torch.zeros_like(each, dtype=dtype) for each in weights]
        groups = optimizer.round_robin_bit16_groups
        firsts = [
            [parameter.storage_offset() - flat.storage_offset() for parameter in group]
            for group, flat in zip(groups, weights, strict=True)
        ]
        super().__init__(engine, flats, slots_of(groups, firsts, flats), chunks)

    def _hand_over(self, shards: list[Tensor]) -> None:
        """Let the optimizer read the gradients from the shards."""
        for number, shard in enumerate(shards):
            parts = [part_of(parameter, shard) for parameter in self._owned(number)]
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
    engine: PipelineEngine, chunks: Mapping[int, Sequence[nn.Parameter]]
) -> FlatGradients:
    """Return the kind of flat gradients that an engine's optimizer needs.

    chunks: the parameters of each chunk, without tied ones, in the order of the last passes
    """
    is_mixed = isinstance(engine.optimizer, BF16_Optimizer)
    return (MixedPrecisionGradients if is_mixed else ZeroGradients)(engine, chunks)


def slots_of(
    groups: Sequence[Sequence[nn.Parameter]],
    firsts: Sequence[Sequence[int]],
    flats: Sequence[Tensor],
) -> dict[nn.Parameter, Slot]:
    """Return the slot of each parameter, which ends where the next begins or the tensor ends.

    Args:
        groups: the parameters of each optimizer group
        firsts: for each parameter the index of its first element in the group's flat tensor
        flats: the flat tensor of each optimizer group
    """
    slots = {}
    for number, (group, starts, flat) in enumerate(zip(groups, firsts, flats, strict=True)):
        placed = sorted(zip(starts, group, strict=True), key=lambda each: each[0])
        stops = [start for start, _ in placed[1:]] + [flat.numel()]
        for (start, parameter), stop in zip(placed, stops, strict=True):
            slots[parameter] = Slot(number, start, stop)
    return slots


def part_of(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """Return the part of a shard that belongs to a parameter; the shard must hold some of it."""
    address = vars(parameter)["_hp_mapping"].hp_fragment_address  # set by DeepSpeed
    return shard[address.start : address.start + address.numel]


def _divided_before(engine: PipelineEngine) -> float:
    """Return the divisor that the JSON applies to gradients before they are summed."""
    if engine._config.prescale_gradients:
        return float(dist.get_world_size(engine.grid.get_data_parallel_group()))
    return float(engine._config.gradient_predivide_factor)
