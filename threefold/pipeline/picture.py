"""Pictures of a pipeline's passes: one row per stage, one box per pass."""

import os
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from models.errors import FULL_DISK_ERRORS, UserError
from threefold.pipeline.balance import evenly_spaced
from threefold.pipeline.schedules import BACKWARD, FORWARD, SCHEDULES, WEIGHT, Kind, Pipeline
from threefold.pipeline.simulation import TimedPass, Timeline, idle_share, pipeline_seconds

MAX_STAGE_ROWS = 16
MAX_MICRO_BATCHES_DRAWN = 34  # of a longer step, only the start and the end are drawn
MIN_PAIRS_DRAWN = 14  # forward and backward passes that the start and the end show at least
FIGURE_INCHES = 11.0  # width of a figure
PASSES_POINTS = 650  # width of the part of a figure with passes, in points of 1/72 inch
MAX_ROTATED_DIGITS = 3  # digits that fit into a row's height
FONT_POINTS, DIGIT_POINTS, LINE_POINTS = 5.5, 3.6, 4.8  # of the numbers in the boxes
MAX_LEGEND_VIRTUAL_STAGES = 3  # of more chunks, the legend has only the first and the last
PASS_LABELS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weights"}
PASS_COLOUR_MAPS = {FORWARD: "Blues", BACKWARD: "Oranges", WEIGHT: "Greens"}
SCHEDULE_NAMES = {
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-v": "ZB-V",
    "dualpipev": "DualPipeV",
    "gpipe": "GPipe",
}

Window = tuple[float, float]  # seconds since the step's start


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure in the format that the file's suffix names.

    Raises:
        UserError: the file cannot be written; an earlier picture still exists, unchanged.
    """
    content = BytesIO()
    figure.savefig(
        content, format=file.suffix.lstrip("."), dpi=200, bbox_inches="tight", pad_inches=0.1
    )
    # `write_whole` of run_folder/ does the same for texts, but this package is on a lower floor.
    file = file.resolve()  # a link to a file stays one
    fresh = file.with_name(file.name + ".incomplete")
    try:
        with fresh.open("wb") as stream:
            stream.write(content.getbuffer())
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(fresh, file)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        remedy = "free disk space, or " if error.errno in FULL_DISK_ERRORS else ""
        raise UserError(
            f"{file} cannot be written ({error.strerror}); {remedy}use a file in another folder"
        ) from None


def comparison(pipeline: Pipeline, predicted: Timeline, measured: Timeline, title: str) -> Figure:
    """Return a figure of the predicted passes above the measured ones, on the same time scale."""
    stages = evenly_spaced(pipeline.stages, MAX_STAGE_ROWS)
    height = 0.5 + 0.24 * max(3, len(stages))
    figure = Figure(figsize=(FIGURE_INCHES, 2 * height + 0.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    longest = max(map(pipeline_seconds, (predicted, measured)))
    for axes, name, passes in ((above, "predicted", predicted), (below, "measured", measured)):
        rows = [passes[stage] for stage in stages]
        draw_passes(
            axes, rows, (0.0, longest), points=PASSES_POINTS, virtual_stages=pipeline.virtual_stages
        )
        label_passes([axes], stages, pipeline)
        axes.set_title(
            f"{name}: {three_digits(pipeline_seconds(passes))} s, stages idle "
            f"{idle_share(passes):.1%}",
            fontsize=9,
            loc="left",
        )
    above.set_xlabel("")
    figure.suptitle(f"{title}, {schedule_title(pipeline)}", fontsize=10)
    return figure


def shown_windows(pipeline: Pipeline, passes: Timeline) -> list[Window]:
    """Return the shown times: all of a step, or the filling and the draining of the pipeline."""
    total = pipeline_seconds(passes)
    pair = total / pipeline.micro_batches
    first_backward = min(timed.start for timed in passes[0] if timed.work.kind == BACKWARD)
    end = max(first_backward + 6 * pair, MIN_PAIRS_DRAWN * pair)
    if pipeline.micro_batches <= MAX_MICRO_BATCHES_DRAWN or 2 * end > 0.9 * total:
        return [(0.0, total)]
    return [(0.0, end), (total - end, total)]


def schedule_title(pipeline: Pipeline) -> str:
    """Return the name of the schedule, with the number of chunks if it can be chosen."""
    is_chosen = SCHEDULES[pipeline.schedule].virtual_stages is None
    return SCHEDULE_NAMES[pipeline.schedule] + f" ({pipeline.virtual_stages} chunks)" * is_chosen


def three_digits(seconds: float) -> str:
    """Format a number with three significant digits."""
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:#.3g}"


def draw_passes(
    axes: Axes,
    rows: Sequence[Sequence[TimedPass]],
    window: Window,
    *,
    points: float,
    virtual_stages: int,
) -> None:
    """Draw the passes of each row within the window, with micro-batch numbers that fit."""
    start, end = window
    scale = points / (end - start)
    for (kind, chunk), boxes in _by_kind(rows, window).items():
        colour = shade(kind, chunk, virtual_stages)
        corners = [
            [(t.start, row - 0.4), (t.end, row - 0.4), (t.end, row + 0.4), (t.start, row + 0.4)]
            for row, t in boxes
        ]
        edge = min(0.5, 0.15 * scale * min(t.end - t.start for _, t in boxes))
        axes.add_collection(
            PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=edge)
        )
        whole = [(row, t) for row, t in boxes if start <= t.start and t.end <= end]
        for row in range(len(rows)):
            _number(axes, row, [t for other, t in whole if other == row], scale, ink(colour))
    axes.set_xlim(start, end)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(labelsize=8)


def _number(axes: Axes, row: int, boxes: Sequence[TimedPass], scale: float, colour: str) -> None:
    """Write micro-batch numbers into all boxes of a row and a kind, if every number fits."""
    if not boxes:
        return
    room = scale * min(timed.end - timed.start for timed in boxes) - 0.5
    digits = max(len(str(timed.work.micro_batch)) for timed in boxes)
    if room < digits * DIGIT_POINTS and (room < LINE_POINTS or digits > MAX_ROTATED_DIGITS):
        return
    for timed in boxes:
        axes.text(
            (timed.start + timed.end) / 2, row, str(timed.work.micro_batch),
            ha="center", va="center_baseline", fontsize=FONT_POINTS, color=colour,
            rotation=0 if room >= digits * DIGIT_POINTS else 90,
        )  # fmt: skip


def _by_kind(
    rows: Sequence[Sequence[TimedPass]], window: Window
) -> dict[tuple[Kind, int], list[tuple[int, TimedPass]]]:
    """Group the passes within the window: (kind, chunk) -> list of (row, pass)."""
    groups: dict[tuple[Kind, int], list[tuple[int, TimedPass]]] = {}
    for row, passes in enumerate(rows):
        for timed in passes:
            if timed.end > window[0] and timed.start < window[1]:
                key = timed.work.kind, timed.work.chunk
                groups.setdefault(key, []).append((row, timed))
    return groups


def shade(kind: Kind, chunk: int, virtual_stages: int) -> tuple[float, float, float]:
    """Return the colour of a chunk's passes: dark for the first chunk, then lighter."""
    lightness = min(0.35, 0.5 / max(1, virtual_stages - 1)) * chunk
    return to_rgb(matplotlib.colormaps[PASS_COLOUR_MAPS[kind]](0.75 - lightness))


