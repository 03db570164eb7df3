"""Information that layers need in addition to activations, such as rows for dropout masks.

s sequence, b micro-batch.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from models.context_parallel.division import Division, Lengths, Slices, divide
from models.kernels.compile import Function
from models.kernels.elementwise import drop_out, mix, signed
from models.parallel.collectives import TensorAxis

# Dropout whose masks do not depend on the layout.
#
# A mask is a function of (seed, sample of the run, name of the layer, position in the logical
# tensor): each element is a counter, hashed, so there is no generator whose state would have to be
# seeded, forked over tensor ranks or restored for recomputation (counter-based random numbers,
# Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Tensor ranks that hold the
# same activations drop the same elements, and ranks that hold different parts drop different ones.
# The masks are the same on one rank, on a thousand ranks, in a replay and in a resumed run.
#
# s sequence, b micro-batch, h hidden, t tensor ranks, a/t heads on this rank.


@dataclass(frozen=True)
class MaskKey:
    """The seed and the samples that decide the masks of one micro-batch.

    seed: of the run
    samples: the b sequences of the run that the micro-batch holds
    """

    seed: int
    samples: range


def dropout(
    x: Tensor,
    probability: float,
    *,
    key: MaskKey | None,
    layer: str,
    tensor: TensorAxis,
    fuse: Function,
    slices: Slices | None = None,
) -> Tensor:
    """Drop elements of the residual stream: [s, b, h], or [s/t, b, h] under sequence parallelism.

    Args:
        key: None disables dropout, for validation
        slices: positions in the sequence of this context rank's tokens; None: 0 to s - 1
    """
    if key is None or probability == 0:
        return x
    rows = stream_rows(x, key=key, layer=layer, tensor=tensor, fuse=fuse, slices=slices)
    return drop_out(x, rows, probability, fuse)


def stream_rows(
    x: Tensor,
    *,
    key: MaskKey,
    layer: str,
    tensor: TensorAxis,
    fuse: Function,
    slices: Slices | None = None,
) -> Tensor:
    """Number the rows of x, [s, b, h] or [s/t, b, h], for its dropout mask: int64 [s, b]."""
    first = tensor.rank * x.shape[0] if tensor.sequence_parallel else 0
    last = first + x.shape[0]
    positions = token_positions(slices or (range(last),), x.device)[first:last]
    return fuse(_stream_rows)(_sample_numbers(key, layer, x.device), positions)


def attention_rows(
    x: Tensor,
    *,
    key: MaskKey,
    layer: str,
    first_head: int,
    fuse: Function,
    slices: Slices | None = None,
) -> Tensor:
    """Number the rows of attention probabilities [b, heads, queries, s]: int64 [b, heads, queries].

    Heads and queries are numbered within the logical model, so that the layout does not change the
    mask.

    Args:
        slices: positions in the sequence of the queries; None: 0 to s - 1
    """
    count, length = x.shape[1:3]
    heads = torch.arange(first_head, first_head + count, device=x.device)
    positions = token_positions(slices or (range(length),), x.device)
    return fuse(_attention_rows)(_sample_numbers(key, layer, x.device), heads, positions)


@lru_cache(maxsize=8)  # shared by all layers
def token_positions(slices: Slices, device: torch.device) -> Tensor:
    """Return the positions in slices of a sequence, int64 [s], without a copy from the host."""
    end = max(chunk.stop for chunk in slices)
    return rows_in(slices, torch.arange(end, device=device))


def rows_in(slices: Slices, x: Tensor) -> Tensor:
    """Return the rows of x, [s, ...], at the positions in slices, in their order."""
    return torch.cat([x[chunk.start : chunk.stop] for chunk in slices])


def _stream_rows(samples: Tensor, positions: Tensor) -> Tensor:
    return mix(mix(samples) + positions[:, None])


def _attention_rows(samples: Tensor, heads: Tensor, positions: Tensor) -> Tensor:
    rows = mix(mix(samples)[:, None] + heads)  # [b, a/t]
    return mix(rows[..., None] + positions)


def _sample_numbers(key: MaskKey, layer: str, device: torch.device) -> Tensor:
    """Number the samples of a layer: int64 [b], created on the device without a copy from the host.

    The result is a tensor because a Python number would be compiled into the kernel as a constant.
    """
    samples = torch.arange(key.samples.start, key.samples.stop, device=device)
    return samples + _layer_number(key.seed, layer)


@lru_cache(maxsize=4096)
def _layer_number(seed: int, layer: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=8).digest()
    return signed(int.from_bytes(digest), 64)


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
    sequences = [[torch.arange(n, device=device) for n in lengths] for lengths in documents.lengths]
    positions = torch.stack([torch.cat(ranges) for ranges in sequences], dim=1)
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

    @classmethod
    def of_windows(
        cls,
        lengths: Lengths,
        context_rank: int = 0,
        context_size: int = 1,
        *,
        dropout: MaskKey | None = None,
    ) -> "MicroBatchInfo":
        """Return the information about a micro-batch of windows.

        lengths: document lengths of each window; attention needs no mask if all windows have one
        """
        documents = Documents(lengths) if any(len(window) > 1 for window in lengths) else None
        division = None
        if context_size > 1:
            within = lengths if documents else None
            division = divide(sum(lengths[0]), context_rank, context_size, within)
        return cls(dropout, documents, division)

    @property
    def slices(self) -> Slices | None:
        """Positions in the sequence of this rank's tokens; None: of all tokens."""
        return None if self.division is None else self.division.slices
