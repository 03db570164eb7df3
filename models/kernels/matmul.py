"""Matmuls in FP8 with tiles and blocks, as in DeepSeek-V3, and weight gradients added in a matmul.

Activations and gradients have one scale per row and 128 columns (a tile of 1 x 128), weights have
one per block of 128 x 128 (arXiv 2412.19437, section 3.3). All values are E4M3. All scales are
powers of two, as those of the paper's cached activations are: a quantized number is then exact in
bf16 and fp32, so that the emulated product has the same inputs as that of a GPU, and a matrix that
is quantized along its rows can be quantized again along its columns with little further error.

Neither tiles nor blocks cross the parts of a joined dimension (q|k|v, gate|up), and the last one of
a part may be smaller. If 128 divides each rank's share of a part, the quantized values therefore do
not depend on the layout.

m rows, such as tokens; n output columns; k summed columns; s sequence, b micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from models.config import FP8_TILE as TILE
from models.kernels.compile import Function, as_written

E4M3 = torch.float8_e4m3fn
MANTISSA_BITS = 23  # of fp32; a sign and 8 bits of the exponent precede them
MANTISSA = (1 << MANTISSA_BITS) - 1
BIAS = 127  # of the exponent
# The largest number of E4M3 is 448 = 1.75 x 2^8.
LARGEST_EXPONENT = 8
LARGEST_MANTISSA = 0b11 << (MANTISSA_BITS - 2)

Parts = tuple[int, ...]  # sizes of the parts of a dimension


@dataclass(frozen=True)
class Quantized:
    """A matrix in FP8, or a tensor whose last dimension has tiles.

    Attributes:
        values: E4M3, [..., k]
        scales: fp32; one per tile, [..., tiles of k], or per block, [blocks of n, blocks of k]
        columns: parts of the last dimension
        rows: parts of the first dimension of a matrix with blocks; None: each row has tiles
    """

    values: Tensor
    scales: Tensor
    columns: Parts
    rows: Parts | None = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers in bf16 or fp32, which represent them exactly."""
        scales = self.scales.to(dtype)
        wide = _tiles(_reals(self.values, dtype), self.columns, -1)  # [..., tiles, 128]
        if self.rows is None:
            wide.mul_(scales.unsqueeze(-1))
        else:
            wide = _tiles(wide, self.rows, 0).mul_(scales[:, None, :, None])
            wide = _without_tiles(wide, self.rows, 0)
        return _without_tiles(wide, self.columns, -1)

    def transposed(self) -> "Quantized":
        """Return the transpose of a matrix with blocks."""
        assert self.rows is not None, "the tiles of a transpose are not rows"
        return Quantized(self.values.t(), self.scales.t(), self.rows, self.columns)

    @property
    def is_whole(self) -> bool:
        """True if no tile or block is smaller than the others."""
        return not _has_smaller_tiles((*self.columns, *(self.rows or ())))


@dataclass(frozen=True)
class Fp8:
    """The quantization of the matrices of a linear layer.

    outputs: parts of the layer's outputs on this rank, which are rows of its weight
    fuse: compiles the quantization
    """

    outputs: Parts
    fuse: Callable[[Function], Function] = as_written

    def rows(self, x: Tensor, columns: Parts | None = None) -> Quantized:
        """Quantize x [..., k] in tiles along its last dimension, which has the given parts."""
        columns = columns or (x.shape[-1],)
        fuse = self._fuse_of(columns)
        values, scales = fuse(quantize_rows)(x, columns)
        return Quantized(values, scales, columns)

    def outputs_of(self, grad: Tensor) -> Quantized:
        """Quantize the gradient of the outputs, [..., n], in tiles along n."""
        return self.rows(grad, self.outputs)

    def tokens(self, x: Tensor) -> Quantized:
        """Quantize x [s, b, k] in tiles along each sequence: [k, b * s]."""
        fuse = self._fuse_of((len(x),))
        values, scales = fuse(quantize_tokens)(x)
        return Quantized(values.flatten(1), scales.flatten(1), (len(x),) * x.shape[1])

    def weight(self, weight: Tensor) -> Quantized:
        """Quantize a weight [n, k] in blocks."""
        columns = (weight.shape[1],)
        fuse = self._fuse_of((*columns, *self.outputs))
        values, scales = fuse(quantize_blocks)(weight.detach(), self.outputs, columns)
        return Quantized(values, scales, columns, self.outputs)

    def _fuse_of(self, sizes: Parts) -> Callable[[Function], Function]:
        """Return the function that compiles a quantization, if all tiles are whole.

        Compiled by torch 2.13 for a CPU, it returns zeros for a part's last tile if it is smaller.
        """
        return as_written if _has_smaller_tiles(sizes) else self.fuse


