"""The record of a run: steps, branches and events of its run folder, read without changing it."""

import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from models.cost import flops_per_token
from models.errors import UserError, reason_of, suggestion, why_no_folder
from threefold.config.loading import is_nested_too_deeply, parse_recipe
from threefold.config.phases import PhasePlan, with_current_names
from threefold.config.recipe import Recipe
from threefold.pipeline.balance import evenly_spaced
from threefold.run_folder.folder import EVENT_KEYS, METRIC_KEYS
from threefold.run_folder.history import WallTime, current_event, replay
from threefold.run_folder.json_lines import LineFile, number, too_large, with_metric_per_position
from threefold.run_folder.lock import is_held

# The metrics of successive steps as arrays.


@dataclass(frozen=True)
class Steps:
    """Metrics of successive steps; every array has the shape [steps].

    Attributes:
        step: numbers of the steps, increasing; int64
        values: metric -> its value after each step, NaN where a line lacks it; float64
    """

    step: np.ndarray
    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]]) -> "Steps":
        """Convert lines of metrics.jsonl.

        Values that are not numbers become NaN, and metrics without any number are left out.
        """
        lines = [with_metric_per_position(line) for line in lines]
        names = dict.fromkeys(name for keys in dict.fromkeys(map(tuple, lines)) for name in keys)
        columns = {
            name: _column([line.get(name) for line in lines]) for name in names if name != "step"
        }
        values = {name: column for name, column in columns.items() if not np.isnan(column).all()}
        return cls(np.array([line["step"] for line in lines], np.int64), values)

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> np.ndarray:
        """Return a metric; all NaN if no line has it."""
        values = self.values.get(name)
        return np.full(len(self), np.nan) if values is None else values

    def last(self, name: str) -> float | None:
        """Return the newest finite value of a metric; None if there is none."""
        values = self.column(name)
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def median(self, name: str) -> float | None:
        """Return the median of the finite values of a metric; None if there are none."""
        values = self.column(name)
        finite = values[np.isfinite(values)]
        return float(np.median(finite)) if len(finite) else None

    def at(self, steps: Sequence[int], name: str) -> np.ndarray:
        """Return a metric at or just before each of some steps; NaN before the first step."""
        places = np.searchsorted(self.step, np.array(steps, np.int64), side="right") - 1
        column = np.append(self.column(name), np.nan)  # place -1 is the appended NaN
        return column[places]


def _column(values: list[Any]) -> np.ndarray:
    if set(map(type, values)) <= {float, type(None)}:  # numpy turns None into NaN
        return np.array(values, np.float64)
    return np.array([_number(value) for value in values], np.float64)


