"""Weight gradients that are computed later than the input's, when a pipeline has nothing to send.

Zero bubble pipeline parallelism (Qi et al. 2023, arXiv 2401.10241): the backward pass of a linear
layer has two parts, and only the input's gradient is waited for by the stage before.
"""

from collections.abc import Callable

from torch import Tensor, nn

WeightGradient = Callable[[], Tensor]


class Deferral:
    """What is put off for the weights of the linears that share it, in the order it came."""

    def __init__(self) -> None:
        self.deferred: list[tuple[nn.Parameter, WeightGradient]] = []

    def put(self, weight: nn.Parameter, gradient: WeightGradient) -> None:
        """Put a weight's gradient off; it holds what it is computed from."""
        self.deferred.append((weight, gradient))

    def take(self) -> list[tuple[nn.Parameter, WeightGradient]]:
        """All that was put off, which is then the caller's."""
        deferred, self.deferred = self.deferred, []
        return deferred


class Deferring(nn.Module):
    """A module whose backward pass may leave the weight's part to a Deferral.

    deferral: where; None: the backward pass is whole
    """

    deferral: Deferral | None = None


def defer_weights(module: nn.Module, deferral: Deferral) -> None:
    """Let all linears in a module leave their weights' gradients there."""
    for each in module.modules():
        if isinstance(each, Deferring):
            each.deferral = deferral
