"""Muon for hidden matrices, with Newton-Schulz iterations, and AdamW for the other parameters."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from models.cost import NEWTON_SCHULZ_ITERATIONS
from threefold.checkpoint.state import STATES, initial_state

(MOMENTUM,) = STATES["muon"]


class Orthogonalize(Protocol):
    """Replaces the elements of logical matrices in flat tensors by their updates.

    Attributes:
        group: the ranks that exchange elements; None: only this one
    """

    group: dist.ProcessGroup | None

    def __call__(self, flats: Mapping[int, Tensor], meanwhile: Callable[[], None]) -> None:
        """Replace the elements in place.

        Args:
            flats: this rank's shard of each flat tensor, by `id` of the tensor of its weights
            meanwhile: function to call while elements are exchanged
        """


class Muon(torch.optim.Optimizer):
    """Muon (Moonlight, arXiv 2502.16982, equations 1 to 4) for some groups, AdamW for the others.

    Groups whose key `algorithm` is "muon" hold hidden matrices. The update of a matrix is

        momentum = beta * momentum + gradient
        update   = 0.2 * sqrt(max(rows, columns)) * orthogonalize(gradient + beta * momentum)
        weight   = weight - rate * (weight_decay * weight + update)

    where the sum in the second line is Nesterov's momentum. The factor gives the update the root
    mean square that updates of AdamW usually have. DeepSpeed passes each group as one flat tensor,
    this rank's shard, so that `exchange` has to gather the matrices.

    Like torch's fused AdamW, it divides the gradients by the attribute `grad_scale`, if it exists.

    Args:
        groups: the groups of `parameter_groups`
        betas: decay rates of AdamW's moments
        momentum: beta of Muon
    """

    grad_scale: Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        momentum: float,
    ):
        # AdamW takes the groups and the state of this optimizer in each step.
        self.adamw = torch.optim.AdamW([torch.zeros(1)], lr=lr, betas=betas, fused=True)
        super().__init__(groups, self.adamw.defaults | {"momentum": momentum})
        self.exchange: Orthogonalize | None = None  # set when the flat tensors exist

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all groups that have gradients; collective within the ranks of the exchange."""
        updated = [
            (weights, group)
            for group in self.param_groups
            if group["algorithm"] == "muon"
            for weights in group["params"]
            if weights.grad is not None
        ]
        updates = {
            id(weights): self._add_momentum(weights, group["momentum"])
            for weights, group in updated
        }
        if not updates:
            self._step_adamw()
            return
        assert self.exchange is not None, "the exchange of matrices is not set"
        self.exchange(updates, self._step_adamw)
        for weights, group in updated:
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(weights.grad, alpha=-group["lr"])

    def _add_momentum(self, weights: Tensor, beta: float) -> Tensor:
        """Update the momentum, and replace the gradient by Nesterov's momentum."""
        state = initial_state(self.state, weights, (MOMENTUM,))
        gradient = weights.grad
        assert gradient is not None
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        momentum = state[MOMENTUM].mul_(beta).add_(gradient)
        state["step"] += 1
        return gradient.add_(momentum, alpha=beta)

    def _step_adamw(self) -> None:
        adamw = self.adamw
        adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
        adamw.state = self.state
        adamw.grad_scale = self.grad_scale  # type: ignore[attr-defined]
        adamw.step()


# Orthogonalization of matrices by Newton-Schulz iterations.

# From Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/); Moonlight uses them, too.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7  # added to the norm


@torch.no_grad()
def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices with the same singular vectors, whose singular values are close to 1.

    Each iteration replaces X by a X + (b A + c A^2) X with A = X X^T. With these coefficients, the
    singular values end between about 0.7 and 1.2. Computes in the type of the input; Muon's
    authors use bf16.

    Args:
        matrices: [n, rows, columns]

    Returns:
        Tensor of the same shape and type.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # [n, short, long]
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + EPSILON)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.mT  # [n, short, short]
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b A + c A^2
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x
