"""Dropout whose masks do not depend on the layout.

A mask is a function of (seed, sample of the run, name of the layer, position in the logical
tensor): each element is a counter, hashed, so there is no generator whose state would have to be
seeded, forked over tensor ranks or restored for recomputation (counter-based random numbers,
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Tensor ranks that hold the same
activations drop the same elements, ranks that hold different parts drop different ones, and one
rank, a thousand ranks, a replay and a resumed run all drop what the recipe says.

s sequence, b micro-batch, h hidden, t tensor ranks, a/t heads on this rank.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from models.parallel.collectives import TensorAxis

GOLDEN_64, GOLDEN_32 = 0x9E3779B97F4A7C15, 0x9E3779B9


@dataclass(frozen=True)
class MaskKey:
    """What decides the masks of one micro-batch.

    seed: of the run
    samples: which sequences of the run it holds, b of them
    """

    seed: int
    samples: range


def dropout(
    x: Tensor, probability: float, *, key: MaskKey | None, place: str, axis: TensorAxis
) -> Tensor:
    """Dropout on the residual stream: [s, b, h], or [s/t, b, h] under sequence parallelism.

    key: None leaves x as it is, for validation
    place: the name of the layer
    """
    if key is None or probability == 0:
        return x
    first = axis.rank * x.shape[0] if axis.sequence_parallel else 0
    positions = torch.arange(first, first + x.shape[0], device=x.device)
    rows = _mix(_sample_rows(key, place, x.device) + positions[:, None])  # [s, b]
    return drop(x, keep_mask(rows, x.shape[2], probability), probability)


def attention_dropout_mask(
    key: MaskKey, probability: float, *, place: str, length: int, heads: range, device: torch.device
) -> Tensor:
    """Which attention probabilities stay: bool [b, a/t, s, s].

    heads: this rank's, numbered within the logical model
    """
    heads = torch.arange(heads.start, heads.stop, device=device)
    rows = _mix(_sample_rows(key, place, device)[:, None] + heads)  # [b, a/t]
    rows = _mix(rows[..., None] + torch.arange(length, device=device))  # [b, a/t, s]
    return keep_mask(rows, length, probability)


def drop(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """x / (1 - probability) where `keep`, else 0; autograd holds one byte per element."""
    return torch.where(keep, x * (1 / (1 - probability)), 0)


def keep_mask(rows: Tensor, columns: int, probability: float) -> Tensor:
    """Bernoulli(1 - probability): rows int64 [...] to bool [..., columns].

    Each element hashes its row's 64 bits and its column to 32 (the constants are those of
    lowbias32, Wellons 2018, "Prospecting for hash functions"); int32 keeps it to half the memory.
    """
    low, high = rows.to(torch.int32), (rows >> 32).to(torch.int32)
    counters = torch.arange(columns, device=rows.device) * GOLDEN_32
    bits = low.unsqueeze(-1) + counters.to(torch.int32)  # wraps, as all of this does
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D, 32))
    bits.add_(high.unsqueeze(-1))
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B, 32))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    return bits >= round(probability * 2**32) - 2**31


def _sample_rows(key: MaskKey, place: str, device: torch.device) -> Tensor:
    """One row number per sample: int64 [b]."""
    samples = torch.arange(key.samples.start, key.samples.stop, device=device)
    return _mix(samples + _place_number(key.seed, place))


@lru_cache(maxsize=4096)
def _place_number(seed: int, place: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest), 64)


def _mix(numbers: Tensor) -> Tensor:
    """splitmix64 (Steele et al. 2014) of int64 [...]: neighbours become unrelated."""
    mixed = numbers * _signed(GOLDEN_64, 64)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB, 64)
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """The logical shift of int64 to the right; torch's own copies the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int, bits: int) -> int:
    """The signed integer with the same bits."""
    return number - (1 << bits) if number >> (bits - 1) else number
