"""Update of the routers' biases, which balances the experts without a loss.

Wang et al. 2024 (arXiv 2408.15664, algorithm 1): in each step, just before AdamW, the bias of an
expert that has received fewer tokens than the mean of its layer grows by a constant, and that of an
expert with more tokens falls by it. The numbers of tokens are those of the whole global batch, so
the update is the same in every layout.
"""

import re
from collections.abc import Sequence

import torch

from threefold.checkpoint.state import TrainingState

ROUTER_BIAS = re.compile(r"blocks\.(\d+)\.mlp\.router\.bias")


@torch.no_grad()
def update_biases(
    state: TrainingState, counts: Sequence[Sequence[int]], *, first_layer: int, amount: float
) -> None:
    """Change this rank's fp32 biases in place, before the optimizer's step.

    The optimizer leaves them as they are, because their gradients are zero and they do not decay.
    Afterwards DeepSpeed copies them into the model, and to the other data ranks, like any weight.

    Args:
        state: this rank's share of the training state
        counts: tokens of the global batch, by layer with experts and by expert
        first_layer: number of the first layer with experts
        amount: `model.experts.bias_update`
    """
    flats = state.weights
    for fragment in state.fragments:
        found = ROUTER_BIAS.fullmatch(fragment.name)
        if found is None:
            continue
        of_layer = torch.tensor(counts[int(found[1]) - first_layer], dtype=torch.float64)
        change = amount * torch.sign(of_layer.mean() - of_layer)
        own = change[fragment.elements.start : fragment.elements.stop].to(flats[fragment.flat])
        flats[fragment.flat][fragment.offset :][: len(own)] += own
