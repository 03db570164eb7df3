"""Measure a layer with experts, relative to an MLP of the same FLOPs per token.

Forward and backward in one process, the two alternating; prints the ratio of the medians, and the
time of the operations that only the experts have. Each token uses 2 of 8 experts, each of which has
half of the MLP's columns.

    python benchmarks/expert_overhead.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from models.config import Experts, ModelConfig
from models.experts.layer import MixtureOfExperts
from models.experts.routing import ExpertAxis
from models.parallel.collectives import TensorAxis
from models.transformer import MLP
from threefold.runtime.output import stdout_for_json

ROUNDS = 15
SHAPES = ((512, 2, 512), (512, 2, 1024))  # s, b, h
COUNT, PER_TOKEN = 8, 2


def main() -> None:
    """Measure the ratios and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with stdout_for_json(options.json):
        found = {f"{shape}": compare(*shape) for shape in SHAPES}
    if options.json:
        print(json.dumps(found))
        return
    for shape, each in found.items():
        print(
            f"{shape} (s, b, h), fp32: {each['ratio']:.2f} of the time of an MLP "
            f"({each['mlp'] * 1e3:.1f} ms); of the layer's time, matmuls of experts take "
            f"{each['matmuls']:.0%}"
        )


def compare(s: int, b: int, h: int) -> dict[str, float]:
    """Return the time of a layer with experts relative to an MLP, and the share of its matmuls."""
    torch.manual_seed(0)
    columns = 4 * h
    experts = Experts(
        count=COUNT, per_token=PER_TOKEN, ffn_hidden_size=columns // PER_TOKEN, normalize=True,
        balance_loss=0.01,
    )  # fmt: skip
    config = ModelConfig(
        layers=1, hidden_size=h, heads=h // 64, kv_heads=h // 64, ffn_hidden_size=columns,
        vocab_size=64, sequence_length=s, norm="rmsnorm", positions="rope", activation="swiglu",
        bias=False, tie_embeddings=False,
    )  # fmt: skip
    mixture = MixtureOfExperts(
        experts, hidden_size=h, activation="swiglu", tensor=TensorAxis(), expert=ExpertAxis()
    )
    mlp = MLP(config, TensorAxis())
    for parameter in (*mixture.parameters(), *mlp.parameters()):
        nn.init.normal_(parameter, std=0.05)
    x = torch.randn(s, b, h)
    rows = [s * b * PER_TOKEN // COUNT] * COUNT
    sorted_by_expert = torch.randn(sum(rows), h)
    seconds = alternate(
        {
            "experts": lambda: run(mixture, x),
            "mlp": lambda: run(mlp, x),
            "matmuls": lambda: run(lambda tokens: mixture.experts(tokens, rows), sorted_by_expert),
        }
    )
    return {
        "ratio": seconds["experts"] / seconds["mlp"],
        "mlp": seconds["mlp"],
        "matmuls": seconds["matmuls"] / seconds["experts"],
    }


def run(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Run a layer forward and backward."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(x.detach())


def alternate(functions: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median seconds of each function; they run in turn, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(ROUNDS + 3):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if number >= 3:
                seconds[name].append(time.perf_counter() - started)
    return {name: median(each) for name, each in seconds.items()}


if __name__ == "__main__":
    main()
