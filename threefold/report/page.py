"""The page: one file of HTML with all data, scripts and styles, and a server for live runs.

Whatever users have written (names, reasons, paths) is escaped by Jinja, and the page's own policy
allows no script but the two in it, so that no text can become a script. The policy also forbids
every request, except to the server of `--watch`.
"""

import base64
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import bokeh
import numpy as np
import tomli_w
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from models.errors import UserError, reason_of
from threefold.config.phases import PhasePlan
from threefold.report.charts import (
    COLOURS,
    PARTS,
    POSITIONS,
    TASKS,
    TREND_POINTS,
    VALIDATION,
    Key,
    Scene,
    axes_of,
    colour,
    count_curves,
    dash,
    draw_lanes,
    draw_panel,
    number_text,
    panels_of,
)
from threefold.report.run_record import RunRecord, describe, marks_of
from threefold.report.summaries import PredictedRun, SourceShare, predict, shares_read
from threefold.run_folder.history import CAUSE_TEXTS
from threefold.run_folder.json_lines import MAX_INTEGER_IN_LINE, number
from threefold.run_folder.lock import is_held

# The tables of the page: a summary of the runs, plans, goodput, mixtures, slow ranks, recipes.

NONE = "–"  # noqa: RUF001 (a dash)
MAX_SLOW_RANKS = 5
PART_NAMES = {"kept": "kept steps"} | CAUSE_TEXTS
UNITS = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its title, and a text for each run."""

    title: str
    cells: Sequence[str]


def summary(runs: Sequence[RunRecord]) -> list[TableRow]:
    """Return the most important numbers of each run."""
    metrics = list(dict.fromkeys(
        name for run in runs for name in run.steps.values
        if name.startswith((*VALIDATION, TASKS)) and POSITIONS not in name
    ))  # fmt: skip
    rows = [
        TableRow("state", [state(run) for run in runs]),
        TableRow("steps", [_steps(run) for run in runs]),
        TableRow("tokens", [_large(run.steps.last("tokens")) for run in runs]),
        TableRow("training compute", [_compute(run) for run in runs]),
        TableRow("loss, last step", [_number(run.steps.last("loss"), 5) for run in runs]),
        *(TableRow(name, [_number(run.steps.last(name), 5) for run in runs]) for name in metrics),
        TableRow("tokens per second, median",
            [_count(run.steps.median("tokens_per_second")) for run in runs]),
        TableRow("goodput", [_percent(run.wall_time["kept"]) for run in runs]),
        TableRow("wall time", [f"{run.hours:.2f} h" for run in runs]),
        TableRow("ranks", [str(run.world_size or NONE) for run in runs]),
        TableRow("layout", [_layout(run) for run in runs]),
        TableRow("code", [_code(run) for run in runs]),
    ]  # fmt: skip
    return [row for row in rows if any(cell != NONE for cell in row.cells)]


def state(run: RunRecord) -> str:
    """Return the state of the run: running, finished, stopped or interrupted."""
    if run.running:
        return "running"
    ends = [event for event in run.events if event["event"] in ("end", "stop", "start", "resume")]
    if ends and ends[-1]["event"] == "end":
        return "finished"
    if ends and ends[-1]["event"] == "stop":
        return "stopped"
    return "interrupted"


def plan_rows(run: RunRecord, plan: PredictedRun) -> list[Sequence[str]]:
    """Return measured and planned numbers of a run: name, measured, planned, difference.

    Metrics that the run does not have, such as the MFU of a CPU, are left out.
    """
    median = run.steps.median
    rows = [
        ("seconds per step", median("step_seconds"), plan.step_seconds, 1.0),
        ("tokens per second", median("tokens_per_second"), plan.tokens_per_second, 1.0),
        ("TFLOP/s per device", median("tflops_per_gpu"), plan.tflops_per_gpu, 1.0),
        ("MFU (%)", median("mfu"), plan.mfu, 100.0),
        ("peak memory of rank 0 (GB)", run.steps.last("memory_gb"), plan.memory_gb, 1.0),
    ]
    return [
        (title, _number(measured * scale, 4), _number(planned * scale, 4),
         f"{measured / planned - 1:+.1%}")
        for title, measured, planned, scale in rows
        if measured is not None
    ]  # fmt: skip


def wall_time_parts(run: RunRecord) -> list[dict[str, Any]]:
    """Return the shares of the wall time: name, share, its text, and colour."""
    return [
        {"name": PART_NAMES[part], "share": 100 * run.wall_time[part], "colour": shade,
         "text": _percent(run.wall_time[part])}
        for part, shade in PARTS.items()
    ]  # fmt: skip


def stops(run: RunRecord) -> list[Sequence[str]]:
    """Return the stops and interruptions of a run, and the steps that each has cost.

    A run that was killed leaves no event `stop`: its next start repeats the steps since the
    checkpoint.
    """
    rows: list[Sequence[str]] = []
    for before, event in pairwise([{"event": "", "step": 0}, *run.events]):
        kind, step = event["event"], f"{event['step']:,}"
        if kind == "stop":
            rows.append((step, str(event.get("reason", "")), NONE))
        elif kind == "rollback":
            rows.append((step, f"rolled back: {event.get('reason', '')}", NONE))
        elif kind == "attempt_end" and event.get("reason"):
            rows.append((step, str(event["reason"]), NONE))
        elif kind == "repeat":
            lost = f"{event.get('steps', NONE)} steps, {_seconds(event.get('seconds'))}"
            if rows and before["event"] in ("stop", "rollback", "attempt_end"):
                rows[-1] = (*rows[-1][:2], lost)
            else:
                rows.append((step, "resumed after an interruption", lost))
    return rows


def mixtures(run: RunRecord) -> list[tuple[str, list[SourceShare]]]:
    """Return the mixture of each part of the data that the kept steps have read.

    Returns:
        (phases, shares of the sources), in the order of the parts; empty if the recipe is unknown
    """
    plan = run.phase_plan
    if plan is None:
        return []
    lines = []
    for part in plan.parts:
        segments = [segment for segment in plan.segments if segment.part == part]
        if segments[0].first > run.newest_step:
            break
        names = ", ".join(dict.fromkeys(segment.phase for segment in segments))
        lines.append((names, _mixture_of_part(run, plan, part)))
    return lines


def _mixture_of_part(run: RunRecord, plan: PhasePlan, part: int) -> list[SourceShare]:
    """Return the shares of the sources in a part of the data.

    Samples are counted from the first sample of the mixture, which may have begun in an earlier
    part. The boundaries of the parts are those of a run without rollbacks.
    """
    first = plan.first_of_part(part)
    train = first.recipe.data.train
    same = part
    while same and plan.first_of_part(same - 1).recipe.data.train == train:
        same -= 1
    samples = plan.samples_before(first.first)
    begin = plan.samples_before(plan.first_of_part(same).first)
    tokens, length = plan.tokens_before(first.first), first.recipe.model.sequence_length
    ends = [
        (int(step), samples - begin + (int(count) - tokens) // length)
        for step, count in zip(run.steps.step, run.steps.column("tokens"), strict=True)
        if abs(count) <= MAX_INTEGER_IN_LINE and plan.at(int(step)).part == part
    ]
    jumps = {step: sample - begin for step, sample in run.first_samples.items()}
    jumps.setdefault(first.first - 1, samples - begin)
    sources = {source.path: source.weight for source in train}
    return shares_read(sources, ends, jumps, batch=first.recipe.batch.global_sequences)


def slowest_ranks(run: RunRecord) -> list[Sequence[str]]:
    """Return the ranks that most comparisons named as the slowest: rank, times, largest ratio."""
    ranks, ratios = run.steps.column("slowest_rank"), run.steps.column("slowest_ratio")
    named = [
        (int(rank), ratio)
        for rank, ratio in zip(ranks, ratios, strict=True)
        if np.isfinite(rank) and np.isfinite(ratio)
    ]
    counts = Counter(rank for rank, _ in named)
    return [
        (str(rank), f"{count} of {len(named)}",
         f"{max(ratio for other, ratio in named if other == rank):.3g}")
        for rank, count in counts.most_common(MAX_SLOW_RANKS)
    ]  # fmt: skip


def recipe_differences(runs: Sequence[RunRecord]) -> list[TableRow]:
    """Return the keys of the recipes whose values differ between the runs."""
    tables = [flat(run.table) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [TableRow(key, [table.get(key, NONE) for table in tables]) for key in keys]
    return [row for row in rows if len(set(row.cells)) > 1]


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a recipe's table as text, by their dotted keys."""
    entries: dict[str, str] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            entries |= flat(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for number, item in enumerate(value):
                entries |= flat(item, f"{name}.{number}.")
        else:
            entries[name] = json.dumps(value, ensure_ascii=False, default=str)
    return entries


def planned(run: RunRecord, predict: Any, gpu: str | None) -> tuple[PredictedRun | None, str]:
    """Return the prediction of a run, or None and the reason why there is none."""
    try:
        return predict(run, gpu), ""
    except UserError as problem:
        return None, f"No prediction: {problem}."


def _steps(run: RunRecord) -> str:
    done = f"{int(run.steps.step[-1]):,}" if len(run.steps) else "0"
    return f"{done} of {run.recipe.training.steps:,}" if run.recipe else done


def _compute(run: RunRecord) -> str:
    tokens = run.steps.last("tokens")
    if not tokens or run.phase_plan is None:
        return NONE
    return f"{run.flops(np.array([tokens]))[0]:.3g} FLOPs"


def _layout(run: RunRecord) -> str:
    if run.phase_plan is None:
        return NONE
    layout, ranks = run.phase_plan.at(run.newest_step).recipe.layout, run.world_size
    data = f" x data {ranks // layout.ranks_per_data_rank}" if ranks else ""
    context = f" x context {layout.context}" if layout.context > 1 else ""
    return f"pipeline {layout.pipeline}{data}{context} x tensor {layout.tensor}"


def _code(run: RunRecord) -> str:
    codes = [event["code_version"] for event in run.events if event.get("code_version")]
    text = str(codes[-1]) if codes else NONE
    commit, dash, rest = text.partition("-")
    return commit[:12] + dash + rest


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else number_text(value, digits)


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _large(value: float | None) -> str:
    if value is None:
        return NONE
    size, letter = next(((size, letter) for size, letter in UNITS if value >= size), (1.0, ""))
    return f"{value / size:.4g} {letter}".strip() if letter else f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _seconds(value: Any) -> str:
    seconds = number(value)
    return NONE if seconds is None else f"{seconds:.1f} s"


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
    plans = [planned(run, predict, gpu) for run in runs]
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
        subtitle=" · ".join(f"{run.path}: {state(run)}" for run in runs),
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
        summary=summary(runs),
        figures=figures,
        differences=recipe_differences(runs),
        figures_data=_json(
            serialize_json(document.to_json(deferred=False), pretty=False) if figures else "null"
        ),
        settings=_json(json.dumps(settings)),
        footer=f"Written by recipes/report.py on {_time(time.time())} UTC. The curves are drawn by "
        f"Bokeh {bokeh.__version__}. {_reduction(runs, scene)}",
        **{name: Markup(text) for name, text in scripts.items()},
    )
    # A path may have bytes that are not UTF-8, and JSON may have half of a surrogate pair.
    return page.encode(errors="backslashreplace").decode()


