"""Measure masks that do not depend on the layout, and sliding windows, relative to other kernels.

Dropout is compared with torch's, and attention within a window with full attention. Forward and
backward, the two alternating in one process on one core; prints the ratios of the medians.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --only windows --json
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from threefold.runtime.output import stdout_for_json

with stdout_for_json(True):  # DeepSpeed logs to standard output while it is imported
    from models.attention import Attention, ModelAxes
    from models.config import ModelConfig
    from models.kernels.attention import causal_attention
    from models.kernels.attention_parts import Limits
    from models.kernels.compile import as_written
    from models.parallel.collectives import TensorAxis
    from models.parallel.micro_batch_info import MaskKey, MicroBatchInfo, dropout
    from threefold.runtime.processes import keep_memory

ROUNDS = 15
WINDOWS = (  # window, sequence, query heads, key-value heads, head size
    (256, 2048, 8, 2, 128),
    (256, 2048, 8, 8, 64),
    (256, 1024, 8, 2, 128),
    (128, 512, 8, 2, 128),
)


def main() -> None:
    """Measure the ratios and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("dropout", "windows"), help="default: both")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()  # as in a run
    ratios: dict[str, float] = {}
    with stdout_for_json(options.json):
        if options.only != "windows":
            for shape in ((256, 4, 192), (512, 8, 512)):
                ratios[f"dropout of residual stream {shape} (s, b, h), of torch's"] = residual(
                    *shape
                )
            for shape in ((256, 4, 192), (512, 2, 512)):
                ratios[f"dropout in attention core {shape} (s, b, h), of torch's"] = attention(
                    *shape
                )
        if options.only != "dropout":
            for window, *sizes in WINDOWS:
                for sinks in (False, True):
                    extra = " with sinks" if sinks else ""
                    name = (
                        f"window {window}{extra} in {tuple(sizes)} (s, a, g, d), of full attention"
                    )
                    ratios[name] = windowed(window, *sizes, sinks=sinks)
    if options.json:
        print(json.dumps(ratios))
        return
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")


def windowed(window: int, s: int, heads: int, kv_heads: int, d: int, *, sinks: bool) -> float:
    """Return the time of attention within a window divided by that of full attention, in fp32."""
    q, k, v = (torch.randn(1, n, s, d, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    logits = torch.zeros(heads, requires_grad=True) if sinks else None
    grad, limits = torch.randn(1, heads, s, d), Limits(window)
    return compare(
        lambda: causal_attention(q, k, v, limits=limits, sinks=logits).backward(grad),
        lambda: causal_attention(q, k, v).backward(grad),
    )


def residual(s: int, b: int, h: int) -> float:
    """Return our time divided by torch's for dropout on [s, b, h]."""
    x = torch.randn(s, b, h, requires_grad=True)
    key, axis = MaskKey(seed=0, samples=range(b)), TensorAxis()
    return compare(
        lambda: dropout(
            x, 0.1, key=key, layer="blocks.0.mlp", tensor=axis, fuse=as_written
        ).backward(x.detach()),
        lambda: F.dropout(x, 0.1).backward(x.detach()),
    )


def attention(s: int, b: int, h: int) -> float:
    """Return our time divided by torch's for fused attention with dropout and heads of 64."""
    heads = h // 64
    config = ModelConfig(
        layers=1,
        hidden_size=h,
        heads=heads,
        kv_heads=heads,
        ffn_hidden_size=h,
        vocab_size=64,
        sequence_length=s,
        bias=False,
        norm="rmsnorm",
        positions="learned",
        activation="gelu",
        tie_embeddings=False,
        attention_dropout=0.1,
    )
    core = Attention(config, ModelAxes(), name="blocks.0.attention.core", recompute_core=False)
    q, k, v = (torch.randn(b, heads, s, 64, requires_grad=True) for _ in range(3))
    info = MicroBatchInfo(dropout=MaskKey(seed=0, samples=range(b)))

    def theirs() -> None:
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        y.sum().backward()

    return compare(lambda: core._core(q, k, v, info=info).sum().backward(), theirs)


def compare(ours: Callable[[], None], theirs: Callable[[], None]) -> float:
    """Return the ratio of the median times."""
    seconds: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for _ in range(ROUNDS + 1):
        for function, times in seconds.items():
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return statistics.median(seconds[ours][1:]) / statistics.median(seconds[theirs][1:])


if __name__ == "__main__":
    main()
