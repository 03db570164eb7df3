"""Pictures of measured runs: their times next to the predictions, and heat maps of the best ones.

Both are drawn from the results of `plan.py --table`, which `planning.measured.comparison` returns.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from models.errors import UserError
from recipes.pictures.pipeline_passes import save_figure
from recipes.planning.output.plan_picture import HEATMAP_COLOURS, cell_ink, colour_scale_end
from recipes.planning.output.plan_report import short_count

TABLE_MARKERS = "osD^vPX<>phd*8"
MAX_LARGE_POINTS = 200  # tables with more rows are drawn with small points
SLOWER_CHOICE = "#c00000"  # colour of the frame of a layout that is not the measured fastest
Runs = Sequence[Mapping[str, Any]]


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


def heatmaps(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return a figure of the fastest run of each model (row) on each number of nodes (column).

    Left: the fastest run by measurement, with its measured MFU. Right: the fastest run of the same
    cell by prediction, with its predicted MFU. A red frame on the right marks a layout that is
    slower by measurement than the layout on the left, and states the difference.

    Raises:
        UserError: no row has a measured time.
    """
    cells = runs_by_cell(results)
    models = sorted({model for model, _ in cells})
    nodes = sorted({count for _, count in cells})
    best = {cell: (fastest(cells[cell], "measured"), fastest(cells[cell], "predicted"))
            for cell in cells}  # fmt: skip
    top = colour_scale_end(
        [[run["measured_mfu_percent"] / 100, choice["predicted_mfu_percent"] / 100]
         for run, choice in best.values()]
    )  # fmt: skip
    figure = Figure(
        figsize=(3.6 + 2.0 * len(nodes), 1.8 + 0.62 * len(models)), layout="constrained"
    )
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, kind in ((left, "measured"), (right, "predicted")):
        chosen = {cell: pair[kind == "predicted"] for cell, pair in best.items()}
        image = _draw_cells(axes, chosen, kind, models, nodes, top)
    for cell, (run, choice) in best.items():
        slower = choice["measured_step_seconds"] / run["measured_step_seconds"] - 1
        if slower > 0:
            _frame(right, nodes.index(cell[1]), models.index(cell[0]), f"+{slower:.1%}")
    left.set_yticks(range(len(models)), [_model_label(*model) for model in models], fontsize=8)
    left.set_title("Measured fastest run, measured MFU", fontsize=9)
    right.set_title("Predicted fastest of these runs, predicted MFU", fontsize=9)
    figure.suptitle(
        "tensor x pipeline x data; sequences of a micro-batch x micro-batches, ZeRO stage; MFU\n"
        "red: slower than the fastest run, as measured", fontsize=9,
    )  # fmt: skip
    bar = figure.colorbar(image, ax=(left, right), pad=0.01, format=lambda share, _: f"{share:.0%}")
    bar.set_label("MFU", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    return figure


def runs_by_cell(
    results: Mapping[str, Mapping[str, Any]],
) -> dict[tuple[tuple[int, int, int], int], list[Mapping[str, Any]]]:
    """Group the measured runs of all tables.

    Returns:
        (parameters, sequence length, tokens per step), number of nodes -> runs

    Raises:
        UserError: no row has a measured time.
    """
    cells: dict[tuple[tuple[int, int, int], int], list[Mapping[str, Any]]] = defaultdict(list)
    for result in results.values():
        for run in result["rows"]:
            if run.get("measured_mfu_percent"):
                model = run["parameters"], run["sequence_length"], run["tokens_per_step"]
                cells[model, run["nodes"]].append(run)
    if not cells:
        raise UserError(
            "--heatmap: no row has a measured step time; use a table with a column step_time_s"
        )
    return cells


def fastest(runs: Runs, kind: str) -> Mapping[str, Any]:
    """Return the run with the shortest time per token.

    Args:
        runs: runs of one model and batch
        kind: "measured" or "predicted"
    """
    return max(runs, key=lambda run: run[f"{kind}_mfu_percent"])


def _draw_cells(
    axes: Axes,
    chosen: Mapping[tuple[tuple[int, int, int], int], Mapping[str, Any]],
    kind: str,
    models: Sequence[tuple[int, int, int]],
    nodes: Sequence[int],
    top: float,
) -> AxesImage:
    """Draw the chosen runs and their MFU; return the image, for the colour bar."""
    key = f"{kind}_mfu_percent"
    shares = [
        [chosen[model, count][key] / 100 if (model, count) in chosen else float("nan")
         for count in nodes]
        for model in models
    ]  # fmt: skip
    image = axes.imshow(shares, cmap=HEATMAP_COLOURS, vmin=0.0, vmax=top, aspect="auto")
    for (model, count), run in chosen.items():
        share = run[key] / 100
        axes.text(
            nodes.index(count), models.index(model), f"{_layout_text(run['layout'])}\n{share:.1%}",
            ha="center", va="center", fontsize=7, color=cell_ink(share, top),
        )  # fmt: skip
    axes.set_xticks(range(len(nodes)), [str(count) for count in nodes], fontsize=8)
    axes.set_xlabel("nodes", fontsize=9)
    return image


def _layout_text(layout: Mapping[str, int]) -> str:
    context = f" x context {layout['context']}" if layout["context"] > 1 else ""
    return (
        f"{layout['tensor']} x {layout['pipeline']} x {layout['data']}{context}\n"
        f"{layout['micro_sequences']} x {layout['micro_batches']}, ZeRO-{layout['zero_stage']}"
    )


def _model_label(parameters: int, sequence: int, tokens: int) -> str:
    return (
        f"{short_count(parameters)} parameters\n{short_count(tokens)} tokens, length {sequence:,}"
    )


def _frame(axes: Axes, column: int, row: int, text: str) -> None:
    """Mark a cell, with a text in its corner."""
    axes.add_patch(
        Rectangle(
            (column - 0.48, row - 0.47), 0.96, 0.94, fill=False, edgecolor=SLOWER_CHOICE,
            linewidth=1.4, zorder=10,
        )
    )  # fmt: skip
    axes.text(
        column + 0.46, row - 0.45, text, ha="right", va="top", fontsize=6, color=SLOWER_CHOICE
    )
