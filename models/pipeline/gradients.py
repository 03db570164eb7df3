"""Where DeepSpeed's optimizers want gradients, and their reduction over the data axis."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from models.parallel.collectives import wait_for


class Gradients(ABC):
    """The gradients of one rank, over all micro-batches of a step.

    DeepSpeed's own hooks are removed: they count the parameters of one backward pass, and here a
    backward pass may leave weights for later.
    """

    def __init__(self, engine: PipelineEngine):
        self.engine, self.optimizer = engine, engine.optimizer
        for hook in getattr(self.optimizer, "_grad_acc_hooks", []):
            hook.remove()

    @abstractmethod
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that autograd has not accumulated."""

    @abstractmethod
    def of(self, parameter: nn.Parameter) -> Tensor:
        """What was accumulated."""

    @abstractmethod
    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """These have all their gradients: start to average them over the data ranks."""

    @abstractmethod
    def finish(self) -> None:
        """All gradients are there: average them over the data ranks, add up tied ones."""

    @abstractmethod
    def discard(self) -> None:
        """Forget all gradients, reduced or not, as if the step had not begun."""

    def add_up_tied(self) -> None:
        """Add the gradients of a tied weight's copies."""
        for weight, group in self.engine.module.get_tied_weights_and_groups():
            dist.all_reduce(self.of(weight), group=group)


class FlatGradients(Gradients):
    """One fp32 tensor for all gradients of an optimizer group.

    A gradient is added to its part of it and freed as soon as autograd has it. A step's first takes
    the place of the last step's: nothing is zeroed in between.

    groups: the parameters of each optimizer group
    totals: of each, a view of the group's tensor
    has_gradients: of each, whether this step has given it one
    """

    def __init__(
        self,
        engine: PipelineEngine,
        groups: list[list[nn.Parameter]],
        totals: list[list[Tensor]],
        has_gradients: list[list[bool]],
    ):
        super().__init__(engine)
        self.totals, self.has_gradients = totals, has_gradients
        self.slots = {
            parameter: (number, slot)
            for number, group in enumerate(groups)
            for slot, parameter in enumerate(group)
        }
        for parameter in self.slots:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:  # torch calls it for what is left for later, too
            self.add(parameter, parameter.grad)
            parameter.grad = None

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that autograd has not accumulated."""
        number, slot = self.slots[parameter]
        total = self.totals[number][slot]
        accumulate = total.add_ if self.has_gradients[number][slot] else total.copy_
        accumulate(gradient.view(total.shape))
        self.has_gradients[number][slot] = True

    def of(self, parameter: nn.Parameter) -> Tensor:
        """What was accumulated."""
        number, slot = self.slots[parameter]
        return self.totals[number][slot]

    def zero_missing(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let these have zeros where this step has given none."""
        for parameter in parameters:
            number, slot = self.slots[parameter]
            if not self.has_gradients[number][slot]:
                self.totals[number][slot].zero_()

    def discard(self) -> None:
        """Forget all gradients: the next ones take their place."""
        self.forget()

    def forget(self) -> None:
        """Let the next gradients take the place of these."""
        for each in self.has_gradients:
            each[:] = [False] * len(each)


