"""Pictures for plan.py: a plan's timeline, a family's heat map, a table's predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from models.cost import parameter_count
from models.errors import UserError
from recipes.pictures.pipeline_passes import ink, save_figure
from recipes.planning.inputs.job import Job, Machine, job_without_layout
from recipes.planning.output.pipeline_picture import timeline
from recipes.planning.output.plan_report import rates
from recipes.planning.search.layout_search import Plan, search
from recipes.training.recipe.loading import load_recipe, shipped_recipes
from recipes.training.recipe.schema import Recipe

MIN_LAST_NODES = 512  # the last column of a heat map has at least this many nodes
HEATMAP_COLOURS = "YlGnBu"
TABLE_MARKERS = "osD^vPX<>phd*8"
MAX_LARGE_POINTS = 200  # tables with more rows are drawn with small points


def draw_timeline(job: Job, *, title: str, file: Path) -> None:
    """Write the schedule of a job's pipeline and the memory of its stages.

    Raises:
        UserError: the file cannot be written, or the schedule does not support this number of
            micro-batches.
    """
    save_figure(timeline(job, title), file)


def draw_heatmap(recipe: Recipe, job: Job, *, file: Path) -> None:
    """Write a heat map of the best layouts of a recipe's family by number of nodes.

    Raises:
        UserError: the file cannot be written.
    """
    save_figure(heatmap(recipe, job), file)


def draw_scatter(results: Mapping[str, Mapping[str, Any]], *, file: Path) -> None:
    """Write a plot of predicted and measured step times, from the results of `plan.py --table`.

    Raises:
        UserError: no row has both times, or the file cannot be written.
    """
    save_figure(scatter(results), file)


def heatmap(recipe: Recipe, job: Job) -> Figure:
    """Return a figure of the best layout of each recipe (row) on each number of nodes (column)."""
    recipes = family(recipe)
    columns = node_counts(job.machine.nodes)
    cells = [[best_plan(each, job, nodes) for nodes in columns] for each in recipes]
    shares = [[mfu(plan) if plan else float("nan") for plan in row] for row in cells]
    figure = Figure(
        figsize=(2.6 + 0.92 * len(columns), 1.5 + 0.42 * len(recipes)), layout="constrained"
    )
    axes = figure.add_subplot()
    top = _colour_scale_end(shares)
    image = axes.imshow(shares, cmap=HEATMAP_COLOURS, vmin=0.0, vmax=top, aspect="auto")
    for row, plans in enumerate(cells):
        for column, plan in enumerate(plans):
            axes.text(
                column, row, cell_text(plan), ha="center", va="center", fontsize=7,
                color=_cell_ink(plan, top),
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
        "Fastest layout that fits: tensor x pipeline x data, and its MFU\n"
        f"-: none fits, or the global batch is not divisible; red: nodes of {recipe.name}",
        fontsize=9,
    )
    bar = figure.colorbar(image, ax=axes, pad=0.01, format=lambda share, _: f"{share:.0%}")
    bar.set_label("predicted MFU", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def _cell_ink(plan: Plan | None, top: float) -> str:
    """Return the text colour of a cell."""
    if plan is None:
        return ink((1.0, 1.0, 1.0))
    red, green, blue, _ = matplotlib.colormaps[HEATMAP_COLOURS](mfu(plan) / top)
    return ink((red, green, blue))


def _colour_scale_end(shares: Sequence[Sequence[float]]) -> float:
    """Return the upper end of the colour scale: the next multiple of 10 % above all shares."""
    highest = max((share for row in shares for share in row if share == share), default=0.1)
    return min(1.0, -(-highest // 0.1) * 0.1)


def family(recipe: Recipe) -> list[Recipe]:
    """Return a recipe and the shipped recipes of its family, the smallest model first."""
    kind = recipe.name.partition("-")[0]
    others = [load_recipe(path) for path in shipped_recipes() if path.parent.name == kind]
    found = [recipe, *(other for other in others if other.name != recipe.name)]
    return sorted(found, key=lambda each: parameter_count(each.model))


def node_counts(own: int) -> list[int]:
    """Return the powers of two up to the largest column, and the recipe's own number of nodes."""
    most = max(MIN_LAST_NODES, own)
    return sorted({2**power for power in range(most.bit_length())} | {own})


def best_plan(recipe: Recipe, job: Job, nodes: int) -> Plan | None:
    """Return the fastest layout of a recipe on `nodes` of the job's nodes; None if none fits."""
    per_node = job.machine.gpus_per_node
    machine = Machine.of(job.machine.gpu, gpus=nodes * per_node, gpus_per_node=per_node)
    try:
        result = search(job_without_layout(recipe, machine, job.software), top=1)
    except UserError:  # the GPU does not support the recipe's precision
        return None
    return result.plans[0] if result.plans else None


