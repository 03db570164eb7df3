"""Latent attention whose latents are exchanged by context ranks instead of keys and values.

Each rank expands the latents that it receives to the keys and values of its heads, and does so
again in the backward pass instead of keeping them. A latent is the input of all heads, so that it
has far fewer columns than their keys and values (DeepSeek-V2, arXiv 2405.04434, table 1).

b micro-batch, a heads, s sequence, c context ranks, n columns of a latent with the rotated key, k
columns of a key, v columns of a value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.context_parallel.attention import Divided, begin_pass, slices_at
from models.context_parallel.collectives import begin_gather, reduce_scatter
from models.context_parallel.division import Division
from models.context_parallel.tiles import (
    Merged,
    add_gradients_of_others,
    assemble,
    attend_to_others,
    attend_to_own,
    pieces,
    write_gradients_of_own,
)
from models.kernels.attention_parts import Part
from models.kernels.compile import Function
from models.kernels.elementwise import keys_and_values, keys_and_values_gradients
from models.parallel.layers import GradientReceiver, weight_gradient


@dataclass(frozen=True)
class Expansion:
    """The projection of latents to the keys and values of all heads.

    key_size: columns of a key that are not rotated
    fuse: compiles element-wise functions
    deferral: receives the gradient of the weight; None: the backward pass returns it
    """

    key_size: int
    fuse: Callable[[Function], Function]
    deferral: GradientReceiver | None

    def __call__(self, latent: Tensor, weight: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Return keys [b, a, s, k] and values [b, a, s, v] of latents [b, 1, s, n]."""
        shared, rotated = _split(latent, weight)
        of_heads = F.linear(shared, weight).unflatten(-1, (heads, -1))
        return keys_and_values(
            of_heads, rotated, key_size=self.key_size, order="basd", fuse=self.fuse
        )

    def gradients(
        self, latent: Tensor, weight: Tensor, grads: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of latents, fp32 [b, 1, s, n], and of the weight.

        grads: of keys and values, fp32 [b, a, s, k] and [b, a, s, v]
        """
        shared, _ = _split(latent, weight)
        of_heads, rotated = keys_and_values_gradients(
            *grads, key_size=self.key_size, fuse=self.fuse
        )
        of_heads = of_heads.flatten(2).to(weight.dtype)
        grad_latent = torch.cat([(of_heads @ weight).float(), rotated.float()], dim=-1)
        return grad_latent.unsqueeze(1), weight_gradient(of_heads, shared)

    def hand_over(self, weight: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the weight for autograd, or put it among the deferred ones.

        It is computed at once, because waiting would keep the gradients of all keys and values.
        """
        if self.deferral is None:
            return gradient
        self.deferral.put(weight, lambda: gradient)
        return None


def _split(latent: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the latents proper and the rotated keys of [b, 1, s, n]: each [b, s, ...]."""
    rank = weight.shape[1]
    whole = latent.squeeze(1)
    return whole[..., :rank], whole[..., rank:]


def gathered_latent_attention(
    q: Tensor,
    latent: Tensor,
    weight: nn.Parameter,
    expansion: Expansion,
    divided: Divided,
) -> Tensor:
    """Return the attention of this rank's queries to all earlier keys: [b, a, s/c, v].

    As `gathered_attention`, with an all-gather of latents.

    Communication: forward, an all-gather; backward, an all-gather and a reduce-scatter in fp32.

    Args:
        q: queries of this rank, [b, a, s/c, k]
        latent: latents of this rank, [b, 1, s/c, n]
        weight: of the expansion; rows for the key, then for the value of each head
    """
    return _Gathered.apply(q, latent, weight, expansion, divided)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, latent, weight, expansion, divided):
        axis, division, tiles, _ = divided
        gathered = begin_gather(latent, axis, division.order)
        heads = q.shape[1]
        keys, values = expansion(latent, weight, heads)
        parts = attend_to_own(q, keys, values, tiles)
        keys, values = expansion(gathered(), weight, heads)
        attend_to_others(parts, q, keys, values, pieces(tiles, division.whole))
        ctx.where = weight, expansion, divided
        return _assembled(ctx, q, latent, parts)

    @staticmethod
    def backward(ctx, grad):
        weight, expansion, (axis, division, tiles, _) = ctx.where
        latent, merged = _saved(ctx, grad)
        q = merged.q
        gathered = begin_gather(latent, axis, division.order)
        grad_q = torch.empty_like(q, dtype=torch.float32)
        keys, values = expansion(latent, weight, q.shape[1])
        own = [torch.empty_like(x, dtype=torch.float32) for x in (keys, values)]
        write_gradients_of_own((grad_q, *own), merged, keys, values, tiles)
        whole = gathered()
        keys, values = expansion(whole, weight, q.shape[1])
        totals = [torch.zeros_like(x, dtype=torch.float32) for x in (keys, values)]
        others = pieces(tiles, division.whole)
        add_gradients_of_others((grad_q, *totals), merged, keys, values, others)
        for total, part in zip(totals, own, strict=True):
            _add_own(total, part, division)
        grad_latent, grad_weight = expansion.gradients(whole, weight, totals)
        received = reduce_scatter(grad_latent, axis, division.order)
        grad_weight = expansion.hand_over(weight, grad_weight)
        return grad_q.to(q.dtype), received.to(latent.dtype), grad_weight, None, None


def _assembled(ctx: Any, q: Tensor, latent: Tensor, parts: Sequence[Part]) -> Tensor:
    """Return the output of all tiles, and save what the backward pass needs."""
    _, _, divided = ctx.where
    out, logsumexp = assemble(q, divided.tiles, parts)
    ctx.save_for_backward(q, latent, out, logsumexp)
    return out


def _saved(ctx: Any, grad: Tensor) -> tuple[Tensor, Merged]:
    """Return the latents and the merged attention."""
    q, latent, out, logsumexp = ctx.saved_tensors
    _, _, divided = ctx.where
    return latent, Merged(q, grad, out, logsumexp, divided.logits)


def _add_own(total: Tensor, own: Tensor, division: Division) -> None:
    """Add [b, a, s/c, ...] to the positions of this rank in [b, a, s, ...]."""
    lengths = [len(held) for held in division.slices]
    for held, part in zip(division.slices, own.split(lengths, dim=2), strict=True):
        total[:, :, held.start : held.stop] += part


def ring_latent_attention(
    q: Tensor,
    latent: Tensor,
    weight: nn.Parameter,
    expansion: Expansion,
    divided: Divided,
) -> Tensor:
    """Return the attention of this rank's queries to all earlier keys: [b, a, s/c, v].

    As `ring_attention`, with latents that are passed on.

    Communication: forward, c - 1 passes of latents; backward, the same, and c passes of their
    gradients in fp32.

    Args:
        q, latent, weight: as in `gathered_latent_attention`
    """
    return _Ring.apply(q, latent, weight, expansion, divided)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, latent, weight, expansion, divided):
        axis, division, tiles, _ = divided
        held, parts = latent.contiguous(), []
        for step in range(axis.size):
            passed = begin_pass(held, axis) if step < axis.size - 1 else None
            keys, values = expansion(held, weight, q.shape[1])
            if step == 0:
                parts = attend_to_own(q, keys, values, tiles)
            others = pieces(tiles, slices_at(step, axis, division))
            attend_to_others(parts, q, keys, values, others)
            if passed is not None:
                held = passed()
        ctx.where = weight, expansion, divided
        return _assembled(ctx, q, latent, parts)

    @staticmethod
    def backward(ctx, grad):
        weight, expansion, (axis, division, tiles, _) = ctx.where
        latent, merged = _saved(ctx, grad)
        q, held = merged.q, latent.contiguous()
        grad_q = torch.empty_like(q, dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        arriving: Callable[[], Tensor] | None = None
        for step in range(axis.size):
            passed = begin_pass(held, axis) if step < axis.size - 1 else None
            keys, values = expansion(held, weight, q.shape[1])
            totals = [torch.zeros_like(x, dtype=torch.float32) for x in (keys, values)]
            if step == 0:
                write_gradients_of_own((grad_q, *totals), merged, keys, values, tiles)
            others = pieces(tiles, slices_at(step, axis, division))
            add_gradients_of_others((grad_q, *totals), merged, keys, values, others)
            total, of_weight = expansion.gradients(held, weight, totals)
            grad_weight += of_weight
            if arriving is not None:  # what earlier ranks have added for the same latents
                total += arriving()
            arriving = begin_pass(total, axis)
            if passed is not None:
                held = passed()
        assert arriving is not None
        of_weight = expansion.hand_over(weight, grad_weight.to(weight.dtype))
        return grad_q.to(q.dtype), arriving().to(latent.dtype), of_weight, None, None
