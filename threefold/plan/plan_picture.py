"""Pictures of a plan: the timeline of its pipeline, and a heat map of its family."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from models.cost import parameter_count
from models.errors import UserError
from threefold.config.recipe import Recipe
from threefold.pipeline.picture import ink, save_figure
from threefold.plan.family import best_plan, relatives
from threefold.plan.job import Job, job_without_layout
from threefold.plan.pipeline_picture import timeline
from threefold.plan.report import rates, short_count
from threefold.plan.search import DEFAULT_HEADROOM, Plan

MIN_LAST_NODES = 512  # the last column of a heat map has at least this many nodes
HEATMAP_COLOURS = "YlGnBu"


def draw_timeline(job: Job, *, title: str, file: Path) -> None:
    """Write the schedule of a job's pipeline and the memory of its stages.

    Raises:
        UserError: the file cannot be written, or the schedule does not support this number of
            micro-batches.
    """
    save_figure(timeline(job, title), file)


def draw_heatmap(
    recipe: Recipe, job: Job, *, file: Path, headroom: float = DEFAULT_HEADROOM
) -> None:
    """Write a heat map of the best layouts of a recipe's family by number of nodes.

    headroom: share of the GPU memory that the layouts leave free

    Raises:
        UserError: the file cannot be written.
    """
    save_figure(heatmap(recipe, job, headroom), file)


def heatmap(recipe: Recipe, job: Job, headroom: float = DEFAULT_HEADROOM) -> Figure:
    """Return a figure of the best layout of each recipe (row) on each number of nodes (column)."""
    recipes = family(recipe)
    columns = node_counts(job.machine.nodes)
    cells = [[plan_on_nodes(each, job, nodes, headroom) for nodes in columns] for each in recipes]
    shares = [[mfu(plan) if plan else float("nan") for plan in row] for row in cells]
    figure = Figure(
        figsize=(2.6 + 0.92 * len(columns), 1.5 + 0.42 * len(recipes)), layout="constrained"
    )
    axes = figure.add_subplot()
    top = colour_scale_end(shares)
    image = axes.imshow(shares, cmap=HEATMAP_COLOURS, vmin=0.0, vmax=top, aspect="auto")
    for row, plans in enumerate(cells):
        for column, plan in enumerate(plans):
            axes.text(
                column, row, memory_text(plan), ha="center", va="center", fontsize=7,
                color=cell_ink(mfu(plan) if plan else None, top),
            )  # fmt: skip
    own = columns.index(job.machine.nodes), recipes.index(recipe)
    frame = Rectangle(
        (own[0] - 0.5, own[1] - 0.5), 1, 1, clip_on=False, fill=False, edgecolor="#c00000",
        linewidth=1.6, zorder=10,
    )  # fmt: skip
    axes.add_patch(frame)
    axes.set_xticks(range(len(columns)), [str(nodes) for nodes in columns], fontsize=8)
    axes.set_yticks(range(len(recipes)), [row_label(each) for each in recipes], fontsize=8)
    axes.set_xlabel(f"nodes of {job.machine.gpus_per_node} x {job.machine.gpu.name}", fontsize=9)
    axes.set_title(
        "Fastest layout that fits: tensor x pipeline x data (c: context ranks), and its MFU\n"
        f"-: none fits, or the global batch is not divisible; red: nodes of {recipe.name}",
        fontsize=9,
    )
    bar = figure.colorbar(image, ax=axes, pad=0.01, format=lambda share, _: f"{share:.0%}")
    bar.set_label("predicted MFU", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def cell_ink(share: float | None, top: float) -> str:
    """Return the text colour of a cell; the colour scale ends at `top`."""
    if share is None:
        return ink((1.0, 1.0, 1.0))
    red, green, blue, _ = matplotlib.colormaps[HEATMAP_COLOURS](share / top)
    return ink((red, green, blue))


def colour_scale_end(shares: Sequence[Sequence[float]]) -> float:
    """Return the upper end of the colour scale: the next multiple of 10 % above all shares."""
    highest = max((share for row in shares for share in row if share == share), default=0.1)
    return min(1.0, -(-highest // 0.1) * 0.1)


def family(recipe: Recipe) -> list[Recipe]:
    """Return a recipe and the shipped recipes of its family, the smallest model first."""
    found = [recipe, *relatives(recipe).values()]
    return sorted(found, key=lambda each: parameter_count(each.model))


def node_counts(own: int) -> list[int]:
    """Return the powers of two up to the largest column, and the recipe's own number of nodes."""
    most = max(MIN_LAST_NODES, own)
    return sorted({2**power for power in range(most.bit_length())} | {own})


def plan_on_nodes(
    recipe: Recipe, job: Job, nodes: int, headroom: float = DEFAULT_HEADROOM
) -> Plan | None:
    """Return the best layout of a recipe on `nodes` of the job's nodes; None if none fits."""
    # With the links of the job's machine, which options or a calibration may have changed.
    machine = replace(job.machine, gpus=nodes * job.machine.gpus_per_node)
    try:
        return best_plan(job_without_layout(recipe, machine, job.software), headroom)
    except UserError:  # the GPU does not support the recipe's precision
        return None


def mfu(plan: Plan) -> float:
    """Return the model FLOPs utilization of a plan."""
    return rates(plan.job, plan.time.total, steps=1).mfu


def memory_text(plan: Plan | None) -> str:
    """Return the text of a cell: a layout and its MFU."""
    if plan is None:
        return "-"
    layout = plan.job.layout
    sizes = [layout.tensor, layout.pipeline, layout.data]
    context = f"c{layout.context} " if layout.context > 1 else ""
    stage = f", ZeRO-{layout.zero_stage}" if layout.zero_stage > 1 else ""
    return f"{context}{' x '.join(map(str, sizes))}\n{mfu(plan):.0%}{stage}"


def row_label(recipe: Recipe) -> str:
    """Return the label of a row: a recipe, its size and its batch."""
    return (
        f"{recipe.name}\n{short_count(parameter_count(recipe.model))} parameters, "
        f"{short_count(recipe.tokens_per_step)} tokens per step"
    )
