"""The shards that the other ranks of a simulated cluster hold of the optimizer's state."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from models.sharding import Sharding, sharding_of
from threefold.checkpoint.state import Fragment, PartitionedState, TrainingState
from threefold.engine.muon_exchange import Shard


def shards_of_all_ranks(
    own: list[Shard], state: TrainingState, group: dist.ProcessGroup
) -> list[list[Shard]]:
    """Return the shards of each rank of a group; replaces `gather_shards`.

    ZeRO-1 and 2 divide each flat tensor equally, ZeRO-3 each parameter. In the group, the tensor
    ranks of a data rank are neighbours. Other ranks have parameters of the same sizes. Where they
    have other experts, the names are changed.
    """
    tensor_size = _tensor_size(state)
    replicas = dist.get_world_size(group) // tensor_size
    ranks: list[list[Shard]] = []
    for replica in range(replicas):
        for tensor_rank in range(tensor_size):
            ranks.append(
                [
                    Shard(
                        _renamed(fragment, sharding, f"{holder}, {tensor_rank}"),
                        sharding,
                        tensor_rank,
                    )
                    for fragment, sharding, holder in _fragments(state, replica, replicas)
                    if sharding.role == "hidden"
                ]
            )
    return ranks


def _tensor_size(state: TrainingState) -> int:
    """Return the number of tensor ranks; ZeRO-3 has no pipeline, so they are the model's ranks."""
    if isinstance(state, PartitionedState):
        return dist.get_world_size(state.optimizer.model_parallel_group)
    return state.optimizer.mpu.get_slice_parallel_world_size()


def _renamed(fragment: Fragment, sharding: Sharding, holder: str) -> Fragment:
    """Return a fragment of an expert with a name of its own on each rank that holds others."""
    if not sharding.of_expert or sharding.dimension is not None:
        return fragment
    return replace(fragment, name=f"{fragment.name} of {holder}")


def _fragments(
    state: TrainingState, replica: int, replicas: int
) -> Iterator[tuple[Fragment, Sharding, str]]:
    """Yield the fragments of a replica with their declarations, and which experts it has."""
    optimizer: Any = state.optimizer
    names = {parameter: name for name, parameter in state.parameters.items()}
    if isinstance(state, PartitionedState):
        for name, parameter in state.parameters.items():
            flat, offset, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
            size = vars(parameter)["ds_numel"]
            elements = range(min(replica * share, size), min((replica + 1) * share, size))
            if elements:
                yield Fragment(name, elements, flat, offset), sharding_of(parameter), ""
        return
    groups = getattr(optimizer, "bf16_groups", None) or optimizer.round_robin_bit16_groups
    for number, (parameters, flat) in enumerate(zip(groups, state.weights, strict=True)):
        owners = dist.get_world_size(optimizer.real_dp_process_group[number])
        with_same = max(1, replicas // owners)  # neighbours with other experts
        start = replica // with_same * flat.numel()
        first = 0
        for parameter in parameters:
            low = max(first, start)
            high = min(first + parameter.numel(), start + flat.numel())
            if low < high:
                elements = range(low - first, high - first)
                fragment = Fragment(names[parameter], elements, number, low - start)
                yield fragment, sharding_of(parameter), f"{replica % with_same}"
            first += parameter.numel()