def _number(value: Any) -> float:
    """Return a value of a line as a float; NaN for anything but a number of a usual size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")


# The kept steps of a run, and the branches that it has abandoned.
#
# A run abandons steps when it rolls back or continues from an earlier checkpoint. It then copies
# metrics.jsonl to metrics.<stamp>.jsonl and removes the abandoned lines (`RunFolder.prepare`). If
# the file could not be rewritten, for example on a full disk, it contains some steps twice, and
# the later line of a step counts. After a kill, the steps since the checkpoint are repeated with
# equal results, so no copy of their first lines exists.

Line = dict[str, Any]


def divide(lines: Iterable[Line]) -> tuple[list[Line], list[list[Line]]]:
    """Divide the lines of a file into kept steps and abandoned branches.

    Args:
        lines: metrics of steps, in the order of the file

    Returns:
        The kept lines, with increasing steps, and the abandoned branches. A branch begins with the
        last kept line before it, if there is one, so that its curve starts on the kept curve.
    """
    kept: list[Line] = []
    branches: list[list[Line]] = []
    for line in lines:
        if kept and line["step"] <= kept[-1]["step"]:
            cut = bisect_left(kept, line["step"], key=lambda kept_line: kept_line["step"])
            branches.append(kept[max(0, cut - 1) :])
            del kept[cut:]
        kept.append(line)
    return kept, branches


def abandoned_branches(kept: Sequence[Line], copies: Iterable[Sequence[Line]]) -> list[list[Line]]:
    """Return the branches in earlier copies of metrics.jsonl that the run has not kept.

    Args:
        kept: the kept lines of the run
        copies: the lines of each copy, oldest first; each has the whole file of its time
    """
    known: set[tuple] = set()
    parts: list[list[Line]] = []
    for lines in copies:
        known = known or {_identity(line) for line in kept}
        then_kept, branches = divide(lines)
        for branch in [*branches, then_kept]:
            parts += _unknown_parts(branch, known)
            known |= {_identity(line) for line in branch}
    return parts


def _unknown_parts(branch: Sequence[Line], known: set[tuple]) -> list[list[Line]]:
    """Return the sequences of unknown lines, each preceded by the line before it."""
    parts: list[list[Line]] = []
    is_new = [_identity(line) not in known for line in branch]
    if branch and is_new[0]:
        parts.append([branch[0]])
    for (before, line), (was_new, new) in zip(pairwise(branch), pairwise(is_new), strict=True):
        if new and not was_new:
            parts.append([before])
        if new:
            parts[-1].append(line)
    return parts


def _identity(line: Line) -> tuple:
    """Return a key that differs between two runs of the same step; NaN equals NaN here."""
    values = (line.get(key) for key in ("loss", "grad_norm", "step_seconds", "tokens"))
    return (line["step"], *map(repr, values))


MAX_RANKS = 2**24  # a larger number is damage
MAX_TIMELINE_BYTES = 1_500_000  # of a picture in the page


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run.

    Attributes:
        name: shown in the report, and different for each of the runs
        steps: the steps that were kept
        abandoned: the branches that were not kept; each begins on the kept curve
        events: all events, oldest first
        table: the recipe as in recipe.toml; empty if it cannot be read
        recipe: the validated recipe; None if this version does not accept it
        wall_time: shares of the wall time by cause; they add up to 1
        hours: since the first start
        timeline: content of timeline.svg; None if there is none
        running: True if a process holds the run folder
        problems: what could not be read, for the reader of the report
    """

    path: Path
    name: str
    steps: Steps
    abandoned: list[Steps]
    events: list[dict[str, Any]]
    table: dict[str, Any]
    recipe: Recipe | None
    wall_time: dict[str, float]
    hours: float
    timeline: bytes | None
    running: bool
    problems: list[str]

    @cached_property
    def phase_plan(self) -> PhasePlan | None:
        """The phases of the run; None if the recipe cannot be read."""
        return PhasePlan(self.recipe) if self.recipe else None

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token at the newest step; None if the recipe cannot be read."""
        if self.phase_plan is None:
            return None
        return flops_per_token(self.phase_plan.at(self.newest_step).recipe.model)

    @property
    def newest_step(self) -> int:
        """The newest kept step; 1 if there is none yet."""
        return int(self.steps.step[-1]) if len(self.steps) else 1

    def flops(self, tokens: np.ndarray) -> np.ndarray:
        """Return the training FLOPs of the first `tokens` tokens of the run; NaN if not known.

        A token costs more in phases with longer sequences. The boundaries of the phases are those
        of a run without rollbacks.
        """
        if self.phase_plan is None:
            return np.full(len(tokens), np.nan)
        total = np.where(np.isnan(tokens), np.nan, 0.0)
        for segment in self.phase_plan.segments:
            begin = self.phase_plan.tokens_before(segment.first)
            end = (
                np.inf
                if segment is self.phase_plan.segments[-1]
                else self.phase_plan.tokens_before(segment.last + 1)
            )
            inside = np.clip(tokens, begin, end) - begin
            with np.errstate(over="ignore"):  # a damaged line may claim 1e308 tokens
                total += inside * flops_per_token(segment.recipe.model)
        return total

    @property
    def world_size(self) -> int | None:
        """The number of ranks at the newest step; None if the metrics do not say it.

        `tflops_per_gpu` is the work of a step divided by its duration and by the number of ranks.
        """
        flops, rate = self.flops_per_token, self.steps.last("tflops_per_gpu")
        tokens = self.steps.last("tokens_per_second")
        if not (flops and rate and tokens and rate > 0):
            return None
        ranks = flops * tokens / (rate * 1e12)
        return max(1, round(ranks)) if ranks < MAX_RANKS else None

    @property
    def first_samples(self) -> dict[int, int]:
        """Step -> the next sample that is read, for steps after which the run skipped samples."""
        return replay(self.events).first_samples()


def read_run(path: Path, name: str) -> RunRecord:
    """Read a run folder; what is damaged or missing becomes a problem of the record.

    Raises:
        UserError: the folder does not exist, or is not a run folder.
    """
    if not path.is_dir():
        runs = sorted(file.parent.name for file in path.parent.glob("*/metrics.jsonl"))
        advice = "name a run folder, such as runs/tiny"
        if runs:
            advice = suggestion(path.name, runs, folder=f"{path.parent}/")
        raise UserError(f"{path} {why_no_folder(path)}; {advice}")
    files = [path / file for file in ("metrics.jsonl", "events.jsonl", "recipe.toml")]
    if not any(file.exists() for file in files):
        raise UserError(
            f"{path} is not a run folder: it has no metrics.jsonl, events.jsonl or recipe.toml; "
            f"name a folder that pretrain.py has written, such as runs/tiny"
        )
    problems: list[str] = []
    lines = _read_lines(files[0], METRIC_KEYS, problems)
    events = [current_event(event) for event in _read_lines(files[1], EVENT_KEYS, problems)]
    kept, branches = divide(lines)
    copies = sorted(path.glob("metrics.*.jsonl"))
    branches += abandoned_branches(
        kept, (_read_lines(copy, METRIC_KEYS, problems) for copy in copies)
    )
    table, recipe = _read_recipe(files[2], problems)
    if not kept and files[0].exists():
        problems.append(f"{files[0]} has no complete step yet")
    running = is_held(path)
    wall_time = WallTime(events, kept)
    end = _end_time(files[0], events)
    return RunRecord(
        path=path,
        name=name,
        steps=Steps.of(kept),
        abandoned=[Steps.of(branch) for branch in branches],
        events=events,
        table=table,
        recipe=recipe,
        wall_time=wall_time.shares(end),
        hours=wall_time.hours(end),
        timeline=_read_timeline(path / "timeline.svg", problems),
        running=running,
        problems=problems,
    )


def names_of(paths: list[Path]) -> list[str]:
    """Return a different name for each run folder: its own name, or more of its path if needed.

    Raises:
        UserError: a folder is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for path in resolved:
        if resolved.count(path) > 1:
            raise UserError(f"{path} is given twice; name each run once")
    for depth in range(1, max(len(path.parts) for path in resolved) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in resolved]


