"""The router: which experts compute a token, and the weights of their outputs.

n tokens of this rank, E experts, k experts per token. Everything here is in fp32, because rounding
would change the choice of experts.
"""

import torch
from torch import Tensor

from models.experts.settings import Router


def choose_experts(logits: Tensor, k: int) -> Tensor:
    """Return the numbers of the k experts with the largest logits: [n, E] to int64 [n, k].

    They are in descending order of their logits. Of equal logits, the expert with the smaller
    number comes first, on every device; `torch.topk` does not define the order.
    """
    ranked = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    return ranked[:, :k].contiguous()  # a view would keep all E numbers for the backward pass


def gates_of(logits: Tensor, chosen: Tensor, *, router: Router, normalize: bool) -> Tensor:
    """Return the weights of the chosen experts' outputs: fp32 [n, k].

    Args:
        logits: [n, E]
        chosen: [n, k], the result of `choose_experts`
        router: "softmax" takes the probabilities among all experts, "softmax-after-topk" those
            among the chosen ones (Mixtral, arXiv 2401.04088, section 2.1)
        normalize: divide the weights of a token by their sum (Qwen3's `norm_topk_prob`)
    """
    if router == "softmax-after-topk":
        return logits.gather(1, chosen).softmax(dim=-1)
    gates = logits.softmax(dim=-1).gather(1, chosen)
    return gates / gates.sum(dim=-1, keepdim=True) if normalize else gates


def smallest_margin(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the smallest difference between a last chosen and a first unchosen logit: [].

    Two layouts round differently. If a margin is below their difference, a token may get another
    expert in another layout. Infinite if every token uses all experts.
    """
    k = chosen.shape[1]
    if k == logits.shape[1]:
        return torch.full((), torch.inf, device=logits.device)
    ranked = logits.sort(dim=-1, descending=True).values
    return (ranked[:, k - 1] - ranked[:, k]).min()
