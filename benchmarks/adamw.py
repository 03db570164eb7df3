"""AdamW for models that are not built by Threefold, with the same settings."""

import torch
from torch import nn

from threefold.config.optimization import Optimizer


def adamw(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """Return AdamW with weight decay for matrices and embeddings, but not for norms and biases."""
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
