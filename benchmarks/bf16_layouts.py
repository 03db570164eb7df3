"""Compare the losses of bf16 runs in several layouts with the effect of another seed.

In bf16 and in FP8, every layout rounds differently, so losses cannot be equal; this benchmark tests
if they differ less than with another seed. It trains a recipe in bf16 with real runs of
pretrain.py: one process with two seeds, one process with micro-batches of one sequence, which
differs by rounding only, and up to four layouts, without those that the recipe rejects. One run per
core trains at a time. It prints a table, and draws the curves.

    python benchmarks/bf16_layouts.py --output docs/images/bf16_layouts.svg
    python benchmarks/bf16_layouts.py recipes/tiny-fp8.toml --set batch.global_sequences=4
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from matplotlib import pyplot

from models.errors import UserError
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.config.sections import short
from threefold.pretrain.experiment import check_phases
from threefold.runtime.command_line import add_overrides
from threefold.runtime.launchers import free_port
from threefold.runtime.output import stdout_for_json

SEED, OTHER_SEED = 1234, 1235
ONE = ["layout.pipeline=1"]
LAYOUTS = {  # name -> ranks, overrides
    "micro-batches of one": (1, [*ONE, "batch.micro_sequences=1"]),
    "pipeline 2, DualPipeV": (2, ["layout.pipeline=2", "layout.schedule=dualpipev"]),
    "tensor 2, sequence-parallel": (
        2,
        ["layout.pipeline=1", "layout.tensor=2", "layout.sequence_parallel=true"],
    ),
    "data 2, ZeRO-2": (2, ["layout.pipeline=1", "deepspeed=ds_configs/zero2_bf16.json"]),
    "pipeline 2 x tensor 2": (4, ["layout.pipeline=2", "layout.tensor=2"]),
}
WINDOW = 20  # steps that a curve is averaged over


def main() -> None:
    """Run all trainings, print their distances, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", type=Path, default=DEFAULT_RECIPE)
    add_overrides(parser)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, help="a picture of the curves")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    overrides = [*options.set, f"training.steps={options.steps}"]
    runs = {  # name -> ranks, overrides
        "one process": (1, all_overrides(overrides, ONE, SEED)),
        "another seed": (1, all_overrides(overrides, ONE, OTHER_SEED)),
    }
    for name, (ranks, layout) in LAYOUTS.items():
        run = ranks, all_overrides(overrides, layout, SEED)
        if reason := rejection(options.recipe, *run):
            print(f"skipped {name}: {reason}", file=sys.stderr)
        else:
            runs[name] = run
    if reason := rejection(options.recipe, *runs["one process"]):
        parser.error(reason)
    with stdout_for_json(options.json):
        curves = losses_of(options.recipe, runs)
    reference = curves.pop("one process")
    layouts = {name: distances(curve, reference) for name, curve in curves.items()}
    seeds = layouts.pop("another seed")
    if options.output:
        draw(options.recipe, reference, seeds, layouts, options.output)
    rows = {"another seed": seeds, **layouts}
    if options.json:
        print(json.dumps({name: summary(row, seeds) for name, row in rows.items()}))
        return
    print(f"{'difference from one process':<28} {'largest':>9} {'rms':>9} {'to another seed':>16}")
    for name, row in rows.items():
        found = summary(row, seeds)
        print(f"{name:<28} {found['largest']:9.2e} {found['rms']:9.2e} {found['ratio']:16.3f}")


def all_overrides(overrides: list[str], layout: list[str], seed: int) -> list[str]:
    """Return a run's `--set` overrides."""
    return [
        *overrides,
        "deepspeed=ds_configs/zero1_bf16.json",
        f"seed={seed}",
        "training.evaluate_every=0",
        "tracking.mode=disabled",
        *layout,
    ]


def rejection(recipe: Path, ranks: int, overrides: list[str]) -> str:
    """Return the reason why a run would be rejected, or ""."""
    try:
        plan = PhasePlan(load_recipe(recipe, overrides))
        world = LaunchEnvironment(size=ranks, local_size=ranks)
        check_phases(world, plan, recipe.stem, has_gpu=False)
    except UserError as problem:
        return str(problem)
    return ""


def losses_of(recipe: Path, runs: dict[str, tuple[int, list[str]]]) -> dict[str, np.ndarray]:
    """Return the loss of every step of each run. The first failure cancels the runs that wait."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = {name: pool.submit(losses, recipe, *run) for name, run in runs.items()}
        try:
            for future in as_completed(futures.values()):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: future.result() for name, future in futures.items()}


def losses(recipe: Path, ranks: int, overrides: list[str]) -> np.ndarray:
    """Return the loss of every step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(str(Path(sys.executable).with_name("deepspeed")), "--quiet"),
                *("--num_gpus", str(ranks), "--master_port", str(free_port())),
                *("recipes/pretrain.py", str(recipe)),
                *(argument for setting in overrides for argument in ("--set", setting)),
                *("--run-dir", folder),
            ],
            cwd=REPOSITORY,
            env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            stdout=sys.stderr,
            check=True,
        )
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


def distances(run: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the relative difference of the losses at each step."""
    return (run - reference) / reference


def summary(row: np.ndarray, seeds: np.ndarray) -> dict[str, float]:
    """Return a run's distance from the reference, and its ratio to that of another seed.

    ratio: the largest ratio, over the steps, of this run's distance to the other seed's,
        both averaged over a window
    """
    return {
        "largest": float(np.abs(row).max()),
        "rms": float(np.sqrt((row**2).mean())),
        "ratio": float((smooth(row) / smooth(seeds)).max()),
    }


def smooth(row: np.ndarray) -> np.ndarray:
    """Return the root mean square over a sliding window of steps."""
    window = min(WINDOW, len(row))
    return np.sqrt(np.convolve(row**2, np.ones(window) / window, mode="valid"))


def draw(
    recipe: Path,
    reference: np.ndarray,
    seeds: np.ndarray,
    layouts: dict[str, np.ndarray],
    output: Path,
) -> None:
    """Draw the losses and, below, each run's distance from the reference in the seeds' band."""
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="tight")
    steps = np.arange(1, len(reference) + 1)
    above.plot(steps, reference, color="black", linewidth=1, label="one process")
    for name, row in layouts.items():
        above.plot(steps, reference * (1 + row), linewidth=0.8, label=name)
    above.set_ylabel("loss (nats per token)")
    above.legend(fontsize=8)
    above.set_title(f"{short(recipe)} in bf16: one loss in every layout", fontsize=10)
    middle = steps[len(steps) - len(smooth(seeds)) :]
    below.fill_between(middle, smooth(seeds), alpha=0.2, color="gray", label="another seed")
    for name, row in layouts.items():
        below.plot(middle, smooth(row), linewidth=0.9, label=name)
    below.set_yscale("log")
    below.set_ylabel(f"relative distance\n(rms of {WINDOW} steps)")
    below.set_xlabel("step")
    below.legend(fontsize=8)
    figure.savefig(output)


if __name__ == "__main__":
    main()
