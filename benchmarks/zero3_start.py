"""Measure the host memory of one rank of ZeRO-3 while it builds the model, on a CPU.

The process is one rank of a group whose collectives do nothing, with real tensors. On a CPU
everything is in host memory: weights, gradients and the optimizer's state. "whole" is DeepSpeed's
default: each rank builds and initializes the whole model, and then discards all but its shard. Each
of the two runs in a process of its own. Peaks exclude the interpreter and its libraries.

    python benchmarks/zero3_start.py recipes/llama/7b.toml --ranks 8
    python benchmarks/zero3_start.py recipes/llama/7b.toml --ranks 8 --layers 4 --whole
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import subprocess
import time
from dataclasses import asdict, dataclass

from models.cost import parameter_count
from models.initialization import initialize
from models.layer_specs import logical_parameters
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.engine import build
from threefold.pipeline.stage import replaced
from threefold.trace.fake_cluster import one_rank_of

WEIGHT_BYTES = 2  # bf16
TABLE_HEADER = (
    "| created | bf16 shard, GB | build peak | peak with engine and moments | remaining | "
    "build seconds | build peak / shard |"
)


@dataclass(frozen=True)
class Measurement:
    """Memory of a rank, and time.

    shard_bytes: weights of the rank in bf16
    build_peak_bytes: peak until the model is built
    peak_bytes: peak until DeepSpeed's engine and the moments exist
    remaining_bytes: what remains of it: weights, gradients, fp32 weights and moments
    seconds: time to build the model
    """

    shard_bytes: int
    build_peak_bytes: int
    peak_bytes: int
    remaining_bytes: int
    seconds: float


def measure_creation(recipe: Recipe, ranks: int, whole: bool) -> Measurement:
    """Build the model and the engine of rank 0 in this process."""
    dims = recipe.parallel_dims(LaunchEnvironment(rank=0, size=ranks, local_size=ranks))
    config = build_deepspeed_config(recipe, dims)
    with one_rank_of(ranks, 0):
        axes = build.build_axes(recipe, dims)
        before, began = resident("VmRSS"), time.monotonic()
        if whole:
            with replaced(build, "ShardedCreation", lambda *_, **__: lambda *_: None):
                model = build.build_model(recipe, axes, config=config)
            parameters = logical_parameters(model, recipe.model)
            initialize(parameters, recipe.model, seed=recipe.seed)
        else:
            model = build.build_model(recipe, axes, config=config)
        seconds, peak = time.monotonic() - began, resident("VmHWM")
        optimizer = build.build_optimizer(model, recipe, config=config)
        engine = build.build_engine(recipe, axes, config=config, model=model, optimizer=optimizer)
        engine.state.tensors()
        return Measurement(
            shard_bytes=WEIGHT_BYTES * parameter_count(recipe.model) // ranks,
            build_peak_bytes=peak - before,
            peak_bytes=resident("VmHWM") - before,
            remaining_bytes=resident("VmRSS") - before,
            seconds=seconds,
        )


def resident(key: str) -> int:
    """Return the resident bytes of this process: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split(":")[1] for line in lines}
    return int(fields[key].split()[0]) * 1024


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--ranks", type=int, default=8, help="data ranks; default: 8")
    parser.add_argument("--layers", type=int, help="number of layers; default: the recipe's")
    parser.add_argument("--whole", action="store_true", help="also measure DeepSpeed's default")
    parser.add_argument("--measure", choices=("sharded", "whole"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print the table."""
    options = parse_arguments()
    if options.measure:
        overrides = ["deepspeed=ds_configs/zero3_bf16.json", "layout.tensor=1", "layout.pipeline=1"]
        overrides += ["training.compile=false", "cluster.nodes=1"]
        overrides += [f"cluster.gpus_per_node={options.ranks}"]
        overrides += [f"model.layers={options.layers}"] if options.layers else []
        recipe = load_recipe(options.recipe, overrides)
        found = measure_creation(recipe, options.ranks, options.measure == "whole")
        print("found", *asdict(found).values(), flush=True)
        os._exit(0)  # DeepSpeed's objects need not be torn down
    print(TABLE_HEADER)
    print(7 * "|---" + "|")
    for way in ("sharded", "whole") if options.whole else ("sharded",):
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", way]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        numbers = done.stdout.split("found")[-1].split()
        shard, model, engine, state = map(int, numbers[:4])
        gigabytes = (shard, model, engine, state)
        cells = " | ".join(f"{each / 1e9:.2f}" for each in gigabytes)
        print(f"| {way} | {cells} | {float(numbers[4]):.1f} | {model / shard:.2f} |")


if __name__ == "__main__":
    main()
