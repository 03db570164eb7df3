"""Pictures of plans and measured runs: timelines, heat maps, predictions and measurements.

Both are drawn from the results of `plan.py table`, which `calibration/fit.py` returns.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from models.cost import parameter_count
from models.errors import UserError
from threefold.config.recipe import Recipe
from threefold.pipeline.balance import evenly_spaced
from threefold.pipeline.picture import (
    FIGURE_INCHES,
    MAX_STAGE_ROWS,
    PASSES_POINTS,
    add_legend,
    draw_passes,
    ink,
    label_passes,
    schedule_title,
    shown_windows,
    three_digits,
)
from threefold.pipeline.schedules import Pipeline
from threefold.pipeline.simulation import Timeline, idle_share, pipeline_seconds
from threefold.plan.catalogue import layout_text, relatives
from threefold.plan.job import Job, PlannedLayout, job_without_layout
from threefold.plan.memory.peak import GIB, StageMemory, stage_memory
from threefold.plan.report import MEMORY_PARTS, rates, short_count
from threefold.plan.search import DEFAULT_HEADROOM, Plan, search
from threefold.plan.time.step import pipeline_of, step_time, timeline_of

# A figure of a job's predicted pipeline timeline and of the memory of its stages.

MAX_STAGE_BARS = 64
MEMORY_COLOURS = ("#4e79a7", "#86bcb6", "#f1ce63", "#59a14f", "#b07aa1", "#9c755f", "#bab0ac")


def timeline(job: Job, title: str) -> Figure:
    """Return a figure: above, the passes of each stage in time; below, the memory per stage."""
    pipeline = pipeline_of(job)
    passes = timeline_of(job)
    windows = shown_windows(pipeline, passes)
    stages = evenly_spaced(pipeline.stages, MAX_STAGE_ROWS)
    height = 0.5 + 0.24 * max(3, len(stages))
    figure = Figure(figsize=(FIGURE_INCHES, height + 3.7), layout="constrained")
    grid = figure.add_gridspec(2, len(windows), height_ratios=[height, 2.6])
    axes = [figure.add_subplot(grid[0, column]) for column in range(len(windows))]
    for panel, window in zip(axes, windows, strict=True):
        rows = [passes[stage] for stage in stages]
        draw_passes(
            panel,
            rows,
            window,
            points=PASSES_POINTS / len(windows),
            virtual_stages=pipeline.virtual_stages,
        )
    label_passes(axes, stages, pipeline)
    _draw_memory(figure.add_subplot(grid[1, :]), job)
    figure.suptitle(f"{title}: {_summary(job, pipeline, passes)}", fontsize=10)
    return figure


def _summary(job: Job, pipeline: Pipeline, passes: Timeline) -> str:
    p, m = pipeline.stages, pipeline.micro_batches
    spent = f"{three_digits(pipeline_seconds(passes))} s of forward and backward passes"
    if p > 1:
        spent = (
            f"{three_digits(pipeline_seconds(passes))} s in the pipeline, stages idle "
            f"{idle_share(passes):.1%} of it (bubble, white)"
        )
    return (
        f"{schedule_title(pipeline)}, {p} stage{'s' * (p > 1)}, "
        f"{m} micro-batch{'es' * (m > 1)}\n{spent}; "
        f"{three_digits(step_time(job).total)} s per step with gradients, optimizer and stragglers"
    )


def _draw_memory(axes: Axes, job: Job) -> None:
    """Draw a bar for each stage, and a line at the GPU's memory."""
    memory = stage_memory(job)
    stages = evenly_spaced(len(memory), MAX_STAGE_BARS)
    limit_gib = job.machine.gpu.memory_gib
    handles = list(_stack(axes, [memory[stage] for stage in stages]))
    axes.axhline(limit_gib, color="#c00000", linestyle="--", linewidth=1.2)
    limit = Line2D(
        [], [], label=f"{job.machine.gpu.name}: {limit_gib:g} GiB", color="#c00000",
        linestyle="--", linewidth=1.2,
    )  # fmt: skip
    totals = [memory[stage].total / GIB for stage in stages]
    if len(stages) <= MAX_STAGE_ROWS:
        for column, total in enumerate(totals):
            axes.annotate(
                f"{total:.1f}", (column, total), (0, 2), textcoords="offset points",
                ha="center", fontsize=7,
            )  # fmt: skip
    spare = max(0.0, (4 - len(stages)) / 2)
    axes.set_xlim(-0.6 - spare, len(stages) - 0.4 + spare)
    axes.set_ylim(0, 1.12 * max(limit_gib, *totals))
    labelled = evenly_spaced(len(stages), MAX_STAGE_ROWS)
    axes.set_xticks(labelled, [str(stages[column]) for column in labelled])
    axes.tick_params(labelsize=8)
    axes.set_xlabel("stage", fontsize=9)
    axes.set_ylabel("peak GiB per GPU", fontsize=9)
    add_legend(axes, [limit, *reversed(handles)])


