"""Parts that all figures of the page share: the x range, the cursor, fonts and tools.

The script of the page (report.js) switches the x axis, hides runs and resets the zoom. It finds the
curves by their tags: the index of the run and the role of the curve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.models import CrosshairTool, NumeralTickFormatter, Range1d, Span
from bokeh.plotting import figure

from threefold.report.axes import Axis
from threefold.report.marks import Mark
from threefold.report.run_record import RunRecord

POINTS_IN_PAGE = 90_000  # of all curves together: about 1 MB, because Bokeh compresses them
MIN_BUCKETS = 250
MAX_BUCKETS = 4_000  # more than a screen has pixels, so that a zoomed curve still has detail
LEFT_PIXELS = 78  # room for the y axis, equal in all figures
FONT = "system-ui, sans-serif"


@dataclass(frozen=True)
class Scene:
    """The runs and what all figures share.

    Attributes:
        runs: the runs of the report
        marks: the marks of each run
        axes: the x axes
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
