"""The router: which experts compute a token, and the weights of their outputs.

n tokens of this rank, E experts, k experts per token. Everything here is in fp32, because rounding
would change the choice of experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.experts_settings import Router

SMALLEST_SUM = 1e-20  # of a token's weights: all sigmoids may underflow to zero


@dataclass(frozen=True)
class Routing:
    """Result of a layer's router for a micro-batch.

    Attributes:
        logits: fp32 [s, b, E]
        scores: the result of `scores_of`, fp32 [s, b, E]
        preferences: the numbers by which the experts were chosen, fp32 [s, b, E]
        chosen: numbers of the chosen experts, int64 [s, b, k]
    """

    logits: Tensor
    scores: Tensor
    preferences: Tensor
    chosen: Tensor


def scores_of(logits: Tensor, router: Router) -> Tensor:
    """Return the affinities of tokens and experts, between 0 and 1: fp32, shape of the logits.

    They are the sigmoid of each logit (DeepSeek-V3, arXiv 2412.19437, equation 15) or the softmax
    over all experts.
    """
    return logits.sigmoid() if router == "sigmoid" else logits.softmax(dim=-1)


def probabilities_of(scores: Tensor, router: Router) -> Tensor:
    """Return the scores with the sum 1 over the experts (arXiv 2412.19437, equation 19)."""
    return (
        scores / (scores.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        if router == "sigmoid"
        else scores
    )


def choose_experts(preferences: Tensor, k: int) -> Tensor:
    """Return the numbers of the k experts with the largest preferences: [n, E] to int64 [n, k].

    They are in descending order of their preferences. Of equal preferences, the expert with the
    smaller number comes first, on every device; `torch.topk` does not define the order.

    Args:
        preferences: the logits, or the scores plus the biases
        k: experts per token
    """
    ranked = torch.sort(preferences, dim=-1, descending=True, stable=True).indices
    return ranked[:, :k].contiguous()  # a view would keep all E numbers for the backward pass


def gates_of(scores: Tensor, chosen: Tensor, *, sum_is_one: bool, scale: float = 1.0) -> Tensor:
    """Return the weights of the chosen experts' outputs: fp32 [n, k].

    With softmax, dividing by the sum gives the softmax over the chosen experts (Mixtral, arXiv
    2401.04088, section 2.1).

    Args:
        scores: [n, E], the result of `scores_of`
        chosen: [n, k], the result of `choose_experts`
        sum_is_one: divide the weights of a token by their sum (`norm_topk_prob` in transformers)
        scale: factor of all weights (`routed_scaling_factor` in transformers)
    """
    gates = scores.gather(1, chosen)
    if sum_is_one:
        gates = gates / (gates.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return gates if scale == 1.0 else gates * scale


def smallest_margin(preferences: Tensor, chosen: Tensor) -> Tensor:
    """Return the smallest difference between a last chosen and a first unchosen expert: [].

    Two layouts round differently. If a margin is below their difference, a token may get another
    expert in another layout. Infinite if every token uses all experts.

    Args:
        preferences: [n, E], from which the experts were chosen
        chosen: [n, k]
    """
    last = preferences.gather(1, chosen[:, -1:])
    others = preferences.scatter(1, chosen, -torch.inf)
    return (last - others).min()