def _stack(axes: Axes, memory: Sequence[StageMemory]) -> Iterator[Patch]:
    """Draw the bars part by part from below, and yield a legend entry for each part."""
    bottom = [0.0] * len(memory)
    for name, colour in zip(MEMORY_PARTS, MEMORY_COLOURS, strict=True):
        sizes = [getattr(stage, name) / GIB for stage in memory]
        if any(sizes):
            axes.bar(range(len(memory)), sizes, bottom=bottom, color=colour, width=0.75)
            yield Patch(color=colour, label=name)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]


# Pictures of a plan: the timeline of its pipeline, and a heat map of its family.

MIN_LAST_NODES = 512  # the last column of a heat map has at least this many nodes
HEATMAP_COLOURS = "YlGnBu"


def heatmap(recipe: Recipe, job: Job, headroom: float = DEFAULT_HEADROOM) -> Figure:
    """Return a figure of the best layout of each recipe (row) on each number of nodes (column)."""
    recipes = family(recipe)
    columns = node_counts(job.machine.nodes)
    cells = [
        [plan_on_nodes(recipe, job, nodes, headroom) for nodes in columns] for recipe in recipes
    ]
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
    axes.set_yticks(range(len(recipes)), [row_label(recipe) for recipe in recipes], fontsize=8)
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
    members = [recipe, *relatives(recipe).values()]
    return sorted(members, key=lambda member: parameter_count(member.model))


def node_counts(own: int) -> list[int]:
    """Return the powers of two up to the largest column, and the recipe's own number of nodes."""
    most = max(MIN_LAST_NODES, own)
    return sorted({2**power for power in range(most.bit_length())} | {own})


def plan_on_nodes(
    recipe: Recipe, job: Job, nodes: int, headroom: float = DEFAULT_HEADROOM
) -> Plan | None:
    """Return the best layout of a recipe on `nodes` of the job's nodes; None if none fits."""
    # With the links and the imbalance of the job, which options or a calibration may have changed.
    machine = replace(job.machine, gpus=nodes * job.machine.gpus_per_node)
    try:
        other = job_without_layout(recipe, machine, job.software)
    except UserError:  # the GPU does not support the recipe's precision
        return None
    other = replace(other, expert_imbalance=job.expert_imbalance)
    plans = search(other, 1, headroom=headroom).plans
    return plans[0] if plans else None


def mfu(plan: Plan) -> float:
    """Return the model FLOPs utilization of a plan."""
    return rates(plan.job, plan.time.total).mfu


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


TABLE_MARKERS = "osD^vPX<>phd*8"
MAX_LARGE_POINTS = 200  # tables with more rows are drawn with small points
SLOWER_CHOICE = "#c00000"  # colour of the frame of a layout that is not the measured fastest
Kind = Literal["measured", "predicted"]


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


class Model(NamedTuple):
    """The rows of a heat map: runs that differ only in their layout and number of nodes."""

    parameters: int
    sequence_length: int
    tokens_per_step: int
    gpu: str
    precision: str
    software: str

    def __str__(self) -> str:
        return (
            f"{short_count(self.parameters)} parameters, {self.gpu} {self.precision}\n"
            f"{short_count(self.tokens_per_step)} tokens, length {self.sequence_length:,}"
        )


class Size(NamedTuple):
    """The columns of a heat map: the number of GPUs in a node, and of GPUs in total."""

    gpus_per_node: int
    gpus: int

    def __str__(self) -> str:
        return f"{-(-self.gpus // self.gpus_per_node)} x {min(self.gpus, self.gpus_per_node)}"


class Cell(NamedTuple):
    """A cell of a heat map."""

    model: Model
    size: Size


Run = Mapping[str, Any]  # a row of `plan.py table`


