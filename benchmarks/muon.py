"""Compare the planner's prediction of the time that Muon adds to an update with a measurement.

Two processes train one model with ZeRO-1, which shards the optimizer state over both. Each round
measures, on both ranks at the same time, the update with Muon and with AdamW, and the speed of the
operations that the planner's prediction depends on: matmuls, copies and exchanges of the same
sizes. Prints the prediction relative to the measurement for each round, and the median.

    python benchmarks/muon.py [--rounds 7] [--json]
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from models.cost import hidden_matrix_parameters
from tests.ranks import join_world, run_ranks
from threefold.config.loading import DEFAULT_RECIPE, load_recipe, parse_recipe
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import Gpu, load_gpu
from threefold.plan.job import Job, Machine, job_of
from threefold.plan.time.update import muon_time
from threefold.prove.shrink import write_corpus
from threefold.prove.training import start, train_step
from threefold.runtime.command_line import count
from threefold.runtime.output import stdout_for_json

RANKS = 2
VOCABULARY = 256
WIDTH, LAYERS = 512, 4
COPIED_ELEMENTS = 2**22
PRODUCTS = 40  # together, they take about as long as an update


@dataclass(frozen=True)
class Round:
    """Seconds of the updates in one round, and the planner's prediction for their difference.

    Attributes:
        muon: an update with Muon
        adamw: an update with AdamW
        predicted: predicted seconds that Muon adds, from the speeds of this round
    """

    muon: float
    adamw: float
    predicted: float

    @property
    def ratio(self) -> float:
        """The predicted additional seconds relative to the measured ones."""
        return self.predicted / (self.muon - self.adamw)


def main() -> None:
    """Measure and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count, default=7, help="rounds of measurements")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args()
    with stdout_for_json(options.json), tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder), VOCABULARY)
        rounds: list[Round] = run_ranks(RANKS, measure, folder, options.rounds)[0]
    ratio = median(each.ratio for each in rounds)
    if options.json:
        print(json.dumps({"predicted_over_measured": ratio, "rounds": [vars(r) for r in rounds]}))
        return
    for each in rounds:
        print(
            f"update with Muon {each.muon:.3f} s, with AdamW {each.adamw:.3f} s; difference "
            f"predicted {each.predicted:.3f} s, {each.ratio:.2f} of the measured one"
        )
    print(f"median: {ratio:.2f}")


def recipe_of(corpus: Path) -> Recipe:
    """Return the recipe that is measured: tiny.toml with wider layers."""
    table = load_recipe(DEFAULT_RECIPE).model_dump(mode="json")
    table["model"] |= {
        "layers": LAYERS, "hidden_size": WIDTH, "heads": 8, "kv_heads": 4, "vocab_size": VOCABULARY,
        "ffn_hidden_size": 3 * WIDTH, "sequence_length": 32,
    }  # fmt: skip
    table["layout"] |= {"pipeline": 1}
    table["batch"] |= {"global_sequences": 4, "micro_sequences": 2}
    table["optimizer"] |= {"kind": "muon"}
    table["data"] |= {
        "train": [{"path": str(corpus / "train")}],
        "validation": str(corpus / "validation"),
        "tokenizer": str(corpus / "tokenizer"),
    }
    return parse_recipe(table, "benchmark")


def measure(folder: str, rounds: int) -> list[Round]:
    """Measure all rounds on this rank; each time is that of the slower rank."""
    world = join_world()
    recipe = recipe_of(Path(folder))
    engine, data = start(recipe, world)
    train_step(engine, data, 1)
    muon = engine.wrapped.optimizer.optimizer
    groups = [each for each in muon.param_groups if each["algorithm"] == "muon"]
    copies = [
        {"params": [weights.detach().clone().requires_grad_() for weights in group["params"]]}
        for group in groups
    ]
    adamw = torch.optim.AdamW(copies, lr=1e-6, fused=True)
    flats = [weights for group in groups for weights in group["params"]]
    twins = [weights for group in copies for weights in group["params"]]
    job = job_of(recipe, Machine.of(load_gpu("cpu"), gpus=RANKS, gpus_per_node=RANKS))

    def give_gradients() -> None:
        for weights in (*flats, *twins):
            weights.grad = torch.ones_like(weights)

    def update(optimizer: torch.optim.Optimizer) -> float:
        give_gradients()
        return seconds_of(optimizer.step)

    found = []
    for _ in range(rounds + 1):
        with_muon, with_adamw = update(muon), update(adamw)
        found.append(Round(with_muon, with_adamw, muon_time(as_measured(job))))
    return found[1:]


def as_measured(job: Job) -> Job:
    """Return the job on a machine with the speeds of this moment."""
    gpu = load_gpu("cpu")
    bytes_moved = 4 * hidden_matrix_parameters(job.model) / RANKS
    rate = bytes_moved * (RANKS - 1) / RANKS / exchange_seconds(job)
    measured = replace(
        gpu,
        peak_tflops=gpu.peak_tflops | {"fp32": matmul_tflops() / gpu.matmul_efficiency},
        memory_gigabytes_per_second=copy_rate(),
        memory_efficiency=1.0,
    )
    return replace(job, machine=of_rate(measured, rate))


def of_rate(gpu: Gpu, rate: float) -> Machine:
    """Return two ranks of a node whose links have a rate in bytes per second."""
    machine = Machine.of(gpu, gpus=RANKS, gpus_per_node=RANKS)
    link = rate / 1e9 / gpu.node_link_efficiency
    return replace(machine, node_link_gigabytes_per_second=link)


def matmul_tflops() -> float:
    """Return the TFLOP/s of a matmul of the size of the model's matrices."""
    left, right = torch.randn(1, WIDTH, WIDTH), torch.randn(1, WIDTH, 3 * WIDTH)

    def multiply() -> None:
        for _ in range(PRODUCTS):
            torch.baddbmm(right, left, right)

    seconds = seconds_of(multiply) / PRODUCTS
    return 2e-12 * WIDTH * WIDTH * 3 * WIDTH / seconds


def copy_rate() -> float:
    """Return the GB/s, read and written, of copies."""
    source = torch.ones(COPIED_ELEMENTS)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2e-9 * 4 * COPIED_ELEMENTS / seconds_of(lambda: target.copy_(source))


def exchange_seconds(job: Job) -> float:
    """Return the seconds of one all-to-all of the shards of all matrices."""
    shard = torch.ones(hidden_matrix_parameters(job.model) // RANKS // RANKS * RANKS)
    received = torch.empty_like(shard)
    return seconds_of(lambda: dist.all_to_all_single(received, shard))


def seconds_of(function: Callable[[], object]) -> float:
    """Return the seconds of a call on the slower rank; all ranks begin together."""
    dist.barrier()
    began = time.perf_counter()
    function()
    seconds: Tensor = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    main()
