"""The catalogue: a table of the shipped recipes with size, machine, layout and predictions."""

from collections.abc import Iterator
from pathlib import Path

from models.cost import parameter_count
from models.pipeline.schedule.order import schedule_name
from recipes.planning.inputs.job import JobLayout, Machine, job_of
from recipes.planning.memory.peak import GIB, fullest_stage
from recipes.planning.output.plan_report import rates
from recipes.planning.time.step_time import step_time
from recipes.training.recipe.loading import REPOSITORY, load_recipe, shipped_recipes
from recipes.training.recipe.schema import Recipe

TABLE_HEADER = (
    "| recipe | parameters | tokens | cluster | tensor x pipeline x data | micro-batch | memory | "
    "MFU | days |",
    "|---|---|---|---|---|---|---|---|---|",
)


def catalogue_lines() -> Iterator[str]:
    """Yield a Markdown table of all recipes with a [cluster], by family and model size."""
    yield from TABLE_HEADER
    recipes = [(path, load_recipe(path)) for path in shipped_recipes()]
    recipes.sort(key=lambda each: (each[0].parent.name, parameter_count(each[1].model)))
    for path, recipe in recipes:
        if recipe.cluster is not None:
            yield recipe_row(path, recipe, Machine.of_cluster(recipe.cluster))


def recipe_row(path: Path, recipe: Recipe, machine: Machine) -> str:
    """Return a recipe's row of the table."""
    gpu = machine.gpu
    job = job_of(recipe, machine)
    seconds = step_time(job).total
    rate = rates(job, seconds, recipe.training.steps)
    billions = parameter_count(recipe.model) / 1e9
    trillions = recipe.training.steps * recipe.tokens_per_step / 1e12
    cells = [
        str(path.relative_to(REPOSITORY / "recipes").with_suffix("")),
        f"{billions:,.0f} B" if billions > 100 else f"{billions:.3g} B",
        f"{trillions:.3g} T",
        f"{machine.gpus:,} {gpu.name}",
        layout_text(job.layout),
        str(job.layout.micro_sequences),
        f"{fullest_stage(job).total / GIB:.0f} of {gpu.memory_gib:.0f} GiB",
        f"{rate.mfu:.0%}",
        f"{rate.days:,.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def layout_text(layout: JobLayout) -> str:
    """Return the sizes of the axes, and every setting that is not the default."""
    extras = [
        *([f"context {layout.context}"] if layout.context > 1 else []),
        *([f"expert {layout.expert}"] if layout.expert > 1 else []),
        *(["sequence parallel"] if layout.sequence_parallel else []),
        *([f"recompute {layout.recompute}"] if layout.recompute != "none" else []),
        *([schedule_name(layout.schedule, layout.chunks)] if layout.schedule != "1f1b" else []),
        *([f"ZeRO-{layout.zero_stage}"] if layout.zero_stage != 1 else []),
    ]
    return ", ".join([f"{layout.tensor} x {layout.pipeline} x {layout.data}", *extras])
