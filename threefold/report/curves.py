"""The curves of a panel: kept and abandoned steps, and the lines that they are compared with."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, NumeralTickFormatter, PrintfTickFormatter

from threefold.report.axes import positions
from threefold.report.charts import Panel
from threefold.report.drawing import Key, Scene, new_figure, tag
from threefold.report.event_figures import draw_marks, draw_turns
from threefold.report.palette import COLOURS, REFERENCE, colour, dash, marker
from threefold.report.reduction import reduced, trend
from threefold.report.run_record import RunRecord
from threefold.report.steps import Steps

FEW_POINTS = 120  # a sparse curve with at most this many points is drawn with markers
TREND_POINTS = 300  # number of means in the thick line through a long curve
TREND_FROM = 4 * TREND_POINTS  # a curve with fewer points needs no thick line
ABANDONED = "#888888"


def draw_panel(panel: Panel, scene: Scene) -> tuple[Any, list[Key]]:
    """Draw the curves of a panel; return the figure and its legend."""
    plot = new_figure(scene, 380 if panel.wide else 250, logarithmic=panel.logarithmic)
    plot.yaxis.axis_label = panel.axis
    plot.yaxis.formatter = PrintfTickFormatter(format="%.4g")
    if panel.thousands:
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    many = len(scene.runs) > 1
    legend: dict[str, Key] = {}
    abandoned: Key | None = None
    for index, run in enumerate(scene.runs):
        for name in panel.metrics:
            title = _title(run, name, many=many, alone=len(panel.metrics) == 1)
            for branch in run.abandoned:
                if name in branch.values:
                    key = _curve(plot, scene, panel, branch, name, run=index, title=title,
                                    abandoned=True)  # fmt: skip
                    abandoned = key if panel.wide else None
            if name in run.steps.values:
                key = _curve(plot, scene, panel, run.steps, name, run=index, title=title)
                if len(panel.metrics) > 1:
                    legend[title] = key
    for reference in panel.references:
        title, shade, belongs_to = reference.label, REFERENCE, -1
        if reference.run is not None:
            title += f" {scene.runs[reference.run].name}"
            shade, belongs_to = colour(reference.run), reference.run
        _line_across(plot, scene, reference.value, shade, run=belongs_to)
        legend[title] = Key(f"{title}: {number_text(reference.value)}", shade, "dashed")
    draw_turns(plot, scene)
    if panel.key == "loss":
        draw_marks(plot, scene)
    if abandoned:
        legend["abandoned"] = abandoned
    return plot, list(legend.values())


def number_text(value: float) -> str:
    """Format a number with four digits, large ones without an exponent."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def count_curves(panels: Sequence[Panel], runs: Sequence[RunRecord]) -> int:
    """Return the number of curves that are long enough to be reduced."""
    return sum(
        name in steps.values and len(steps) > FEW_POINTS
        for panel in panels
        for name in panel.metrics
        for run in runs
        for steps in [run.steps, *run.abandoned]
    )


def _curve(
    plot: Any, scene: Scene, panel: Panel, steps: Steps, name: str, *, run: int, title: str,
    abandoned: bool = False,
) -> Key:  # fmt: skip
    """Draw a curve, and return its entry in the legend.

    In a report of several runs, the colour shows the run and the line style the metric. In a report
    of one run, the colour shows the metric.
    """
    place = panel.metrics.index(name)
    values = steps.column(name) * panel.scale
    if panel.logarithmic:
        values = np.where(values > 0, values, np.nan)
    chosen = reduced(values, scene.buckets)
    data = positions(steps, scene.runs[run], scene.axes, chosen)
    data["y"] = values[chosen].astype(np.float32)
    source = ColumnDataSource(data)
    many = len(scene.runs) > 1
    shade = colour(run if many else place)
    if abandoned:
        line = plot.line("step", "y", source=source, color=shade, line_width=1.2, alpha=0.45,
                         line_dash=[2, 2])  # fmt: skip
        tag(line, run, "abandoned")
        return Key("abandoned steps", ABANDONED, "dotted")
    # A metric that only some steps have, such as a validation loss, is drawn with its points.
    count = int(np.isfinite(values).sum())
    sparse = count < len(steps) / 2 or count < 2
    points = sparse and count <= FEW_POINTS
    noisy = not sparse and count >= TREND_FROM
    pattern = dash(place + run // len(COLOURS)) if many else "solid"
    drawn = plot.line(
        "step", "y", source=source, color=shade, name=title,
        line_dash="solid" if noisy else pattern, line_width=2.0 if sparse else 1.3,
        line_alpha=0.35 if noisy else 1.0,
    )  # fmt: skip
    tag(drawn, run, "kept")
    if noisy:
        middles, means = trend(values, TREND_POINTS)
        data = positions(steps, scene.runs[run], scene.axes, middles)
        line = plot.line("step", "y", source=ColumnDataSource(data | {"y": means}), color=shade,
                         line_dash=pattern, line_width=2.0)  # fmt: skip
        tag(line, run, "kept")
    if points:
        found = plot.scatter("step", "y", source=source, marker=marker(place), size=6,
                             line_color=shade, fill_color="white", line_width=1.5)  # fmt: skip
        tag(found, run, "kept")
    return Key(title, shade, "points" if points else pattern)


def _line_across(plot: Any, scene: Scene, value: float, shade: str, *, run: int) -> None:
    """Draw a horizontal line over the whole range of each x axis."""
    data: dict[str, Any] = {name: [0.0, axis.end] for name, axis in scene.axes.items()}
    source = ColumnDataSource(data | {"y": [value, value]})
    line = plot.line("step", "y", source=source, color=shade, line_dash=[7, 4], line_width=1.5)
    tag(line, run, "reference")


def _title(run: RunRecord, name: str, *, many: bool, alone: bool) -> str:
    """Return the name of a curve: that of its run, of its metric, or both."""
    short = name.removeprefix("validation/").removeprefix("tasks/")
    if not many:
        return short
    return run.name if alone else f"{run.name}, {short}"
