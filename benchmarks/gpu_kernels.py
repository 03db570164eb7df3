"""Time single kernels on an NVIDIA GPU, on random data: the tables of BENCHMARKS.md, "One GPU".

    python benchmarks/gpu_kernels.py
    python benchmarks/gpu_kernels.py --only fp8 --json

A duration is the median of at least three calls, for about 0.15 s. FLOPs of attention are those of
the visible pairs of a query and a key. Bytes are those read and written. The group fp8 needs a GPU
of compute capability 9.0 or higher; a group that a GPU or torch does not support prints torch's
error instead of durations.

s tokens of a sequence, b sequences, a query heads, g key-value heads, d head size; m tokens,
k columns of their activations, n columns of the output; e experts.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from threefold.runtime.output import stdout_for_json

with stdout_for_json(True):  # DeepSpeed logs to standard output while it is imported
    from models.kernels.attention import flash_backward, flash_forward

DEVICE = "cuda"
SECONDS = 0.15  # of the calls of a kernel
MIN_CALLS, MAX_CALLS = 3, 200
COPIED_BYTES = 2**30
HEADS, KEY_HEADS = 32, 8
ATTENTION = ((64, 4, 4096), (128, 2, 4096), (128, 2, 8192))  # d, b, s
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash attention": SDPBackend.FLASH_ATTENTION}
LINEAR = (16384, 16384, 2048)  # m, n, k
VOCABULARY, HIDDEN = 128256, 2048
LOGITS_TOKENS = (512, 1024, 2048, 4096, 8192)
# m, n, k: the first two are MLPs with a hidden size of 2048, the others have one of 4096; the last
# one is an MLP of llama/7b, whose scales of blocks are padded, because 4 does not divide k / 128
FP8 = (
    (16384, 16384, 2048),
    (16384, 2048, 8192),
    (8192, 22528, 4096),
    (8192, 4096, 4096),
    (8192, 4096, 11008),
)
BLOCK = 128  # columns, or rows and columns, that share a scale (DeepSeek-V3, arXiv 2412.19437)
FP8_MAX = 448.0  # the largest number of float8_e4m3fn
EXPERTS = ((32768, 2048, 1024, 64), (32768, 2048, 2816, 8))  # m, k, n, e
WINDOWS = ((64, 2, 8192, 512), (128, 1, 8192, 1024), (128, 1, 8192, 4096))  # d, b, s, window


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A call to time.

    flops: floating-point operations of a call; 0: its rate is that of memory
    moved_bytes: bytes that a call reads and writes
    error: norm of the difference from fp64, relative to the result; None: not compared
    """

    name: str
    call: Callable[[], object]
    flops: float = 0.0
    moved_bytes: float = 0.0
    error: float | None = None


def main() -> None:
    """Time the kernels and print their rates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=GROUPS, help="default: all groups")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with stdout_for_json(options.json):
        if not has_gpu():
            parser.error("this benchmark needs an NVIDIA GPU, and torch finds none on this machine")
        for group in [options.only] if options.only else GROUPS:
            if not options.json:
                print(f"\n{group}\n\n| kernel | ms | rate | error |\n|---|---|---|---|")
            for row in measure(group):
                rows.append({"group": group, **row})
                if not options.json:
                    print(line(row), flush=True)
    if options.json:
        print(json.dumps(rows))


def has_gpu() -> bool:
    """Return True on a machine with an NVIDIA GPU."""
    return torch.cuda.is_available() and torch.version.hip is None


def measure(group: str) -> Iterator[dict[str, Any]]:
    """Yield the name, milliseconds and rate of each kernel of a group, and its error if known."""
    kernels = GROUPS[group]()
    try:
        for kernel in kernels:
            seconds = median_seconds(kernel.call)
            row: dict[str, Any] = {"kernel": kernel.name, "milliseconds": 1e3 * seconds}
            if kernel.flops:
                row["tflops"] = 1e-12 * kernel.flops / seconds
            else:
                row["tb_per_s"] = 1e-12 * kernel.moved_bytes / seconds
            if kernel.error is not None:
                row["error"] = kernel.error
            yield row
    # RuntimeError includes NotImplementedError and errors of CUDA and cuBLAS; torch rejects scales
    # with a ValueError.
    except (RuntimeError, ValueError) as error:
        yield {"kernel": f"not supported: {str(error).splitlines()[0]}"}


def line(row: dict[str, Any]) -> str:
    """Return a row of the printed table."""
    if "milliseconds" not in row:
        return f"| {row['kernel']} | | | |"
    rate = f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"{row['tb_per_s']:.2f} TB/s"
    error = f"{row['error']:.1e}" if "error" in row else ""
    return f"| {row['kernel']} | {row['milliseconds']:.3f} | {rate} | {error} |"


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median duration of a call on the GPU."""
    for _ in range(2):  # compile, choose algorithms, allocate memory
        call()
    calls = max(MIN_CALLS, min(MAX_CALLS, int(SECONDS / max(elapsed(call, 1)[0], 1e-6))))
    return statistics.median(elapsed(call, calls))


