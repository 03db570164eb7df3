"""A job's pipeline in time, stage by stage, and what its stages hold in memory, as one picture."""

from collections.abc import Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from models.pipeline.order import BACKWARD, FORWARD, SCHEDULES, WEIGHT, Kind, Pipeline
from models.pipeline.simulation import TimedPass, Timeline, idle_share, pipeline_seconds
from recipes.planning.job import Job
from recipes.planning.memory import GIB, StageMemory, stage_memory
from recipes.planning.passes import pipeline_of, timeline_of
from recipes.planning.report import MEMORY
from recipes.planning.step_time import step_time

ROWS = 16  # stages with a row of their own, at most
BARS = 64  # stages with a bar of their own, at most
WHOLE = 34  # micro-batches that are all drawn; of more, the first and the last ones
PAIRS = 14  # of a forward and a backward pass that each of the two ends shows, at least
WIDTH = 11.0  # inches
POINTS = 650  # of that, 1/72 inch each, where passes are
UPRIGHT = 3  # digits that fit into a row's height
FONT, DIGIT, LINE = 5.5, 3.6, 4.8  # points: of the numbers, of a digit, of a line of them
LEGEND = 3  # chunks that are all in the legend; of more, the first and the last one
LABELS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weights"}
SHADES = {FORWARD: "Blues", BACKWARD: "Oranges", WEIGHT: "Greens"}
PARTS = ("#4e79a7", "#86bcb6", "#f1ce63", "#59a14f", "#b07aa1", "#9c755f", "#bab0ac")
NAMES = {
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-v": "ZB-V",
    "dualpipev": "DualPipeV",
}

Window = tuple[float, float]  # seconds since the step's start


def timeline(job: Job, title: str) -> Figure:
    """Above, a row for each stage: when it runs which micro-batch; below, what it holds."""
    pipeline = pipeline_of(job)
    passes = timeline_of(job)
    windows = shown_windows(pipeline, passes)
    stages = evenly_picked(pipeline.stages, ROWS)
    height = 0.5 + 0.24 * max(3, len(stages))
    figure = Figure(figsize=(WIDTH, height + 3.7), layout="constrained")
    grid = figure.add_gridspec(2, len(windows), height_ratios=[height, 2.6])
    axes = [figure.add_subplot(grid[0, column]) for column in range(len(windows))]
    for each, window in zip(axes, windows, strict=True):
        rows = [passes[stage] for stage in stages]
        _draw_passes(each, rows, window, points=POINTS / len(windows), chunks=pipeline.chunks)
    _label_passes(axes, stages, pipeline)
    _draw_memory(figure.add_subplot(grid[1, :]), job)
    figure.suptitle(f"{title}: {_summary(job, pipeline, passes)}", fontsize=10)
    return figure


