"""Probes of a process: the libraries that compute its matmuls, and its slowest kernels."""

import contextlib
import ctypes
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MKL_LINE = re.compile(r"MKL_VERBOSE (\w*GEMM\w*)\(.*?\) ([\d.]+)([mun]?s) ")
ONEDNN_LINE = re.compile(
    r"onednn_verbose,v1,primitive,exec,[^,]*,(?:matmul|inner_product|gemm)[^,]*,[^,]*,[^,]*,"
    r"[^,]*?(?:src|src_a):?:?(\w+):.*,([\d.]+)$"
)
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
GPU_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|Cijk", re.IGNORECASE)


def gemm_libraries(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Run a step, and return the shares of its matmul time by library and precision."""
    seconds = gpu_gemms(step) if device.type == "cuda" else cpu_gemms(step)
    total = sum(seconds.values())
    found = sorted(seconds.items(), key=lambda each: -each[1])
    return {name: spent / total for name, spent in found}


def cpu_gemms(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of matmuls from the verbose output of MKL and oneDNN."""
    mkl, onednn = torch.backends.mkl, torch.backends.mkldnn
    with captured_output() as read, mkl.verbose(mkl.VERBOSE_ON), onednn.verbose(onednn.VERBOSE_ON):
        step()
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in read():
        if found := MKL_LINE.match(line):
            precision = "bf16" if "BF16" in found[1] else "fp32"
            seconds[f"MKL {precision}"] += float(found[2]) * UNITS[found[3]]
        elif found := ONEDNN_LINE.match(line):
            precision = {"f32": "fp32"}.get(found[1], found[1])
            seconds[f"oneDNN {precision}"] += float(found[2]) / 1000
    return seconds


@contextlib.contextmanager
def captured_output() -> Iterator[Callable[[], list[str]]]:
    """Capture what libraries write to standard output; the lines can be read afterwards."""
    flush = ctypes.CDLL(None).fflush
    with tempfile.TemporaryFile() as file:
        flush(None)
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        lines: list[str] = []
        try:
            yield lambda: lines
        finally:
            flush(None)
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def gpu_gemms(step: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of kernels whose names are those of matmuls, by shortened name."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for kernel in profiled(step, torch.device("cuda")):
        if GPU_GEMM.search(kernel["name"]):
            seconds[re.split(r"[<(]", kernel["name"])[0][:48]] += kernel["seconds"]
    return seconds


def top_kernels(
    step: Callable[[], object], device: torch.device, count: int
) -> list[dict[str, Any]]:
    """Run a step, and return its slowest kernels (on a CPU: operators) with their shares."""
    kernels = profiled(step, device)
    total = sum(kernel["seconds"] for kernel in kernels)
    kernels.sort(key=lambda kernel: -kernel["seconds"])
    return [kernel | {"share": kernel["seconds"] / total} for kernel in kernels[:count]]


def profiled(step: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Return the name, calls and own seconds of each kernel of a step."""
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler:
        step()
    return [
        {
            "name": each.key,
            "calls": each.count,
            "seconds": (each.self_device_time_total if gpu else each.self_cpu_time_total) / 1e6,
        }
        for each in profiler.key_averages()
    ]
