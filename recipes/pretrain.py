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
import atexit
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from models.cost import parameter_count
from recipes.training.deepspeed_config import build_deepspeed_config, precision
from recipes.training.learning_rate import learning_rate
from recipes.training.recipe import DEFAULT_RECIPE, REPOSITORY, Recipe, load_recipe, origin
from recipes.training.run_folder import RunFolder
from recipes.training.topology import Topology, World

if TYPE_CHECKING:
    from recipes.training.checkpoint import Found
    from recipes.training.checkpoint_writer import CheckpointWriter
    from recipes.training.data import TrainingData
    from recipes.training.engine import Engine
    from recipes.training.feed import Feed
    from recipes.training.tracking import Meter, Tracker

SECONDS_FOR_RANK_0_TO_SPEAK = 5
DRIFTED_SHOWN = 8  # weights in a message


def main() -> None:
    """Check everything that can be checked, then train."""
    options = parse_command_line()
    with refusals(World()):
        world = World.from_environment(os.environ)
    with refusals(world):
        recipe = load_recipe(options.recipe, options.set)
    with refusals(world, options):
        topology = recipe.topology(world)
        config = build_deepspeed_config(recipe, topology)
        number_format = precision(config)

    # torch and DeepSpeed take seconds to import; a bad recipe has been refused by now.
    import torch.distributed as dist

    from recipes.training import checkpoint
    from recipes.training.checkpoint_writer import CheckpointWriter
    from recipes.training.data import TrainingData
    from recipes.training.engine import build_engine, check_machine, start_processes
    from recipes.training.feed import Feed
    from recipes.training.tracking import STOPPED, Meter, open_tracker

    folder = RunFolder(options.run_dir or REPOSITORY / "runs" / recipe.name)
    with refusals(world, options):
        check_machine(world, precision=number_format)
        data = TrainingData(recipe, topology, world.rank)
        if world.rank == 0:
            folder.hold()
        start_processes(world)
        found = checkpoint.find(folder.checkpoints, options.resume, recipe, data.fingerprint)
    start = found.progress
    if world.rank == 0:
        tell_skipped(folder, found)
    if start.step >= recipe.training.steps:
        summarize(recipe, folder, world)
        leave(0)
    if world.rank == 0:
        with refusals(world, options):
            fresh, branching = options.resume == "never", options.resume not in ("auto", "never")
            folder.prepare(recipe, start.step, fresh=fresh, branching=branching)
        announce(recipe, topology, folder, found)

    engine = build_engine(recipe, topology, config)
    if found.path:
        engine.load(found.reader(), weights_only=found.weights_only)
    if world.rank == 0:
        checkpoint.abandon_after(folder.checkpoints, found)
    data.resume(start)
    meter = Meter(recipe, world.size, precision=number_format, device_name=engine.device_name)
    feed = Feed(data.step, last_step=recipe.training.steps, pinned=engine.device_name != "cpu")
    facts = {"recipe": recipe, "topology": topology, "data": data.fingerprint}
    with (
        CheckpointWriter(engine.state, folder, damaged=found.skipped, **facts) as writer,
        open_tracker(
            recipe, folder, world.rank, done=start.step, changed=found.changes(recipe)
        ) as tracker,
    ):
        broken = None
        for step in range(start.step + 1, recipe.training.steps + 1):
            metrics = train_step(
                step, recipe=recipe, engine=engine, data=data, feed=feed, meter=meter
            )
            tracker.step(metrics)
            broken = (
                find_broken(metrics, number_format)
                or find_drift(step, recipe, engine)
                or save_if_due(step, recipe=recipe, data=data, writer=writer, tracker=tracker)
            )
            if broken:
                break
        unsaved = writer.wait()
        broken = broken or unsaved
        if broken:
            tracker.stop(broken)
        else:
            tracker.end()
    dist.barrier()  # launchers end all ranks when the first one fails; rank 0 may be the last
    dist.destroy_process_group()
    if not broken:
        summarize(recipe, folder, world)
    leave(STOPPED if broken else 0)


def train_step(
    step: int,
    *,
    recipe: Recipe,
    engine: "Engine",
    data: "TrainingData",
    feed: "Feed",
    meter: "Meter",
) -> dict[str, Any]:
    """One step, and a validation where one is due; the step's line of metrics."""
    started = time.perf_counter()
    rate = learning_rate(step, recipe.optimizer, recipe.training.steps)
    micro_batches, waited = feed.take(step)
    result = engine.train_step(micro_batches, rate)
    seconds = time.perf_counter() - started
    metrics = meter.line(
        data.progress_after(step),
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=rate,
        seconds=seconds,
    )
    metrics["data_seconds"] = waited
    if due(step, recipe.training.evaluate_every, recipe.training.steps):
        metrics["validation_loss"] = engine.evaluate(data.evaluation())
    return metrics


