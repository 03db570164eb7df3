"""Measure the time that training waits for a background save of 100 M parameters.

One process, fp32, ZeRO-1: 1.2 GB of weights and moments. Synchronous saves and saves in the
background take turns in one run, each after the disk has been synced; the table has the medians.
Steps that run during a background save share the machine with it; their slowdown
is in the last row.

    python benchmarks/background_save.py
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from models.cost import parameter_count
from threefold.checkpoint.writer import CheckpointWriter
from threefold.config.loading import DEFAULT_RECIPE, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.prove.layouts import reference
from threefold.prove.shrink import write_corpus
from threefold.prove.training import start, train_step
from threefold.run_folder.folder import RunFolder
from threefold.runtime.processes import start_processes

STEPS_DURING_SAVE = 4  # training steps after each save


def build_recipe(corpus: Path) -> Recipe:
    """Return tiny.toml with 100 M parameters and short steps."""
    table = tomllib.loads(DEFAULT_RECIPE.read_text())
    table["model"] |= {
        "layers": 12,
        "hidden_size": 768,
        "heads": 12,
        "kv_heads": 12,
        "ffn_hidden_size": 2048,
        "vocab_size": 10_000,
        "sequence_length": 64,
    }
    table["layout"] = {}
    table["batch"] = {"global_sequences": 2, "micro_sequences": 2}
    table["checkpoint"] = {"every": 1, "keep": 1}
    table["data"] = {
        "train": [{"path": str(corpus / "train")}],
        "validation": str(corpus / "validation"),
        "tokenizer": str(corpus / "tokenizer"),
    }
    return parse_recipe(table, "100 M")


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every save and of the steps during it."""
    write_corpus(folder / "corpus", 10_000)
    recipe = build_recipe(folder / "corpus")
    start_processes(LaunchEnvironment())
    variant = reference(recipe)
    engine, data = start(variant.recipe, LaunchEnvironment())
    (folder / "run").mkdir(exist_ok=True)
    writer = CheckpointWriter(
        engine.state,
        RunFolder(folder / "run"),
        recipe=variant.recipe,
        dims=variant.dims,
        data=data.fingerprint,
    )
    step = 0
    seconds: dict[str, list[float]] = {"waited": [], "stall": [], "alone": [], "beside": []}

    def steps() -> None:
        nonlocal step
        for _ in range(STEPS_DURING_SAVE):
            step += 1
            train_step(engine, data, step)

    def save() -> None:
        problem = writer.save(data.progress_after(step))
        assert problem is None, problem

    def save_and_wait() -> None:
        save()
        problem = writer.wait()
        assert problem is None, problem

    steps()
    save_and_wait()  # opens connections, imports
    for _ in range(repeats):
        seconds["alone"].append(timed(steps))
        os.sync()
        seconds["waited"].append(timed(save_and_wait))
        steps()
        os.sync()
        seconds["stall"].append(timed(save))
        seconds["beside"].append(timed(steps))
        writer.wait()
    print(f"{parameter_count(recipe.model) / 1e6:.0f} M parameters, {repeats} saves of each kind\n")
    return seconds


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder), options.repeats)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    longer = middle["beside"] - middle["alone"]
    print("| | seconds | of the save |\n|---|---|---|")
    print(f"| synchronous save | {middle['waited']:.3f} | 1 |")
    print(f"| wait for a background save | {middle['stall']:.3f} | ", end="")
    print(f"{middle['stall'] / middle['waited']:.3f} |")
    print(f"| slowdown of {STEPS_DURING_SAVE} steps during it | {longer:.3f} | ", end="")
    print(f"{longer / middle['waited']:.3f} |")


if __name__ == "__main__":
    main()
