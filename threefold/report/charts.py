"""The figures of the page: panels of curves over steps, tokens or FLOPs, with events."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    CrosshairTool,
    FactorRange,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    Span,
)
from bokeh.plotting import figure

from threefold.pipeline.balance import evenly_spaced
from threefold.report.run_record import SYMBOLS, TURNS, Mark, RunRecord, Steps
from threefold.report.summaries import PredictedRun, reduced, trend
from threefold.run_folder.json_lines import AVERAGED, POSITION_LOSSES

MAX_OTHER_PANELS = 16
LOSS = "loss"
VALIDATION = ("validation_loss", "validation/", f"{AVERAGED}validation")
POSITIONS = f"{POSITION_LOSSES}/"
TASKS = "tasks/"
PERPLEXITY = "/perplexity"
BITS_PER_BYTE = "bits_per_byte"
# Metrics that other parts of the page show.
SHOWN_ELSEWHERE = {"tokens", "slowest_rank", "tflops_per_gpu", "mfu"}


@dataclass(frozen=True)
class Reference:
    """A horizontal line that a curve is compared with.

    Attributes:
        label: text in the legend, such as "plan"
        run: index of the run; None if the line belongs to all runs
        value: height of the line, in the panel's unit
    """

    label: str
    run: int | None
    value: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A figure of the page.

    Attributes:
        key: part of the HTML element's id
        axis: title of the y axis, with its unit
        metrics: metrics of the curves
        scale: factor from a metric to the unit of the axis
        thousands: write the numbers of the axis as 12,000
        references: lines that the curves are compared with
        wide: use the whole width of the page
    """

    key: str
    title: str
    axis: str
    metrics: Sequence[str]
    scale: float = 1.0
    logarithmic: bool = False
    thousands: bool = False
    note: str = ""
    references: Sequence[Reference] = field(default_factory=tuple)
    wide: bool = False


def panels_of(runs: Sequence[RunRecord], plans: Mapping[int, PredictedRun]) -> list[Panel]:
    """Return the panels of the metrics that at least one run has.

    Args:
        plans: predictions by index of the run
    """
    names = list(dict.fromkeys(
        name
        for run in runs
        for steps in [run.steps, *run.abandoned]
        for name in steps.values
    ))  # fmt: skip
    validation = [name for name in names if name.startswith(VALIDATION)]
    bits = [name for name in validation if BITS_PER_BYTE in name]
    positions = [name for name in names if POSITIONS in name]
    losses = [name for name in validation if name not in bits and name not in positions]
    scores = [name for name in names if name.startswith(TASKS)]
    perplexities = [name for name in scores if name.endswith(PERPLEXITY)]
    bits_of_tasks = [name for name in scores if BITS_PER_BYTE in name]
    in_loss_panel = [name for name in losses if name.endswith("validation_loss")]
    clipping = [
        Reference("gradient_clipping", index, run.recipe.optimizer.gradient_clipping)
        for index, run in enumerate(runs)
        if run.recipe and run.recipe.optimizer.gradient_clipping
    ]
    slow = [
        Reference("supervision.slow_rank", index, run.recipe.supervision.slow_rank)
        for index, run in enumerate(runs)
        if run.recipe and "slowest_ratio" in run.steps.values
    ]
    panels = [
        Panel(key="loss", title="Training loss", axis="loss (nats per token)", wide=True,
              metrics=[LOSS, *in_loss_panel]),
        Panel(key="validation", title="Validation loss", axis="loss (nats per token)",
              metrics=losses),
        Panel(key="bits", title="Validation, bits per byte", axis="bits per byte", metrics=bits),
        Panel(key="positions", title="Validation loss by position", axis="loss (nats per token)",
              metrics=positions),
        Panel(key="tasks", title="Task scores", axis="score",
              metrics=[name for name in scores if name not in {*perplexities, *bits_of_tasks}]),
        Panel(key="perplexities", title="Tasks, perplexity", axis="perplexity",
              metrics=perplexities, logarithmic=True),
        Panel(key="task-bits", title="Tasks, bits per byte", axis="bits per byte",
              metrics=bits_of_tasks),
        Panel(key="rate", title="Learning rate", axis="learning rate",
              metrics=["learning_rate"]),
        Panel(key="norm", title="Gradient norm", axis="norm before clipping",
              metrics=["grad_norm"], logarithmic=True, references=_shared(clipping, runs)),
        Panel(key="throughput", title="Throughput", axis="tokens per second",
              thousands=True,
              metrics=["tokens_per_second"],
              references=_planned(plans, "tokens_per_second", runs)),
        Panel(key="mfu", title="Model FLOPs utilisation", axis="MFU (%)", scale=100.0,
              metrics=["mfu"], references=_planned(plans, "mfu", runs, scale=100.0)),
        *_flops_per_second(runs, plans),
        Panel(key="step", title="Step time", axis="seconds per step",
              metrics=["step_seconds"], references=_planned(plans, "step_seconds", runs)),
        Panel(key="memory", title="Peak memory of rank 0", axis="memory (GB, 10^9 bytes)",
              metrics=["memory_gb"], references=_planned(plans, "memory_gb", runs)),
        Panel(key="outside", title="Time outside the passes", axis="seconds per step",
              metrics=[name for name in ("between_seconds", "data_seconds", "validation_seconds")
                       if name in names]),
        Panel(key="slowest", title="Slowest rank", axis="time relative to its peers",
              metrics=["slowest_ratio"], references=_shared(slow, runs)),
    ]  # fmt: skip
    drawn = {name for panel in panels for name in panel.metrics} | SHOWN_ELSEWHERE
    others = [name for name in names if name not in drawn]
    panels += [
        Panel(key=f"other-{number}", title=name, axis=name, metrics=[name])
        for number, name in enumerate(others[:MAX_OTHER_PANELS])
    ]
    return [panel for panel in panels if any(name in names for name in panel.metrics)]


