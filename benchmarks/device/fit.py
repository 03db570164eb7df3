"""Fit of the planner's numbers of a device to measurements.

Legend of a matmul: [rows, inner] x [inner, columns].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.taking_turns import Player
from threefold.gpus.datasheet import Gpu, rounded
from threefold.plan.time.block import BACKWARD_SLOWER, fused_attention_seconds, matmul_seconds

CPU_ROWS, GPU_ROWS = (256, 1024), (2048, 8192)  # tokens of a micro-batch
CPU_SIZES = ((512, 512), (1536, 512), (2816, 512), (512, 1408), (4096, 512), (3072, 1024),
             (5504, 1024), (1024, 2752), (1024, 1024), (16384, 512))  # fmt: skip
GPU_SIZES = ((2048, 2048), (3072, 2048), (16384, 2048), (2048, 8192), (4096, 4096), (28672, 4096),
             (4096, 14336), (8192, 8192), (128256, 2048), (1023, 4096), (50257, 2048))  # fmt: skip
HEADS = 16  # of the timed attention
CPU_ATTENTION = ((512, 64), (1024, 64))  # length, head size
GPU_ATTENTION = ((4096, 64), (4096, 128), (8192, 128))
ACTIVATION = 8192  # rows and columns of the timed sum on a GPU
CPU_ACTIVATIONS = ((1024, 1408), (1024, 4096), (1024, 32768))
BOUNDS = {  # of the numbers fitted to matmuls on a GPU
    "matmul_efficiency": (0.05, 1.0),
    "matmul_tile_cost": (0.1, 200.0),
    "matmul_depth_cost": (1.0, 4000.0),
    "wave_quantization": (0.01, 1.0),
    "unaligned_efficiency": (0.02, 1.0),
}
ONE_PROCESSOR = ("matmul_efficiency", "matmul_tile_cost", "matmul_depth_cost")  # without waves
TOLERANCE = 0.05  # larger errors of a matmul's logarithm count linearly
MIN_STEP = 1e-3  # of a number's logarithm
ROUNDS = 200


@dataclass(frozen=True)
class Product:
    """A matmul and its measured time."""

    precision: str
    rows: int
    columns: int
    inner: int
    seconds: float

    @property
    def tflops(self) -> float:
        """The measured speed."""
        return 2e-12 * self.rows * self.columns * self.inner / self.seconds


def fit(gpu: Gpu, rates: Player, precisions: Sequence[str]) -> tuple[Gpu, dict[str, Any]]:
    """Fit a device's numbers to measurements, and return it with the errors of its matmuls.

    A CPU has no datasheet: its peaks are the fastest measured matmuls, and its memory is
    as fast as a copy into allocated memory.
    """
    on_cpu = not gpu.device_names
    products = measure_products(rates, precisions, on_cpu)
    (kernel,), (copied,) = rates.ask("kernel"), rates.ask("copy")
    gpu = replace(gpu, kernel_seconds=kernel)
    if on_cpu:
        fastest = {
            precision: max(each.tflops for each in products if each.precision == precision)
            for precision in precisions
        }
        peaks = {precision: rounded(rate) for precision, rate in fastest.items()}
        gpu = replace(
            gpu, peak_tflops=gpu.peak_tflops | peaks, memory_gigabytes_per_second=rounded(copied)
        )
    activations = CPU_ACTIVATIONS if on_cpu else ((ACTIVATION, ACTIVATION),)
    summed = geometric_mean(
        rates.ask("elementwise", precision, *shape)[0]
        for precision in precisions
        for shape in activations
    )
    # Of a CPU's activations, some stay in its cache.
    gpu = replace(gpu, memory_efficiency=min(1.0, summed / gpu.memory_gigabytes_per_second))
    gpu = fit_products(gpu, products, ONE_PROCESSOR if on_cpu else tuple(BOUNDS))
    gpu = replace(gpu, attention_efficiency=1.0)
    attention = CPU_ATTENTION if on_cpu else GPU_ATTENTION
    efficiency = geometric_mean(
        attention_efficiency(gpu, rates, precision, *shape)
        for precision in precisions
        for shape in attention
    )
    return replace(gpu, attention_efficiency=efficiency), {
        "products": len(products),
        "mean_error": fmean(abs(exp(error(gpu, each)) - 1) for each in products),
        "copy_gigabytes_per_second": copied,
    }


def measure_products(rates: Player, precisions: Sequence[str], on_cpu: bool) -> list[Product]:
    """Measure matmuls of the sizes in transformers, forward and backward."""
    found = []
    for precision in precisions:
        for rows in CPU_ROWS if on_cpu else GPU_ROWS:
            for columns, inner in CPU_SIZES if on_cpu else GPU_SIZES:
                (seconds,) = rates.ask("matmul", precision, rows, columns, inner)
                sizes = ((rows, columns, inner), (rows, inner, columns), (columns, inner, rows))
                for size, each in zip(sizes, seconds, strict=True):
                    found.append(Product(precision, *size, each))
    return found


def attention_efficiency(
    gpu: Gpu, rates: Player, precision: str, length: int, head_size: int
) -> float:
    """Return the speed of attention relative to the planner's at an efficiency of 1."""
    (seconds,) = rates.ask("attention", precision, HEADS, length, head_size)
    flops = 4 * length**2 * head_size * HEADS / 2  # half of the scores are masked
    forward = fused_attention_seconds(gpu, precision, flops=flops)
    return forward * (1 + 2.5 * BACKWARD_SLOWER) / seconds


def fit_products(gpu: Gpu, products: Sequence[Product], names: Sequence[str]) -> Gpu:
    """Return the device whose predicted matmuls are closest to the measured ones.

    Minimizes a robust sum over them (Charbonnier's), one number after the other, by halving steps
    of its logarithm.
    """

    def cost(candidate: Gpu) -> float:
        return sum(2 * (sqrt(1 + (error(candidate, p) / TOLERANCE) ** 2) - 1) for p in products)

    best = within_bounds(gpu, {name: log(max(getattr(gpu, name), 1e-9)) for name in names})
    least, step = cost(best), 0.5
    for _ in range(ROUNDS):
        improved = False
        for name in names:
            for change in (step, -step):
                now = log(getattr(best, name)) + change
                candidate = within_bounds(best, {name: now})
                found = cost(candidate)
                if found < least - 1e-9:
                    best, least, improved = candidate, found, True
                    break
        step = step if improved else step / 2
        if step < MIN_STEP:
            break
    return best


def within_bounds(gpu: Gpu, logs: Mapping[str, float]) -> Gpu:
    """Return the device with other numbers, given by their logarithms."""
    values: dict[str, Any] = {}
    for name, value in logs.items():
        low, high = BOUNDS[name]
        values[name] = min(high, max(low, exp(value)))
    return replace(gpu, **values)


def error(gpu: Gpu, product: Product) -> float:
    """Return the error of a prediction as a logarithm."""
    predicted = matmul_seconds(
        gpu, product.precision, rows=product.rows, columns=product.columns, inner=product.inner
    )
    return log(predicted / product.seconds)
