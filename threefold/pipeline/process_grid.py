"""The process groups of the parallel axes, in the form in which DeepSpeed's engines read them."""

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

from models.parallel.process_groups import NcclSettings, create_groups


class ProcessGrid(PipelineParallelGrid):
    """DeepSpeed's grid with one call per axis instead of one call per group.

    The constructor of PipelineParallelGrid, which this one replaces, calls `new_group` for each
    group of each axis, and even for each rank if there is no tensor parallelism. The attributes
    keep DeepSpeed's names: "slice" is the tensor axis, and a "model" group has all ranks that share
    a data rank.

    Attributes:
        shard_group: this rank's group of data ranks that divide the optimizer state (hybrid
            sharding); None: all data ranks do
        optimizer_group: the ranks that hold one copy of the optimizer state of this rank's stage,
            if the optimizer exchanges matrices between them; otherwise None
        same_shard_group: the data ranks of all such groups that hold the same shard as this rank

    Args:
        topology: the sizes of the axes
        shard_groups: the global ranks of every shard group; None: no hybrid sharding
        same_shard_groups: the global ranks of every group that holds the same shard
        optimizer_groups: the global ranks of every `optimizer_group`; None: there is none
    """

    def __init__(
        self,
        topology: PipeModelDataParallelTopology,
        *,
        shard_groups: list[list[int]] | None = None,
        same_shard_groups: list[list[int]] | None = None,
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
        self.shard_group = create_groups(shard_groups) if shard_groups else None
        self.same_shard_group = create_groups(same_shard_groups) if same_shard_groups else None
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