def quantize_rows(x: Tensor, columns: Parts) -> tuple[Tensor, Tensor]:
    """Return the values of x [..., k] in E4M3, and the scales of its tiles in fp32."""
    tiles = _tiles(x, columns, -1)  # [..., tiles, 128]
    scales, inverse = power_of_two_scales(tiles.abs().amax(-1))
    values = (tiles * inverse.to(x.dtype).unsqueeze(-1)).to(E4M3)
    return _without_tiles(values, columns, -1), scales


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `quantize_rows` does of the transpose of x [s, b, k]: [k, b, s]."""
    tiles = _tiles(x, (len(x),), 0)  # [tiles, 128, b, k]
    scales, inverse = power_of_two_scales(tiles.abs().amax(1))
    values = _without_tiles((tiles * inverse.to(x.dtype).unsqueeze(1)).to(E4M3), (len(x),), 0)
    return values.permute(2, 1, 0).contiguous(), scales.permute(2, 1, 0).contiguous()


def quantize_blocks(weight: Tensor, rows: Parts, columns: Parts) -> tuple[Tensor, Tensor]:
    """Return the values of a weight [n, k] in E4M3, and the scales of its blocks in fp32."""
    blocks = _tiles(_tiles(weight, columns, -1), rows, 0)  # [blocks, 128, blocks, 128]
    scales, inverse = power_of_two_scales(blocks.abs().amax((1, 3)))
    values = (blocks * inverse.to(weight.dtype)[:, None, :, None]).to(E4M3)
    return _without_tiles(_without_tiles(values, rows, 0), columns, -1), scales


def power_of_two_scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest powers of two with `largest` / scale <= 448, and their inverses.

    They are computed in integers, so that no rounding of a logarithm can change them. A tile with a
    number that is not finite becomes NaN.

    largest: absolute values

    Returns:
        Both in fp32. A product with an inverse is exact in the type of `largest`, too.
    """
    bits = largest.float().view(torch.int32)
    exponent = (bits >> MANTISSA_BITS) - BIAS - LARGEST_EXPONENT
    exponent = exponent + ((bits & MANTISSA) > LARGEST_MANTISSA).int()
    exponent = exponent.clamp(min=1 - BIAS)  # the smallest power with an inverse
    return _power_of_two(exponent), _power_of_two(-exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + BIAS) << MANTISSA_BITS).view(torch.float32)


