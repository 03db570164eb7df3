"""Pictures of a proof: the loss curves of all layouts, and a heat map of their differences."""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure

from models.errors import counted
from threefold.config.parallel_dims import IN_TEXTS
from threefold.pipeline.picture import save_figure
from threefold.prove.compare import (
    LOSS_TOLERANCE,
    Difference,
)
from threefold.prove.layouts import SCHEDULES, ZERO_STAGES, ProofCase
from threefold.prove.report import (
    CaseResult,
)

matplotlib.use("Agg")  # no display
MIN_COLOUR = -3.0  # log10: a thousandth of the tolerance, or less
FAILED = 1.0  # above the colour scale, drawn in black
RECOMPUTE = ("none", "selective", "full")
COLUMN_GROUPS = [  # (ZeRO stage or schedule, sequence parallelism)
    (kind, split)
    for kind, split in product(
        [*(f"zero{stage}" for stage in ZERO_STAGES), *SCHEDULES], (False, True)
    )
]


def draw_curves(findings: Sequence[CaseResult], *, title: str, file: Path) -> None:
    """Write a picture of the loss of every layout over the steps, and of their differences.

    The lower part shows how far each layout is from the median of all of them, relative to it, on a
    scale that reaches the tolerance of the proof.

    Raises:
        UserError: the file cannot be written.
    """
    save_figure(curves(findings, title), file)


def curves(findings: Sequence[CaseResult], title: str) -> Figure:
    """Return the picture that `draw_curves` writes."""
    losses = [finding.losses[:-1] for finding in findings if finding.losses]  # without validation
    largest = max((f.result.loss for f in findings if isinstance(f.result, Difference)), default=0)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, 1 + max(map(len, losses), default=0))
    middle = [median(column) for column in zip(*losses, strict=False)]
    for number, line in enumerate(losses):
        colour = matplotlib.colormaps["turbo"](number / max(1, len(losses) - 1))
        upper.plot(steps[: len(line)], line, color=colour, linewidth=1.2)
        apart = [loss / usual - 1 for loss, usual in zip(line, middle, strict=False)]
        lower.plot(steps[: len(apart)], apart, color=colour, linewidth=0.8)
    upper.set_title(
        f"{title}: {counted(len(losses), 'layout')}, one loss curve\n"
        f"largest difference from one process: {largest:.1e} of the loss",
        fontsize=11,
    )
    upper.set_ylabel("loss (nats per token)")
    lower.set_ylabel("difference /\nloss", fontsize=9)
    lower.set_ylim(-max(largest, LOSS_TOLERANCE), max(largest, LOSS_TOLERANCE))
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.grid(color="0.92", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_heatmap(findings: Sequence[CaseResult], *, title: str, file: Path) -> None:
    """Write the picture, in the format of the file's extension (.svg, .png, .pdf).

    Rows are sizes of the axes, with the attention over context ranks. Column groups are
    schedules or ZeRO stages, with and without sequence parallelism; their columns are recomputation
    and micro-batch.
    Blank: not valid; black: failed.
    """
    within = sorted({_within(finding.case) for finding in findings})
    rows = sorted({_sizes(finding) for finding in findings})
    cells = [[math.nan] * (len(COLUMN_GROUPS) * len(within)) for _ in rows]
    for finding in findings:
        cells[rows.index(_sizes(finding))][_column(finding.case, within)] = _colour(finding)
    figure, axes = pyplot.subplots(
        figsize=(3 + 0.14 * len(cells[0]), 1.6 + 0.2 * len(rows)), layout="constrained"
    )
    colours = matplotlib.colormaps["RdYlGn_r"].with_extremes(over="black")
    image = axes.imshow(cells, cmap=colours, vmin=MIN_COLOUR, vmax=0, aspect="auto")
    names = [f"{' x '.join(map(str, sizes))} {kind}".strip() for _, *sizes, kind in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.set_ylabel(" x ".join(IN_TEXTS), fontsize=8)
    middles = [(group + 0.5) * len(within) - 0.5 for group in range(len(COLUMN_GROUPS))]
    labels = [f"{kind}\nsequence-\nparallel" if split else kind for kind, split in COLUMN_GROUPS]
    axes.set_xticks(middles, labels, fontsize=7)
    for edge in range(1, len(COLUMN_GROUPS)):
        axes.axvline(edge * len(within) - 0.5, color="black", linewidth=0.4)
    axes.set_title(
        f"{title}\nin each column: recompute "
        + ", ".join(f"{RECOMPUTE[kind]} {interval} x {micro}" for kind, interval, micro in within)
        + " (interval x micro-batch)",
        fontsize=8,
    )
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("largest difference / tolerance, log10", fontsize=7)
    save_figure(figure, file)
    pyplot.close(figure)


def _sizes(finding: CaseResult) -> tuple[Any, ...]:
    """Return the key of a row: the number of ranks, the axes, and the attention over context."""
    dims, layout = finding.case.dims, finding.case.recipe.layout
    kind = layout.context_attention if dims.context > 1 else ""
    return dims.world_size, *(getattr(dims, axis) for axis in IN_TEXTS), kind


def _within(case: ProofCase) -> tuple[int, int, int]:
    """Return the key of a column within its group: recomputation, interval, micro-batch."""
    layout = case.recipe.layout
    kind = RECOMPUTE.index(layout.recompute)
    return kind, layout.recompute_interval, case.recipe.batch.micro_sequences


def _column(case: ProofCase, within: list[tuple[int, int, int]]) -> int:
    layout = case.recipe.layout
    kind = layout.schedule_name if layout.pipeline > 1 else f"zero{case.zero_stage}"
    group = COLUMN_GROUPS.index((kind, layout.sequence_parallel))
    return group * len(within) + within.index(_within(case))


def _colour(finding: CaseResult) -> float:
    result = finding.result
    if not finding.passes or not isinstance(result, Difference):
        return FAILED
    ratio = result.ratio
    return min(0.0, max(MIN_COLOUR, math.log10(ratio))) if ratio else MIN_COLOUR
