"""A figure of a job's predicted pipeline timeline and of the memory of its stages."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from threefold.pipeline.picture import (
    FIGURE_INCHES,
    MAX_STAGE_ROWS,
    PASSES_POINTS,
    add_legend,
    draw_passes,
    evenly_picked,
    label_passes,
    schedule_title,
    shown_windows,
    three_digits,
)
from threefold.pipeline.schedules import Pipeline
from threefold.pipeline.simulation import Timeline, idle_share, pipeline_seconds
from threefold.plan.job import Job
from threefold.plan.memory.peak import GIB, StageMemory, stage_memory
from threefold.plan.report import MEMORY_PARTS
from threefold.plan.time.passes import pipeline_of, timeline_of
from threefold.plan.time.step import step_time

MAX_STAGE_BARS = 64
MEMORY_COLOURS = ("#4e79a7", "#86bcb6", "#f1ce63", "#59a14f", "#b07aa1", "#9c755f", "#bab0ac")


def timeline(job: Job, title: str) -> Figure:
    """Return a figure: above, the passes of each stage in time; below, the memory per stage."""
    pipeline = pipeline_of(job)
    passes = timeline_of(job)
    windows = shown_windows(pipeline, passes)
    stages = evenly_picked(pipeline.stages, MAX_STAGE_ROWS)
    height = 0.5 + 0.24 * max(3, len(stages))
    figure = Figure(figsize=(FIGURE_INCHES, height + 3.7), layout="constrained")
    grid = figure.add_gridspec(2, len(windows), height_ratios=[height, 2.6])
    axes = [figure.add_subplot(grid[0, column]) for column in range(len(windows))]
    for each, window in zip(axes, windows, strict=True):
        rows = [passes[stage] for stage in stages]
        draw_passes(each, rows, window, points=PASSES_POINTS / len(windows), chunks=pipeline.chunks)
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
    stages = evenly_picked(len(memory), MAX_STAGE_BARS)
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
    labelled = evenly_picked(len(stages), MAX_STAGE_ROWS)
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
