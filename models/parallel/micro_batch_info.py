"""Information about a micro-batch that layers need in addition to its activations.

s sequence, b micro-batch.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from models.context_parallel.division import Division, Slices
from models.parallel.rng import MaskKey, rows_in


@dataclass(frozen=True)
class Documents:
    """The division of a micro-batch's sequences into documents.

    It is kept on the host, because the lengths determine the shapes of tensors on the device, and
    reading them from the device would wait for it.

    lengths: document lengths of each of the b sequences, in order; those of a sequence sum to s
    """

    lengths: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=2)  # shared by all layers, for a micro-batch and for a recomputed one
def positions_in(
    documents: Documents, device: torch.device, slices: Slices | None = None
) -> Tensor:
    """Return each token's position in its document, int64 [s, b], without a synchronization.

    slices: positions in the sequence of the tokens; None: all
    """
    sequences = [[torch.arange(n, device=device) for n in each] for each in documents.lengths]
    positions = torch.stack([torch.cat(each) for each in sequences], dim=1)
    if slices is None:
        return positions
    return rows_in(slices, positions)


@dataclass(frozen=True)
class MicroBatchInfo:
    """Information about a micro-batch that layers need in addition to its activations.

    dropout: the key of the masks; None: no dropout, as in validation
    documents: attention is restricted to each document, and positions restart in each; None: every
        sequence is one document
    division: division of the sequences among context ranks; None: this rank has whole sequences
    """

    dropout: MaskKey | None = None
    documents: Documents | None = None
    division: Division | None = None

    @property
    def slices(self) -> Slices | None:
        """Positions in the sequence of this rank's tokens; None: of all tokens."""
        return None if self.division is None else self.division.slices
