"""What a run says on the terminal: what it skips, how it begins, how it went."""

import sys
from typing import TYPE_CHECKING

from models.cost import parameter_count
from models.pipeline.schedule.balance import balance_text
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.topology import Topology, World, rank_map
from recipes.training.run_folder.folder import RunFolder

if TYPE_CHECKING:  # it needs torch, which takes a second
    from recipes.training.checkpoint.reader import Found


def tell_skipped(folder: RunFolder, found: "Found") -> None:
    """Say which checkpoints could not be used."""
    for path, damage in found.skipped.items():
        folder.event("skip", found.progress.step, checkpoint=str(path), reason=damage)
        print(f"{path} is damaged and skipped: {damage}", file=sys.stderr)


NOT_COMPILED = (
    'training.compile = "auto": a node has no C compiler or not the headers of Python, so that '
    "kernels run as they are written: slower, with more memory than planned and other rounding; "
    "install both on all nodes, or set training.compile = false"
)


def announce(
    recipe: Recipe, topology: Topology, hosts: list[str], folder: RunFolder, found: "Found"
) -> None:
    """Say what is about to run, and where."""
    print(
        f"{recipe.name}: {parameter_count(recipe.model) / 1e6:,.1f} M parameters, "
        f"pipeline {topology.pipeline} x data {topology.data} x tensor {topology.tensor}, "
        f"{recipe.deepspeed}, into {folder.path}"
        + (f", resumed after step {found.progress.step}" if found.progress.step else "")
        + (f", from the weights of {found.path}" if found.weights_only else ""),
        flush=True,
    )
    layout = recipe.layout
    if layout.pipeline > 1:
        deal = balance_text(
            recipe.blocks_of_virtual_stages,
            schedule=layout.schedule,
            stages=layout.pipeline,
            head=recipe.head_in_blocks,
        )
        print(f"  {layout.schedule_name}: {deal}", flush=True)
    if len(set(hosts)) > 1:
        print("\n".join(f"  {line}" for line in rank_map(topology, hosts)), flush=True)


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
