"""The record of a run: the contents of its run folder, read without changing it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.cost import flops_per_token
from models.errors import UserError, reason_of
from threefold.config.loading import is_nested_too_deeply, parse_recipe
from threefold.config.phases import StagePlan
from threefold.config.recipe import Recipe
from threefold.report.branches import abandoned_branches, divide
from threefold.report.steps import Steps
from threefold.run_folder.folder import EVENT_KEYS, METRIC_KEYS
from threefold.run_folder.history import WallTime, replay
from threefold.run_folder.json_lines import LineFile, number
from threefold.run_folder.lock import is_held

MAX_RANKS = 2**24  # a larger number is damage
MAX_TIMELINE_BYTES = 1_500_000  # of a picture in the page


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The record of a run.

    Attributes:
        path: the run folder
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
    def plan(self) -> StagePlan | None:
        """The stages of the run; None if the recipe cannot be read."""
        return StagePlan(self.recipe) if self.recipe else None

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs per token at the newest step; None if the recipe cannot be read."""
        if self.plan is None:
            return None
        return flops_per_token(self.plan.at(self.newest_step).recipe.model)

    @property
    def newest_step(self) -> int:
        """The newest kept step; 1 if there is none yet."""
        return int(self.steps.step[-1]) if len(self.steps) else 1

    def flops(self, tokens: np.ndarray) -> np.ndarray:
        """Return the training FLOPs of the first `tokens` tokens of the run; NaN if not known.

        A token costs more in stages with longer sequences. The boundaries of the stages are those
        of a run without rollbacks.
        """
        if self.plan is None:
            return np.full(len(tokens), np.nan)
        total = np.where(np.isnan(tokens), np.nan, 0.0)
        for span in self.plan.spans:
            begin = self.plan.tokens_before(span.first)
            end = np.inf if span is self.plan.spans[-1] else self.plan.tokens_before(span.last + 1)
            inside = np.clip(tokens, begin, end) - begin
            with np.errstate(over="ignore"):  # a damaged line may claim 1e308 tokens
                total += inside * flops_per_token(span.recipe.model)
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
        what = "is not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}; name a run folder, such as runs/tiny")
    files = [path / file for file in ("metrics.jsonl", "events.jsonl", "recipe.toml")]
    if not any(file.exists() for file in files):
        raise UserError(
            f"{path} is not a run folder: it has no metrics.jsonl, events.jsonl or recipe.toml; "
            f"name a folder that pretrain.py has written, such as runs/tiny"
        )
    problems: list[str] = []
    lines = _read_lines(files[0], METRIC_KEYS, problems)
    events = _read_lines(files[1], EVENT_KEYS, problems)
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
        found = lines.parse(complete)
    except OSError as error:
        problems.append(f"{file} cannot be read ({error.strerror})")
        return []
    usable = [line for line in found if line["step"] >= 0]
    written = sum(1 for line in complete.split(b"\n") if line.strip(b"\0 \t\r"))
    if damaged := written - len(usable):
        problems.append(
            f"{file}: {damaged} of {written} lines are damaged, and left out of this report"
        )
    return usable


def _read_recipe(file: Path, problems: list[str]) -> tuple[dict[str, Any], Recipe | None]:
    """Return the table of a recipe, and the recipe if this version accepts it."""
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
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
        return table, parse_recipe(table, str(file))
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
