"""A training loop without DeepSpeed, for any model that returns its loss."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.adamw import adamw
from threefold.config.recipe import Recipe


class BareLoop:
    """A training loop of only forward, backward, clipping and fused AdamW.

    In bf16 without autocast the optimizer has an fp32 copy of the weights, whose gradients are
    accumulated in fp32 as soon as they are computed.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, *, autocast: bool):
        self.model, self.clipping = model, recipe.optimizer.gradient_clipping
        self.weights: list[tuple[Tensor, Tensor]] = []  # the optimizer's copy, the model's weight
        trained: nn.Module = model
        if "bf16" in recipe.deepspeed and not autocast:
            trained = nn.ParameterList(
                nn.Parameter(each.detach().float().clone()) for each in model.parameters()
            )
            model.bfloat16()
            self.weights = list(zip(trained.parameters(), model.parameters(), strict=True))
            for master, weight in self.weights:
                master.grad = torch.empty_like(master)
                weight.register_post_accumulate_grad_hook(partial(self._accumulate, master))
        self.trained = list(trained.parameters())
        self.optimizer = adamw(trained, recipe.optimizer)

    def train(self, batch: Sequence[tuple[Any, ...]]) -> float:
        """Run a step; each micro-batch is a tuple of the model's arguments."""
        losses: list[Tensor] = []
        for micro_batch in batch:
            self.is_first = not losses
            loss = self.model(*micro_batch)
            (loss / len(batch)).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self.trained, self.clipping)
        self.optimizer.step()
        if not self.weights:
            self.optimizer.zero_grad()
        with torch.no_grad():
            for master, weight in self.weights:
                weight.copy_(master)
        return float(torch.stack(losses).mean())

    def _accumulate(self, master: Tensor, weight: Tensor) -> None:
        """Add a weight's gradient to that of its fp32 copy; the first micro-batch overwrites it."""
        assert master.grad is not None and weight.grad is not None
        if self.is_first:
            master.grad.copy_(weight.grad)
        else:
            master.grad.add_(weight.grad)
        weight.grad = None