def _flops_per_second(
    runs: Sequence[RunRecord], plans: Mapping[int, PredictedRun]
) -> Iterator[Panel]:
    """Yield the panel of TFLOP/s if the peak of a run's device, and so its MFU, is not known."""
    without = [
        run.name
        for run in runs
        if "tflops_per_gpu" in run.steps.values and "mfu" not in run.steps.values
    ]
    if without:
        named = "" if len(without) == len(runs) else " of " + ", ".join(without)
        yield Panel(
            key="tflops", title="Model FLOPs per second", axis="TFLOP/s per device",
            metrics=["tflops_per_gpu"], references=_planned(plans, "tflops_per_gpu", runs),
            note=f"no MFU{named}: the peak of the device is not known",
        )  # fmt: skip


def _planned(
    plans: Mapping[int, PredictedRun],
    attribute: str,
    runs: Sequence[RunRecord],
    *,
    scale: float = 1.0,
) -> Sequence[Reference]:
    references = [
        Reference("plan", index, getattr(plan, attribute) * scale) for index, plan in plans.items()
    ]
    return _shared(references, runs)


def _shared(references: Sequence[Reference], runs: Sequence[RunRecord]) -> Sequence[Reference]:
    """Return one reference for all runs if all have the same value, otherwise all references."""
    same = len(references) == len(runs) and len({line.value for line in references}) == 1
    return [replace(references[0], run=None)] if same else references


# The three x axes of the page: steps, tokens and FLOPs.

TOKEN_UNITS = ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
FLOP_UNITS = ((1e24, "10^24"), (1e21, "10^21"), (1e18, "10^18"), (1e15, "10^15"), (1e12, "10^12"))
MARGIN = 0.01  # of the width, on both sides


@dataclass(frozen=True)
class Axis:
    """An x axis.

    Attributes:
        label: its title, with the unit
        unit: tokens or FLOPs per unit of the axis
        start: left end of the whole range, in units of the axis
        end: right end, in the same units
    """

    label: str
    unit: float
    start: float
    end: float


def axes_of(runs: Sequence[RunRecord]) -> dict[str, Axis]:
    """Return the axes "step", "tokens" and "flops"; without "flops" if no recipe can be read."""
    tokens = max((_largest(run.steps.column("tokens")) for run in runs), default=0.0)
    flops = max(
        (_largest(run.flops(run.steps.column("tokens"))) for run in runs),
        default=0.0,
    )
    last = max((int(run.steps.step[-1]) for run in runs if len(run.steps)), default=0)
    token_unit, token_name = _unit(tokens, TOKEN_UNITS)
    flop_unit, flop_name = _unit(flops, FLOP_UNITS)
    axes = {"step": _axis("step", 1.0, last)}
    axes["tokens"] = _axis(f"tokens{f' ({token_name})' * bool(token_name)}", token_unit, tokens)
    if flops:
        label = f"training compute ({f'{flop_name} ' if flop_name else ''}FLOPs)"
        axes["flops"] = _axis(label, flop_unit, flops)
    return axes


