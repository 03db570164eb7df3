"""Experts in the engine: their process groups, the report of a step, and the routers' biases."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import nn

from models.config import ModelConfig
from models.experts.layer import MixtureOfExperts, expert_layers
from threefold.checkpoint.state import TrainingState
from threefold.engine.axes import ParallelAxes


@dataclass(frozen=True)
class ExpertReport:
    """The use of the experts in a step.

    Attributes:
        counts: number of tokens of each expert, by layer with experts; those of prediction modules
            come last
        balance_loss: mean over the layers and sequences; 1 is perfect
        z_loss: mean over the layers and tokens
        dropped: pairs of token and chosen expert that were not computed
    """

    counts: list[list[int]]
    balance_loss: float
    z_loss: float
    dropped: int

    @property
    def largest_load(self) -> float:
        """Tokens of the busiest expert of any layer, relative to the mean of its layer."""
        return max(max(of_layer) * len(of_layer) / sum(of_layer) for of_layer in self.counts)

    @property
    def entropy(self) -> float:
        """Entropy of the distribution of tokens among experts: mean over layers, 1 if equal."""
        return sum(map(_entropy, self.counts)) / len(self.counts)


def _entropy(counts: Sequence[int]) -> float:
    shares = [count / sum(counts) for count in counts if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(counts))


def expert_report(
    layers: Sequence[MixtureOfExperts],
    model: ModelConfig,
    *,
    tokens: int,
    replicas: int,
    micro_batches: int,
    device: torch.device,
) -> ExpertReport:
    """Return the report of the last step; collective over all ranks, one all-reduce.

    Args:
        tokens: tokens of the global batch
        replicas: number of ranks with the same part of the model
        micro_batches: number of micro-batches of a rank
    """
    assert model.experts is not None
    first = model.experts.dense_layers
    sums = torch.zeros(model.routed_layers, model.experts.count + 3, dtype=torch.float64)
    sums = sums.to(device)
    for layer in layers:
        statistics, row = layer.statistics, sums[layer.number - first]
        assert statistics.counts is not None
        row[:-3] = statistics.counts
        row[-3] = statistics.computed / layer.expert.columns.size
        row[-2] = statistics.balance / (replicas * micro_batches)
        row[-1] = statistics.z / (replicas * micro_batches)
    dist.all_reduce(sums)
    *_, computed, balance, z = sums.mean(0).tolist()
    dropped = round((tokens * model.experts.per_token - computed) * model.routed_layers)
    return ExpertReport(sums[:, :-3].long().tolist(), balance, z, dropped)


def smallest_margin(layers: Sequence[MixtureOfExperts], device: torch.device) -> float:
    """Return the smallest margin of any token's choice since the last step began; collective.

    It is the difference of the preferences for the last chosen and the first unchosen expert, or
    half of that of the scores of the last chosen and the first unchosen group.
    """
    margins = [torch.tensor(math.inf), *(layer.statistics.margin for layer in layers)]
    smallest = torch.stack([margin.to(device) for margin in margins if margin is not None]).min()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return float(smallest)


# Tell DeepSpeed which ranks hold the same experts, so that ZeRO divides experts among them.

EXPERTS = "experts"  # DeepSpeed's name of the group


def mark_experts(model: nn.Module, axes: ParallelAxes) -> None:
    """Mark the weights of experts if data ranks hold different ones.

    DeepSpeed reads the attributes `allreduce` and `group_name` of a parameter. Without expert
    ranks, the experts of a tensor rank are like any other weight that tensor ranks divide.
    """
    copies = axes.expert_data_group
    if copies is None:
        return
    groups._EXPERT_PARALLEL_GROUP[EXPERTS] = axes.expert.group
    groups._EXPERT_DATA_PARALLEL_GROUP[EXPERTS] = copies
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[EXPERTS] = dist.get_process_group_ranks(copies)
    for layer in expert_layers(model):
        for weight in layer.experts.parameters():
            vars(weight).update(allreduce=False, group_name=EXPERTS)


def is_marked(weight: nn.Parameter) -> bool:
    """Return True if `mark_experts` has marked a weight."""
    return not vars(weight).get("allreduce", True)


# Update of the routers' biases, which balances the experts without a loss.
#
# Wang et al. 2024 (arXiv 2408.15664, algorithm 1): in each step, just before AdamW, the bias of an
# expert that has received fewer tokens than the mean of its layer grows by a constant, and that of
# an expert with more tokens falls by it. The mean change of the layer is then subtracted, as in
# torchtitan: few experts have more tokens than the mean, so all biases would rise together until
# bf16 cannot hold their differences. The numbers of tokens are those of the whole global batch, so
# the update is the same in every layout.

ROUTER_BIAS = re.compile(r"(blocks|predictions)\.(\d+)\.(?:block\.)?mlp\.router\.bias")


@torch.no_grad()
def update_biases(
    state: TrainingState, counts: Sequence[Sequence[int]], *, model: ModelConfig, amount: float
) -> None:
    """Change this rank's fp32 biases in place, before the optimizer's step.

    The optimizer leaves them as they are, because their gradients are zero and they do not decay.
    Afterwards DeepSpeed copies them into the model, and to the other data ranks, like any weight.

    Args:
        counts: tokens of the global batch, by layer with experts and by expert
        amount: `model.experts.bias_update`
    """
    flats = state.weights
    assert model.experts is not None
    for fragment in state.fragments:
        match = ROUTER_BIAS.fullmatch(fragment.name)
        if match is None:
            continue
        first = model.expert_layers if match[1] == "predictions" else -model.experts.dense_layers
        of_layer = torch.tensor(counts[first + int(match[2])], dtype=torch.float64)
        sign = torch.sign(of_layer.mean() - of_layer)
        change = amount * (sign - sign.mean())
        own = change[fragment.elements.start : fragment.elements.stop].to(flats[fragment.flat])
        flats[fragment.flat][fragment.offset :][: len(own)] += own
