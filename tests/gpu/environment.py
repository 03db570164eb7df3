"""Description of this machine: GPU, driver, libraries, compiler, and rates of matrix products."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from models.config import ModelConfig
from tests.gpu.setting import Result, Setting
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.gpus.datasheet import peak_tflops
from threefold.runtime.processes import compiler

LIBRARIES = ("torch", "deepspeed", "transformers", "triton", "numpy", "pydantic")
TOKENS = 8192  # rows of the products
SUSTAINED_SECONDS = 4.0  # long enough for a GPU to settle at the clock that its power limit allows
SHORT_SECONDS = 0.1
LLAMA_1B = REPOSITORY / "recipes" / "llama" / "1b.toml"


def environment(setting: Setting) -> Result:
    """Describe the machine, and measure matrix products with the shapes of llama/1b."""
    result = Result()
    result.table(["", ""], [[name, text] for name, text in facts(setting.device)])
    precision = torch.bfloat16 if setting.device == "cuda" else torch.float32
    rows = []
    for name, (m, n, k) in product_shapes(setting).items():
        rates = product_rates(setting, m, n, k, precision)
        rows.append([f"{name}: {m} x {n} x {k}", *(f"{rate:,.3g}" for rate in rates)])
    short, sustained = large_rates(setting, precision)
    name = str(precision).removeprefix("torch.")
    result.say(f"Matrix products in {name}, TFLOP/s (weight gradients also added to a sum):")
    result.table(["tokens x columns x inner", "forward", "input", "weight", "weight, added"], rows)
    text = f"A large square product: {short:,.3g} TFLOP/s, sustained {sustained:,.3g}"
    peak = peak_tflops(device_name(setting.device), "bf16") if setting.device == "cuda" else None
    result.say(text + (f" ({sustained / peak:.0%} of the datasheet's {peak:g})." if peak else "."))
    return result


def facts(device: str, *, small: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of everything that the measurements depend on."""
    yield "device", device_name(device) + (", small sizes" if small else "")
    yield "commit", commit()
    yield "Python", f"{platform.python_version()}, {sys.platform} {platform.machine()}"
    for name in LIBRARIES:
        yield name, installed(name) or "not installed"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield "GPUs", str(torch.cuda.device_count())
        yield "memory", f"{properties.total_memory / 2**30:.1f} GiB"
        yield "multiprocessors", str(properties.multi_processor_count)
        yield "compute capability", f"{properties.major}.{properties.minor}"
        yield "driver", driver()
        yield "CUDA", str(torch.version.cuda)
        yield "cuDNN", str(torch.backends.cudnn.version())
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    yield "compiler", shutil.which(compiler()) or "none: kernels run as they are written"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    yield "Python's headers", "yes" if headers.exists() else "no"
    yield "cores", str(len(os.sched_getaffinity(0)))


def commit() -> str:
    """Return the commit of this checkout, if it is one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def device_name(device: str) -> str:
    """Return the name of the device as its driver reports it."""
    return torch.cuda.get_device_name(0) if device == "cuda" else device


def installed(package: str) -> str | None:
    """Return a package's version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver() -> str:
    """Return the version of NVIDIA's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown: nvidia-smi does not run"
    lines = done.stdout.splitlines()
    return lines[0] if lines else "unknown: nvidia-smi lists no GPU"


def product_shapes(setting: Setting) -> dict[str, tuple[int, int, int]]:
    """Return (tokens, columns, inner) of the linear layers of llama/1b."""
    if setting.small:
        return {"small": (64, 48, 32)}
    model: ModelConfig = load_recipe(LLAMA_1B).model
    hidden, head_size = model.hidden_size, model.hidden_size // model.heads
    columns = (model.heads + 2 * model.kv_heads) * head_size
    shapes = {
        "queries, keys, values": (TOKENS, columns, hidden),
        "attention's output": (TOKENS, hidden, hidden),
        "MLP, in": (TOKENS, 2 * model.ffn_hidden_size, hidden),
        "MLP, out": (TOKENS, hidden, model.ffn_hidden_size),
    }
    for tokens in (512, 2048, TOKENS):
        shapes[f"logits of {tokens} tokens"] = (tokens, model.vocab_size, hidden)
    return shapes


def product_rates(setting: Setting, m: int, n: int, k: int, dtype: torch.dtype) -> list[float]:
    """Return the TFLOP/s of a linear layer's matrix products.

    They are the forward product, the input gradient, the weight gradient, and the weight gradient
    added to a sum.
    """
    make = {"dtype": dtype, "device": setting.device}
    x, weight, grad = (torch.randn(*size, **make) for size in ((m, k), (n, k), (m, n)))
    total = torch.zeros(n, k, **make)
    products: list[Callable[[], Tensor]] = [
        lambda: F.linear(x, weight),
        lambda: grad @ weight,
        lambda: grad.t() @ x,
        lambda: total.addmm_(grad.t(), x),
    ]
    flops = 2e-12 * m * n * k
    return [flops / seconds_of_call(each, setting.device, SHORT_SECONDS) for each in products]


def large_rates(setting: Setting, dtype: torch.dtype) -> tuple[float, float]:
    """Return the TFLOP/s of a large square product, at first and sustained over seconds."""
    size = 256 if setting.small else 8192
    a = torch.randn(size, size, device=setting.device, dtype=dtype)
    flops = 2e-12 * size**3
    short = seconds_of_call(lambda: a @ a, setting.device, SHORT_SECONDS)
    span = SHORT_SECONDS if setting.small else SUSTAINED_SECONDS
    return flops / short, flops / seconds_of_call(lambda: a @ a, setting.device, span)


def seconds_of_call(call: Callable[[], object], device: str, span: float) -> float:
    """Return the mean duration of a call, over as many calls as take `span` seconds."""
    call()
    once = max(timed(call, device, 1), 1e-7)
    calls = max(1, int(span / once))
    return timed(call, device, calls) / calls


def timed(call: Callable[[], object], device: str, calls: int) -> float:
    """Return the duration of some calls; the device is idle before and after them."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: str) -> None:
    """Wait until a GPU is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
