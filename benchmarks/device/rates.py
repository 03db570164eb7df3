"""Measured speed of one device at the operations of a step, in a separate process."""

from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional as F

from benchmarks.taking_turns import serve
from models.kernels.attention import causal_attention
from threefold.engine.build import DTYPES
from threefold.runtime.cpu_matmuls import dtypes_without_instructions, replace_slow_cpu_matmuls
from threefold.runtime.processes import driver_name, keep_memory, on_gpu
from threefold.runtime.timing import Repetitions, matmul_tflops, timed

REPEATS = 5
MIN_SECONDS = 0.02  # timed together, so that reading the clock does not matter
LARGE = {"cpu": {"fp32": 2048, "bf16": 4096}, "cuda": {"fp32": 8192, "bf16": 8192}}
COPIED_BYTES = 2**28
TINY = 1000  # kernels in a row


def play(pipe: Connection) -> None:
    """Answer the parent's requests."""
    if not on_gpu():
        torch.set_num_threads(1)
        keep_memory()  # as in a run
        replace_slow_cpu_matmuls()  # as in a run with 16-bit weights
    serve(pipe, Rates())


class Rates:
    """Measurements that the parent may request."""

    def __init__(self) -> None:
        self.device = torch.device(get_accelerator().current_device_name())

    def name(self) -> str:
        """Return the device's name."""
        return driver_name()

    def properties(self) -> dict[str, float]:
        """Return the memory and multiprocessors of a GPU; empty for a CPU."""
        if self.device.type != "cuda":
            return {}
        found = torch.cuda.get_device_properties(self.device)
        return {
            "memory_gib": round(found.total_memory / 2**30, 1),
            "multiprocessors": found.multi_processor_count,
        }

    def large_matmul(self, precision: str) -> dict[str, float]:
        """Return the TFLOP/s of a large square matmul by library."""
        dtype = DTYPES[precision]
        in_fp32 = self.device.type == "cpu" and dtype in dtypes_without_instructions()
        size = LARGE[self.device.type]["fp32" if in_fp32 else precision]
        rates = {"torch.mm": matmul_tflops(size, dtype, self.device, choose=min)}
        if self.device.type == "cpu" and not in_fp32:
            left, right = (self._matrix(precision, size, size) for _ in range(2))
            product = torch.ops.mkldnn._linear_pointwise
            seconds = self._fastest(lambda: product(left, right, None, "none", [], ""))
            rates["oneDNN"] = 2e-12 * size**3 / seconds
        return rates

    def matmul(self, precision: str, rows: int, columns: int, inner: int) -> list[float]:
        """Return the seconds of a linear layer's three matmuls for `rows` tokens.

        [rows, inner] x [inner, columns] forward, [rows, columns] x [columns, inner] for its input's
        gradient and [columns, rows] x [rows, inner] for its weight's.
        """
        x, weight = self._matrix(precision, rows, inner), self._matrix(precision, columns, inner)
        grad = self._matrix(precision, rows, columns)
        products = (lambda: F.linear(x, weight), lambda: grad @ weight, lambda: grad.t() @ x)
        return [self._fastest(product) for product in products]

    def attention(self, precision: str, heads: int, length: int, head_size: int) -> float:
        """Return the seconds of causal attention, both passes; [1, heads, length, head_size]."""
        shape = (1, heads, length, head_size)
        dtype, device = DTYPES[precision], self.device
        q, k, v = (
            torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3)
        )
        grad = torch.randn(shape, dtype=dtype, device=device)

        def attend() -> None:
            causal_attention(q, k, v).backward(grad)

        return self._fastest(attend)

    def copy(self) -> float:
        """Return the GB/s, read and written, of a large copy into allocated memory."""
        source = torch.ones(COPIED_BYTES // 4, device=self.device)
        target = torch.empty_like(source)
        return 2e-9 * COPIED_BYTES / self._fastest(lambda: target.copy_(source))

    def elementwise(self, precision: str, rows: int, columns: int) -> float:
        """Return the GB/s of adding two activations [rows, columns] into a new tensor."""
        one, other = self._matrix(precision, rows, columns), self._matrix(precision, rows, columns)
        moved = 3 * one.numel() * one.element_size()
        return 1e-9 * moved / self._fastest(lambda: one + other)

    def kernel(self) -> float:
        """Return the seconds of a tiny kernel in a long series."""
        x = torch.ones(1, device=self.device)

        def row() -> None:
            for _ in range(TINY):
                x.add_(1)

        return self._fastest(row) / TINY

    def _matrix(self, precision: str, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device).to(DTYPES[precision])

    def _fastest(self, call: Callable[[], object]) -> float:
        """Return the fastest of several timings of a call, which other processes disturb least."""
        calls = 1
        while calls * timed(call, self.device, Repetitions(1, calls)) < MIN_SECONDS:
            calls *= 2
        return timed(call, self.device, Repetitions(REPEATS, calls, min))