def _read_lines(
    file: Path, keys: Mapping[str, tuple[type, ...]], problems: list[str]
) -> list[dict[str, Any]]:
    """Return the lines of a file that can be parsed.

    A last line without a line break is being written, so it is left out without a problem.
    """
    lines = LineFile(file, keys=keys)
    try:
        if not file.exists():
            problems.append(f"{file} does not exist")
            return []
        content = lines.content()
        complete = content[: content.rfind(b"\n") + 1]
        events = lines.parse(complete)
    except OSError as error:
        problems.append(f"{file} cannot be read ({error.strerror})")
        return []
    usable = [line for line in events if line["step"] >= 0]
    written = sum(1 for line in complete.split(b"\n") if line.strip(b"\0 \t\r"))
    if damaged := written - len(usable):
        problems.append(
            f"{file}: {damaged} of {written} lines are damaged, and left out of this report"
        )
    return usable


def _read_recipe(file: Path, problems: list[str]) -> tuple[dict[str, Any], Recipe | None]:
    """Return the table of a recipe, and the recipe if this version accepts it."""
    try:
        table = with_current_names(tomllib.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        problems.append(f"{file} does not exist: no plan, no mixture and no FLOPs")
        return {}, None
    except OSError as error:
        problems.append(f"{file} cannot be read ({error.strerror})")
        return {}, None
    except (ValueError, RecursionError) as error:
        problems.append(
            f"{file} is not valid TOML ({reason_of(error)}): no plan, no mixture and no FLOPs"
        )
        return {}, None
    try:
        return table, parse_recipe(with_current_names(table), str(file))
    except UserError as problem:
        problems.append(f"no plan, no mixture and no FLOPs: {problem}")
        return {} if is_nested_too_deeply(table) else table, None


def _end_time(metrics: Path, events: list[dict[str, Any]]) -> float:
    """Return the time until which the run is known to have run, in seconds since the epoch.

    It is the time of the last event after an orderly end, and otherwise that of the last step.
    """
    times = [time for event in events if (time := number(event.get("time"))) is not None]
    last = times[-1] if times and np.isfinite(times[-1]) else 0.0
    if events and events[-1]["event"] in ("end", "stop"):
        return last
    try:
        return max(last, metrics.stat().st_mtime)
    except OSError:
        return last


def _read_timeline(file: Path, problems: list[str]) -> bytes | None:
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{file} cannot be read ({error.strerror})")
        return None
    if len(content) > MAX_TIMELINE_BYTES:
        problems.append(
            f"{file} has {len(content) / 1e6:.1f} MB, too much for this page; open the file itself"
        )
        return None
    return content


# Events as marks on the curves, with a description of each.

Event = Mapping[str, Any]
MAX_DEPTH = 4  # of nested lists and tables in a description
MAX_TEXT = 300  # characters of a description
MAX_MARKS = 400  # marks of each kind, spread over the run
# Kinds of marks, in the order of their lanes from the top; the symbols are Bokeh's.
SYMBOLS = {
    "resume": "triangle",
    "branch": "star",
    "phase": "diamond_cross",
    "re-plan": "diamond",
    "rollback": "inverted_triangle",
    "skip": "x",
    "stop": "square",
    "slow ranks": "hex",
    "GPU error": "asterisk",
    "warning": "plus",
    "save": "circle",
}
TURNS = ("resume", "branch", "re-plan", "rollback")  # the run changed its course
NO_DETAIL = {"event", "step", "time", "attempt", "wall_time", "code_version", "stamp", "seconds",
             "number", "predicted_step_seconds", "plan", "read_parts"}  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """An event at a step.

    Attributes:
        kind: a key of SYMBOLS
        step: the last completed step
        text: description of the event; untrusted, because users and machines wrote its parts
    """

    kind: str
    step: int
    text: str


def marks_of(events: Iterable[Event]) -> list[Mark]:
    """Return the marks of a run's events; at most MAX_MARKS of a kind, which include the newest."""
    by_kind: dict[str, list[Mark]] = {kind: [] for kind in SYMBOLS}
    for event in events:
        if (kind := kind_of(event)) is not None:
            by_kind[kind].append(Mark(kind, event["step"], describe(event)))
    return [
        marks[index] for marks in by_kind.values() for index in evenly_spaced(len(marks), MAX_MARKS)
    ]


def kind_of(event: Event) -> str | None:
    """Return the kind of an event's mark; None for an event that is not marked."""
    kind = event["event"]
    if kind == "attempt":  # the first attempt of launch.py is the start of the run
        return "re-plan" if event.get("number") not in (None, 1) else None
    if kind == "replace":
        return "re-plan"
    names = {"slow": "slow ranks", "gpu_error": "GPU error"}
    name = names.get(kind, kind)
    return name if name in SYMBOLS else None


def describe(event: Event) -> str:
    """Return the details of an event in words."""
    kind = event["event"]
    if kind == "rollback":
        return _cut(f"to step {event.get('to')}: {event.get('reason', '')}")
    if kind == "repeat":
        return f"steps lost and repeated: {event.get('steps')}"
    if kind == "save":
        return _cut(str(event.get("checkpoint", "")).rpartition("/")[2])
    if kind == "slow":
        ranks, nodes, ratio = (_words(event.get(key)) for key in ("ranks", "nodes", "ratio"))
        return _cut(f"ranks {ranks} on {nodes} take {ratio} times as long as similar ranks")
    for key in ("reason", "message", "error"):
        if event.get(key):
            rest = f" ({event['layout']})" if kind == "attempt" and event.get("layout") else ""
            return _cut(f"{event[key]}{rest}")
    details = [
        f"changed: {_changes(value)}" if key == "changed" else f"{key} {_words(value)}"
        for key, value in event.items()
        if key not in NO_DETAIL
    ]
    return _cut(", ".join(details))


def _changes(value: Any) -> str:
    """Return the changed keys of a recipe with their old and new values."""
    if not isinstance(value, dict):
        return _words(value)
    pairs = [
        (key, " -> ".join(map(_words, item)) if isinstance(item, list) else _words(item))
        for key, item in value.items()
    ]
    return "; ".join(f"{key}: {text}" for key, text in pairs)


def _words(value: Any, depth: int = 0) -> str:
    if isinstance(value, dict | list) and depth == MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_words(item, depth + 1)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(_words(item, depth + 1) for item in value)
    if too_large(value):  # str() has a limit of 4,300 digits
        return "a very large number"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
