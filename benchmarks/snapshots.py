"""Measure how much time snapshots in memory take from the training steps of tiny.toml.

Two ranks on this machine stand for two nodes that hold copies for each other. Blocks of steps
without and with a snapshot alternate. The cost of a snapshot is the difference in processor time
per rank, which other programs disturb less than elapsed time. If every core runs a rank, steps take
longer by this cost; steps on a GPU are hardly affected. The last line is the share of time that
snapshots take at the interval that the planner's formula recommends for these costs.

    python benchmarks/snapshots.py [--rounds 20] [--failures-per-day 8]
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from models.cost import parameter_count
from threefold.checkpoint.snapshots.node_memory import NodeMemory
from threefold.checkpoint.snapshots.writer import SnapshotWriter
from threefold.checkpoint.writer import CheckpointWriter
from threefold.config.loading import DEFAULT_RECIPE, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.data.dataset import TrainingData
from threefold.engine.engine import Engine
from threefold.plan.goodput import FaultCosts, best_interval
from threefold.prove.shrink import write_corpus
from threefold.prove.training import start, train_step
from threefold.run_folder.folder import RunFolder
from threefold.runtime.command_line import count
from threefold.runtime.processes import start_processes
from threefold.runtime.ranks import log_tails, start_interpreters

NODES = 2
STEPS_PER_BLOCK = 2  # of a block; a snapshot is complete before the block ends
MAX_STEPS = 100_000  # between snapshots


def main() -> None:
    """Start the ranks, and print the costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count, default=20, help="pairs of blocks")
    parser.add_argument("--failures-per-day", type=count, default=8)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # for a rank
    options = parser.parse_args()
    if options.folder:
        measure(options.folder, options.rounds)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="threefold-benchmark-") as name:
        folder = Path(name)
        write_corpus(folder / "corpus", read_tiny()["model"]["vocab_size"])
        command = [__file__, "--folder", name, "--rounds", str(options.rounds)]
        ranks = start_interpreters(NODES, command, logs=folder, variables={})
        ranks.wait(until_failure=True)
        ranks.stop()
        if any(ranks.ended().values()):
            sys.exit(f"a rank failed:\n{log_tails(sorted(folder.glob('rank*.log')))}")
        found = json.loads((folder / "result").read_text())
    step, pause, cost, write = (
        found[f"{name}_seconds"] for name in ("step", "pause", "cost", "write")
    )
    costs = FaultCosts(pause_seconds=cost, write_seconds=write, restart_seconds=0.0)
    every = best_interval(step, costs, options.failures_per_day, max_steps=MAX_STEPS)
    print(f"{found['parameters'] / 1e6:.1f} M parameters, {options.rounds} rounds, medians")
    print(f"  step                             {step:.3f} s")
    print(f"  pause for comparison and copy    {pause:.4f} s")
    print(f"  until the snapshot is complete   {write:.3f} s")
    print(f"  cost of a snapshot               {cost:.3f} s, {cost / step:.2f} steps")
    print(
        f"  best interval for {options.failures_per_day} failures per day: every {every} steps "
        f"({every * step:.0f} s), which takes {cost / (every * step):.2%} of the time"
    )


def read_tiny() -> dict[str, Any]:
    """Return the table of tiny.toml."""
    return tomllib.loads(DEFAULT_RECIPE.read_text())


def measure(folder: Path, rounds: int) -> None:
    """Train on this rank, and let rank 0 write the medians."""
    world = LaunchEnvironment.from_environment(os.environ)
    start_processes(world)
    table, corpus = read_tiny(), folder / "corpus"
    table["training"]["evaluate_every"] = 0
    table["data"] = {"train": [{"path": str(corpus / "train")}],
                     "validation": str(corpus / "validation"),
                     "tokenizer": str(corpus / "tokenizer")}  # fmt: skip
    recipe = parse_recipe(table, "tiny")
    engine, data = start(recipe, world)
    run = RunFolder(folder / "run")
    run.path.mkdir(exist_ok=True)
    own = folder / f"node{world.rank}"
    own.mkdir()
    dims = recipe.parallel_dims(world)
    blocks: list[Block] = []
    with CheckpointWriter(
        engine.state, run, recipe=recipe, dims=dims, data=data.fingerprint
    ) as writer:
        snapshots = SnapshotWriter(writer, NodeMemory(own), every=1, step=0, ranks_per_node=1)
        for number in range(2 * rounds + 2):
            first = number * STEPS_PER_BLOCK + 1
            taking = snapshots if number % 2 == 1 else None
            blocks.append(run_block(engine, data, writer, first=first, snapshots=taking))
    if world.rank == 0:
        found = medians(blocks[2:])  # the first two warm up
        found["parameters"] = parameter_count(recipe.model)
        (folder / "result").write_text(json.dumps(found))


@dataclass(frozen=True)
class Block:
    """The times of a block of steps, in seconds.

    Attributes:
        processor: processor time of this rank
        step: elapsed time of a step
        pause: pause of the steps for the snapshot; None without a snapshot
        write: time until the snapshot is complete; None without a snapshot
    """

    processor: float
    step: float
    pause: float | None = None
    write: float | None = None


def run_block(
    engine: Engine,
    data: TrainingData,
    writer: CheckpointWriter,
    *,
    first: int,
    snapshots: SnapshotWriter | None,
) -> Block:
    """Run a block of steps.

    Args:
        engine: the engine
        data: the corpora
        writer: the writer of checkpoints, whose thread writes the snapshot
        first: the first step
        snapshots: takes a snapshot before the first step; None for a block without a snapshot
    """
    began, used = time.perf_counter(), time.process_time()
    pause = write = None
    if snapshots:
        assert not engine.diverged_replicas()  # as a run does before each snapshot
        assert not snapshots.take(data.progress_after(first - 1))
        pause = time.perf_counter() - began
    for step in range(first, first + STEPS_PER_BLOCK):
        train_step(engine, data, step)
        if snapshots and write is None and not writer.busy:
            write = time.perf_counter() - began
    elapsed = time.perf_counter() - began
    writer.wait()
    if snapshots and write is None:
        write = time.perf_counter() - began
    return Block(time.process_time() - used, elapsed / STEPS_PER_BLOCK, pause, write)


def medians(blocks: Sequence[Block]) -> dict[str, float]:
    """Return the medians of the times in seconds, and the cost of a snapshot.

    blocks: alternating without and with a snapshot
    """
    pauses = [block.pause for block in blocks if block.pause is not None]
    pairs = zip(blocks[1::2], blocks[::2], strict=True)
    return {
        "step_seconds": median(block.step for block in blocks),
        "pause_seconds": median(pauses),
        "write_seconds": median(block.write for block in blocks if block.write is not None),
        "cost_seconds": max(
            median(pauses), median(own.processor - other.processor for own, other in pairs)
        ),
    }


if __name__ == "__main__":
    main()
