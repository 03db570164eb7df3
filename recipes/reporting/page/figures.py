"""The figures of the page, as models of Bokeh.

The script of the page (report.js) switches the x axis, hides runs and resets the zoom. It finds the
curves by their tags: the index of the run and the role of the curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    CrosshairTool,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    Span,
)
from bokeh.plotting import figure

from recipes.reporting.page.axes import Axis, positions, step_positions
from recipes.reporting.page.palette import COLOURS, REFERENCE, colour, dash, marker
from recipes.reporting.page.panels import LOSS, Panel
from recipes.reporting.record.marks import SYMBOLS, TURNS, Mark, spread
from recipes.reporting.record.reduction import reduced, trend
from recipes.reporting.record.run_record import RunRecord
from recipes.reporting.record.steps import Steps

POINTS_IN_PAGE = 90_000  # of all curves together: about 2 MB
MIN_BUCKETS = 250
MAX_BUCKETS = 4_000  # more than a screen has pixels, so that a zoomed curve still has detail
FEW_POINTS = 120  # a curve with at most so many points shows each of them
TREND_POINTS = 300  # means in the line through a noisy curve
TREND_FROM = 4 * TREND_POINTS  # a curve with fewer points needs no such line
SAVES_ON_CURVE = 40
LANE_PIXELS = 24
LEFT_PIXELS = 78  # room for the y axis, equal in all figures
ABANDONED = "#888888"
FONT = "system-ui, sans-serif"
TIP = (
    '<div style="font: 12px system-ui, sans-serif; white-space: nowrap">'
    '<span style="color: $color">&#9632;</span> $name: <b>@y{%.{digits}g}</b>'
    '<span style="color: #666">&ensp;step @step{0,0}</span></div>'
)
MARK_TIP = (
    '<div style="font: 12px system-ui, sans-serif; max-width: 420px; white-space: normal">'
    "<b>@kind</b> @step{0,0} @run<br>@text</div>"
)


@dataclass(frozen=True)
class Scene:
    """The runs and what all figures share.

    Attributes:
        runs: the runs of the report
        marks: the marks of each run
        axes: the x axes
        x_range: the x range of all figures, so that zooming one zooms all
        cursor: the vertical line at the mouse, in all figures
        buckets: buckets of each curve
    """

    runs: Sequence[RunRecord]
    marks: Sequence[Sequence[Mark]]
    axes: dict[str, Axis]
    x_range: Range1d
    cursor: Span
    buckets: int

    @classmethod
    def of(
        cls, runs: Sequence[RunRecord], marks: Sequence[Sequence[Mark]], axes: dict[str, Axis],
        curves: int,
    ) -> "Scene":  # fmt: skip
        """Return the scene of some runs with a number of curves."""
        buckets = min(MAX_BUCKETS, max(MIN_BUCKETS, POINTS_IN_PAGE // (2 * max(1, curves))))
        whole = axes["step"]
        x_range = Range1d(start=whole.start, end=whole.end)
        cursor = Span(dimension="height", line_color="#888888", line_dash="dotted")
        return cls(runs, marks, axes, x_range, cursor, buckets)


@dataclass(frozen=True)
class Key:
    """An entry of a panel's legend: name, colour, and style (a line style or "points")."""

    name: str
    colour: str
    style: str


def draw_panel(panel: Panel, scene: Scene) -> tuple[Any, list[Key]]:
    """Draw the curves of a panel; return the figure and its legend."""
    plot = _figure(scene, 380 if panel.wide else 250, logarithmic=panel.logarithmic)
    plot.yaxis.axis_label = panel.axis
    plot.yaxis.formatter = PrintfTickFormatter(format="%.4g")
    if panel.thousands:
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    many = len(scene.runs) > 1
    legend: dict[str, Key] = {}
    hovered = []
    for index, run in enumerate(scene.runs):
        for name in panel.metrics:
            title = _title(run, name, many=many, alone=len(panel.metrics) == 1)
            for branch in run.abandoned:
                if name in branch.values:
                    _, key = _curve(plot, scene, panel, branch, name, run=index, title=title,
                                    abandoned=True)  # fmt: skip
                    if panel.wide:
                        legend[key.name] = key
            if name in run.steps.values:
                drawn, key = _curve(plot, scene, panel, run.steps, name, run=index, title=title)
                hovered.append(drawn)
                if len(panel.metrics) > 1:
                    legend[title] = key
    for reference in panel.references:
        title = reference.label
        shared = len(panel.references) == 1
        if many and not shared:
            title += f" {scene.runs[reference.run].name}"
        shade = colour(reference.run) if many and not shared else REFERENCE
        _line_across(plot, scene, reference.value, shade, run=-1 if shared else reference.run)
        legend[title] = Key(f"{title}: {number_text(reference.value)}", shade, "dashed")
    _turns(plot, scene)
    if panel.key == "loss":
        _marks_on_curve(plot, scene)
    plot.add_tools(HoverTool(
        renderers=hovered, mode="vline", line_policy="nearest",
        tooltips=TIP.replace("{digits}", str(panel.digits)), formatters={"@y": "printf"},
        attachment="horizontal",
    ))  # fmt: skip
    return plot, list(legend.values())


