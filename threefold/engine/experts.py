"""Report about the experts of all layers in a step, over the whole global batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from models.config import ModelConfig
from models.experts.layer import MixtureOfExperts


@dataclass(frozen=True)
class ExpertReport:
    """The use of the experts in a step.

    Attributes:
        counts: number of tokens of each expert, by layer with experts
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
        layers: this rank's layers with experts
        model: the model
        tokens: tokens of the global batch
        replicas: number of ranks with the same part of the model
        micro_batches: number of micro-batches of a rank
        device: device of the process group
    """
    assert model.experts is not None
    first = model.layers - model.expert_layers
    sums = torch.zeros(model.expert_layers, model.experts.count + 3, dtype=torch.float64)
    sums = sums.to(device)
    for layer in layers:
        found, row = layer.statistics, sums[layer.number - first]
        assert found.counts is not None
        row[:-3] = found.counts
        row[-3] = found.computed / layer.expert_axis.columns.size
        row[-2] = found.balance / (replicas * micro_batches)
        row[-1] = found.z / (replicas * micro_batches)
    dist.all_reduce(sums)
    *_, computed, balance, z = sums.mean(0).tolist()
    dropped = round((tokens * model.experts.per_token - computed) * model.expert_layers)
    return ExpertReport(sums[:, :-3].long().tolist(), balance, z, dropped)


def smallest_margin(layers: Sequence[MixtureOfExperts], device: torch.device) -> float:
    """Return the smallest margin of any token's choice since the last step began; collective.

    It is the difference of the preferences for the last chosen and the first unchosen expert.
    """
    margins = [torch.tensor(math.inf), *(layer.statistics.margin for layer in layers)]
    smallest = torch.stack([each.to(device) for each in margins if each is not None]).min()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return float(smallest)
