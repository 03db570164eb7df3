"""Pictures of measured runs: their times next to the predictions, and heat maps of the best ones.

Both are drawn from the results of `plan.py --table`, which `planning.measured.comparison` returns.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from models.errors import UserError
from threefold.pipeline.picture import save_figure
from threefold.plan.catalogue import layout_text
from threefold.plan.job import JobLayout
from threefold.plan.plan_picture import (
    HEATMAP_COLOURS,
    cell_ink,
    colour_scale_end,
)
from threefold.plan.report import short_count

TABLE_MARKERS = "osD^vPX<>phd*8"
MAX_LARGE_POINTS = 200  # tables with more rows are drawn with small points
SLOWER_CHOICE = "#c00000"  # colour of the frame of a layout that is not the measured fastest
Kind = Literal["measured", "predicted"]


def draw_scatter(results: Mapping[str, Mapping[str, Any]], *, file: Path) -> None:
    """Write a plot of predicted and measured step times, from the results of `plan.py --table`.

    Raises:
        UserError: no row has both times, or the file cannot be written.
    """
    save_figure(scatter(results), file)


def draw_heatmaps(results: Mapping[str, Mapping[str, Any]], *, file: Path) -> None:
    """Write heat maps of the measured and the predicted fastest runs.

    Raises:
        UserError: no row has a measured time, or the file cannot be written.
    """
    save_figure(heatmaps(results), file)


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


Run = Mapping[str, Any]  # a row of `plan.py --table`


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
    left.set_yticks(range(len(grid.models)), [str(each) for each in grid.models], fontsize=8)
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
    layout = JobLayout(**run["layout"])
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