def elapsed(call: Callable[[], object], calls: int) -> list[float]:
    """Return the seconds of each of some calls in a row, between events on the GPU."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in pairwise(events)]


def random(*shape: int) -> Tensor:
    """Return normally distributed numbers in bf16."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def copy_kernels() -> Iterator[Kernel]:
    """Copy of a tensor that no cache holds."""
    source, target = (torch.empty(COPIED_BYTES, device=DEVICE, dtype=torch.uint8) for _ in range(2))
    yield Kernel(
        name=f"copy of {COPIED_BYTES / 2**30:g} GiB",
        call=lambda: target.copy_(source),
        moved_bytes=2 * COPIED_BYTES,
    )


def attention_kernels() -> Iterator[Kernel]:
    """Causal attention in both passes, with cuDNN and with flash attention."""
    for sizes in ATTENTION:
        for backend in BACKENDS:
            yield from _attention(backend, *sizes)


def _attention(backend: str, d: int, b: int, s: int) -> Iterator[Kernel]:
    # [b, a or g, s, d], in memory [s, b, a or g, d] as in a run
    q, k, v = (
        random(s, b, heads, d).permute(1, 2, 0, 3).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    grad = random(b, HEADS, s, d)

    def attend() -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flops = 4 * b * HEADS * d * s * s / 2
    name = f"{backend}, {HEADS} and {KEY_HEADS} heads of size {d}, {b} x {s} tokens"
    yield Kernel(name=f"{name}, forward", call=attend, flops=flops)
    y = attend()
    yield Kernel(
        name=f"{name}, backward",
        call=lambda: torch.autograd.grad(y, (q, k, v), grad, retain_graph=True),
        flops=2.5 * flops,
    )


def linear_kernels() -> Iterator[Kernel]:
    """Matmuls of a linear layer, and ways to add its weight gradient to an fp32 sum."""
    m, n, k = LINEAR
    x, grad, weight = random(m, k), random(m, n), random(n, k)
    total, total_16 = torch.zeros(n, k, device=DEVICE), random(n, k)
    of_layer = partial(Kernel, flops=2 * m * n * k)
    name = f"weight gradient [{n}, {k}], {m} tokens"
    add = partial(torch.addmm, total, grad.t(), x, out_dtype=torch.float32)
    yield of_layer(name="linear layer, forward", call=lambda: F.linear(x, weight))
    yield of_layer(name="input gradient", call=lambda: grad @ weight)
    yield of_layer(name=name, call=lambda: grad.t() @ x)
    yield of_layer(
        name=f"{name}, in fp32", call=lambda: torch.mm(grad.t(), x, out_dtype=torch.float32)
    )
    yield of_layer(name=f"{name}, added to bf16", call=lambda: total_16.addmm_(grad.t(), x))
    yield of_layer(name=f"{name}, added to fp32 afterwards", call=lambda: total.add_(grad.t() @ x))
    yield of_layer(name=f"{name}, added to fp32 in the matmul", call=lambda: add(out=total))


def logits_kernels() -> Iterator[Kernel]:
    """Matmuls of the output layer, for several numbers of tokens at a time."""
    for m in LOGITS_TOKENS:
        yield from _logits(m, random(VOCABULARY, HIDDEN))


def _logits(m: int, table: Tensor) -> Iterator[Kernel]:
    x, logits = random(m, HIDDEN), random(m, VOCABULARY)
    total = torch.zeros(VOCABULARY, HIDDEN, device=DEVICE)
    of_layer = partial(Kernel, flops=2 * m * HIDDEN * VOCABULARY)
    name = f"{VOCABULARY} logits, hidden {HIDDEN}, {m} tokens"
    add = partial(torch.addmm, total, logits.t(), x, out_dtype=torch.float32)
    yield of_layer(name=name, call=lambda: torch.mm(x, table.t(), out=logits))
    yield of_layer(name=f"{name}, input gradient", call=lambda: logits @ table)
    yield of_layer(
        name=f"{name}, weight gradient added to fp32 in the matmul", call=lambda: add(out=total)
    )
    yield Kernel(
        name=f"{name}, largest logit", call=lambda: logits.amax(1), moved_bytes=2 * m * VOCABULARY
    )


def fp8_kernels() -> Iterator[Kernel]:
    """Matmuls in FP8, and the rounding of their inputs to FP8, compared with bf16."""
    for sizes in FP8:
        yield from _fp8(*sizes)


def _fp8(m: int, n: int, k: int) -> Iterator[Kernel]:
    x, weight = random(m, k), random(n, k)
    x_8, x_scales = quantized_rows(x)
    w_8, w_scales = quantized_blocks(weight)
    w_rows_8, w_row_scales = quantized_rows(weight)
    # Scales of 1 x 128 are in column-major order. Those of 128 x 128 are [r, n / 128] for the
    # transposed weight, and r is k / 128 rounded up to a multiple of 4
    # (torch/_meta_registrations.py).
    x_scales, w_row_scales = column_major(x_scales), column_major(w_row_scales)
    padded = F.pad(w_scales, (0, -w_scales.shape[1] % 4)).t()
    rows_type, blocks_type = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    one = torch.ones((), device=DEVICE)
    by_blocks = partial(F.scaled_mm, x_8, w_8.t(), x_scales, rows_type, padded, blocks_type)
    by_rows = partial(F.scaled_mm, x_8, w_rows_8.t(), x_scales, rows_type, w_row_scales, rows_type)
    by_tensor = partial(
        F.scaled_mm, x_8, w_8.t(), one, F.ScalingType.TensorWise, one, F.ScalingType.TensorWise
    )
    exact = reals(x_8, x_scales) @ block_reals(w_8, w_scales).t()
    exact_by_rows = reals(x_8, x_scales) @ reals(w_rows_8, w_row_scales).t()
    errors = relative_error(by_blocks(), exact), relative_error(by_rows(), exact_by_rows)
    del exact, exact_by_rows
    of_matmul = partial(Kernel, flops=2 * m * n * k)
    name = f"{m} x {n} x {k}"
    yield of_matmul(name=f"{name} in bf16", call=lambda: x @ weight.t())
    yield of_matmul(
        name=f"{name} in FP8, scales of 1 x 128 and 128 x 128", call=by_blocks, error=errors[0]
    )
    yield of_matmul(name=f"{name} in FP8, scales of 1 x 128", call=by_rows, error=errors[1])
    yield of_matmul(
        name=f"{name} in FP8, scales of 1 x 128, into fp32",
        call=partial(by_rows, output_dtype=torch.float32),
    )
    yield of_matmul(name=f"{name} in FP8, one scale per tensor", call=by_tensor)
    yield of_matmul(
        name=f"{name} in FP8, one scale per tensor, fast accumulation",
        call=partial(by_tensor, use_fast_accum=True),
    )
    to_rows, to_blocks = torch.compile(quantized_rows), torch.compile(quantized_blocks)
    yield Kernel(
        name=f"{m} x {k} to FP8, scales of 1 x 128", call=lambda: to_rows(x), moved_bytes=3 * m * k
    )
    yield Kernel(
        name=f"{k} x {m}, transposed, to FP8, scales of 1 x 128",
        call=lambda: to_rows(x.t()),
        moved_bytes=3 * m * k,
    )
    yield Kernel(
        name=f"{n} x {k} to FP8, scales of 128 x 128",
        call=lambda: to_blocks(weight),
        moved_bytes=3 * n * k,
    )


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference, relative to that of the exact result."""
    return float((result - exact).norm() / exact.norm())


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [m, k] in FP8, and the fp32 scale of every 128 columns of a row, [m, k / 128]."""
    parts = x.float().unflatten(1, (-1, BLOCK))
    scales = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (parts / scales).to(torch.float8_e4m3fn).flatten(1), scales.squeeze(-1)


def quantized_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [n, k] in FP8, and the fp32 scale of every block, [n / 128, k / 128]."""
    parts = x.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = parts.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / FP8_MAX
    eights = (parts / scales).to(torch.float8_e4m3fn)
    return eights.flatten(2).flatten(0, 1), scales[:, 0, :, 0]


def reals(x: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that `quantized_rows` has rounded to, in fp64 [m, k]."""
    return x.double() * scales.double().repeat_interleave(BLOCK, 1)


def block_reals(x: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers that `quantized_blocks` has rounded to, in fp64 [n, k]."""
    return reals(x, scales.repeat_interleave(BLOCK, 0))


def column_major(x: Tensor) -> Tensor:
    """Return a copy of a matrix with adjacent columns."""
    return x.t().contiguous().t()


def expert_kernels() -> Iterator[Kernel]:
    """Matmuls of the experts of a layer in one kernel, and one by one."""
    for sizes in EXPERTS:
        yield from _experts(*sizes)


def _experts(m: int, k: int, n: int, e: int) -> Iterator[Kernel]:
    x, weights, grad = random(m, k), random(e, n, k), random(m, n)
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(e, generator=generator) + 0.5  # the busiest expert: up to three times
    counts = (shares / shares.sum() * m).int()
    counts[-1] += m - counts.sum()
    rows = counts.tolist()
    ends = counts.cumsum(0, dtype=torch.int32).to(DEVICE)
    of_layer = partial(Kernel, flops=2 * m * n * k)
    name = f"{e} experts, {m} tokens, {k} x {n}"
    yield of_layer(
        name=f"{name}, grouped matmul",
        call=lambda: F.grouped_mm(x, weights.transpose(1, 2), offs=ends),
    )
    yield of_layer(
        name=f"{name}, one by one",
        call=lambda: [part @ w.t() for part, w in zip(x.split(rows), weights, strict=True)],
    )
    yield of_layer(
        name=f"{name}, weight gradients in one matmul",
        call=lambda: F.grouped_mm(grad.t(), x, offs=ends),
    )


def window_kernels() -> Iterator[Kernel]:
    """Flash attention over documents, with and without a sliding window."""
    for sizes in WINDOWS:
        yield from _windowed(*sizes)


def _windowed(d: int, b: int, s: int, window: int) -> Iterator[Kernel]:
    q, k, v = (random(b * s, heads, d) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    grad = random(b * s, HEADS, d)
    ends = torch.arange(0, b * s + 1, s, device=DEVICE, dtype=torch.int32)
    all_pairs, visible_pairs = b * s * s / 2, b * (s * window - window * window / 2)
    name = f"flash attention, heads of size {d}, {b} x {s} tokens"
    yield Kernel(
        name=f"{name}, forward",
        call=lambda: flash_forward(q, k, v, ends, s, -1),
        flops=4 * HEADS * d * all_pairs,
    )
    yield Kernel(
        name=f"{name}, window of {window}, forward",
        call=lambda: flash_forward(q, k, v, ends, s, window - 1),
        flops=4 * HEADS * d * visible_pairs,
    )
    out, logsumexp = flash_forward(q, k, v, ends, s, window - 1)
    yield Kernel(
        name=f"{name}, window of {window}, backward",
        call=lambda: flash_backward(grad, q, k, v, out, logsumexp, ends, s, window - 1),
        flops=10 * HEADS * d * visible_pairs,
    )


GROUPS: dict[str, Callable[[], Iterator[Kernel]]] = {
    "copy": copy_kernels,
    "attention": attention_kernels,
    "linear": linear_kernels,
    "logits": logits_kernels,
    "fp8": fp8_kernels,
    "experts": expert_kernels,
    "windows": window_kernels,
}

if __name__ == "__main__":
    main()
