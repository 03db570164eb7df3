"""What layers have to know of a micro-batch beside its numbers.

s sequence, b micro-batch.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from models.parallel.rng import MaskKey


@dataclass(frozen=True)
class Documents:
    """How a micro-batch's sequences divide into documents.

    Kept on the host: they decide the shapes of what runs on a device, which would be waited for.

    lengths: of each sequence's documents in their order, b times; those of a sequence sum to s
    """

    lengths: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=2)  # for all layers of a micro-batch, and of one that is computed again
def positions_in(documents: Documents, device: torch.device) -> Tensor:
    """Each token's place in its document: int64 [s, b]; made without waiting for the device."""
    sequences = [[torch.arange(n, device=device) for n in each] for each in documents.lengths]
    return torch.stack([torch.cat(places) for places in sequences], dim=1)


@dataclass(frozen=True)
class Context:
    """What layers have to know of a micro-batch beside its numbers.

    dropout: what decides the masks; None: nothing is dropped, as in validation
    documents: attention stays within them and positions start again in each; None: every sequence
        is one
    """

    dropout: MaskKey | None = None
    documents: Documents | None = None
