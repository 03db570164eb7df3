"""All-gathers of updated weights, which run during the first passes of the next step.

After an update, each data rank has new values of its own shard of every bucket. The all-gathers of
all buckets start at once, in the order in which the next step needs them. A layer waits for the
buckets of its own weights before it runs, so gathers of later layers overlap with earlier layers
and with the time in which the pipeline fills.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from models.parallel.collectives import all_gather_single, wait_for
from threefold.pipeline.gradients import Bucket
from threefold.pipeline.stage import replaced


class WeightGathering:
    """Gathers updated weights in the background, instead of at the end of the optimizer's step.

    Code that reads weights without running a layer must call `finish` first.

    layers_of_chunks: the layers of each chunk: modules, and for tied layers functions, which are
        replaced because they call no hooks of their modules
    bucket_of: the bucket of each weight
    optimizer: DeepSpeed's optimizer, whose groups are the buckets
    """

    def __init__(
        self,
        layers_of_chunks: Sequence[list[Any]],
        bucket_of: Mapping[nn.Parameter, Bucket],
        optimizer: Any,
    ):
        self.running: dict[int, dist.Work] = {}  # by number of the bucket
        order: list[int] = []
        for layers in layers_of_chunks:
            for number, layer in enumerate(layers):
                module = layer if isinstance(layer, nn.Module) else layer.args[0]
                numbers = sorted({bucket_of[parameter].number for parameter in module.parameters()})
                order += numbers
                if isinstance(layer, nn.Module):
                    layer.register_forward_pre_hook(partial(self._before_layer, numbers))
                else:
                    layers[number] = partial(self._run_after_wait, numbers, layer)
        self.order = list(dict.fromkeys(order))  # of the first use of each bucket
        assert sorted(self.order) == sorted({bucket.number for bucket in bucket_of.values()})
        self._replace_gather(optimizer)

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
        """Make the optimizer's step start the gathers.

        DeepSpeed's optimizers call `all_gather_dp_groups` of their module, which is replaced during
        the step. Loading a checkpoint uses the original function, which waits.
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