def ink(colour: tuple[float, float, float]) -> str:
    """Return black or white, whichever is readable on a colour (by luma, ITU-R BT.601)."""
    red, green, blue = colour[:3]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def label_passes(axes: Sequence[Axes], stages: Sequence[int], pipeline: Pipeline) -> None:
    """Label the axes, add a legend of the colours, and mark the break between two windows."""
    first, last = axes[0], axes[-1]
    first.set_yticks(range(len(stages)), [str(stage) for stage in stages])
    some = f" ({len(stages)} of {pipeline.stages} shown)" * (len(stages) < pipeline.stages)
    first.set_ylabel(f"stage{some}", fontsize=9)
    for panel in axes:
        panel.set_xlabel("seconds since the step's start", fontsize=9)
    if first is not last:
        last.set_yticks([])
        first.spines.right.set_visible(False)
        last.spines.left.set_visible(False)
        for panel, x in ((first, 1), (last, 0)):
            panel.plot(
                [x, x], [0, 1], transform=panel.transAxes, clip_on=False, color="k",
                marker=[(-1, -2), (1, 2)], markersize=9, linestyle="none",
            )  # fmt: skip
    virtual_stages = pipeline.virtual_stages
    shown = (
        range(virtual_stages)
        if virtual_stages <= MAX_LEGEND_VIRTUAL_STAGES
        else (0, virtual_stages - 1)
    )
    handles = [
        Patch(
            color=shade(kind, chunk, virtual_stages),
            label=PASS_LABELS[kind] + f" of chunk {chunk}" * (virtual_stages > 1),
        )
        for kind in (Kind if pipeline.splits else (FORWARD, BACKWARD))
        for chunk in shown
    ]
    add_legend(last, handles)


def add_legend(axes: Axes, handles: Sequence[Line2D | Patch]) -> None:
    """Add a legend to the right of the axes."""
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.0), borderaxespad=0.0,
        fontsize=8, frameon=False, handlelength=1.4,
    )  # fmt: skip
