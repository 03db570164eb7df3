"""Dropout with masks that are computed from row numbers, in the kernel that applies them.

A row number is 64 bits that identify a row of the logical tensor
(`models/parallel/micro_batch_info.py` computes it); the mask of an element is a hash of its row
number and its column. A compiled kernel computes the mask, applies it and writes the mask, one byte
per element, for the backward pass.
"""

import torch
from torch import Tensor

from models.kernels.compile import Function, native_on_cpu


def signed(number: int, bits: int) -> int:
    """Return the signed integer with the same bits."""
    return number - (1 << bits) if number >> (bits - 1) else number


# 2^64 and 2^32 divided by the golden ratio, the latter with the same 32 bits as a signed number for
# GPUs: Triton multiplies positions in int32 and rejects constants that do not fit. With the signed
# number, torch 2.13's compiled CPU code also multiplies in int32, and writes past the mask's end.
GOLDEN_64 = signed(0x9E3779B97F4A7C15, 64)
GOLDEN_32_ON_CPU, GOLDEN_32_ON_GPU = 0x9E3779B9, signed(0x9E3779B9, 32)


def drop_out(x: Tensor, rows: Tensor, probability: float, fuse: Function) -> Tensor:
    """Return x / (1 - probability) where the mask keeps x, else 0.

    Args:
        x: [..., columns]
        rows: int64 [...], the row numbers
    """
    return _DropOut.apply(x, rows, probability, fuse)


class _DropOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, probability, fuse):
        ctx.probability, ctx.fuse = probability, fuse
        dropped, keep = fuse(_drop_out)(x, rows, probability)
        ctx.save_for_backward(keep)
        return dropped

    @staticmethod
    def backward(ctx, grad):
        return ctx.fuse(drop)(grad, *ctx.saved_tensors, ctx.probability), None, None, None


@native_on_cpu
def _drop_out(x: Tensor, rows: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    keep = keep_mask(rows, x.shape[-1], probability)
    return drop(x, keep, probability), keep


def drop(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """Return x / (1 - probability) where `keep`, else 0; its gradient is the same function."""
    return torch.where(keep, x * (1 / (1 - probability)), 0)


def keep_mask(rows: Tensor, columns: int, probability: float) -> Tensor:
    """Draw from Bernoulli(1 - probability): rows int64 [...] to bool [..., columns].

    Each element hashes the 64 bits of its row and its column to 32 bits (with the constants of
    lowbias32, Wellons 2018, "Prospecting for hash functions"); int64 would take twice the memory.
    """
    low, high = rows.to(torch.int32), (rows >> 32).to(torch.int32)
    golden = GOLDEN_32_ON_CPU if rows.device.type == "cpu" else GOLDEN_32_ON_GPU
    counters = torch.arange(columns, device=rows.device) * golden  # int64: see above
    bits = low.unsqueeze(-1) + counters.to(torch.int32)  # wraps around, as intended throughout
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(signed(0x7FEB352D, 32))
    bits.add_(high.unsqueeze(-1))
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(signed(0x846CA68B, 32))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    return bits >= round(probability * 2**32) - 2**31


def mix(numbers: Tensor) -> Tensor:
    """Hash int64 [...] with splitmix64 (Steele et al. 2014): neighbours get unrelated results."""
    mixed = numbers * GOLDEN_64
    mixed = (mixed ^ _shifted(mixed, 30)) * signed(0xBF58476D1CE4E5B9, 64)
    mixed = (mixed ^ _shifted(mixed, 27)) * signed(0x94D049BB133111EB, 64)
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right logically; torch's own shift copies the sign bit."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
