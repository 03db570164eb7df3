"""A stage of the pipeline: DeepSpeed's module with any number of chunks.

DeepSpeed builds the layers and connects the replicas of tied ones. `run_layers` runs them, with the
same information about each micro-batch and the same recomputation as without a pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Self

from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import module
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import Tensor, nn

from models.layer_specs import run_layers
from models.parallel.collectives import create_groups
from models.parallel.micro_batch_info import MicroBatchInfo
from threefold.pipeline.schedules import Pipeline

# Temporary replacement of an attribute that other code reads and that no argument can change.


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module or a class for the duration of the context.

    An attribute that a class inherits is inherited again afterwards.
    """
    attributes = vars(owner)  # unlike getattr, it returns static methods as such
    is_own, original = name in attributes, attributes.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


class Stage(PipelineModule):
    """The layers of one stage.

    pipeline: the order of the passes
    grid: the process groups
    layers_of_virtual_stages: number of layers of each virtual stage
    recompute_interval: blocks that the backward pass recomputes at a time; 0: no recomputation
    """

    def __init__(
        self,
        *arguments: Any,
        pipeline: Pipeline,
        grid: PipelineParallelGrid,
        layers_of_virtual_stages: Sequence[int],
        recompute_interval: int,
        **settings: Any,
    ):
        assert len(layers_of_virtual_stages) == pipeline.total_virtual_stages
        self.pipeline = pipeline
        self.parts = [0, *accumulate(layers_of_virtual_stages)]
        # PipelineModule builds a grid itself, group by group, and no argument can change its class.
        with replaced(module, "PipelineParallelGrid", lambda **_: grid):
            super().__init__(*arguments, topology=grid.topology(), **settings)
        self.recompute_interval = recompute_interval
        self.take_micro_batch_infos([])

    def _partition_layers(self, method: str = "") -> None:
        """Set the bounds of this stage's chunks; DeepSpeed calls this to partition the layers."""
        assert self.parts[-1] == self._num_layers
        chunks = range(self.pipeline.virtual_stages)
        virtual_stages = [self.pipeline.virtual_stage(self.stage_id, chunk) for chunk in chunks]
        self.bounds = [(self.parts[n], self.parts[n + 1]) for n in virtual_stages]
        self._set_bounds(*self.bounds[0])

    def _build(self) -> None:
        self.layers_of_chunks = []
        for start, stop in self.bounds:
            self._set_bounds(start, stop)
            self.forward_funcs: list[Callable[..., Tensor]] = []
            super()._build()
            self.layers_of_chunks.append(self.forward_funcs)
        self.forward_funcs = [layer for chunk in self.layers_of_chunks for layer in chunk]
        self._set_bounds(*self.bounds[0])

    def _synchronize_tied_weights(self) -> None:
        """Do nothing: `initialize` makes all replicas equal, and DeepSpeed's broadcast warns."""

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Create the groups of stages with a tied module, for all data and tensor ranks at once.

        PipelineModule's own method calls `new_group` for every data and tensor rank.

        Returns:
            By key: the ranks, their group, the names of the weights and the module.
        """
        if self.num_stages == 1:
            return {}
        keys = sorted({s.key for s in self._layer_specs if isinstance(s, TiedLayerSpec)})
        tied = {key: self._tied_comm(key) for key in keys}
        return {key: comm for key, comm in tied.items() if comm is not None}

    def _tied_comm(self, key: str) -> dict[str, Any] | None:
        stages = {
            self.stage_owner(index)
            for index, spec in enumerate(self._layer_specs)
            if isinstance(spec, TiedLayerSpec) and spec.key == key
        }
        of_stages = [self._topo.filter_match(pipe=stage) for stage in sorted(stages)]
        partition = list(zip(*of_stages, strict=True))
        group = create_groups(partition)
        ranks = next((list(group) for group in partition if self.global_rank in group), None)
        if ranks is None:
            return None
        shared = self.tied_modules[key]
        if self.global_rank != ranks[0]:
            for parameter in shared.parameters():
                parameter.ds_pipe_replicated = True  # the gradient norm counts it once
        attributes = self.tied_weight_attrs[key]
        return {"ranks": ranks, "group": group, "weight_attr": attributes, "module": shared}

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that holds a layer."""
        virtual_stage = next(n for n, stop in enumerate(self.parts[1:]) if layer_idx < stop)
        return self.pipeline.stage_and_chunk(virtual_stage)[0]

    def parameters_of_chunk(self, chunk: int) -> Iterator[nn.Parameter]:
        """Yield the parameters of a chunk, without tied ones, which other chunks may also hold."""
        start, stop = self.bounds[chunk]
        for number, layer in self.named_children():
            if number.isdecimal() and start <= int(number) < stop:
                yield from layer.parameters()

    def take_micro_batch_infos(self, micro_batch_infos: Sequence[MicroBatchInfo]) -> None:
        """Set the information about the next micro-batches, in the order in which they arrive."""
        self.micro_batch_infos = [
            iter(micro_batch_infos) for _ in range(self.pipeline.virtual_stages)
        ]

    def check_all_taken(self) -> None:
        """Check that every micro-batch has passed through every chunk."""
        assert not any(list(micro_batch_infos) for micro_batch_infos in self.micro_batch_infos)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; DeepSpeed calls this in each step, and modules are visited on a change."""
        return self if mode == self.training else super().train(mode)

    def forward(self, x: Tensor, chunk: int, labels: Tensor | None = None) -> Tensor:
        """Run the next micro-batch through one of this rank's chunks.

        labels: [b, s], for the last virtual stage, which then returns the loss
        """
        return run_layers(
            self.layers_of_chunks[chunk],
            x,
            info=next(self.micro_batch_infos[chunk]),
            labels=labels,
            recompute_interval=self.recompute_interval,
        )