def comparison(pipeline: Pipeline, predicted: Timeline, measured: Timeline, title: str) -> Figure:
    """A row for each stage, twice on one scale: predicted above measured."""
    stages = evenly_picked(pipeline.stages, ROWS)
    height = 0.5 + 0.24 * max(3, len(stages))
    figure = Figure(figsize=(WIDTH, 2 * height + 0.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    longest = max(map(pipeline_seconds, (predicted, measured)))
    for axes, name, passes in ((above, "predicted", predicted), (below, "measured", measured)):
        rows = [passes[stage] for stage in stages]
        _draw_passes(axes, rows, (0.0, longest), points=POINTS, chunks=pipeline.chunks)
        _label_passes([axes], stages, pipeline)
        axes.set_title(
            f"{name}: {_three_digits(pipeline_seconds(passes))} s, stages wait "
            f"{idle_share(passes):.1%}",
            fontsize=9,
            loc="left",
        )
    above.set_xlabel("")
    figure.suptitle(f"{title}, {_name(pipeline)}", fontsize=10)
    return figure


def shown_windows(pipeline: Pipeline, passes: Timeline) -> list[Window]:
    """All of the time, or its two ends: until the pipeline is full, and since it empties."""
    total = pipeline_seconds(passes)
    pair = total / pipeline.micro_batches
    first_backward = min(timed.start for timed in passes[0] if timed.work.kind == BACKWARD)
    end = max(first_backward + 6 * pair, PAIRS * pair)
    if pipeline.micro_batches <= WHOLE or 2 * end > 0.9 * total:
        return [(0.0, total)]
    return [(0.0, end), (total - end, total)]


def evenly_picked(count: int, most: int) -> list[int]:
    """So many of 0 .. count - 1, the ends among them."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _summary(job: Job, pipeline: Pipeline, passes: Timeline) -> str:
    p, m = pipeline.stages, pipeline.micro_batches
    spent = f"{_three_digits(pipeline_seconds(passes))} s of forward and backward passes"
    if p > 1:
        spent = (
            f"{_three_digits(pipeline_seconds(passes))} s in the pipeline, of which stages wait "
            f"{idle_share(passes):.1%} (bubble, white)"
        )
    return (
        f"{_name(pipeline)}, {p} stage{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}\n{spent}; "
        f"{_three_digits(step_time(job).total)} s a step with gradients, optimizer and slower nodes"
    )


def _name(pipeline: Pipeline) -> str:
    """The schedule's, with its chunks where they are chosen."""
    is_chosen = SCHEDULES[pipeline.schedule].chunks is None
    return NAMES[pipeline.schedule] + f" ({pipeline.chunks} chunks)" * is_chosen


def _three_digits(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:#.3g}"


def _draw_passes(
    axes: Axes,
    rows: Sequence[Sequence[TimedPass]],
    window: Window,
    *,
    points: float,
    chunks: int,
) -> None:
    """The passes of each row that fall into the window, numbered where the number fits."""
    start, end = window
    scale = points / (end - start)
    for (kind, chunk), boxes in _by_kind(rows, window).items():
        colour = shade(kind, chunk, chunks)
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
    """Micro-batches in the boxes of a row and a kind: all or, where they do not fit, none."""
    if not boxes:
        return
    room = scale * min(timed.end - timed.start for timed in boxes) - 0.5
    digits = max(len(str(timed.work.micro_batch)) for timed in boxes)
    if room < digits * DIGIT and (room < LINE or digits > UPRIGHT):
        return
    for timed in boxes:
        axes.text(
            (timed.start + timed.end) / 2, row, str(timed.work.micro_batch),
            ha="center", va="center_baseline", fontsize=FONT, color=colour,
            rotation=0 if room >= digits * DIGIT else 90,
        )  # fmt: skip


def _by_kind(
    rows: Sequence[Sequence[TimedPass]], window: Window
) -> dict[tuple[Kind, int], list[tuple[int, TimedPass]]]:
    """(kind, chunk) -> (row, pass) in the window."""
    found: dict[tuple[Kind, int], list[tuple[int, TimedPass]]] = {}
    for row, passes in enumerate(rows):
        for timed in passes:
            if timed.end > window[0] and timed.start < window[1]:
                of = timed.work.kind, timed.work.chunk
                found.setdefault(of, []).append((row, timed))
    return found


def shade(kind: Kind, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of a chunk's passes: dark for the first one, lighter for each that follows."""
    lightness = min(0.35, 0.5 / max(1, chunks - 1)) * chunk
    return to_rgb(matplotlib.colormaps[SHADES[kind]](0.75 - lightness))


def ink(colour: tuple[float, float, float]) -> str:
    """What can be read on a colour (its luma, ITU-R BT.601)."""
    red, green, blue = colour[:3]
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _label_passes(axes: Sequence[Axes], stages: Sequence[int], pipeline: Pipeline) -> None:
    """Stages, seconds, the colours, and a break between two windows."""
    first, last = axes[0], axes[-1]
    first.set_yticks(range(len(stages)), [str(stage) for stage in stages])
    some = f", {len(stages)} of {pipeline.stages}" if len(stages) < pipeline.stages else ""
    first.set_ylabel(f"stage{some}", fontsize=9)
    for each in axes:
        each.set_xlabel("seconds since the step's start", fontsize=9)
    if first is not last:
        last.set_yticks([])
        first.spines.right.set_visible(False)
        last.spines.left.set_visible(False)
        slash = {"marker": [(-1, -2), (1, 2)], "markersize": 9, "linestyle": "none", "color": "k"}
        first.plot([1, 1], [0, 1], transform=first.transAxes, clip_on=False, **slash)
        last.plot([0, 0], [0, 1], transform=last.transAxes, clip_on=False, **slash)
    chunks = pipeline.chunks
    shown = range(chunks) if chunks <= LEGEND else (0, chunks - 1)
    handles = [
        Patch(
            color=shade(kind, chunk, chunks),
            label=LABELS[kind] + f" of chunk {chunk}" * (chunks > 1),
        )
        for kind in (Kind if pipeline.splits else (FORWARD, BACKWARD))
        for chunk in shown
    ]
    _legend(last, handles)


def _draw_memory(axes: Axes, job: Job) -> None:
    """A bar for each stage, and a line at what the GPU has."""
    memory = stage_memory(job)
    stages = evenly_picked(len(memory), BARS)
    room = job.machine.gpu.memory_gib
    handles = list(_stack(axes, [memory[stage] for stage in stages]))
    line = {"color": "#c00000", "linestyle": "--", "linewidth": 1.2}
    axes.axhline(room, **line)
    limit = Line2D([], [], label=f"{job.machine.gpu.name}: {room:g} GiB", **line)
    totals = [memory[stage].total / GIB for stage in stages]
    if len(stages) <= ROWS:
        for place, total in enumerate(totals):
            axes.annotate(
                f"{total:.1f}", (place, total), (0, 2), textcoords="offset points",
                ha="center", fontsize=7,
            )  # fmt: skip
    spare = max(0.0, (4 - len(stages)) / 2)
    axes.set_xlim(-0.6 - spare, len(stages) - 0.4 + spare)
    axes.set_ylim(0, 1.12 * max(room, *totals))
    labelled = evenly_picked(len(stages), ROWS)
    axes.set_xticks(labelled, [str(stages[place]) for place in labelled])
    axes.tick_params(labelsize=8)
    axes.set_xlabel("stage", fontsize=9)
    axes.set_ylabel("GiB on each GPU, at its fullest", fontsize=9)
    _legend(axes, [limit, *reversed(handles)])


def _stack(axes: Axes, memory: Sequence[StageMemory]) -> Iterator[Patch]:
    """The bars, part by part from below; what the legend says of each part that there is."""
    bottom = [0.0] * len(memory)
    for name, colour in zip(MEMORY, PARTS, strict=True):
        sizes = [getattr(stage, name) / GIB for stage in memory]
        if any(sizes):
            axes.bar(range(len(memory)), sizes, bottom=bottom, color=colour, width=0.75)
            yield Patch(color=colour, label=name)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]


def _legend(axes: Axes, handles: Sequence[Line2D | Patch]) -> None:
    """Beside the axes, at the right."""
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.0), borderaxespad=0.0,
        fontsize=8, frameon=False, handlelength=1.4,
    )  # fmt: skip
