"""A picture of each schedule's stages in time: measured passes, and simulated ones above."""

import pathlib
import re
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from benchmarks.pipelines.sleeping_stages import Found, Setting
from threefold.pipeline.schedules import BACKWARD, FORWARD, WEIGHT
from threefold.pipeline.simulation import Timeline

COLOURS = {  # kind of pass -> colour of each chunk
    FORWARD: ("#2b6cb0", "#63a4dd", "#a9cff0"),
    BACKWARD: ("#d9730d", "#f0a04b", "#f8cd9a"),
    WEIGHT: ("#3f8f4f", "#86c38f", "#bfe0c4"),
}
MEASURED, SIMULATED = (0.1, 6.5), (-0.34, 1.8)  # offset in a stage's row, and height in points
GAP = 0.004  # seconds between passes, so that they remain distinguishable


def draw(setting: Setting, found: Mapping[str, Found], output: pathlib.Path) -> None:
    """Draw a strip of all stages for each contestant's best step, on one scale."""
    figure = Figure(figsize=(9, 1.05 * len(found) + 0.7), layout="constrained")
    strips = figure.subplots(len(found), 1, sharex=True)
    for axes, (name, each) in zip(strips, found.items(), strict=True):
        _draw_strip(axes, each)
        ratios = each.ratios(setting)
        axes.set_title(
            f"{name}: {ratios['makespan_seconds']:.2f} s, {ratios['over_theory']:.3f} times theory "
            f"and {ratios['over_simulated']:.3f} times the simulation (thin)",
            fontsize=8,
            loc="left",
            pad=2,
        )
    strips[-1].set_xlim(0, max(each.best.makespan for each in found.values()))
    strips[-1].set_xlabel("seconds", fontsize=8)
    names = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "its weights' part, where apart"}
    handles = [Patch(color=COLOURS[kind][0], label=name) for kind, name in names.items()]
    handles.append(Patch(color="#dddddd", label="lighter: later chunks"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(output)
    if output.suffix == ".svg":  # hundredths of a point are enough
        output.write_text(re.sub(r"(\.\d\d)\d+", r"\1", output.read_text()))


def _draw_strip(axes: Axes, found: Found) -> None:
    best = found.best
    _draw_passes(axes, best.passes, MEASURED)
    _draw_passes(axes, best.simulated(found.pipeline), SIMULATED)
    stages = found.pipeline.stages
    axes.set_ylim(stages - 0.45, -0.5)
    axes.set_yticks(range(stages), [str(stage) for stage in range(stages)])
    axes.tick_params(labelsize=7, length=2)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_passes(axes: Axes, timeline: Timeline, row: tuple[float, float]) -> None:
    """Draw bars from the first pass's start on, one path per colour to keep the file small."""
    offset, height = row
    start = min(stage[0].start for stage in timeline)
    bars: dict[str, list[tuple[float, float]]] = {}
    for number, stage in enumerate(timeline):
        for work, begin, end in stage:
            colour = COLOURS[work.kind][work.chunk]
            ends = [(begin - start, number + offset), (end - start - GAP, number + offset)]
            bars.setdefault(colour, []).extend(ends)
    for colour, points in bars.items():
        codes = [Path.MOVETO, Path.LINETO] * (len(points) // 2)
        axes.add_patch(
            PathPatch(
                Path(points, codes),
                facecolor="none",
                edgecolor=colour,
                linewidth=height,
                capstyle="butt",
            )
        )
