"""The shipped recipes as a table: size, machine, layout, and what is predicted."""

from collections.abc import Iterator

from models.cost import parameter_count
from recipes.planning.hardware import load_gpu
from recipes.planning.job import Machine, job_of
from recipes.planning.memory import GIB, fullest_stage
from recipes.planning.report import rates
from recipes.planning.step_time import step_time
from recipes.training.recipe import REPOSITORY, load_recipe, shipped_recipes

HEAD = (
    "| recipe | parameters | tokens | cluster | tensor x pipeline x data | micro-batch | memory | "
    "MFU | days |",
    "|---|---|---|---|---|---|---|---|---|",
)


def catalogue_lines() -> Iterator[str]:
    """A Markdown table of all recipes that name a machine."""
    yield from HEAD
    for path in shipped_recipes():
        recipe = load_recipe(path)
        if recipe.cluster is None:
            continue
        cluster = recipe.cluster
        gpu = load_gpu(cluster.gpu)
        machine = Machine.of(
            gpu, gpus=cluster.nodes * cluster.gpus_per_node, gpus_per_node=cluster.gpus_per_node
        )
        job = job_of(recipe, machine)
        seconds = step_time(job).total
        rate = rates(job, seconds, recipe.training.steps)
        spread, tokens = job.spread, recipe.training.steps * recipe.tokens_per_step
        name = path.relative_to(REPOSITORY / "recipes").with_suffix("")
        extras = [
            *(["sequence parallel"] if spread.sequence_parallel else []),
            *([f"recompute {spread.recompute}"] if spread.recompute != "none" else []),
            *([spread.schedule] if spread.schedule != "1f1b" else []),
            *([f"ZeRO-{spread.zero_stage}"] if spread.zero_stage != 1 else []),
        ]
        yield (
            f"| {name} | {parameter_count(recipe.model) / 1e9:.3g} B | {tokens / 1e12:.3g} T | "
            f"{machine.gpus:,} {gpu.name} | {spread.tensor} x {spread.pipeline} x {spread.data}"
            + "".join(f", {extra}" for extra in extras)
            + f" | {spread.micro_sequences} | {fullest_stage(job).total / GIB:.0f} of "
            f"{gpu.memory_gib:.0f} GiB | {rate.mfu:.0%} | {rate.days:,.1f} |"
        )
