"""The page: one file of HTML with all data, scripts and styles, which loads nothing else.

Whatever users have written (names, reasons, paths) is escaped by Jinja, and the page's own policy
allows no script but the two in it, so that no text can become a script. The policy also forbids
every request, except to the server of `--watch`.
"""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import bokeh
import numpy as np
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from threefold.report import facts
from threefold.report.axes import axes_of
from threefold.report.charts import panels_of
from threefold.report.curves import TREND_POINTS, count_curves, draw_panel
from threefold.report.drawing import Key, Scene
from threefold.report.event_figures import draw_lanes
from threefold.report.marks import describe, marks_of
from threefold.report.palette import COLOURS, colour, dash
from threefold.report.run_record import RunRecord
from threefold.report.summaries import Prediction, predict
from threefold.run_folder.json_lines import number

FOLDER = Path(__file__).parent
BOKEH = Path(bokeh.__file__).parent / "server" / "static" / "js" / "bokeh.min.js"
MAX_EVENTS_SHOWN = 500  # of a run, the newest ones
AXIS_NAMES = {"step": "steps", "tokens": "tokens", "flops": "FLOPs"}
DASHES = {"dashed": "7 3", "dotted": "2 2", "dotdash": "2 2 7 2"}


@dataclass(frozen=True)
class Watching:
    """Settings of a page that is served during its runs.

    Attributes:
        version: text that changes when a run folder changes
        seconds: interval at which the page asks for the version
    """

    version: str
    seconds: float


def render(
    runs: Sequence[RunRecord], *, gpu: str | None = None, watching: Watching | None = None
) -> str:
    """Return the page of some runs.

    Args:
        runs: at least one run
        gpu: datasheet of the plan; None for the run's own GPU
        watching: None for a page that is a file
    """
    plans = [facts.planned(run, predict, gpu) for run in runs]
    marks = [marks_of(run.events) for run in runs]
    axes = axes_of(runs)
    panels = panels_of(runs, {index: plan for index, (plan, _) in enumerate(plans) if plan})
    scene = Scene.of(runs, marks, axes, count_curves(panels, runs))
    document, figures, roots = Document(), [], {}

    def add(plot: Any, key: str, title: str, legend: Sequence[Key] = (), **more: Any) -> None:
        document.add_root(plot)
        roots[plot.id] = f"plot-{key}"
        usual = {"key": key, "title": title, "legend": legend, "note": "", "wide": False}
        figures.append(usual | more)

    for panel in panels:
        plot, legend = draw_panel(panel, scene)
        add(plot, panel.key, panel.title, legend, note=panel.note, wide=panel.wide)
        if panel.key == "loss" and (lanes := draw_lanes(scene)) is not None:
            add(lanes, "events", "Events", wide=True)
    settings = {"axes": {name: vars(axis) for name, axis in axes.items()}, "roots": roots}
    settings["colours"] = [colour(index) for index in range(len(runs))]
    settings |= {"version": watching.version, "seconds": watching.seconds} if watching else {}
    scripts = {"bokeh": bokeh_script(), "script": _own_file("report.js")}
    environment = _environment()
    page = environment.get_template("report.html").render(
        title=_title(runs),
        subtitle=f"{' · '.join(_subtitle(run) for run in runs)}",
        policy=_policy(scripts.values(), served=watching is not None),
        style=Markup(_own_file("report.css")),
        axes=axes,
        axis_names=AXIS_NAMES,
        has_abandoned=any(run.abandoned for run in runs),
        runs=[
            _run_facts(run, index, plan, marks[index])
            for index, (run, plan) in enumerate(zip(runs, plans, strict=True))
        ],
        problems=[problem for run in runs for problem in run.problems],
        summary=facts.summary(runs),
        figures=figures,
        differences=facts.recipe_differences(runs),
        figures_data=_json(_figures_json(document) if figures else "null"),
        settings=_json(json.dumps(settings)),
        footer=f"Written by recipes/report.py on {_time(time.time())} UTC. The curves are drawn by "
        f"Bokeh {bokeh.__version__}. {_reduction(runs, scene)}",
        **{name: Markup(text) for name, text in scripts.items()},
    )
    # A path may have bytes that are not UTF-8, and JSON may have half of a surrogate pair.
    return page.encode(errors="backslashreplace").decode()


