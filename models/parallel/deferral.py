"""Deferred weight gradients, which a pipeline computes while it would otherwise be idle.

Zero bubble pipeline parallelism (Qi et al. 2023, arXiv 2401.10241): the backward pass of a linear
layer has two parts, and the previous stage waits only for the gradient of the input.
"""

from collections.abc import Callable

from torch import Tensor, nn

WeightGradient = Callable[[], Tensor]


class Deferral:
    """Deferred weight gradients of the linear layers that share this object, in order."""

    def __init__(self) -> None:
        self.deferred: list[tuple[nn.Parameter, WeightGradient]] = []

    def put(self, weight: nn.Parameter, gradient: WeightGradient) -> None:
        """Defer a weight gradient; the function holds its inputs."""
        self.deferred.append((weight, gradient))

    def take(self) -> list[tuple[nn.Parameter, WeightGradient]]:
        """Return all deferred gradients and forget them."""
        deferred, self.deferred = self.deferred, []
        return deferred


class Deferring(nn.Module):
    """A module whose backward pass may defer the weight gradient.

    deferral: receives the weight gradient; None: the backward pass computes it
    """

    deferral: Deferral | None = None


def defer_weights(module: nn.Module, deferral: Deferral) -> None:
    """Let all linear layers of a module defer their weight gradients."""
    for each in module.modules():
        if isinstance(each, Deferring):
            each.deferral = deferral