def _reals(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return E4M3 values in another type.

    On a CPU they are looked up in a table, because torch's conversion is four times as slow.
    """
    if values.device.type != "cpu":
        return values.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(E4M3).to(dtype)
    bits = values.contiguous().view(torch.uint8)
    return table.index_select(0, bits.flatten().int()).view(values.shape)


def _has_smaller_tiles(sizes: Sequence[int]) -> bool:
    """Return True if the last tile of a part is smaller than the others."""
    return any(size % TILE for size in sizes)


def _tiles(x: Tensor, parts: Sequence[int], dimension: int) -> Tensor:
    """Split a dimension into tiles, [tiles, 128]; the last tile of a part is filled with zeros."""
    if _has_smaller_tiles(parts):
        after = (x.dim() - 1 - dimension) % x.dim()  # dimensions that follow
        filled = [
            F.pad(part, (0, 0) * after + (0, -part.shape[dimension] % TILE))
            for part in x.split(parts, dimension)
        ]
        x = torch.cat(filled, dimension)
    return x.unflatten(dimension, (-1, TILE))


def _without_tiles(x: Tensor, parts: Sequence[int], dimension: int) -> Tensor:
    """Undo `_tiles`."""
    first = dimension if dimension >= 0 else x.dim() - 1 + dimension
    x = x.flatten(first, first + 1)
    if not _has_smaller_tiles(parts):
        return x
    filled = x.split([size + -size % TILE for size in parts], first)
    whole = [part.narrow(first, 0, size) for part, size in zip(filled, parts, strict=True)]
    return torch.cat(whole, first)


def product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a b^T, summed in fp32: [..., k] and [n, k] to [..., n].

    On a Hopper GPU one matmul in FP8 computes it if each dimension consists of whole tiles.
    Otherwise the dequantized matrices are multiplied, in bf16 if `dtype` is, which is exact.
    """
    m, n = a.values.shape[:-1].numel(), len(b.values)
    is_whole = a.is_whole and b.is_whole and m % TILE == n % TILE == 0
    if is_whole and multiplies_tiles(a.values.device):
        # No view, because autograd does not let the output of a function be a view that a
        # collective changes in place.
        return torch.ops.aten._unsafe_view(_scaled_product(a, b, dtype), (*a.values.shape[:-1], n))
    inner = inner_type(dtype)
    return (a.dequantized(inner) @ b.dequantized(inner).t()).to(dtype)


def multiplies_tiles(device: torch.device) -> bool:
    """Return True on a Hopper GPU, whose matmuls read the scales of tiles and blocks."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def inner_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which dequantized matrices are multiplied; their sums are in fp32."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _scaled_product(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    """Return a b^T [m, n] in one matmul.

    torch expects the scales of tiles as [m, k / 128] with strides (1, m). Those of blocks have rows
    of a multiple of four: [r, n / 128] with strides (1, r), and r is k / 128 rounded up
    (torch/_meta_registrations.py).
    """
    by_tile, by_block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    return F.scaled_mm(
        a.values.flatten(0, -2),
        b.values.contiguous().t(),
        _column_major(a.scales.flatten(0, -2)),
        by_tile,
        _column_major(b.scales) if b.rows is None else _in_rows_of_fours(b.scales).t(),
        by_tile if b.rows is None else by_block,
        output_dtype=dtype,
    )


def _in_rows_of_fours(scales: Tensor) -> Tensor:
    """Return the scales of blocks, [n / 128, k / 128], with zeros up to a multiple of 4 columns."""
    missing = -scales.shape[1] % 4
    return F.pad(scales, (0, missing)) if missing else scales.contiguous()


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


# Weight gradients that a matmul adds to fp32 sums, without a temporary for the product.


SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def adds_in_matmul(x: Tensor, total: torch.dtype) -> bool:
    """Return True if the device adds products of tensors like x to sums of type `total`."""
    return is_on_gpu(x) and x.dtype in SIXTEEN_BITS and total == torch.float32


def is_on_gpu(x: Tensor) -> bool:
    """Return True for a tensor on a GPU, whose matmuls can add to sums of another type."""
    return x.device.type == "cuda"


def add_product(total: Tensor, grad: Tensor, x: Tensor, *, replace: bool) -> None:
    """Add grad^T x to a sum, or replace the sum by it.

    In one matmul the product is not rounded to 16 bits before it is added.

    Args:
        total: [out, in]
        grad: [n, out]
        x: [n, in]
        replace: the old values of `total` do not count
    """
    is_empty = not len(x)  # an expert without tokens
    if is_empty and not replace:
        return
    if adds_in_matmul(x, total.dtype) and not is_empty:
        multiply_into(total, grad.t(), x, replace=replace)
        return
    product = grad.t() @ x
    if replace:
        total.copy_(product)
    else:
        total.add_(product)


def multiply_into(total: Tensor, first: Tensor, second: Tensor, *, replace: bool) -> None:
    """Add first second to an fp32 tensor, or replace it, in one matmul of 16-bit tensors."""
    if replace:
        torch.mm(first, second, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, first, second, out_dtype=torch.float32, out=total)
