"""How fast one device is at what a step consists of; in a process of its own."""

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional as F

from benchmarks.taking_turns import serve
from models.kernels.attention import causal_attention
from recipes.training.engine.build import DTYPES
from recipes.training.runtime.processes import keep_memory, on_gpu

REPEATS = 5
LEAST_SECONDS = 0.02  # that are timed together; a clock's reading is nothing beside them
LARGE = {"cpu": {"fp32": 2048, "bf16": 4096}, "cuda": {"fp32": 8192, "bf16": 8192}}
COPIED_BYTES = 2**28
TINY = 1000  # kernels in a row


def play(pipe: Connection) -> None:
    """Answer the parent."""
    if not on_gpu():
        torch.set_num_threads(1)
        keep_memory()  # as in a run
    serve(pipe, Rates())


class Rates:
    """What the parent may ask."""

    def __init__(self) -> None:
        self.device = torch.device(get_accelerator().current_device_name())

    def name(self) -> str:
        """What the device calls itself."""
        on_cuda = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if on_cuda else self.device.type

    def properties(self) -> dict[str, float]:
        """Of a GPU: its memory and multiprocessors."""
        if self.device.type != "cuda":
            return {}
        found = torch.cuda.get_device_properties(self.device)
        return {
            "memory_gib": round(found.total_memory / 2**30, 1),
            "multiprocessors": found.multi_processor_count,
        }

    def large_matmul(self, precision: str) -> dict[str, float]:
        """TFLOP/s of a large square product, by what computes it."""
        size = LARGE[self.device.type][precision]
        left, right = self._matrix(precision, size, size), self._matrix(precision, size, size)
        rates = {"torch.mm": 2e-12 * size**3 / self._fastest(lambda: left @ right)}
        if self.device.type == "cpu":
            product = torch.ops.mkldnn._linear_pointwise
            seconds = self._fastest(lambda: product(left, right, None, "none", [], ""))
            rates["oneDNN"] = 2e-12 * size**3 / seconds
        return rates

    def matmul(self, precision: str, rows: int, columns: int, inner: int) -> list[float]:
        """Seconds of a linear layer's three products, of `rows` tokens.

        [rows, inner] x [inner, columns] forward, [rows, columns] x [columns, inner] for its input's
        gradient and [columns, rows] x [rows, inner] for its weight's.
        """
        x, weight = self._matrix(precision, rows, inner), self._matrix(precision, columns, inner)
        grad = self._matrix(precision, rows, columns)
        products = (lambda: F.linear(x, weight), lambda: grad @ weight, lambda: grad.t() @ x)
        return [self._fastest(product) for product in products]

    def attention(self, precision: str, heads: int, length: int, head_size: int) -> float:
        """Seconds of causal attention, forward and backward; [1, heads, length, head_size]."""
        shape = (1, heads, length, head_size)
        make = {"dtype": DTYPES[precision], "device": self.device}
        q, k, v = (torch.randn(shape, **make).requires_grad_() for _ in range(3))
        grad = torch.randn(shape, **make)

        def attend() -> None:
            causal_attention(q, k, v).backward(grad)

        return self._fastest(attend)

    def copy(self) -> float:
        """Gigabytes a second, read and written, of a large copy into memory that is there."""
        source = torch.ones(COPIED_BYTES // 4, device=self.device)
        target = torch.empty_like(source)
        return 2e-9 * COPIED_BYTES / self._fastest(lambda: target.copy_(source))

    def elementwise(self, precision: str, rows: int, columns: int) -> float:
        """Gigabytes a second of adding two activations [rows, columns] into a new one."""
        one, other = self._matrix(precision, rows, columns), self._matrix(precision, rows, columns)
        moved = 3 * one.numel() * one.element_size()
        return 1e-9 * moved / self._fastest(lambda: one + other)

    def kernel(self) -> float:
        """Seconds of a kernel that has next to nothing to do, in a row of such."""
        x = torch.ones(1, device=self.device)

        def row() -> None:
            for _ in range(TINY):
                x.add_(1)

        return self._fastest(row) / TINY

    def _matrix(self, precision: str, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device).to(DTYPES[precision])

    def _fastest(self, call: Callable[[], object]) -> float:
        """Seconds of a call, the least of some: what else runs only makes them longer."""
        calls, found = 1, []
        self._timed(call, 2)
        while (seconds := self._timed(call, calls)) < LEAST_SECONDS:
            calls *= 2
        found = [seconds] + [self._timed(call, calls) for _ in range(REPEATS - 1)]
        return min(found) / calls

    def _timed(self, call: Callable[[], object], calls: int) -> float:
        self._synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
