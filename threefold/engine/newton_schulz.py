"""Orthogonalization of matrices by Newton-Schulz iterations."""

import torch
from torch import Tensor

from models.cost import NEWTON_SCHULZ_ITERATIONS

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
