"""What flows through the model at a time."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.parallel.context import Context


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of the run.

    tokens: int64 [b, s]; None on a stage that takes none
    labels: the tokens one place on, int64 [b, s]; None likewise
    context: what every layer has to know of them
    """

    tokens: Tensor | None
    labels: Tensor | None
    context: Context

    def pinned(self) -> "MicroBatch":
        """The same in memory that a GPU copies from by itself."""
        if self.tokens is None:
            return self
        return replace(self, tokens=self.tokens.pin_memory(), labels=self.labels.pin_memory())

    def on(self, device: torch.device) -> "MicroBatch":
        """The same on a device, which pinned ones are copied to beside what runs."""
        tokens, labels = (t.to(device, non_blocking=True) for t in (self.tokens, self.labels))
        return replace(self, tokens=tokens, labels=labels)
