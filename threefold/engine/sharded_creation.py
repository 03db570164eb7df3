"""Create the weights of ZeRO-3 as shards, so that no rank ever holds the whole model.

DeepSpeed would partition a model that every rank has built and initialized. Here each layer is
partitioned before the next one is created, and each rank draws only its own part of the initial
values.
"""

from typing import Any

import deepspeed
import torch
from torch import nn

from models.initialization import initialize
from models.layer_specs import layer_names
from models.parallel.collectives import TensorAxis
from threefold.config.recipe import Recipe
from threefold.pipeline.stage import ProcessGrid


class ShardedCreation:
    """Initializes and partitions the weights of a layer, as `SequentialModel` calls it.

    Args:
        recipe: the recipe
        config: the DeepSpeed configuration of `build_deepspeed_config`
        grid: the process groups; a weight is divided among the data ranks
        axis: the tensor axis
        dtype: type of the weights
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        config: dict[str, Any],
        grid: ProcessGrid,
        axis: TensorAxis,
        dtype: torch.dtype,
    ):
        self.recipe, self.axis, self.dtype = recipe, axis, dtype
        self.names = layer_names(recipe.model)
        self.zero = deepspeed.zero.Init(
            data_parallel_group=grid.get_data_parallel_group(),
            config_dict_or_path=config,
            mpu=grid,
        )
        # torch's F.linear would keep every gathered weight until the backward pass.
        self.zero._enable_mem_efficient_linear()

    def __call__(self, number: int, layer: nn.Module) -> None:
        """Partition layer `number`."""
        for rest, parameter in layer.named_parameters():
            self._partition(f"{self.names[number]}.{rest}", parameter)

    def _partition(self, name: str, parameter: nn.Parameter) -> None:
        """Fill this rank's part of a parameter, and free the rest.

        On a CPU, `torch.empty` takes no physical memory until it is written. On a GPU it takes the
        memory of one whole parameter, which `partition` frees.
        """
        zero = self.zero
        parameter.data = torch.empty_like(parameter, dtype=self.dtype, device=zero.local_device)
        zero._convert_to_deepspeed_param(parameter)
        partitioned: Any = parameter
        share = zero._aligned_size(parameter) // zero._partition_world_size(parameter)
        first = min(share * zero._partition_rank(parameter), parameter.numel())
        own = range(first, min(first + share, parameter.numel()))
        initialize(
            [(name, parameter)],
            self.recipe.model,
            seed=self.recipe.seed,
            tensor_rank=self.axis.rank,
            tensor_size=self.axis.size,
            elements=own,
        )
        partitioned.partition()
        partitioned.ds_tensor[len(own) :].zero_()  # padding
