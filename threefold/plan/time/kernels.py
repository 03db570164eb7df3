"""Predicted seconds of a transformer's kernels on one GPU."""

from math import ceil

from threefold.config.deepspeed_json import BYTES
from threefold.gpus.datasheet import Gpu

TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
)  # cuBLAS's output tiles


def matmul_seconds(
    gpu: Gpu, precision: str, *, rows: int, columns: int, inner: int, batch: int = 1
) -> float:
    """Return the seconds of `batch` matmuls [rows, inner] x [inner, columns] in one kernel.

    The multiprocessors compute output tiles in waves. If the last wave is only partly filled, the
    share `wave_quantization` of its empty part adds to the time (tile and wave quantization, NVIDIA
    Deep Learning Performance: Matrix Multiplication Background). Like cuBLAS, the function uses the
    fastest tile size. Memory traffic is a lower bound (roofline, Williams et al. 2009).
    """
    peak = gpu.peak_tflops[precision] * 1e12 * gpu.matmul_efficiency
    peak *= min(alignment(gpu, precision, inner), alignment(gpu, precision, columns))
    depth = inner + gpu.matmul_depth_cost
    best = float("inf")
    for tile_rows, tile_columns in TILES:
        tiles = ceil(rows / tile_rows) * ceil(columns / tile_columns) * batch
        waves = tiles / gpu.multiprocessors
        waves += gpu.wave_quantization * (ceil(waves) - waves)
        cost = 1 + gpu.matmul_tile_cost * (1 / tile_rows + 1 / tile_columns)
        multiplications = waves * gpu.multiprocessors * tile_rows * tile_columns * depth
        best = min(best, multiplications * cost)
    moved = batch * (rows * inner + inner * columns + rows * columns) * BYTES[precision]
    return max(2 * best / peak, memory_seconds(gpu, moved)) + gpu.kernel_seconds


def alignment(gpu: Gpu, precision: str, size: int) -> float:
    """Return the relative speed of matmuls with rows of `size` elements.

    Tensor cores need rows that are multiples of 16 bytes (cuBLAS documentation, "Tensor Core
    Usage").
    """
    return 1.0 if size * BYTES[precision] % 16 == 0 else gpu.unaligned_efficiency


def memory_seconds(gpu: Gpu, moved: float) -> float:
    """Return the seconds of memory-bound kernels that read and write `moved` bytes."""
    return moved / (gpu.memory_gigabytes_per_second * 1e9 * gpu.memory_efficiency)


def fused_attention_seconds(gpu: Gpu, precision: str, *, flops: float) -> float:
    """Return the seconds of attention without written scores (Dao 2023, arXiv 2307.08691).

    Published runs with heads of 64 to 128 reach the same rate.

    Args:
        flops: floating-point operations of the unmasked scores
    """
    peak = gpu.peak_tflops[precision] * 1e12 * gpu.matmul_efficiency * gpu.attention_efficiency
    return flops / peak + gpu.kernel_seconds
