"""The shipped recipes as a table: size, machine, layout, and what is predicted."""

from collections.abc import Iterator
from pathlib import Path

from models.cost import parameter_count
from models.pipeline.schedule.order import schedule_name
from recipes.planning.inputs.job import Machine, Spread, job_of
from recipes.planning.memory.peak import GIB, fullest_stage
from recipes.planning.output.plan_report import rates
from recipes.planning.time.step_time import step_time
from recipes.training.recipe.loading import REPOSITORY, load_recipe, shipped_recipes
from recipes.training.recipe.schema import Recipe

HEAD = (
    "| recipe | parameters | tokens | cluster | tensor x pipeline x data | micro-batch | memory | "
    "MFU | days |",
    "|---|---|---|---|---|---|---|---|---|",
)


def catalogue_lines() -> Iterator[str]:
    """A Markdown table of all recipes that name a machine, family by family, smallest first."""
    yield from HEAD
    found = [(path, load_recipe(path)) for path in shipped_recipes()]
    found = [(path, recipe) for path, recipe in found if recipe.cluster is not None]
    found.sort(key=lambda each: (each[0].parent.name, parameter_count(each[1].model)))
    for path, recipe in found:
        yield line(path, recipe)


def line(path: Path, recipe: Recipe) -> str:
    """A recipe's row."""
    machine = Machine.of_cluster(recipe.cluster)
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
        layout(job.spread),
        str(job.spread.micro_sequences),
        f"{fullest_stage(job).total / GIB:.0f} of {gpu.memory_gib:.0f} GiB",
        f"{rate.mfu:.0%}",
        f"{rate.days:,.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def layout(spread: Spread) -> str:
    """The axes, and what is not the default."""
    extras = [
        *(["sequence parallel"] if spread.sequence_parallel else []),
        *([f"recompute {spread.recompute}"] if spread.recompute != "none" else []),
        *([schedule_name(spread.schedule, spread.chunks)] if spread.schedule != "1f1b" else []),
        *([f"ZeRO-{spread.zero_stage}"] if spread.zero_stage != 1 else []),
    ]
    return ", ".join([f"{spread.tensor} x {spread.pipeline} x {spread.data}", *extras])
