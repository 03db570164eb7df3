"""Attention to some of the keys, and the merging of such parts into attention to all of them.

A part comes with the logsumexp of its scores, which is the logarithm of the softmax's denominator,
so that parts can be merged in any order ("online softmax", Milakov and Gimelshein 2018, arXiv
1805.02867). The backward pass of a part needs the merged result and the merged logsumexp, but no
other part (FlashAttention, arXiv 2205.14135; ring attention, arXiv 2310.01889).

b sequences, a query heads, g key-value heads, n queries, m keys, d head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from models.kernels.attention import MAX_FLASH_HEAD_SIZE, has_flash_attention

aten = torch.ops.aten
LOGSUMEXP_ROWS = 32  # the memory-efficient kernel pads its logsumexps to a multiple of this

Part = tuple[Tensor, Tensor]  # output fp32 [b, a, n, d], and logsumexp fp32 [b, a, n]
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Part:
    """Return the attention of q [b, a, n, d] to k and v [b, g, m, d].

    Args:
        q: queries
        k: keys
        v: values
        causal: query i sees the keys up to i; requires n = m
    """
    kernel = kernel_for(q)
    if not kernel.grouped:
        k, v = (_for_each_query_head(x, q) for x in (k, v))
    out, logsumexp = kernel.forward(q, k, v, causal)
    return out.float(), logsumexp.float()


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, *, causal: bool
) -> Gradients:
    """Return the gradients of q, k and v that pass through this part, in fp32.

    Args:
        grad: gradient of the merged output, [b, a, n, d]
        q: queries of the part
        k: keys of the part
        v: values of the part
        whole: the merged output and logsumexp
        causal: as in `attend`
    """
    kernel, groups, (out, logsumexp) = kernel_for(q), k.shape[1], whole
    if not kernel.grouped:
        k, v = (_for_each_query_head(x, q) for x in (k, v))
    grads = kernel.backward(grad, q, k, v, (out.to(q.dtype), logsumexp), causal)
    grad_q, grad_k, grad_v = (x.float() for x in grads)
    if not kernel.grouped:
        grad_k, grad_v = (x.unflatten(1, (groups, -1)).sum(dim=2) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def merge(one: Part, other: Part) -> Part:
    """Merge two parts of the same queries; `one` must have a key for every query."""
    (out, logsumexp), (out_other, logsumexp_other) = one, other
    share = torch.sigmoid(logsumexp_other - logsumexp)[..., None]  # of the other part
    merged = logsumexp - F.logsigmoid(logsumexp - logsumexp_other)
    return torch.lerp(out, out_other, share), merged


@dataclass(frozen=True)
class Kernel:
    """A fused kernel whose forward pass also returns the logsumexp.

    Attributes:
        forward: function of q, k, v and causal
        backward: function of the gradient, q, k, v, the merged part and causal
        grouped: several query heads may share a key and a value
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], Part]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Part, bool], Gradients]
    grouped: bool


def kernel_for(q: Tensor) -> Kernel:
    """Return the fastest kernel for the type, the device and the head size of q."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return REFERENCE
    if q.device.type == "cpu":
        return CPU_FLASH
    if q.device.type != "cuda" or q.shape[-1] % 8 or q.shape[-1] > MAX_FLASH_HEAD_SIZE:
        return REFERENCE
    if q.dtype == torch.float32:
        return EFFICIENT
    return FLASH if has_flash_attention(q.device) else REFERENCE


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values [b, g, m, d] for the query heads that share them: [b, a, m, d]."""
    repeats = q.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, *whole, 0.0, causal
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is not used
    out, logsumexp = whole
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out,
        logsumexp.contiguous(),  # the kernel ignores its strides (pytorch's mha_bwd)
        None, None, q.shape[2], k.shape[2], 0.0, causal, state, state[:1],
    )  # fmt: skip


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal
    )
    return out, logsumexp[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    out, logsumexp = whole
    # As in the forward kernel: the probabilities of the rows that pad the last block are 0.
    padding = (0, -logsumexp.shape[-1] % LOGSUMEXP_ROWS)
    padded = F.pad(logsumexp, padding, value=float("inf"))
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    wanted = [True, True, True, False]  # no gradient of a bias
    *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded, state, state, 0.0, wanted, causal
    )
    return grads[0], grads[1], grads[2]


def _masked_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return scaled scores fp32 [b, a, n, m], -inf for keys that a query does not see."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    scores = _masked_scores(q, k, causal)
    logsumexp = scores.logsumexp(dim=-1)
    return torch.matmul((scores - logsumexp[..., None]).exp(), v.to(scores.dtype)), logsumexp


def _reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    out, logsumexp = whole
    probabilities = (_masked_scores(q, k, causal) - logsumexp[..., None]).exp()
    wide = probabilities.dtype
    grad, out, q, k, v = (x.to(wide) for x in (grad, out, q, k, v))
    delta = (grad * out).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (torch.matmul(grad, v.transpose(-1, -2)) - delta)
    grad_scores *= q.shape[-1] ** -0.5
    return (
        torch.matmul(grad_scores, k),
        torch.matmul(grad_scores.transpose(-1, -2), q),
        torch.matmul(probabilities.transpose(-1, -2), grad),
    )


REFERENCE = Kernel(
    _reference_forward, _reference_backward, grouped=False
)  # materialises the scores
CPU_FLASH = Kernel(_cpu_forward, _cpu_backward, grouped=True)
FLASH = Kernel(_flash_forward, _flash_backward, grouped=True)
EFFICIENT = Kernel(_efficient_forward, _efficient_backward, grouped=False)
