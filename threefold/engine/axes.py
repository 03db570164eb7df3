"""The parallel axes of a rank: process groups with a size and an index, each created once.

`build_axes` creates them. Tied weights and saves have further groups, and with NCCL each route
between stages. The layers of the model read `ModelAxes`, from
which `ParallelAxes` is derived; DeepSpeed's engines read the same groups from `ProcessGrid`.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from models.attention import ModelAxes
from models.context_parallel.collectives import ContextAxis
from models.experts.routing import ExpertAxis
from models.parallel.collectives import NcclSettings, TensorAxis, create_groups
from threefold.config.parallel_dims import ParallelDims
from threefold.config.recipe import Recipe

IN_EVERY_LAYER = NcclSettings(high_priority=True)  # the next operation waits for the collective


class ProcessGrid(PipelineParallelGrid):
    """The process groups in the form in which DeepSpeed's engines read them.

    The constructor of PipelineParallelGrid calls `new_group` once for each group of an axis, and
    without tensor parallelism once for each rank. Ours replaces it, and creates all groups of an
    axis in one call. The attributes keep DeepSpeed's names: "slice" is the tensor axis, a "model"
    group has all ranks that share a data rank, and context ranks are data ranks.

    Attributes:
        dp_shard_group: this rank's group of data ranks that divide the optimizer state (hybrid
            sharding); None: all data ranks do
        dp_replicate_group: the data ranks of all such groups that hold the same shard as this rank
        optimizer_group: the ranks that hold one copy of the optimizer state of this rank's stage,
            if the optimizer exchanges matrices between them; otherwise None

    Args:
        exchanges_matrices: the optimizer is Muon
    """

    def __init__(self, dims: ParallelDims, *, exchanges_matrices: bool = False):
        self._topo: Any = PipeModelDataParallelTopology(
            num_pp=dims.pipeline, num_dp=dims.dp_cp_size, num_mp=dims.tensor
        )
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data_parallel_size, self.pipe_parallel_size = dims.dp_cp_size, dims.pipeline
        self.model_parallel_size = self.slice_parallel_size = dims.tensor
        assert self._is_grid_valid()
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.p2p_groups: list[list[int]] = []  # DeepSpeed reads them only where send is missing

        models = dims.groups("pipeline", "tensor")
        self.ds_model_proc_group = create_groups(models)
        self.ds_model_world_size = len(models[0])
        self.ds_model_rank = self._own(models).index(self.global_rank)

        self.dp_groups = dims.groups("data", "context")
        self.dp_group = self._own(self.dp_groups)
        self.dp_proc_group = create_groups(self.dp_groups)
        self.dp_shard_group = self.dp_replicate_group = self.optimizer_group = None
        if dims.is_hsdp:
            self.dp_shard_group = create_groups(dims.dp_shard_groups())
            self.dp_replicate_group = create_groups(dims.dp_replicate_groups())
        if exchanges_matrices and dims.dp_shard_size * dims.tensor > 1:
            self.optimizer_group = create_groups(dims.optimizer_groups())
        self.pipe_groups = dims.groups("pipeline")
        self.pp_group = self._own(self.pipe_groups)
        self.pp_proc_group = create_groups(self.pipe_groups)
        self.model_groups = dims.groups("tensor")
        self.mp_group = self.slice_group = self._own(self.model_groups)
        self.slice_proc_group = create_groups(self.model_groups, IN_EVERY_LAYER)

    def _own(self, groups: list[list[int]]) -> list[int]:
        return next(ranks for ranks in groups if self.global_rank in ranks)


@dataclass(frozen=True, kw_only=True)
class ParallelAxes(ModelAxes):
    """All parallel axes of a rank.

    Attributes:
        expert_data_group: the ranks that hold the same experts, if data ranks divide the experts
    """

    dims: ParallelDims
    grid: ProcessGrid
    expert_data_group: dist.ProcessGroup | None = None

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks with the same part of the model: along the data and the context axis."""
        group = self.grid.dp_proc_group
        assert group is not None
        return group

    @property
    def axis_of_group(self) -> dict[str, str]:
        """Name of a group -> its axis, for groups that may have the same ranks as another one.

        With one data rank, for example, all ranks of the data group are context ranks.
        """
        groups = [
            (self.context.group, "context"),
            (self.expert.group, "expert"),
            (self.expert.sequence_group, "expert"),
            (self.expert_data_group, "data"),
            (self.grid.dp_shard_group, "data"),
            (self.grid.dp_replicate_group, "data"),
            (self.grid.optimizer_group, "optimizer"),
        ]
        return {group.group_name: axis for group, axis in groups if group is not None}


def build_axes(recipe: Recipe, dims: ParallelDims) -> ParallelAxes:
    """Create the process groups of all axes; collective."""
    layout, rank = recipe.layout, dist.get_rank()
    grid = ProcessGrid(dims, exchanges_matrices=recipe.optimizer.kind == "muon")
    tensor = TensorAxis()
    if dims.tensor > 1:
        index = grid.get_slice_parallel_rank()
        tensor = TensorAxis(grid.slice_proc_group, index, dims.tensor, layout.sequence_parallel)
    context = ContextAxis()
    if dims.context > 1:
        group = create_groups(dims.groups("context"), IN_EVERY_LAYER)
        index = dims.coordinates(rank).context
        context = ContextAxis(group, index, dims.context, layout.context_attention)
    expert, expert_data_group = ExpertAxis(), None
    if recipe.model.experts is not None:
        exchanges, shares = dims.ep_size > 1, dims.context * dims.tensor > 1
        sequences = dims.groups("context", "tensor")
        expert = ExpertAxis(
            group=create_groups(dims.expert_groups(), IN_EVERY_LAYER) if exchanges else None,
            rank=rank // dims.expert_tensor % dims.ep_size,
            size=dims.ep_size,
            sequence_group=create_groups(sequences, IN_EVERY_LAYER) if shares else None,
            sequence_size=dims.context * dims.tensor,
            tensor=tensor,
            columns=tensor if dims.expert_tensor > 1 else TensorAxis(),
        )
        if dims.expert > 1:
            expert_data_group = create_groups(dims.expert_data_groups())
    return ParallelAxes(
        dims=dims,
        grid=grid,
        tensor=tensor,
        context=context,
        expert=expert,
        expert_data_group=expert_data_group,
    )