def mfu(plan: Plan) -> float:
    """Return the model FLOPs utilization of a plan."""
    return rates(plan.job, plan.time.total, steps=1).mfu


def cell_text(plan: Plan | None) -> str:
    """Return the text of a cell: a layout and its MFU."""
    if plan is None:
        return "-"
    layout = plan.job.layout
    stage = f", ZeRO-{layout.zero_stage}" if layout.zero_stage > 1 else ""
    return f"{layout.tensor} x {layout.pipeline} x {layout.data}\n{mfu(plan):.0%}{stage}"


def row_label(recipe: Recipe) -> str:
    """Return the label of a row: a recipe, its size and its batch."""
    return (
        f"{recipe.name}\n{_short(parameter_count(recipe.model))} parameters, "
        f"{_short(recipe.tokens_per_step)} tokens per step"
    )


def _short(count: int) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= unit:
            return f"{count / unit:.3g} {letter}"
    return f"{count:,}"


@dataclass(frozen=True)
class Points:
    """The step times of a table in seconds, and its label in the legend."""

    measured: list[float]
    predicted: list[float]
    label: str

    @classmethod
    def of(cls, name: str, result: Mapping[str, Any]) -> "Points":
        """Return the points of the rows that have both a measured and a predicted time."""
        keys = ("measured_step_seconds", "predicted_step_seconds")
        both = [
            (row[keys[0]], row[keys[1]])
            for row in result["rows"]
            if row.get(keys[0]) and row.get(keys[1])
        ]
        error = result["summary"].get("mean_absolute_error_percent")
        label = f"{name}: {error:.1f}%, {len(both)}" if both and error is not None else name
        return cls([pair[0] for pair in both], [pair[1] for pair in both], label)


def scatter(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return a figure of predicted over measured times (above) and of their ratio (below)."""
    tables = [points for name in results if (points := Points.of(name, results[name])).measured]
    if not tables:
        raise UserError(
            "--scatter: no row has both a predicted and a measured step time; use a table with a "
            "column step_time_s"
        )
    figure = Figure(figsize=(9.0, 7.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    values = [value for points in tables for value in points.measured + points.predicted]
    ends = min(values) / 1.3, max(values) * 1.3
    _draw_exact_line(above, ends, ends)
    _draw_exact_line(below, ends, (1.0, 1.0))
    tables.sort(key=lambda points: -len(points.measured))  # the smallest table is drawn on top
    handles = [_draw_table(above, below, points, order) for order, points in enumerate(tables)]
    above.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    above.set_ylabel("predicted, seconds a step")
    below.set(xlabel="measured, seconds a step", ylabel="predicted / measured")
    legend = above.legend(
        handles=[*above.get_legend_handles_labels()[0][:2], *handles],
        title="table: mean error, rows", loc="upper left", bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0, fontsize=8, title_fontsize=8, frameon=False,
    )  # fmt: skip
    legend.set_alignment("left")
    return figure


def _draw_exact_line(axes: Axes, ends: tuple[float, float], right: tuple[float, float]) -> None:
    """Draw the line of exact predictions, and a band of 10 % on both sides."""
    less, more = [0.9 * value for value in right], [1.1 * value for value in right]
    axes.fill_between(ends, less, more, color="0.86", linewidth=0, label="within 10%")
    axes.plot(ends, right, color="black", linewidth=0.8, label="predicted = measured")
    axes.grid(which="major", color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_table(above: Axes, below: Axes, points: Points, order: int) -> Line2D:
    """Draw a table's rows, small and faint if there are many, and return its legend entry."""
    many = len(points.measured) > MAX_LARGE_POINTS
    marker = TABLE_MARKERS[order % len(TABLE_MARKERS)]
    colour = matplotlib.colormaps["tab20"](order * 2 % 20 + order // 10 % 2)
    style: dict[str, Any] = {
        "marker": marker,
        "color": colour,
        "linestyle": "none",
        "markersize": 2.2 if many else 5.0,
        "alpha": 0.4 if many else 0.9,
        "markeredgewidth": 0.0 if many else 0.4,
        "markeredgecolor": "white",
        "zorder": 3 + order,
    }
    ratios = [p / m for p, m in zip(points.predicted, points.measured, strict=True)]
    above.plot(points.measured, points.predicted, **style)
    below.plot(points.measured, ratios, **style)
    return Line2D(
        [], [], markersize=5, label=points.label, marker=marker, color=colour, linestyle="none"
    )
