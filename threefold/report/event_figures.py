"""Events in the figures: in lanes of their own, and on the curves."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange

from threefold.report.axes import step_positions
from threefold.report.charts import LOSS
from threefold.report.drawing import Scene, new_figure, tag
from threefold.report.marks import SYMBOLS, TURNS, Mark, spread
from threefold.report.palette import colour
from threefold.report.run_record import RunRecord

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
            found = plot.vspan("step", source=ColumnDataSource(data), line_color=shade,
                               line_alpha=0.55, line_dash=[3, 3], level="underlay")  # fmt: skip
            tag(found, index, "turn")


def draw_marks(plot: Any, scene: Scene) -> None:
    """Draw the events on the curves of the training loss, but only some of many saves."""
    for index, (run, marks) in enumerate(zip(scene.runs, scene.marks, strict=True)):
        saves = [mark for mark in marks if mark.kind == "save"]
        others = [mark for mark in marks if mark.kind != "save"]
        chosen = [*spread(saves, MAX_SAVES_ON_CURVE), *others]
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
