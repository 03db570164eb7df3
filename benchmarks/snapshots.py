"""Measure how much time snapshots in memory take from the training steps of tiny.toml.

Two ranks of this machine, as two nodes that hold copies for each other. Blocks of steps without and
with one snapshot take turns. The cost of a snapshot is the difference of the processor time that a
rank uses, because other programs disturb it less than the time of day. If every core has a rank,
the steps take as much longer; the steps of a GPU hardly do. The last line is the share of time that
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
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Sequence
from statistics import median
from typing import Any

from models.cost import parameter_count
from recipes.planning.goodput.renewal import FaultCosts, best_interval
from recipes.planning.inputs.option_types import count
from recipes.proving.proof_corpus import write_corpus
from recipes.proving.trial import start, train_step
from recipes.proving.worlds import free_port, rank_variables
from recipes.training.checkpoint.writer import CheckpointWriter
from recipes.training.recipe.loading import DEFAULT_RECIPE, parse_recipe
from recipes.training.recipe.topology import World
from recipes.training.run_folder.folder import RunFolder
from recipes.training.runtime.processes import start_processes
from recipes.training.snapshots.node_memory import NodeMemory
from recipes.training.snapshots.writer import SnapshotWriter

NODES = 2
STEPS = 2  # of a block; a snapshot is complete before the block ends
MOST_STEPS = 100_000  # between snapshots


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
        folder, port = Path(name), free_port()
        write_corpus(folder / "corpus", read_tiny()["model"]["vocab_size"])
        command = [sys.executable, __file__, "--folder", name, "--rounds", str(options.rounds)]
        ranks = [
            subprocess.Popen(command, env=os.environ | rank_variables(rank, NODES, port))
            for rank in range(NODES)
        ]
        wait_for_all(ranks)
        found = json.loads((folder / "result").read_text())
    step, pause, cost, write = (found[key] for key in ("step", "pause", "cost", "write"))
    costs = FaultCosts(pause=cost, write=write, restart=0.0)
    every = best_interval(step, costs, options.failures_per_day, most=MOST_STEPS)
    print(f"{found['parameters'] / 1e6:.1f} M parameters, {options.rounds} rounds, medians")
    print(f"  step                             {step:.3f} s")
    print(f"  pause for comparison and copy    {pause:.4f} s")
    print(f"  until the snapshot is complete   {write:.3f} s")
    print(f"  cost of a snapshot               {cost:.3f} s, {cost / step:.2f} steps")
    print(
        f"  best interval for {options.failures_per_day} failures per day: every {every} steps "
        f"({every * step:.0f} s), which takes {cost / (every * step):.2%} of the time"
    )


def wait_for_all(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have ended; if one fails, kill the others and end this process."""
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.1)
    if any(codes):
        for rank in ranks:
            rank.kill()
            rank.wait()
        sys.exit(1)


def read_tiny() -> dict[str, Any]:
    """Return the table of tiny.toml."""
    return tomllib.loads(DEFAULT_RECIPE.read_text())


def measure(folder: Path, rounds: int) -> None:
    """Train on this rank, and let rank 0 write the medians."""
    world = World.from_environment(os.environ)
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
    topology = recipe.topology(world)
    seconds: dict[str, list[float]] = {
        key: [] for key in ("without", "with", "steps", "pause", "write")
    }
    step = 0
    with CheckpointWriter(
        engine.state, run, recipe=recipe, topology=topology, data=data.fingerprint
    ) as writer:
        snapshots = SnapshotWriter(writer, NodeMemory(own), every=1, step=0, ranks_per_node=1)
        for number in range(2 * rounds + 2):  # the first two warm up
            with_snapshot = number % 2 == 1
            began, used = time.perf_counter(), time.process_time()
            pause = complete = 0.0
            if with_snapshot:
                assert not engine.differing_replicas()  # as a run does before each snapshot
                assert not snapshots.take(data.progress_after(step))
                pause = time.perf_counter() - began
            for _ in range(STEPS):
                step += 1
                train_step(engine, data, step)
                if with_snapshot and not complete and not writer.busy:
                    complete = time.perf_counter() - began
            took = time.perf_counter() - began
            writer.wait()
            if number >= 2:
                used = time.process_time() - used
                seconds["with" if with_snapshot else "without"].append(used)
                seconds["steps"].append(took / STEPS)
                if with_snapshot:
                    seconds["pause"].append(pause)
                    seconds["write"].append(complete or time.perf_counter() - began)
    if world.rank == 0:
        pairs = zip(seconds["with"], seconds["without"], strict=True)
        found = {
            "parameters": parameter_count(recipe.model),
            "step": median(seconds["steps"]),
            "pause": median(seconds["pause"]),
            "write": median(seconds["write"]),
            "cost": max(median(seconds["pause"]), median(a - b for a, b in pairs)),
        }
        (folder / "result").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
