"""A stage of the pipeline: DeepSpeed's module with any number of chunks, and its process groups.

DeepSpeed builds the layers and connects the replicas of tied ones. `run_layers` runs them, with the
same information about each micro-batch and the same recomputation as without a pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import module
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import Tensor, nn

from models.layer_specs import run_layers
from models.parallel.micro_batch_info import MicroBatchInfo
from models.parallel.process_groups import NcclSettings, create_groups
from threefold.pipeline.schedules import Pipeline

# The process groups of the parallel axes, in the form in which DeepSpeed's engines read them.


class ProcessGrid(PipelineParallelGrid):
    """DeepSpeed's grid with one call per axis instead of one call per group.

    The constructor of PipelineParallelGrid, which this one replaces, calls `new_group` for each
    group of each axis, and even for each rank if there is no tensor parallelism. The attributes
    keep DeepSpeed's names: "slice" is the tensor axis, and a "model" group has all ranks that share
    a data rank.

    Attributes:
        dp_shard_group: this rank's group of data ranks that divide the optimizer state (hybrid
            sharding); None: all data ranks do
        optimizer_group: the ranks that hold one copy of the optimizer state of this rank's stage,
            if the optimizer exchanges matrices between them; otherwise None
        dp_replicate_group: the data ranks of all such groups that hold the same shard as this rank

    Args:
        topology: the sizes of the axes
        dp_shard_groups: the global ranks of every shard group; None: no hybrid sharding
        dp_replicate_groups: the global ranks of every group that holds the same shard
        optimizer_groups: the global ranks of every `optimizer_group`; None: there is none
    """

    def __init__(
        self,
        topology: PipeModelDataParallelTopology,
        *,
        dp_shard_groups: list[list[int]] | None = None,
        dp_replicate_groups: list[list[int]] | None = None,
        optimizer_groups: list[list[int]] | None = None,
    ):
        self._topo = topology
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data_parallel_size = topology.get_dim("data")
        self.pipe_parallel_size = topology.get_dim("pipe")
        self.model_parallel_size = self.slice_parallel_size = topology.get_dim("model")
        assert self._is_grid_valid()
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.p2p_groups = self._build_p2p_groups()

        models = [
            topology.get_axis_list(axis="data", idx=index)
            for index in range(self.data_parallel_size)
        ]
        self.ds_model_proc_group = create_groups(models)
        self.ds_model_world_size = len(models[0])
        self.ds_model_rank = sorted(models[self.data_parallel_id]).index(self.global_rank)

        self.dp_groups, self.dp_group = self._axis("data")
        self.dp_proc_group = create_groups(self.dp_groups)
        self.dp_shard_group = create_groups(dp_shard_groups) if dp_shard_groups else None
        self.dp_replicate_group = (
            create_groups(dp_replicate_groups) if dp_replicate_groups else None
        )
        self.optimizer_group = create_groups(optimizer_groups) if optimizer_groups else None
        self.pipe_groups, self.pp_group = self._axis("pipe")
        self.pp_proc_group = create_groups(self.pipe_groups)
        self.model_groups, self.slice_group = self._axis("model")
        self.mp_group = self.slice_group
        self.slice_proc_group = create_groups(self.model_groups, NcclSettings(high_priority=True))

    def _axis(self, name: str) -> tuple[list[list[int]], list[int]]:
        """Return the global ranks of all groups of an axis, and those of this rank's group."""
        every = self._topo.get_axis_comm_lists(name)
        return every, next(ranks for ranks in every if self.global_rank in ranks)


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
        grid: ProcessGrid,
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
        found = {key: self._tied_comm(key) for key in keys}
        return {key: comm for key, comm in found.items() if comm is not None}

    def _tied_comm(self, key: str) -> dict[str, Any] | None:
        stages = {
            self.stage_owner(index)
            for index, spec in enumerate(self._layer_specs)
            if isinstance(spec, TiedLayerSpec) and spec.key == key
        }
        of_stages = [self._topo.filter_match(pipe=stage) for stage in sorted(stages)]
        partition = list(zip(*of_stages, strict=True))
        group = create_groups(partition)
        ranks = next((list(each) for each in partition if self.global_rank in each), None)
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