def positions(
    steps: Steps, run: RunRecord, axes: dict[str, Axis], chosen: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the positions of some steps on each axis.

    Args:
        steps: kept or abandoned steps of the run
    """
    tokens = steps.column("tokens")[chosen]
    fits = not len(steps.step) or int(steps.step[-1]) < 2**31  # the steps increase
    columns = {"step": steps.step[chosen].astype(np.int32 if fits else np.float64)}
    columns["tokens"] = (tokens / axes["tokens"].unit).astype(np.float32)
    if "flops" in axes:
        columns["flops"] = (run.flops(tokens) / axes["flops"].unit).astype(np.float32)
    return columns


def step_positions(
    at: Sequence[int], run: RunRecord, axes: dict[str, Axis]
) -> dict[str, np.ndarray]:
    """Return the positions of events at some steps; those at step 0 are at the left end."""
    tokens = run.steps.at(at, "tokens")
    tokens = np.where(np.array(at) <= 0, 0.0, tokens)
    columns = {"step": np.array(at, np.float64), "tokens": tokens / axes["tokens"].unit}
    if "flops" in axes:
        columns["flops"] = run.flops(tokens) / axes["flops"].unit
    return columns


def _axis(label: str, unit: float, largest: float) -> Axis:
    width = max(largest / unit, 1e-9)
    return Axis(label, unit, -MARGIN * width, (1 + MARGIN) * width)


def _unit(largest: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next(((size, name) for size, name in units if largest >= size), (1.0, ""))


def _largest(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if len(finite) else 0.0


# Parts that all figures of the page share: the x range, the cursor, fonts and tools.
#
# The script of the page (report.js) switches the x axis, hides runs and resets the zoom. It finds
# the curves by their tags: the index of the run and the role of the curve.

POINTS_IN_PAGE = 90_000  # of all curves together: about 1 MB, because Bokeh compresses them
MIN_BUCKETS = 250
MAX_BUCKETS = 4_000  # more than a screen has pixels, so that a zoomed curve still has detail
LEFT_PIXELS = 78  # room for the y axis, equal in all figures
FONT = "system-ui, sans-serif"


@dataclass(frozen=True)
class Scene:
    """The runs and what all figures share.

    Attributes:
        x_range: the x range of all figures, so that zooming one zooms all
        cursor: the vertical line at the mouse, in all figures
        buckets: number of buckets to which a long curve is reduced
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


def new_figure(scene: Scene, height: int, *, logarithmic: bool = False, y_range: Any = None) -> Any:
    """Return an empty figure of a height in pixels."""
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


def tag(renderer: Any, run: int, role: str) -> None:
    """Set the tags of a renderer, for the page's script.

    Args:
        renderer: what a method of a figure has returned; tags given to the method are the glyph's
        run: index of the run; -1 for all
        role: "kept", "abandoned", "reference", "turn", "mark" or "lane"
    """
    renderer.tags = [run, role]


# Colours and line styles of runs and metrics.
#
# The colours are those of Okabe and Ito 2008, "Color universal design", without the yellow, which
# is hard to see on paper. They can be told apart with every common colour-vision deficiency and,
# because runs also differ in their line styles, in black and white.

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("solid", "dashed", "dotted", "dotdash")
MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "hex")
MAX_RUNS = len(COLOURS) * len(DASHES)
REFERENCE = "#555555"
PARTS = {  # of the wall time
    "kept": "#009E73",
    "between": "#56B4E9",
    "validating": "#0072B2",
    "starting": "#E69F00",
    "repeated": "#D55E00",
    "waiting": "#999999",
}


