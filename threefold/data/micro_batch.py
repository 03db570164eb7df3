"""The micro-batch, which flows through the model in one forward pass."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.parallel.micro_batch_info import MicroBatchInfo


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of the run.

    tokens: int64 [b, s]; None on a stage that takes no tokens
    labels: the next token of each token, int64 [b, s]; None if tokens are None
    info: the dropout key and the documents, which all layers need
    """

    tokens: Tensor | None
    labels: Tensor | None
    info: MicroBatchInfo

    def pinned(self) -> "MicroBatch":
        """Return a copy in page-locked memory, which a GPU reads without the host."""
        if self.tokens is None or self.labels is None:
            return self
        return replace(self, tokens=self.tokens.pin_memory(), labels=self.labels.pin_memory())

    def on(self, device: torch.device) -> "MicroBatch":
        """Return a copy on a device; from page-locked memory, kernels run during the copy."""
        if self.tokens is None or self.labels is None:
            return self
        tokens, labels = (t.to(device, non_blocking=True) for t in (self.tokens, self.labels))
        return replace(self, tokens=tokens, labels=labels)
