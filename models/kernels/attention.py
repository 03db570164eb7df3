"""Causal attention as matrix products over blocks of queries, for CPUs.

On a CPU torch's fused attention takes longer than matrix products of the same size do, and most of
a short sequence's time (512 tokens: 1.5 times as long in fp32, twice in bf16); a block of queries
leaves out the keys that come after it. A GPU's fused kernels do better by themselves.

b micro-batch, a query heads, g key-value heads, s sequence, d head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 128  # queries of a block
# The longest sequence whose probabilities are kept for the backward pass; in a trace of a GPU none.
MOST_KEPT = 1024


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, no query seeing a later key.

    q [b, a, s, d] and k, v [b, g, s, d] to [b, a, s, d].
    """
    if in_blocks(q.device, q.shape[2]):
        return _BlockedAttention.apply(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def in_blocks(device: torch.device, length: int) -> bool:
    """Whether attention over so many tokens is computed in blocks, instead of by torch's kernel."""
    return device.type == "cpu" and length <= MOST_KEPT


class _BlockedAttention(torch.autograd.Function):
    """Keeps each block's probabilities, a s (s + ROWS) / 2 of them for a sequence.

    The heads that share a key and a value are rows of one product, [b * g, a/g * ROWS, d].
    """

    @staticmethod
    def forward(ctx, q, k, v):
        keys, values = k.flatten(0, 1), v.flatten(0, 1)  # [b * g, s, d]
        out, kept = torch.empty_like(q), []
        for first, last in _blocks(q):
            queries = _rows(q, k, first, last)
            scores = _scores(queries, keys[:, :last], first)
            kept.append(scores.softmax(dim=-1))
            block = torch.bmm(kept[-1], values[:, :last])
            out[:, :, first:last] = block.view(out[:, :, first:last].shape)
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *kept = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        keys, values = k.flatten(0, 1), v.flatten(0, 1)
        grad_q, grad_keys, grad_values = (
            torch.empty_like(q),
            torch.zeros_like(keys),
            torch.zeros_like(values),
        )
        for (first, last), probabilities in zip(_blocks(q), kept, strict=True):
            queries, rows = _rows(q, k, first, last), _rows(grad, k, first, last)
            grad_values[:, :last].baddbmm_(probabilities.transpose(1, 2), rows)
            grad_scores = torch.bmm(rows, values[:, :last].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(
                grad_scores, probabilities, -1, probabilities.dtype
            )
            block = torch.bmm(grad_scores, keys[:, :last]).mul_(scale)
            grad_q[:, :, first:last] = block.view(q[:, :, first:last].shape)
            grad_keys[:, :last].baddbmm_(grad_scores.transpose(1, 2), queries, alpha=scale)
        return grad_q, grad_keys.view(k.shape), grad_values.view(v.shape)


def _blocks(q: Tensor) -> list[tuple[int, int]]:
    """The first row of each block and that of the next."""
    length = q.shape[2]
    return [(first, min(first + ROWS, length)) for first in range(0, length, ROWS)]


def _rows(x: Tensor, k: Tensor, first: int, last: int) -> Tensor:
    """A block of [b, a, s, d] by key-value head: [b * g, a/g * rows, d]."""
    b, g = k.shape[:2]
    return x[:, :, first:last].reshape(b * g, -1, x.shape[-1])


def _scores(queries: Tensor, keys: Tensor, first: int) -> Tensor:
    """[b * g, a/g * rows, keys], scaled, -inf where a key comes after the query."""
    rows = keys.shape[1] - first
    scale = queries.shape[-1] ** -0.5
    scores = torch.baddbmm(
        queries.new_empty(1), queries, keys.transpose(1, 2), beta=0, alpha=scale
    )  # scaled before it is rounded
    later = scores.new_full((rows, rows), float("-inf")).triu_(1)
    scores.unflatten(1, (-1, rows))[..., first:].add_(later)
    return scores