def save_if_due(
    step: int,
    *,
    recipe: Recipe,
    data: "TrainingData",
    writer: "CheckpointWriter",
    tracker: "Tracker",
) -> str | None:
    """Begin to save, where a save is due; why the run must stop because an earlier one failed."""
    if not due(step, recipe.checkpoint.every, recipe.training.steps):
        return None
    problem = writer.save(data.progress_after(step))
    if problem and recipe.checkpoint.on_failure == "continue":
        tracker.warn(problem)
        return None
    return problem


def due(step: int, every: int, last: int) -> bool:
    """Whether something is done after this step: every so many steps (0: never), and the last."""
    return every > 0 and (step % every == 0 or step == last)


def find_broken(metrics: dict[str, Any], number_format: str) -> str | None:
    """What makes it pointless to go on: DeepSpeed would skip every step from here and exit 0.

    In fp16 a step with infinite gradients is how the loss scale finds its value.
    """
    if not math.isfinite(metrics["loss"]):
        return without_save(metrics["step"], f"the loss is {metrics['loss']}")
    if not math.isfinite(metrics["grad_norm"]) and number_format != "fp16":
        return without_save(metrics["step"], f"the gradient norm is {metrics['grad_norm']}")
    return None


def find_drift(step: int, recipe: Recipe, engine: "Engine") -> str | None:
    """Which weights have drifted apart on ranks that share them; also looked at before a save."""
    every, last = recipe.training.compare_copies_every, recipe.training.steps
    if not every or not (due(step, every, last) or due(step, recipe.checkpoint.every, last)):
        return None
    drifted = engine.differing_copies()
    if not drifted:
        return None
    more = len(drifted) - DRIFTED_SHOWN
    shown = "; ".join(drifted[:DRIFTED_SHOWN]) + (f" (and {more} more)" if more > 0 else "")
    return without_save(step, shown)


def without_save(step: int, reason: str) -> str:
    """Why the run stops before it saves this step."""
    return f"step {step}: {reason}; the newest checkpoint is before that"


@contextmanager
def refusals(world: World, options: argparse.Namespace | None = None) -> Iterator[None]:
    """Turn a ValueError into one message, about this recipe file if named, and exit code 2.

    Launchers end all ranks when the first one exits, so the others let rank 0 speak; they speak
    up themselves if they are still there after that.
    """
    try:
        yield
    except ValueError as problem:
        about = f"{origin(options.recipe, options.set)}: " if options else ""
        if world.rank != 0:
            time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
            about = f"rank {world.rank}: {about}"
        print(f"pretrain.py: {about}{problem}", file=sys.stderr, flush=True)
        leave(2)


def tell_skipped(folder: RunFolder, found: "Found") -> None:
    """Say which checkpoints could not be used."""
    for path, damage in found.skipped.items():
        folder.event("skip", found.progress.step, checkpoint=str(path), reason=damage)
        print(f"{path} is damaged and skipped: {damage}", file=sys.stderr)


def announce(recipe: Recipe, topology: Topology, folder: RunFolder, found: "Found") -> None:
    """Say what is about to run."""
    print(
        f"{recipe.name}: {parameter_count(recipe.model) / 1e6:,.1f} M parameters, "
        f"pipeline {topology.pipeline} x data {topology.data} x tensor {topology.tensor}, "
        f"{recipe.deepspeed}, into {folder.path}"
        + (f", resumed after step {found.progress.step}" if found.progress.step else "")
        + (f", from the weights of {found.path}" if found.weights_only else ""),
        flush=True,
    )


def summarize(recipe: Recipe, folder: RunFolder, world: World) -> None:
    """Say how the run went, from its metrics file."""
    if world.rank != 0:
        return
    lines = folder.read_metrics()
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    print(f"{recipe.name} is finished: {recipe.training.steps} steps")
    if lines:
        first, last = lines[0], lines[-1]
        speed = len(lines) * recipe.tokens_per_step / sum(line["step_seconds"] for line in lines)
        print(f"  loss        {first['loss']:.4f} at step {first['step']}, ", end="")
        print(f"{last['loss']:.4f} at step {last['step']}")
        print(f"  tokens      {last['tokens']:,} at {speed:,.0f} tokens/s")
    if validation:
        print(f"  validation  {validation[-1]:.4f}")
    print(f"  checkpoints {folder.checkpoints}")
    print(f"  metrics     {folder.metrics}, events.jsonl and recipe.toml beside it")
    if (folder.path / "wandb").is_dir():
        print(f"  W&B         {folder.path / 'wandb'} (offline runs: wandb sync)")
    print("  to go on, raise training.steps; to start again, --resume never", flush=True)


def leave(code: int) -> None:
    """End this process after its exit handlers, without the teardown of libraries' threads.

    Of torch's, some abort now and then ("terminate called without an active exception"), and the
    launcher would take a finished run for a failed one.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