class Float32Gradients(FlatGradients):
    """BF16_Optimizer's own tensors."""

    def __init__(self, engine: PipelineEngine):
        optimizer = engine.optimizer
        super().__init__(
            engine,
            optimizer.bf16_groups,
            optimizer.fp32_groups_gradients,
            optimizer.fp32_groups_has_gradients,
        )
        optimizer.clear_hp_grads = self.forget  # which would zero them
        self.group = engine.grid.get_data_parallel_group()
        config = engine._config
        self.scales_before = config.prescale_gradients or config.gradient_predivide_factor != 1.0
        self.begun: set[nn.Parameter] = set()
        self.running: list[tuple[Tensor, Tensor, dist.Work]] = []

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that autograd has not accumulated."""
        super().add(parameter, gradient)
        parameter._hp_grad = self.of(parameter)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """These have all their gradients: start to average them over the data ranks."""
        new = [each for each in parameters if each not in self.begun]
        self.begun.update(new)
        self.zero_missing(new)
        if self.scales_before or dist.get_world_size(self.group) == 1:
            return
        for number, flat in enumerate(self.optimizer.fp32_groups_gradients_flat):
            held = [self.of(each) for each in new if self.slots[each][0] == number]
            for start, stop in runs(held):
                part = flat[start:stop]
                sent = part.to(self.engine.communication_data_type)  # itself if it is in fp32
                running = dist.all_reduce(sent, group=self.group, async_op=True)
                self.running.append((part, sent, running))

    def finish(self) -> None:
        """All gradients are there: average them over the data ranks, add up tied ones."""
        self.begin(self.slots)
        if self.scales_before:  # as DeepSpeed does
            self.engine._bf16_reduce_grads()
        for part, sent, running in self.running:
            wait_for(running)
            torch.div(sent, dist.get_world_size(self.group), out=part)
        self.running, self.begun = [], set()
        self.add_up_tied()


class LoneGradients(FlatGradients):
    """DeepSpeedZeroOptimizer's in fp32 on one data rank, which has nobody to average them with."""

    def __init__(self, engine: PipelineEngine):
        optimizer = engine.optimizer
        groups = optimizer.params_in_partition  # all of them, in the order of the weights
        self.flats = [torch.zeros_like(each) for each in optimizer.single_partition_of_fp32_groups]
        totals = [
            list(flat.split([*map(nn.Parameter.numel, group), flat.numel() - size(group)])[:-1])
            for flat, group in zip(self.flats, groups, strict=True)
        ]
        for group, views in zip(groups, totals, strict=True):
            for parameter, total in zip(group, views, strict=True):
                assert parameter.storage_offset() == total.storage_offset()  # as the weights lie
        has_gradients = [[False] * len(group) for group in groups]
        super().__init__(engine, groups, totals, has_gradients)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing: nobody has others."""

    def finish(self) -> None:
        """All gradients are there: add up tied ones, and show DeepSpeed where they are."""
        self.zero_missing(self.slots)
        self.add_up_tied()
        for number, (flat, totals) in enumerate(zip(self.flats, self.totals, strict=True)):
            self.optimizer.averaged_gradients[number] = InOneTensor(totals, flat)
        self.forget()


class InOneTensor(list):
    """Gradients, and the tensor that they are parts of; DeepSpeed asks for its `flat_partition`."""

    def __init__(self, gradients: Iterable[Tensor], flat: Tensor):
        super().__init__(gradients)
        self.flat_partition = flat


class ZeroGradients(Gradients):
    """DeepSpeedZeroOptimizer's, stage 1: autograd's, or a copy in another precision.

    Of what it averages a rank keeps its share only, so that tied weights come before.
    """

    def __init__(self, engine: PipelineEngine):
        super().__init__(engine)
        if self.optimizer.use_grad_accum_attribute:
            for group in self.optimizer.bit16_groups:
                for parameter in group:
                    parameter.register_post_accumulate_grad_hook(
                        self.optimizer._fill_param_grad_accum_attribute
                    )

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that autograd has not accumulated."""
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        if self.optimizer.use_grad_accum_attribute:
            self.optimizer._fill_param_grad_accum_attribute(parameter)

    def of(self, parameter: nn.Parameter) -> Tensor:
        """What was accumulated."""
        return self.optimizer.get_param_gradient_attribute(parameter)

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing: DeepSpeed averages all of an optimizer group together."""

    def finish(self) -> None:
        """All gradients are there: average them over the data ranks, add up tied ones."""
        self.add_up_tied()
        self.optimizer.setup_buckets()
        self.optimizer.set_gradient_accumulation_boundary(True)
        if dist.get_world_size(self.optimizer.dp_process_group) > 1:
            self.optimizer.reduce_gradients()
        else:  # what else that does: it would copy them into its buckets to reduce them with nobody
            self.optimizer.overlapping_partition_gradients_reduce_epilogue()

    def discard(self) -> None:
        """Forget all gradients, and those that DeepSpeed has averaged."""
        for group in self.optimizer.bit16_groups:
            for parameter in group:
                parameter.grad = None
                if self.optimizer.use_grad_accum_attribute:
                    parameter.grad_accum = None
        self.optimizer.averaged_gradients.clear()


def gradients_of(engine: PipelineEngine) -> Gradients:
    """The gradients of this engine's optimizer."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        return Float32Gradients(engine)
    alone = dist.get_world_size(optimizer.dp_process_group) == 1
    if alone and optimizer.dtype == torch.float32 and not optimizer.use_grad_accum_attribute:
        return LoneGradients(engine)
    return ZeroGradients(engine)


def size(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of all."""
    return sum(each.numel() for each in parameters)


def runs(parts: Iterable[Tensor]) -> list[tuple[int, int]]:
    """(start, stop) of the elements that views of one flat tensor cover, adjacent ones together."""
    found: list[tuple[int, int]] = []
    for first, size in sorted((each.storage_offset(), each.numel()) for each in parts):
        touches = bool(found) and found[-1][1] == first
        start = found.pop()[0] if touches else first
        found.append((start, first + size))
    return found
