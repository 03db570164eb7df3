"""All-gathers of updated weights, which run during the first passes of the next step.

After an update, each data rank has new values of its own shard of every bucket. The all-gathers of
all buckets start at once, in the order in which the next step needs them. A layer waits for the
buckets of its own weights before it runs, so that later gathers overlap with the passes through
earlier layers, and with the time in which the pipeline fills.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from models.parallel.collectives import all_gather_single, wait_for
from models.pipeline.replacement import replaced

if TYPE_CHECKING:
    from models.pipeline.scheduled_engine import ScheduledEngine


class WeightGathering:
    """Gathers updated weights in the background, instead of at the end of the optimizer's step.

    Code that reads weights without running a layer must call `finish` first.

    engine: the engine, whose optimizer and gradients exist
    """

    def __init__(self, engine: "ScheduledEngine"):
        self.running: dict[int, dist.Work] = {}  # by number of the bucket
        self.order: list[int] = []  # numbers of the buckets, in the order of their first use
        for layers in engine.module.layers_of_chunks:
            for place, layer in enumerate(layers):
                module = layer if isinstance(layer, nn.Module) else layer.args[0]
                buckets = (engine.gradients.bucket_of[each] for each in module.parameters())
                numbers = sorted({bucket.number for bucket in buckets})
                self.order += (each for each in numbers if each not in self.order)
                if module is layer:
                    module.register_forward_pre_hook(partial(self._before_layer, numbers))
                else:  # the function of a tied layer, which calls no hooks of the module
                    layers[place] = partial(self._run_after_wait, numbers, layer)
        self._replace_gather(engine.optimizer)

    def begin(
        self,
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[Sequence[Tensor]],
        dp_process_group: Sequence[dist.ProcessGroup],
        **_: Any,
    ) -> None:
        """Start the gathers; the parameters are those of DeepSpeed's `all_gather_dp_groups`."""
        for number in self.order:
            group = dp_process_group[number]
            if dist.get_world_size(group) > 1:
                shard = partitioned_param_groups[number][dist.get_rank(group)]
                self.running[number] = all_gather_single(
                    groups_flat[number], shard, group=group, async_op=True
                )

    def wait(self, numbers: Iterable[int]) -> None:
        """Wait until the weights of some buckets are gathered."""
        for number in numbers:
            work = self.running.pop(number, None)
            if work is not None:
                wait_for(work)

    def finish(self) -> None:
        """Wait until all weights are gathered."""
        self.wait(list(self.running))

    def _before_layer(self, numbers: Sequence[int], *_: Any) -> None:
        self.wait(numbers)

    def _run_after_wait(
        self, numbers: Sequence[int], layer: Callable[..., Tensor], *arguments: Any
    ) -> Tensor:
        self.wait(numbers)
        return layer(*arguments)

    def _replace_gather(self, optimizer: Any) -> None:
        """Let a step of the optimizer start the gathers.

        DeepSpeed's optimizers call a function of their module, which is replaced during the step.
        If a checkpoint replaces the weights, they still call DeepSpeed's function, which waits.
        """
        module = sys.modules[type(optimizer).__module__]
        step, update = optimizer.step, optimizer.update_lp_params

        def step_and_begin(*arguments: Any, **settings: Any) -> None:
            self.finish()
            with replaced(module, "all_gather_dp_groups", self.begin):
                step(*arguments, **settings)

        def finish_and_update() -> None:
            self.finish()
            update()

        optimizer.step, optimizer.update_lp_params = step_and_begin, finish_and_update
