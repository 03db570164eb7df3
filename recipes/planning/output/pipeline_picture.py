"""A job's pipeline in time, stage by stage, and the memory of its stages, as one picture."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from models.pipeline.schedule.order import Pipeline
from models.pipeline.schedule.simulation import Timeline, idle_share, pipeline_seconds
from recipes.pictures.pipeline_passes import (
    POINTS,
    ROWS,
    WIDTH,
    add_legend,
    draw_passes,
    evenly_picked,
    label_passes,
    schedule_title,
    shown_windows,
    three_digits,
)
from recipes.planning.inputs.job import Job
from recipes.planning.memory.peak import GIB, StageMemory, stage_memory
from recipes.planning.output.plan_report import MEMORY
from recipes.planning.time.passes import pipeline_of, timeline_of
from recipes.planning.time.step_time import step_time

BARS = 64  # stages with a bar of their own, at most
PARTS = ("#4e79a7", "#86bcb6", "#f1ce63", "#59a14f", "#b07aa1", "#9c755f", "#bab0ac")


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
        draw_passes(each, rows, window, points=POINTS / len(windows), chunks=pipeline.chunks)
    label_passes(axes, stages, pipeline)
    _draw_memory(figure.add_subplot(grid[1, :]), job)
    figure.suptitle(f"{title}: {_summary(job, pipeline, passes)}", fontsize=10)
    return figure


def _summary(job: Job, pipeline: Pipeline, passes: Timeline) -> str:
    p, m = pipeline.stages, pipeline.micro_batches
    spent = f"{three_digits(pipeline_seconds(passes))} s of forward and backward passes"
    if p > 1:
        spent = (
            f"{three_digits(pipeline_seconds(passes))} s in the pipeline, of which stages wait "
            f"{idle_share(passes):.1%} (bubble, white)"
        )
    return (
        f"{schedule_title(pipeline)}, {p} stage{'s' * (p > 1)}, "
        f"{m} micro-batch{'es' * (m > 1)}\n{spent}; "
        f"{three_digits(step_time(job).total)} s a step with gradients, optimizer and slower nodes"
    )


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
    add_legend(axes, [limit, *reversed(handles)])


def _stack(axes: Axes, memory: Sequence[StageMemory]) -> Iterator[Patch]:
    """The bars, part by part from below; what the legend says of each part that there is."""
    bottom = [0.0] * len(memory)
    for name, colour in zip(MEMORY, PARTS, strict=True):
        sizes = [getattr(stage, name) / GIB for stage in memory]
        if any(sizes):
            axes.bar(range(len(memory)), sizes, bottom=bottom, color=colour, width=0.75)
            yield Patch(color=colour, label=name)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
