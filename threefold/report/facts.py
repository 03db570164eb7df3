"""The tables of the page: a summary of the runs, plans, goodput, mixtures, slow ranks, recipes."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import tomli_w

from models.errors import UserError
from threefold.config.phases import StagePlan
from threefold.report.mixture import SourceShare, shares_read
from threefold.report.palette import PARTS
from threefold.report.run_record import RunRecord
from threefold.report.summaries import Prediction
from threefold.run_folder.history import CAUSE_TEXTS
from threefold.run_folder.json_lines import MAX_INTEGER_IN_LINE, number

NONE = "–"  # noqa: RUF001 (a dash)
MAX_SLOW_RANKS = 5
PART_NAMES = {"kept": "kept steps"} | CAUSE_TEXTS
UNITS = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


@dataclass(frozen=True)
class Row:
    """A row of a table: its title, and a text for each run."""

    title: str
    cells: Sequence[str]


def summary(runs: Sequence[RunRecord]) -> list[Row]:
    """Return the most important numbers of each run."""
    metrics = list(dict.fromkeys(
        name for run in runs for name in run.steps.values
        if name.startswith(("validation_loss", "validation/", "tasks/"))
    ))  # fmt: skip
    rows = [
        Row("state", [state(run) for run in runs]),
        Row("steps", [_steps(run) for run in runs]),
        Row("tokens", [_large(run.steps.last("tokens")) for run in runs]),
        Row("training compute", [_compute(run) for run in runs]),
        Row("loss, last step", [_number(run.steps.last("loss"), 5) for run in runs]),
        *(Row(name, [_number(run.steps.last(name), 5) for run in runs]) for name in metrics),
        Row("tokens per second, median",
            [_count(run.steps.median("tokens_per_second")) for run in runs]),
        Row("goodput", [_percent(run.wall_time["kept"]) for run in runs]),
        Row("wall time", [f"{run.hours:.2f} h" for run in runs]),
        Row("ranks", [str(run.world_size or NONE) for run in runs]),
        Row("layout", [_layout(run) for run in runs]),
        Row("code", [_code(run) for run in runs]),
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


def plan_rows(run: RunRecord, plan: Prediction) -> list[Sequence[str]]:
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
        (stages, shares of the sources), in the order of the parts; empty if the recipe is unknown
    """
    plan = run.plan
    if plan is None:
        return []
    found = []
    for part in plan.parts:
        spans = [span for span in plan.spans if span.part == part]
        if spans[0].first > run.newest_step:
            break
        names = ", ".join(dict.fromkeys(span.stage for span in spans))
        found.append((names, _mixture_of_part(run, plan, part)))
    return found


def _mixture_of_part(run: RunRecord, plan: StagePlan, part: int) -> list[SourceShare]:
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


def event_rows(run: RunRecord, most: int) -> list[dict[str, Any]]:
    """Return the newest events of a run, at most `most`."""
    return run.events[-most:]


def recipe_differences(runs: Sequence[RunRecord]) -> list[Row]:
    """Return the keys of the recipes whose values differ between the runs."""
    tables = [flat(run.table) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [Row(key, [table.get(key, NONE) for table in tables]) for key in keys]
    return [row for row in rows if len(set(row.cells)) > 1]


def recipe_text(run: RunRecord) -> str:
    """Return the recipe as TOML; empty if it could not be read."""
    return tomli_w.dumps(run.table) if run.table else ""


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a recipe's table as text, by their dotted keys."""
    found: dict[str, str] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= flat(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for number, each in enumerate(value):
                found |= flat(each, f"{name}.{number}.")
        else:
            found[name] = json.dumps(value, ensure_ascii=False, default=str)
    return found


def planned(run: RunRecord, predict: Any, gpu: str | None) -> tuple[Prediction | None, str]:
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
    if not tokens or run.plan is None:
        return NONE
    return f"{run.flops(np.array([tokens]))[0]:.3g} FLOPs"


def _layout(run: RunRecord) -> str:
    if run.plan is None:
        return NONE
    layout, ranks = run.plan.at(run.newest_step).recipe.layout, run.world_size
    model = layout.pipeline * layout.tensor * layout.context
    data = f" x data {ranks // model}" if ranks else ""
    context = f" x context {layout.context}" if layout.context > 1 else ""
    return f"pipeline {layout.pipeline}{data}{context} x tensor {layout.tensor}"


def _code(run: RunRecord) -> str:
    codes = [event["code_version"] for event in run.events if event.get("code_version")]
    text = str(codes[-1]) if codes else NONE
    commit, dash, rest = text.partition("-")
    return commit[:12] + dash + rest


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return NONE
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.{digits}g}"


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