def heatmaps(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return a figure of the fastest run of each model (row) on each number of nodes (column).

    Left: the fastest run by measurement, with its measured MFU. Right: the fastest of the measured
    runs by prediction, with its predicted MFU. A red frame on the right marks a layout that is
    slower by measurement than the layout on the left, and states the difference.

    Raises:
        UserError: no row has a measured time.
    """
    cells = runs_by_cell(results)
    measured = {cell: fastest(runs, "measured") for cell, runs in cells.items()}
    predicted = {cell: fastest(runs, "predicted") for cell, runs in cells.items()}
    grid = Grid(
        models=sorted({cell.model for cell in cells}),
        sizes=sorted({cell.size for cell in cells}),
        top=colour_scale_end(
            [[run["measured_mfu_percent"] / 100 for run in measured.values()],
             [run["predicted_mfu_percent"] / 100 for run in predicted.values()]]
        ),
    )  # fmt: skip
    lines = max(cell_text(run, "measured").count("\n") for run in measured.values()) + 1
    figure = Figure(
        figsize=(4.2 + 2.3 * len(grid.sizes), 1.8 + 0.17 * lines * len(grid.models)),
        layout="constrained",
    )
    left, right = figure.subplots(1, 2, sharey=True)
    grid.draw(left, measured, "measured")
    image = grid.draw(right, predicted, "predicted")
    for cell, run in measured.items():
        slower = predicted[cell]["measured_step_seconds"] / run["measured_step_seconds"] - 1
        if slower > 0:
            grid.frame(right, cell, f"+{slower:.1%}")
    left.set_yticks(range(len(grid.models)), [str(model) for model in grid.models], fontsize=8)
    left.set_title("Fastest run by measurement, measured MFU", fontsize=8)
    right.set_title("Fastest of these runs by prediction, predicted MFU", fontsize=8)
    figure.suptitle(
        "tensor x pipeline x data; sequences of a micro-batch x micro-batches; MFU\n"
        "red: slower than the fastest run, as measured", fontsize=9,
    )  # fmt: skip
    bar = figure.colorbar(image, ax=(left, right), pad=0.01, format=lambda share, _: f"{share:.0%}")
    bar.set_label("MFU", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def runs_by_cell(results: Mapping[str, Mapping[str, Any]]) -> dict[Cell, list[Run]]:
    """Group the measured runs of all tables by the cells of a heat map.

    Raises:
        UserError: no row has a measured time.
    """
    cells: dict[Cell, list[Run]] = defaultdict(list)
    for result in results.values():
        for run in result["rows"]:
            if run.get("measured_mfu_percent"):
                model = Model(*(run[key] for key in Model._fields))
                cells[Cell(model, Size(run["gpus_per_node"], run["gpus"]))].append(run)
    if not cells:
        raise UserError(
            "--heatmap: no row has a measured step time; use a table with a column step_time_s"
        )
    return cells


def fastest(runs: Sequence[Run], kind: Kind) -> Run:
    """Return the run of a cell with the shortest measured or predicted step."""
    return min(runs, key=lambda run: run[f"{kind}_step_seconds"])


def cell_text(run: Run, kind: Kind) -> str:
    """Return the text of a cell: layout, micro-batches, settings other than the usual, and MFU."""
    layout = PlannedLayout(**run["layout"])
    sizes, *settings = layout_text(layout).split(", ")
    batch = f"{layout.micro_sequences} x {run['micro_batches']}"
    share = f"{run[f'{kind}_mfu_percent']:.1f}%"
    return "\n".join([sizes, batch, *settings, share])


@dataclass(frozen=True)
class Grid:
    """The rows and columns of two heat maps, and the upper end of their colour scale."""

    models: list[Model]
    sizes: list[Size]
    top: float

    def draw(self, axes: Axes, runs: Mapping[Cell, Run], kind: Kind) -> AxesImage:
        """Draw a run in each cell, and return the image, for the colour bar."""
        shares = {cell: run[f"{kind}_mfu_percent"] / 100 for cell, run in runs.items()}
        image = axes.imshow(
            [[shares.get(Cell(model, size), float("nan")) for size in self.sizes]
             for model in self.models],
            cmap=HEATMAP_COLOURS, vmin=0.0, vmax=self.top, aspect="auto",
        )  # fmt: skip
        for cell, run in runs.items():
            axes.text(
                self.sizes.index(cell.size), self.models.index(cell.model), cell_text(run, kind),
                ha="center", va="center", fontsize=7, color=cell_ink(shares[cell], self.top),
            )  # fmt: skip
        axes.set_xticks(range(len(self.sizes)), [str(size) for size in self.sizes], fontsize=8)
        axes.set_xlabel("nodes x GPUs in each", fontsize=9)
        return image

    def frame(self, axes: Axes, cell: Cell, text: str) -> None:
        """Mark a cell, with a text in its corner."""
        column, row = self.sizes.index(cell.size), self.models.index(cell.model)
        axes.add_patch(
            Rectangle(
                (column - 0.48, row - 0.47), 0.96, 0.94, fill=False, edgecolor=SLOWER_CHOICE,
                linewidth=1.4, zorder=10,
            )
        )  # fmt: skip
        axes.text(
            column + 0.46, row - 0.45, text, ha="right", va="top", fontsize=6, color=SLOWER_CHOICE
        )