def _run_facts(
    run: RunRecord, index: int, plan: tuple[Prediction | None, str], marks: Sequence[Any]
) -> dict[str, Any]:
    """Return the facts about a run that the template shows."""
    wall_time, start = facts.wall_time_parts(run), 0.0
    for part in wall_time:
        part["start"] = start
        start += part["share"]
    timeline = None
    if run.timeline:
        timeline = "data:image/svg+xml;base64," + base64.b64encode(run.timeline).decode()
    return {
        "name": run.name,
        "colour": colour(index),
        "dash": dash(index // len(COLOURS)),
        "plan": plan[0],
        "no_plan": plan[1],
        "plan_rows": facts.plan_rows(run, plan[0]) if plan[0] else [],
        "wall_time": wall_time,
        "stops": facts.stops(run),
        "mixtures": facts.mixtures(run),
        "slowest": facts.slowest_ranks(run),
        "slow_events": [mark for mark in marks if mark.kind == "slow ranks"],
        "timeline": timeline,
        "recipe": facts.recipe_text(run),
        "event_count": len(run.events),
        "events": [
            (_time(event.get("time")), f"{event['step']:,}", event["event"], describe(event))
            for event in facts.event_rows(run, MAX_EVENTS_SHOWN)
        ],
    }


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["swatch"] = _swatch
    return environment


def _swatch(shade: str, style: str) -> Markup:
    """Return a small picture of a line, points or a block, for a legend."""
    if style == "block":
        shape = '<rect width="22" height="10" fill="{}"/>'
    elif style == "points":
        shape = (
            '<line x1="0" y1="5" x2="22" y2="5" stroke="{0}" stroke-width="2"/>'
            '<circle cx="11" cy="5" r="3.5" stroke="{0}" stroke-width="1.5" fill="white"/>'
        )
    else:
        pattern = f' stroke-dasharray="{DASHES[style]}"' if style in DASHES else ""
        shape = f'<line x1="0" y1="5" x2="22" y2="5" stroke="{{}}" stroke-width="2.5"{pattern}/>'
    picture = '<svg class="swatch" viewBox="0 0 22 10" aria-hidden="true">{}</svg>'
    return Markup(picture).format(Markup(shape).format(shade))


def _figures_json(document: Document) -> str:
    return serialize_json(document.to_json(deferred=False), pretty=False)


def _json(text: str) -> Markup:
    """Return JSON for a script element, which only `</script>` or `<!--` could end or disturb."""
    return Markup(text.replace("<", "\\u003c"))


def _policy(scripts: Any, *, served: bool) -> str:
    """Return a content security policy that allows only these scripts, and no requests."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    connect = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def bokeh_script() -> str:
    """Return Bokeh's own script, with its licence in its first lines."""
    return BOKEH.read_text(encoding="utf-8").replace("</script", "<\\/script")


@cache
def _own_file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _title(runs: Sequence[RunRecord]) -> str:
    names = [run.name for run in runs]
    return names[0] if len(names) == 1 else f"Comparison of {', '.join(names)}"


def _subtitle(run: RunRecord) -> str:
    return f"{run.path}: {facts.state(run)}"


def _reduction(runs: Sequence[RunRecord], scene: Scene) -> str:
    """Return a sentence about the reduction of long curves."""
    longest = max(len(run.steps) for run in runs)
    if longest <= 2 * scene.buckets:
        return "Every step is drawn."
    return (
        f"Of every {-(-longest // scene.buckets):,} successive steps of a long curve, the smallest "
        f"and the largest value are drawn. The thick line is the mean of "
        f"{-(-longest // TREND_POINTS):,} steps."
    )


def _time(seconds: Any) -> str:
    """Format a time from events.jsonl; empty if it is not valid, because a user edited it."""
    seconds = number(seconds)
    if seconds is None or not np.isfinite(seconds):
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):  # far outside the calendar
        return ""