def draw_lanes(scene: Scene) -> Any | None:
    """Draw the events in lanes, one for each kind; return None if there are none."""
    kinds = [kind for kind in SYMBOLS if any(
        mark.kind == kind for marks in scene.marks for mark in marks
    )]  # fmt: skip
    if not kinds:
        return None
    lanes = FactorRange(*reversed(kinds))
    plot = _figure(scene, 56 + LANE_PIXELS * len(kinds), y_range=lanes)
    plot.ygrid.grid_line_color = None
    many, drawn = len(scene.runs), []
    for index, (run, marks) in enumerate(zip(scene.runs, scene.marks, strict=True)):
        if not marks:
            continue
        offset = (index + 0.5) / many * 0.7 - 0.35 if many > 1 else 0.0
        data: dict[str, Any] = _mark_columns(run, marks, scene)
        data["lane"] = [[mark.kind, -offset] for mark in marks]
        drawn.append(plot.scatter(
            "step", "lane", marker="symbol", source=ColumnDataSource(data), size=9,
            line_color=colour(index), fill_color=colour(index), fill_alpha=0.35,
            tags=[index, "lane"],
        ))  # fmt: skip
    plot.add_tools(HoverTool(renderers=drawn, tooltips=MARK_TIP))
    return plot


def number_text(value: float) -> str:
    """Format a number with four digits, large ones without an exponent."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def count_curves(panels: Sequence[Panel], runs: Sequence[RunRecord]) -> int:
    """Return the number of curves with so many points that they may have to be reduced."""
    return sum(
        name in steps.values and len(steps) > FEW_POINTS
        for panel in panels
        for name in panel.metrics
        for run in runs
        for steps in [run.steps, *run.abandoned]
    )


def _figure(scene: Scene, height: int, *, logarithmic: bool = False, y_range: Any = None) -> Any:
    options: dict[str, Any] = {"y_range": y_range} if y_range is not None else {}
    plot = figure(
        height=height, sizing_mode="stretch_width", x_range=scene.x_range,
        y_axis_type="log" if logarithmic else "auto", tools="box_zoom,xpan,xwheel_zoom,reset,save",
        active_drag="box_zoom", active_scroll=None, toolbar_location="above",
        background_fill_color="#ffffff", outline_line_color=None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.toolbar.autohide = plot.toolbar_inner = True
    plot.min_border_left, plot.min_border_right = LEFT_PIXELS, 12
    plot.min_border_top = 8
    plot.add_tools(CrosshairTool(overlay=scene.cursor, dimensions="height"))
    plot.xaxis.axis_label = scene.axes["step"].label
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[000000]")
    for axis in (plot.xaxis, plot.yaxis):
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_color = axis.major_label_text_color = "#333333"
        axis.axis_label_text_font_size, axis.major_label_text_font_size = "12px", "11px"
        axis.axis_line_color = axis.major_tick_line_color = "#999999"
        axis.minor_tick_line_color = None
    plot.grid.grid_line_color = "#ececec"
    if y_range is None:
        plot.y_range.only_visible = True
    return plot


def _curve(
    plot: Any, scene: Scene, panel: Panel, steps: Steps, name: str, *, run: int, title: str,
    abandoned: bool = False,
) -> tuple[Any, Key]:  # fmt: skip
    """Draw a curve; return the renderer of its points, and its entry of the legend.

    Of several runs, each has its colour and each metric its line style. Of a single run, each
    metric has its colour.
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
        line = plot.line("step", "y", source=source, color=shade, line_width=1.2, alpha=0.4,
                         line_dash=[2, 2], tags=[run, "abandoned"])  # fmt: skip
        return line, Key("abandoned steps", ABANDONED, "dotted")
    # A metric that only some steps have, such as a validation loss, is drawn with its points.
    count = int(np.isfinite(values).sum())
    sparse = count < len(steps) / 2 or count < 2
    points = sparse and count <= FEW_POINTS
    noisy = not sparse and count >= TREND_FROM
    pattern = dash(place + run // len(COLOURS)) if many else "solid"
    drawn = plot.line(
        "step", "y", source=source, color=shade, name=title, tags=[run, "kept"],
        line_dash="solid" if noisy else pattern, line_width=2.0 if sparse else 1.3,
        line_alpha=0.35 if noisy else 1.0,
    )  # fmt: skip
    if noisy:
        middles, means = trend(values, TREND_POINTS)
        data = positions(steps, scene.runs[run], scene.axes, middles)
        plot.line("step", "y", source=ColumnDataSource(data | {"y": means}), color=shade,
                  line_dash=pattern, line_width=2.0, tags=[run, "kept"])  # fmt: skip
    if points:
        plot.scatter(
            "step", "y", source=source, marker=marker(place), size=6, line_color=shade,
            fill_color="white", line_width=1.5, tags=[run, "kept"],
        )  # fmt: skip
    return drawn, Key(title, shade, "points" if points else pattern)


def _line_across(plot: Any, scene: Scene, value: float, shade: str, *, run: int) -> None:
    """Draw a horizontal line over the whole range of each x axis."""
    data: dict[str, Any] = {name: [0.0, axis.end] for name, axis in scene.axes.items()}
    source = ColumnDataSource(data | {"y": [value, value]})
    plot.line("step", "y", source=source, color=shade, line_dash=[7, 4], line_width=1.5,
              tags=[run, "reference"])  # fmt: skip


def _turns(plot: Any, scene: Scene) -> None:
    """Draw a thin vertical line at each step where a run was resumed or changed its course."""
    for index, (run, marks) in enumerate(zip(scene.runs, scene.marks, strict=True)):
        turns = [mark for mark in marks if mark.kind in TURNS]
        if turns:
            data = step_positions([mark.step for mark in turns], run, scene.axes)
            shade = colour(index) if len(scene.runs) > 1 else "#888888"
            plot.vspan("step", source=ColumnDataSource(data), line_color=shade, line_alpha=0.55,
                       line_dash=[3, 3], tags=[index, "turn"], level="underlay")  # fmt: skip


def _marks_on_curve(plot: Any, scene: Scene) -> None:
    """Draw the events on the curves of the training loss; of many saves only some."""
    drawn = []
    for index, (run, marks) in enumerate(zip(scene.runs, scene.marks, strict=True)):
        marks = [*spread([mark for mark in marks if mark.kind == "save"], SAVES_ON_CURVE),
                 *(mark for mark in marks if mark.kind != "save")]  # fmt: skip
        if not marks:
            continue
        data: dict[str, Any] = _mark_columns(run, marks, scene)
        heights = run.steps.at([mark.step for mark in marks], LOSS)
        first = run.steps.column(LOSS)[:1]
        early = np.array([mark.step for mark in marks]) < (run.steps.step[:1] or [0])[0]
        heights = np.where(early, first if len(first) else np.nan, heights)
        for branch in run.abandoned:  # what ended a branch happened on that branch
            ended = {"rollback", "skip", "stop"}
            on_branch = [mark.kind in ended and mark.step in branch.step[1:] for mark in marks]
            at = branch.at([mark.step for mark in marks], LOSS)
            heights = np.where(on_branch, at, heights)
        data["y"] = heights
        shade = colour(index)
        drawn.append(plot.scatter(
            "step", "y", marker="symbol", source=ColumnDataSource(data), size="size",
            line_color="#222222", fill_color=shade, fill_alpha=0.85, tags=[index, "mark"],
        ))  # fmt: skip
    plot.add_tools(HoverTool(renderers=drawn, tooltips=MARK_TIP))


def _mark_columns(run: RunRecord, marks: Sequence[Mark], scene: Scene) -> dict[str, Any]:
    columns: Mapping[str, Any] = step_positions([mark.step for mark in marks], run, scene.axes)
    return {
        **columns,
        "symbol": [SYMBOLS[mark.kind] for mark in marks],
        "kind": [mark.kind for mark in marks],
        "text": [mark.text for mark in marks],
        "size": [5 if mark.kind == "save" else 10 for mark in marks],
        "run": [run.name if len(scene.runs) > 1 else "" for _ in marks],
    }


def _title(run: RunRecord, name: str, *, many: bool, alone: bool) -> str:
    """Return the name of a curve: that of its run, of its metric, or both."""
    short = name.removeprefix("validation/").removeprefix("tasks/")
    if not many:
        return short
    return run.name if alone else f"{run.name}, {short}"
