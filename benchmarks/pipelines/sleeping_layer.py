"""A layer that sleeps instead of computing."""

import time

import torch
from torch import Tensor, nn

from models.parallel.layers import Deferring

SHAPE = (1, 1, 8)  # of activations, [s, b, h]


def loss(y: Tensor, labels: Tensor) -> Tensor:
    """Return an arbitrary scalar of two tensors [s, b, h]."""
    return (y * labels).mean()


class SleepingLayer(Deferring):
    """A layer that multiplies x by a weight per column, and sleeps.

    seconds: of the forward pass and of each part of the backward pass
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(SHAPE[-1]))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map [s, b, h] to [s, b, h], or to a loss if labels of this shape are given."""
        y = _SleepingProduct.apply(x, self.weight, self)
        return y if labels is None else loss(y, labels)


class _SleepingProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x)
        ctx.weight, ctx.layer = weight, layer
        time.sleep(layer.seconds)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        time.sleep(layer.seconds)

        def weight_gradient() -> Tensor:
            time.sleep(layer.seconds)
            return (grad * x).flatten(0, 1).sum(0)

        grad_weight = None
        if layer.deferral is None:
            grad_weight = weight_gradient()
        else:
            layer.deferral.put(ctx.weight, weight_gradient)
        return grad * ctx.weight, grad_weight, None