def colour(index: int) -> str:
    """Return the colour of a run, or of a metric of a single run."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """Return the line style of a metric, or of the runs that share a colour."""
    return DASHES[index % len(DASHES)]


def marker(index: int) -> str:
    """Return the marker of the points of a metric."""
    return MARKERS[index % len(MARKERS)]


# Events in the figures: in lanes of their own, and on the curves.

MAX_SAVES_ON_CURVE = 40
LANE_PIXELS = 24
ON_ANY_BRANCH = ("rollback", "skip", "stop")  # may have happened on an abandoned branch


def draw_lanes(scene: Scene) -> Any | None:
    """Draw the events in lanes, one for each kind; return None if there are none."""
    kinds = [kind for kind in SYMBOLS if any(
        mark.kind == kind for marks in scene.marks for mark in marks
    )]  # fmt: skip
    if not kinds:
        return None
    lanes = FactorRange(*reversed(kinds))
    plot = new_figure(scene, 56 + LANE_PIXELS * len(kinds), y_range=lanes)
    plot.ygrid.grid_line_color = None
    many = len(scene.runs)
    for index, (run, marks) in enumerate(zip(scene.runs, scene.marks, strict=True)):
        if not marks:
            continue
        offset = (index + 0.5) / many * 0.7 - 0.35 if many > 1 else 0.0
        data: dict[str, Any] = _mark_columns(run, marks, scene)
        data["lane"] = [[mark.kind, -offset] for mark in marks]
        found = plot.scatter(
            "step", "lane", marker="symbol", source=ColumnDataSource(data), size=9,
            line_color=colour(index), fill_color=colour(index), fill_alpha=0.35,
        )  # fmt: skip
        tag(found, index, "lane")
    return plot


def draw_turns(plot: Any, scene: Scene) -> None:
    """Draw a thin vertical line at each step where a run was resumed or changed its course."""
    for index, (run, marks) in enumerate(zip(scene.runs, scene.marks, strict=True)):
        turns = [mark for mark in marks if mark.kind in TURNS]
        if turns:
            data = step_positions([mark.step for mark in turns], run, scene.axes)
            shade = colour(index) if len(scene.runs) > 1 else "#888888"
            spans = plot.vspan("step", source=ColumnDataSource(data), line_color=shade,
                               line_alpha=0.55, line_dash=[3, 3], level="underlay")  # fmt: skip
            tag(spans, index, "turn")


def draw_marks(plot: Any, scene: Scene) -> None:
    """Draw the events on the curves of the training loss, but only some of many saves."""
    for index, (run, marks) in enumerate(zip(scene.runs, scene.marks, strict=True)):
        saves = [mark for mark in marks if mark.kind == "save"]
        others = [mark for mark in marks if mark.kind != "save"]
        chosen = [saves[index] for index in evenly_spaced(len(saves), MAX_SAVES_ON_CURVE)] + others
        if not chosen:
            continue
        data: dict[str, Any] = _mark_columns(run, chosen, scene)
        data["y"] = _heights(run, chosen)
        found = plot.scatter(
            "step", "y", marker="symbol", source=ColumnDataSource(data), size="size",
            line_color="#222222", fill_color=colour(index), fill_alpha=0.85,
        )  # fmt: skip
        tag(found, index, "mark")


def _heights(run: RunRecord, marks: Sequence[Mark]) -> np.ndarray:
    """Return the loss at each mark; marks before the first step get the loss of that step."""
    at, loss = [mark.step for mark in marks], run.steps.column(LOSS)
    if not len(run.steps):
        return np.full(len(marks), np.nan)
    heights = np.where(np.array(at) < run.steps.step[0], loss[0], run.steps.at(at, LOSS))
    for branch in run.abandoned:
        own = set(branch.step[1:].tolist())
        on_branch = [mark.kind in ON_ANY_BRANCH and mark.step in own for mark in marks]
        heights = np.where(on_branch, branch.at(at, LOSS), heights)
    return heights


def _mark_columns(run: RunRecord, marks: Sequence[Mark], scene: Scene) -> dict[str, Any]:
    columns: Mapping[str, Any] = step_positions([mark.step for mark in marks], run, scene.axes)
    return {
        **columns,
        "symbol": [SYMBOLS[mark.kind] for mark in marks],
        "kind": [mark.kind for mark in marks],
        "text": [mark.text for mark in marks],
        "size": [5 if mark.kind in ("save", "warning") else 10 for mark in marks],
        "run": [run.name if len(scene.runs) > 1 else "" for _ in marks],
    }


# The curves of a panel: kept and abandoned steps, and the lines that they are compared with.

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


def number_text(value: float, digits: int = 4) -> str:
    """Format a number with some digits, large ones without an exponent."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.{digits}g}"


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
    with np.errstate(over="ignore"):  # a damaged value becomes infinite
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