def _run_facts(
    run: RunRecord, index: int, plan: tuple[PredictedRun | None, str], marks: Sequence[Any]
) -> dict[str, Any]:
    """Return the facts about a run that the template shows."""
    wall_time, start = wall_time_parts(run), 0.0
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
        "plan_rows": plan_rows(run, plan[0]) if plan[0] else [],
        "wall_time": wall_time,
        "stops": stops(run),
        "mixtures": mixtures(run),
        "slowest": slowest_ranks(run),
        "slow_events": [mark for mark in marks if mark.kind == "slow ranks"],
        "timeline": timeline,
        "recipe": tomli_w.dumps(run.table) if run.table else "",
        "event_count": len(run.events),
        "events": [
            (_time(event.get("time")), f"{event['step']:,}", event["event"], describe(event))
            for event in run.events[-MAX_EVENTS_SHOWN:]
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


def may_be_replaced(file: Path) -> bool:
    """Return True if a report may replace a file: it is a report, or empty.

    Raises:
        OSError: the file cannot be read.
    """
    start = _own_file("report.html").partition("{{")[0].encode()
    with file.open("rb") as stream:
        return stream.read(len(start)) in (start, b"")


def _title(runs: Sequence[RunRecord]) -> str:
    names = [run.name for run in runs]
    return names[0] if len(names) == 1 else f"Comparison of {', '.join(names)}"


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


# Serving of the page on this machine during its runs.

HOST = "127.0.0.1"
WATCHED = ("metrics.jsonl", "events.jsonl", "recipe.toml", "timeline.svg")
LAST_ANSWERS_SECONDS = 2.0  # time for open pages to load the final state


class Watcher:
    """A page that is generated again when its run folders have changed.

    Args:
        generate: function that returns the page as HTML, for a version
    """

    def __init__(self, paths: Sequence[Path], generate: Callable[[str], str]):
        self.paths, self.generate = paths, generate
        self._lock = Lock()
        self._page: tuple[str, bytes] | None = None

    def version(self) -> str:
        """Return a text that changes when a run folder changes."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(os.fsencode(path) + f" {is_held(path)}\n".encode())
            for name in WATCHED:
                try:
                    status = (path / name).stat()
                except OSError:
                    continue
                digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> bytes:
        """Return the page; it is generated at most once for each version."""
        with self._lock:
            version = self.version()
            if self._page is None or self._page[0] != version:
                self._page = (version, self.generate(version).encode())
            return self._page[1]

    def is_running(self) -> bool:
        """Return True if a process holds one of the run folders."""
        return any(map(is_held, self.paths))


def serve(watcher: Watcher, *, port: int, seconds: float) -> None:
    """Serve a page on this machine until its runs end or the user presses Ctrl-C.

    Args:
        port: port to listen on; 0: a free port
        seconds: interval at which the runs are checked

    Raises:
        UserError: the port is in use.
    """
    try:
        server = new_server(watcher, port)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--port {port} cannot be used ({reason_of(error)}); use another one, such as --port 0 "
            f"for any free port"
        ) from None
    thread = Thread(target=server.serve_forever, name="report", daemon=True)
    thread.start()
    print(f"serving on http://{HOST}:{server.server_port}/ until the run ends; Ctrl-C stops it",
          flush=True)  # fmt: skip
    try:
        while watcher.is_running():
            time.sleep(seconds)
        time.sleep(seconds + LAST_ANSWERS_SECONDS)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        server.shutdown()
        server.server_close()


def new_server(watcher: Watcher, port: int) -> ThreadingHTTPServer:
    """Return a server of a page on this machine; port 0 is a free one."""
    return ThreadingHTTPServer((HOST, port), _handler(watcher))


def _handler(watcher: Watcher) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers `/` with the page, and `/version` with its version."""

        def do_GET(self) -> None:
            """Answer a request of a browser on this machine."""
            # A page of another site whose name was made to point here sends its own name.
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (HOST, "localhost"):
                self._answer(403, b"only for this machine", "text/plain")
            elif self.path == "/":
                self._answer(200, watcher.page(), "text/html; charset=utf-8")
            elif self.path == "/version":
                self._answer(200, watcher.version().encode(), "text/plain")
            else:
                self._answer(404, b"not found", "text/plain")

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing about requests."""

        def _answer(self, code: int, content: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

    return Handler
