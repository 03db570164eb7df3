"""Pretrain the model of a recipe: one run, top to bottom.

deepspeed recipes/pretrain.py                                     # recipes/tiny.toml
deepspeed --num_nodes 4 recipes/pretrain.py recipes/llama/7b.toml
deepspeed recipes/pretrain.py --set training.steps=20 --run-dir runs/short
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not recipes/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from models.cost import parameter_count
from recipes.training.deepspeed_config import build_deepspeed_config, precision
from recipes.training.learning_rate import learning_rate
from recipes.training.recipe import DEFAULT_RECIPE, REPOSITORY, Recipe, load_recipe, short
from recipes.training.run_folder import RunFolder
from recipes.training.topology import Topology, World

if TYPE_CHECKING:
    from recipes.training.engine import StepResult

SECONDS_FOR_RANK_0_TO_SPEAK = 5


def main() -> None:
    """Check everything that can be checked, then train."""
    options = parse_command_line()
    world = World.from_environment(os.environ)
    with refusals(world):
        recipe = load_recipe(options.recipe, options.set)
    with refusals(world, options.recipe):
        topology = recipe.topology(world)
        config = build_deepspeed_config(recipe, topology)

    # torch and DeepSpeed take seconds to import; a bad recipe has been refused by now.
    import torch.distributed as dist

    from recipes.training import checkpoint
    from recipes.training.data import TrainingData
    from recipes.training.engine import build_engine, start_processes
    from recipes.training.tracking import Meter, open_tracker

    folder = RunFolder(options.run_dir or REPOSITORY / "runs" / recipe.name)
    with refusals(world, options.recipe):
        data = TrainingData(recipe, topology, topology.coordinates(world.rank).data)
        newest = checkpoint.find(folder.checkpoints, options.resume)
        done = checkpoint.read_manifest(newest, recipe, topology)["step"] if newest else 0
        if world.rank == 0:
            announce(recipe, topology, folder, done)
        if done >= recipe.training.steps:
            summarize(recipe, folder, world)
            return
        if world.rank == 0:
            folder.hold()
            folder.prepare(recipe, done, fresh=options.resume == "never")
        start_processes(world, precision=precision(config))

    engine = build_engine(recipe, topology, config)
    if newest:
        engine.load(newest)
    meter = Meter(recipe, world.size, precision(config))
    with open_tracker(recipe, folder, world.rank, done) as tracker:
        for step in range(done + 1, recipe.training.steps + 1):
            started = time.perf_counter()
            rate = learning_rate(step, recipe.optimizer, recipe.training.steps)
            result = engine.train_step(step, data.step(step), rate)
            metrics = meter.line(
                step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=rate,
                seconds=time.perf_counter() - started,
            )
            if due(step, recipe.training.evaluate_every, recipe):
                metrics["validation_loss"] = engine.evaluate(data.evaluation())
            tracker.step(metrics)
            if broken := find_broken(result, precision(config)):
                tracker.stop(f"{broken} in step {step}; the newest checkpoint is before that")
                sys.exit(3)
            if due(step, recipe.checkpoint.every, recipe):
                checkpoint.save(engine.save, folder, step, recipe, topology)
        tracker.end()
    summarize(recipe, folder, world)
    dist.destroy_process_group()


def due(step: int, every: int, recipe: Recipe) -> bool:
    """Whether something is done after this step: every so many steps, and after the last."""
    return every > 0 and (step % every == 0 or step == recipe.training.steps)


def find_broken(result: "StepResult", precision: str) -> str | None:
    """What makes it pointless to go on: DeepSpeed would skip every step from here and exit 0.

    In fp16 a step with infinite gradients is how the loss scale finds its value.
    """
    if not math.isfinite(result.loss):
        return f"the loss is {result.loss}"
    if not math.isfinite(result.grad_norm) and precision != "fp16":
        return f"the gradient norm is {result.grad_norm}"
    return None


@contextmanager
def refusals(world: World, recipe: Path | None = None) -> Iterator[None]:
    """Turn a ValueError into one message, about this recipe file, and exit code 2.

    Launchers end all ranks when the first one exits, so the others let rank 0 speak.
    """
    try:
        yield
    except ValueError as problem:
        if world.rank == 0:
            about = f"{short(recipe)}: " if recipe else ""
            print(f"pretrain.py: {about}{problem}", file=sys.stderr, flush=True)
        else:
            time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
        sys.exit(2)


def announce(recipe: Recipe, topology: Topology, folder: RunFolder, done: int) -> None:
    """Say what is about to run."""
    print(
        f"{recipe.name}: {parameter_count(recipe.model) / 1e6:,.1f} M parameters, "
        f"pipeline {topology.pipeline} x data {topology.data} x tensor {topology.tensor}, "
        f"{recipe.deepspeed}, into {folder.path}"
        + (f", resumed after step {done}" if done else ""),
        flush=True,
    )


def summarize(recipe: Recipe, folder: RunFolder, world: World) -> None:
    """Say how the run went, from its metrics file."""
    if world.rank != 0:
        return
    lines = folder.read_metrics()
    first, last = lines[0], lines[-1]
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    seconds = sum(line["step_seconds"] for line in lines)
    print(f"{recipe.name} is finished: {last['step']} of {recipe.training.steps} steps")
    print(
        f"  loss        {first['loss']:.4f} at step {first['step']}, {last['loss']:.4f} at the end"
    )
    if validation:
        print(f"  validation  {validation[-1]:.4f}")
    print(f"  tokens      {last['tokens']:,} at {last['tokens'] / seconds:,.0f} tokens/s")
    print(f"  checkpoints {folder.checkpoints}")
    print(f"  metrics     {folder.metrics}, events.jsonl and recipe.toml beside it")
    if (folder.path / "wandb").is_dir():
        print(f"  W&B         {folder.path / 'wandb'} (offline runs: wandb sync)")
    print("  to go on, raise training.steps; to start again, --resume never", flush=True)


def parse_command_line() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipe", nargs="?", type=Path, default=DEFAULT_RECIPE, help="default: recipes/tiny.toml"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change a key for this run; the value in TOML, a bare word is a string; repeatable",
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|CHECKPOINT",
        help="auto: from the newest checkpoint of the run folder, if there is one",
    )
    parser.add_argument("--run-dir", type=Path, help="default: runs/NAME of the recipe")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser.parse_args()


if __name__ == "__main__":
    main()
