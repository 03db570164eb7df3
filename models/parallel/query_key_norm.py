"""RMSNorm of the queries, and of the keys, over all heads together, as in OLMo 2.

Tensor ranks divide the heads. They add up their sums between functions that a compiler may fuse.

s sequence, b micro-batch, t tensor ranks, d head size, a/t query heads and g/t key-value heads on
this rank; q, k and v in shapes are the numbers of their columns on this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel.collectives import TensorAxis
from models.parallel.layers import Norm, RMSNorm
from models.sharding import Sharding, declared_parameter


class SplitRMSNorm(RMSNorm):
    """RMSNorm over columns that are split over the tensor axis, as its weight is.

    `norm_queries_and_keys` applies two such norms, because their sums travel together.

    size: columns of all tensor ranks
    """

    def __init__(self, size: int, epsilon: float, *, tensor: TensorAxis):
        super().__init__(size, epsilon, input_is_split=True, tensor=tensor)
        self.weight = declared_parameter(Sharding((size,), 0, (size,)), tensor)


def norm_queries_and_keys(qkv: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
    """Return q|k|v with RMSNorm applied to q and to k, each over all heads: [s, b, (a + 2g)/t * d].

    As in OLMo 2 (arXiv 2501.00656, section 3.2). Forward: all-reduce of the mean squares, fp32
    [s, b, 2]; backward: all-reduce of as many means.
    """
    sizes = (q_norm.size, k_norm.size)
    return _QueryKeyNorm.apply(
        qkv, q_norm.weight, k_norm.weight, sizes, q_norm.epsilon, q_norm.tensor, q_norm.fuse
    )


class _QueryKeyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, sizes, epsilon, tensor, fuse):
        columns = (len(q_weight), len(k_weight), qkv.shape[-1] - len(q_weight) - len(k_weight))
        ctx.shape, ctx.tensor, ctx.fuse = (columns, sizes), tensor, fuse
        mean_squares = _summed(fuse(_query_key_squares)(qkv, columns, sizes), tensor)
        inverse_rms = torch.rsqrt(mean_squares + epsilon)
        ctx.save_for_backward(qkv, q_weight, k_weight, inverse_rms)
        return fuse(_query_key_norm)(qkv, q_weight, k_weight, inverse_rms, columns)

    @staticmethod
    def backward(ctx, grad):
        (columns, sizes), fuse = ctx.shape, ctx.fuse
        saved = ctx.saved_tensors  # read once, because a recomputed pass unpacks them only once
        products = fuse(_query_key_products)(grad, *saved, columns, sizes)
        means = _summed(products, ctx.tensor)
        gradients = fuse(_query_key_norm_backward)(grad, *saved, means, columns)
        return *gradients, None, None, None, None


def _summed(terms: Tensor, tensor: TensorAxis) -> Tensor:
    if tensor.size > 1:
        dist.all_reduce(terms, group=tensor.group)
    return terms


def _query_key_squares(
    qkv: Tensor, columns: tuple[int, int, int], sizes: tuple[int, int]
) -> Tensor:
    """Return this rank's terms of the mean squares of q and k: [s, b, q + k + v] to fp32 [s, b, 2].

    sizes: columns of q and of k on all ranks
    """
    q, k, _ = qkv.float().split(columns, dim=-1)
    terms = [q.square().sum(-1) / sizes[0], k.square().sum(-1) / sizes[1]]
    return torch.stack(terms, dim=-1)


def _query_key_norm(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    inverse_rms: Tensor,
    columns: tuple[int, int, int],
) -> Tensor:
    """Return normed q, normed k and v: [s, b, q + k + v].

    inverse_rms: of q and k, fp32 [s, b, 2]
    """
    q, k, v = qkv.split(columns, dim=-1)
    of_q, of_k = inverse_rms.split(1, dim=-1)
    q = (q.float() * of_q).to(qkv.dtype) * q_weight
    k = (k.float() * of_k).to(qkv.dtype) * k_weight
    return torch.cat([q, k, v], dim=-1)


def _query_key_products(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    inverse_rms: Tensor,
    columns: tuple[int, int, int],
    sizes: tuple[int, int],
) -> Tensor:
    """Return this rank's terms of the means of gradient times normed value: fp32 [s, b, 2].

    sizes: as in `_query_key_squares`
    """
    q, k, _ = qkv.float().split(columns, dim=-1)
    grad_q, grad_k, _ = grad.float().split(columns, dim=-1)
    of_q = (grad_q * q_weight * q).sum(-1) / sizes[0]
    of_k = (grad_k * k_weight * k).sum(-1) / sizes[1]
    return torch.stack([of_q, of_k], dim=-1) * inverse_rms


def _query_key_norm_backward(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    inverse_rms: Tensor,
    means: Tensor,
    columns: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q|k|v and of both weights.

    means: the sum of `_query_key_products` over the ranks, fp32 [s, b, 2]
    """
    q, k, _ = qkv.float().split(columns, dim=-1)
    grad_q, grad_k, grad_v = grad.float().split(columns, dim=-1)
    of_q, of_k = inverse_rms.split(1, dim=-1)
    mean_q, mean_k = means.split(1, dim=-1)
    q, k = q * of_q, k * of_k
    grad_q_weight = (grad_q * q).flatten(0, -2).sum(0).to(q_weight.dtype)
    grad_k_weight = (grad_k * k).flatten(0, -2).sum(0).to(k_weight.dtype)
    grad_q = of_q * (grad_q * q_weight - q * mean_q)
    grad_k = of_k * (grad_k * k_weight - k * mean_k)
    grad_x = torch.cat([grad_q, grad_k, grad_v], dim=-1).to(qkv.dtype)
    return grad_x, grad_q_weight, grad_k_weight
