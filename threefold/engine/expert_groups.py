"""Tell DeepSpeed which ranks hold the same experts, so that ZeRO divides experts among them."""

import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn

from models.experts.layer import expert_layers
from models.experts.routing import ExpertAxis
from models.parallel.process_groups import create_groups
from threefold.config.parallel_dims import Topology

EXPERTS = "experts"  # DeepSpeed's name of the group


def mark_experts(model: nn.Module, topology: Topology, axis: ExpertAxis) -> None:
    """Mark the weights of experts if data ranks hold different ones; collective.

    DeepSpeed reads the attributes `allreduce` and `group_name` of a parameter. Without expert
    ranks, the experts of a tensor rank are like any other weight that tensor ranks divide.
    """
    if topology.expert == 1:
        return
    copies = create_groups(topology.expert_data_groups())
    groups._EXPERT_PARALLEL_GROUP[EXPERTS] = axis.group
    groups._EXPERT_DATA_PARALLEL_GROUP[EXPERTS] = copies
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[EXPERTS] = dist.get_process_group_ranks(copies)
    for layer in expert_layers(model):
        for weight in layer.experts.parameters():
            vars(weight).update(allreduce=False, group_name=EXPERTS)


def is_marked(weight: nn.Parameter) -> bool:
    """Return True if `mark_experts` has marked a weight."""
    return not vars(weight).get("allreduce", True)


def expert_data_group() -> dist.ProcessGroup:
    """Return this rank's group of ranks that hold the same experts, after `mark_experts`."""
    return groups._EXPERT_DATA_PARALLEL_GROUP[EXPERTS]
