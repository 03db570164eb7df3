"""Text and tables that plan.py prints, and the predictions that a run sends with its metrics."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from models.cost import (
    active_parameter_count,
    flops_per_token,
    parameter_count,
    recomputed_flops_per_token,
)
from models.errors import UserError, counted
from threefold.config.phases import PhasePlan, Segment
from threefold.config.recipe import Recipe
from threefold.config.sections import FIRST_PHASE
from threefold.pipeline.schedules import schedule_name
from threefold.plan.calibration.fit import Fit, errors_by_group
from threefold.plan.job import Job, Machine, PlannedLayout, job_of, links_text, own_job
from threefold.plan.memory.peak import (
    GIB,
    MEMORY_BAND,
    StageMemory,
    exceeds_band,
    fits,
    fullest_stage,
    host_bytes,
    stage_memory,
)
from threefold.plan.recipe_edits import edits_in_phase, replaced_settings
from threefold.plan.search import (
    DEFAULT_HEADROOM,
    NEAR_TIE,
    Plan,
    SearchResult,
    is_near_tie,
)
from threefold.plan.software import Software
from threefold.plan.stage_contents import stage_imbalance, stages_text
from threefold.plan.time.step import TIME_PARTS, StepTime, step_time

MIN_MICRO_BATCHES_PER_STAGE = 4
MAX_ROWS_IN_LINE = 8
MEMORY_PARTS = [field.name for field in fields(StageMemory)]


@dataclass(frozen=True)
class Rates:
    """Throughput of a step.

    Attributes:
        model_tflops: TFLOP/s per GPU, without recomputation
        hardware_tflops: TFLOP/s per GPU, with recomputation
    """

    model_tflops: float
    hardware_tflops: float
    mfu: float
    tokens_per_second: float


def rates(job: Job, seconds: float) -> Rates:
    """Return the rates of a step that takes `seconds`."""
    gpus = job.machine.gpus
    flops = flops_per_token(job.model) * job.tokens_per_step
    again = recomputed_flops_per_token(job.model, job.layout.recompute) * job.tokens_per_step
    model_tflops = flops / seconds / gpus / 1e12
    return Rates(
        model_tflops=model_tflops,
        hardware_tflops=(flops + again) / seconds / gpus / 1e12,
        mfu=model_tflops / job.peak_tflops,
        tokens_per_second=job.tokens_per_step / seconds,
    )


@dataclass(frozen=True)
class Cost:
    """Duration and price of a run, or of a phase of it."""

    days: float
    gpu_hours: float
    dollars: float


def cost(machine: Machine, seconds: float) -> Cost:
    """Return the cost of `seconds` on a machine."""
    hours = seconds / 3600
    gpu_hours = hours * machine.gpus
    return Cost(hours / 24, gpu_hours, gpu_hours * machine.gpu.dollars_per_hour)


def seconds_of_segments(job: Job, segments: Sequence[Segment]) -> float:
    """Return the time of a phase's segments, which differ only in the batch, as a job runs them."""
    batches = [(segment.steps, segment.recipe.batch.global_sequences) for segment in segments]
    return sum(
        steps * step_time(replace(job, global_sequences=sequences)).total
        for steps, sequences in batches
    )


def heading(recipe: Recipe, job: Job) -> str:
    """Describe a recipe and its machine in two lines."""
    machine, plan, model = job.machine, PhasePlan(recipe), recipe.model
    active = f", of which {short_count(active_parameter_count(model))} compute a token"
    parameters = f"{short_count(parameter_count(model))} parameters{active * bool(model.experts)}"
    phases = f" to {plan.segments[-1].recipe.tokens_per_step:,}" if len(plan.segments) > 1 else ""
    return (
        f"{recipe.name}: {parameters}, "
        f"{short_count(plan.total_tokens)} tokens, {counted(recipe.training.steps, 'step')} of "
        f"{plan.segments[0].recipe.tokens_per_step:,}{phases} tokens\n"
        f"{machine.gpus:,} x {machine.gpu.name} on {machine.nodes} "
        f"node{'s' * (machine.nodes > 1)}, {job.precision}, software {job.software.name}; "
        f"{links_text(machine)}"
    )


def short_count(count: float) -> str:
    """Format a count in thousands, millions, billions or trillions, such as 70.6 B."""
    for size, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:,.3g}{letter}"
    return f"{count:.3g}"


def layout_line(layout: PlannedLayout) -> str:
    """Describe a layout in one line."""
    recompute = layout.recompute
    if layout.recompute_interval > 1:
        recompute += f" by {layout.recompute_interval}"
    return (
        f"{layout.text}, "
        + ("expert overlap, " if layout.expert_overlap else "")
        + f"ZeRO-{layout.zero_stage}"
        + (f" in groups of {layout.dp_shard}" if layout.dp_shard else "")
        + f", {schedule_name(layout.schedule, layout.virtual_stages)}"
        + (f", {layout.context_attention}" if layout.context > 1 else "")
        + (", sequence parallel" if layout.sequence_parallel else "")
        + f", recompute {recompute}, micro-batch size {layout.micro_sequences}"
    )


def plan_text(job: Job, seconds: float) -> Iterator[str]:
    """Yield lines with a layout's memory by stage, the parts of its step time, rates and cost.

    seconds: the time of all steps
    """
    time, memory = step_time(job), stage_memory(job)
    many = "es" * (job.micro_batches > 1)
    yield f"{layout_line(job.layout)}, {job.micro_batches:,} micro-batch{many} per step"
    if job.layout.pipeline > 1:
        yield stages_text(job)
    yield ""
    yield "GiB per GPU     " + "".join(f"{name:>12}" for name in [*MEMORY_PARTS, "total"])
    for name, stage in distinct_stages(memory):
        cells = [getattr(stage, name) for name in MEMORY_PARTS] + [stage.total]
        yield f"{name:16}" + "".join(f"{cell / GIB:12.2f}" for cell in cells)
    yield from fit_lines(job, memory)
    yield ""
    used = {"context": job.layout.context > 1, "expert": job.model.experts is not None}
    parts = [name for name in TIME_PARTS if used.get(name, True)]
    yield "seconds per step" + "".join(f"{name:>12}" for name in [*parts, "total"])
    spent = [getattr(time, name) for name in parts]
    yield f"{'':16}" + "".join(f"{part:12.3f}" for part in [*spent, time.total])
    yield f"{'':16}" + "".join(f"{part / time.total:12.1%}" for part in spent)
    yield ""
    yield rates_text(rates(job, time.total))
    yield cost_text(cost(job.machine, seconds))
    yield from warnings(job, memory)


def warnings(job: Job, memory: Sequence[StageMemory]) -> Iterator[str]:
    """Yield warnings about a layout that fits, but leaves little memory free or stages idle."""
    limit = job.machine.gpu.memory_gib * GIB
    free = 1 - max(stage.total for stage in memory) / limit
    if 0 <= free < DEFAULT_HEADROOM:
        yield (
            f"Warning: {free:.0%} of the GPU memory is free; leave {DEFAULT_HEADROOM:.0%}, because "
            f"predictions are off by a few per cent, and the allocator needs room."
        )
    layout = job.layout
    if job.micro_batches < MIN_MICRO_BATCHES_PER_STAGE * layout.pipeline and layout.pipeline > 1:
        smaller = "batch.micro_sequences or layout.pipeline"
        if layout.micro_sequences == 1:
            smaller = "layout.pipeline"
        yield (
            f"Warning: {job.micro_batches} micro-batches for {layout.pipeline} stages; with fewer "
            f"than {MIN_MICRO_BATCHES_PER_STAGE} for each stage, stages are often idle. Use a "
            f"smaller {smaller}, or a larger batch.global_sequences."
        )


def fit_lines(job: Job, memory: Sequence[StageMemory]) -> Iterator[str]:
    """Yield the memory of the fullest stage and, if it is too small, that of the host."""
    fullest = max(stage.total for stage in memory) / GIB
    limit = job.machine.gpu.memory_gib
    if exceeds_band(fullest, limit):
        yield f"DOES NOT FIT: needs {fullest:.1f} of {limit:g} GiB"
    elif fullest > limit:
        yield (
            f"MAY NOT FIT: needs {fullest:.1f} of {limit:g} GiB, and predictions are up to "
            f"{MEMORY_BAND:.0%} too large; choose a layout that leaves memory free"
        )
    else:
        yield f"fits: {fullest:.1f} of {limit:g} GiB, {1 - fullest / limit:.0%} free"
    host, host_limit = host_bytes(job) / GIB, job.machine.gpu.node_memory_gib
    if host > host_limit:
        yield (
            f"DOES NOT FIT IN HOST MEMORY: building the model needs {host:,.0f} of "
            f"{host_limit:,.0f} GiB per node"
        )


def rates_text(rate: Rates) -> str:
    """Format rates in one line."""
    recomputing = ""
    if rate.hardware_tflops > rate.model_tflops:
        recomputing = f" ({rate.hardware_tflops:.3g} including recomputation)"
    return (
        f"{rate.model_tflops:.3g} TFLOP/s per GPU{recomputing}, MFU {rate.mfu:.1%}, "
        f"{rate.tokens_per_second:,.0f} tokens/s"
    )


def cost_text(spent: Cost) -> str:
    """Format a cost in one line."""
    days = f"{spent.days:,.1f} days" if spent.days >= 1 else f"{24 * spent.days:.2g} hours"
    return f"{days}, {short_count(spent.gpu_hours)} GPU hours, about ${short_count(spent.dollars)}"


def distinct_stages(memory: Sequence[StageMemory]) -> list[tuple[str, StageMemory]]:
    """Merge neighbouring stages of equal memory into groups, such as "stage 2 .. 7".

    Of more than four groups, return only the first, the fullest of those between, and the last.
    """
    groups: list[tuple[int, int, StageMemory]] = []
    for number, stage in enumerate(memory):
        if groups and groups[-1][2] == stage:
            groups[-1] = (groups[-1][0], number, stage)
        else:
            groups.append((number, number, stage))
    if len(groups) > 4:  # with 1F1B, each stage holds one micro-batch less than the one before
        fullest = max(groups[1:-1], key=lambda group: group[2].total)
        groups = [groups[0], fullest, groups[-1]]
    return [
        (f"stage {first}" + (f" .. {last}" if last > first else ""), stage)
        for first, last, stage in groups
    ]


def search_lines(result: SearchResult, own: StepTime | None) -> Iterator[str]:
    """Yield lines with the best layouts, an explanation of the first, and the rejected layouts.

    Args:
        own: time of a step in the recipe's own layout; None if that layout is not valid
    """
    if result.plans:
        yield f"Best of {result.tried:,} layouts:"
    fastest = min((plan.time.total for plan in result.plans), default=0.0)
    ties = [is_near_tie(plan.time.total, fastest) for plan in result.plans]
    for rank, plan in enumerate(result.plans, start=1):
        seconds = plan.time.total
        yield (
            f"{rank:3}.{'=' if ties[rank - 1] and sum(ties) > 1 else ' '}{seconds:9.3f} s"
            + (f" ({seconds / own.total - 1:+.1%})" if own else "")
            + f"  {plan.memory.total / GIB:5.1f} GiB  {layout_line(plan.job.layout)}"
        )
    if result.plans and own and result.plans[0].time.total < own.total:
        yield difference_text(result.plans[0].time, own)
    if sum(ties) > 1:
        yield (
            f"= within {NEAR_TIE:.0%} of the fastest; simplest first. Measure these layouts to "
            f"choose."
        )
    if not result.plans and result.problem:
        yield f"None of {result.tried:,} layouts is valid in the whole run: {result.problem}"
    elif not result.plans:
        yield f"None of {result.tried:,} layouts fits."
    reasons = ", ".join(f"{reason} ({n:,})" for reason, n in result.rejected.most_common())
    if reasons:
        yield f"Left out: {reasons}."
    if result.nearest and not result.plans:
        layout, excess = result.nearest
        yield f"The closest needs {excess:.1f} GiB more per GPU: {layout_line(layout)}"


def difference_text(best: StepTime, own: StepTime) -> str:
    """Explain in a sentence where layout 1 gains and loses time against the recipe's own layout."""
    gained = own.total - best.total
    parts = {name: getattr(best, name) - getattr(own, name) for name in TIME_PARTS}
    shown = sorted(parts.items(), key=lambda part: part[1])
    large = [f"{name} {change:+.3f}" for name, change in shown if abs(change) >= gained / 10]
    return f"Layout 1 is {gained:.3f} s faster than the recipe's own layout: {', '.join(large)}."


def evaluation_text(name: str, summary: Mapping[str, Any]) -> str:
    """Format the errors of a table as a row of Markdown."""

    def cell(key: str, form: str = ".1f") -> str:
        value = summary.get(key)
        return "" if value is None else format(value, form)

    false_alarms = ""
    if summary.get("predicted"):  # of the rows that ran
        ran = summary["predicted"] - summary.get("out_of_memory_rows", 0)
        false_alarms = f"{summary['false_alarms']} of {ran}"
    return " | ".join(
        [
            f"| {name}",
            cell("compared", "d"),
            cell("mean_absolute_error_percent"),
            cell("max_absolute_error_percent"),
            cell("bias_percent", "+.1f"),
            cell("kendall_tau", ".2f"),
            cell("mean_regret_percent"),
            cell("memory_mean_absolute_error_percent"),
            false_alarms,
            f"{summary['skipped']} |",
        ]
    )


EVALUATION_HEADER = (
    "| table | rows | mean error, % | largest | bias | tau | regret, % | memory error, % | "
    "false alarms | skipped |\n|---|---|---|---|---|---|---|---|---|---|"
)


GROUPS_HEADER = (
    "| software | GPU | matmuls | rows | mean error, % | largest | bias | memory error, % |\n"
    "|---|---|---|---|---|---|---|---|"
)


def groups_lines(results: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of the errors by software, GPU and format of the matmuls."""
    yield GROUPS_HEADER
    for (software, gpu, precision), rows in errors_by_group(results).items():
        errors = [row["error_percent"] for row in rows if row["error_percent"] is not None]
        memory = [row["memory_error_percent"] for row in rows]
        memory = [abs(error) for error in memory if error is not None]
        if not errors and not memory:
            continue
        cells = [software, gpu, precision, str(len(errors))]
        if errors:
            absolute = [abs(error) for error in errors]
            cells += [f"{fmean(absolute):.1f}", f"{max(absolute):.1f}", f"{fmean(errors):+.1f}"]
        else:
            cells += ["", "", ""]
        cells.append(f"{fmean(memory):.1f}" if memory else "")
        yield f"| {' | '.join(cells)} |"


def calibration_text(fit: Fit) -> str:
    """Format the factors of a calibration, the rows used, and the errors, in one line each."""
    factors = ", ".join(f"{name} x {factor:.3f}" for name, factor in asdict(fit.factors).items())
    lines = [
        f"calibrated with {fit.source}: {factors}",
        f"fitted to {', '.join(row.row_id for row in fit.rows)}",
    ]
    for rows, quality in (("these rows", fit.used), ("the other rows", fit.others)):
        if quality and quality.steps:
            errors = f"{quality.after:.1%}, {quality.before:.1%} without calibration"
            ranking = quality.ranking
            if ranking.tau is not None and quality.tau_before is not None:
                errors += f"; Kendall's tau {ranking.tau:.2f}, {quality.tau_before:.2f} without"
            if ranking.within_noise:
                errors += f" ({ranking.within_noise} of {ranking.pairs} pairs are within noise)"
            if ranking.max_regret is not None:
                slower = f"at most {ranking.max_regret:.1%} slower than the fastest"
                errors += f"; the first choice is {slower}"
            lines.append(f"mean error on {rows} ({quality.steps}): {errors}")
    if fit.left_out:
        lines.append(f"left out {fit.left_out} row{'s' * (fit.left_out > 1)} on other GPUs")
    return "\n".join(lines) + "\n"


def notes_on_rows(results: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each reason why rows are skipped, and for each stack of another framework.

    A line names its rows. Those with the most rows come first.
    """
    rows_of: dict[tuple[str, str], list[str]] = defaultdict(list)
    for result in results:
        for reason, rows in result["summary"].get("skipped_rows", {}).items():
            rows_of["skipped", reason] += rows
        for row in result["rows"]:
            for note in row["assumed"]:
                if note.startswith("framework = "):
                    rows_of["predicted", note].append(row["row_id"])
    for (verb, reason), rows in sorted(rows_of.items(), key=lambda item: -len(item[1])):
        names = ", ".join(rows[:MAX_ROWS_IN_LINE]) + ", ..." * (len(rows) > MAX_ROWS_IN_LINE)
        yield f"{verb} {counted(len(rows), 'row')}: {reason} ({names})"


# Time and memory of each phase of a run, and the totals.

HEADER = (
    "phase              steps   length   batch   layout                 s/step    hours   tokens"
    "  GiB of fullest GPU"
)


@dataclass(frozen=True)
class PhaseRow:
    """The predictions for a phase, or for the part of it with one batch size.

    Attributes:
        layout: sizes of the axes that have more than one rank
        step_seconds: predicted time of a step; None if the layout is not valid
        memory_bytes: predicted memory of the fullest GPU
        fits: True if the layout is valid and fits into memory
        problem: the reason why the layout is not valid; empty if it is
    """

    phase: str
    first_step: int
    last_step: int
    sequence_length: int
    global_sequences: int
    layout: str
    tokens: int
    step_seconds: float | None
    seconds: float | None
    memory_bytes: float | None
    gpu_memory_bytes: float
    fits: bool
    problem: str


def phase_row(
    segment: Segment, machine: Machine, software: Software, adjust: Callable[[Job], Job]
) -> PhaseRow:
    """Return the predictions for a segment of a run.

    Args:
        software: the software that the times are predicted for
        adjust: applies a calibration to a job
    """
    recipe = segment.recipe
    job, problem = own_job(recipe, machine, software)
    job = adjust(job) if job else None
    seconds = step_time(job).total if job else None
    layout = recipe.layout
    sizes = {"pp": layout.pipeline, "tp": layout.tensor, "cp": layout.context, "ep": layout.expert}
    text = " ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return PhaseRow(
        phase=segment.phase,
        first_step=segment.first,
        last_step=segment.last,
        sequence_length=recipe.model.sequence_length,
        global_sequences=recipe.batch.global_sequences,
        layout=f"{text or 'data only'}{', recompute' * (layout.recompute == 'full')}",
        tokens=segment.steps * recipe.tokens_per_step,
        step_seconds=seconds,
        seconds=None if seconds is None else seconds * segment.steps,
        memory_bytes=fullest_stage(job).total if job else None,
        gpu_memory_bytes=machine.gpu.memory_gib * GIB,
        fits=job is not None and fits(job),
        problem=problem,
    )


def phases_table(rows: Sequence[PhaseRow]) -> dict[str, Any]:
    """Return the predictions for all phases, and their totals, for `--json`."""
    return {
        "rows": [asdict(row) for row in rows],
        "total_tokens": sum(row.tokens for row in rows),
        "total_seconds": total_seconds(rows),
        "do_not_fit": do_not_fit(rows),
    }


def do_not_fit(rows: Sequence[PhaseRow]) -> list[str]:
    """Return the names of the phases that are not valid or do not fit into memory."""
    return list(dict.fromkeys(row.phase for row in rows if not row.fits))


def phases_lines(rows: Sequence[PhaseRow]) -> list[str]:
    """Return a table of the phases, the totals, and a line for each phase that cannot run."""
    lines = [HEADER, *(_line(row) for row in rows)]
    total = total_seconds(rows)
    hours = f"{total / 3600:,.1f} h" if total is not None else "unknown time"
    steps, tokens = rows[-1].last_step, short_count(sum(row.tokens for row in rows))
    lines.append(f"all phases: {counted(steps, 'step')}, {tokens} tokens, {hours}")
    for row in rows:
        if row.problem:
            lines.append(f'phase "{row.phase}": {row.problem}')
        elif not row.fits:
            lines.append(
                f'phase "{row.phase}" does not fit into the {row.gpu_memory_bytes / GIB:.0f} GiB '
                f"of a GPU; plan.py --phase {row.phase} lists layouts that do"
            )
    return lines


def _line(row: PhaseRow) -> str:
    steps = f"{row.first_step} .. {row.last_step}"
    start = (
        f"{row.phase:12} {steps:>11} {row.sequence_length:>8,} {row.global_sequences:>7,}   "
        f"{row.layout:20}"
    )
    if row.step_seconds is None or row.seconds is None or row.memory_bytes is None:
        return f"{start}  not valid"
    mark = "" if row.fits else "  does not fit"
    return (
        f"{start} {row.step_seconds:>8.3g} {row.seconds / 3600:>8,.1f} "
        f"{short_count(row.tokens):>8} {row.memory_bytes / GIB:>6.1f}{mark}"
    )


def total_seconds(rows: Sequence[PhaseRow]) -> float | None:
    """Return the time of all rows; None if a layout is not valid."""
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return sum(seconds) if len(seconds) == len(rows) else None


# Tables that plan.py prints with --json: predictions of a layout, and the layouts of a search.


def job_table(job: Job, seconds: float) -> dict[str, Any]:
    """Return a layout's predictions; memory is in bytes.

    seconds: the time of all steps
    """
    time, memory = step_time(job), stage_memory(job)
    return {
        "layout": asdict(job.layout),
        "micro_batches": job.micro_batches,
        "blocks": job.blocks_of_virtual_stages,
        "imbalance": stage_imbalance(job),
        "fits": fits(job),
        "memory_bytes": [asdict(stage) | {"total": stage.total} for stage in memory],
        "gpu_memory_bytes": job.machine.gpu.memory_gib * GIB,
        "step_seconds": asdict(time) | {"total": time.total},
        **asdict(rates(job, time.total)),
        **asdict(cost(job.machine, seconds)),
    }


def links_table(machine: Machine) -> dict[str, float]:
    """Return the links that a plan assumes: rates per GPU in one direction, and the latency."""
    return {
        "node_link_gigabytes_per_second": machine.node_link_gigabytes_per_second,
        "network_gigabytes_per_second": machine.network_gigabytes_per_second,
        "network_latency_seconds": machine.gpu.network_latency_seconds,
    }


def plan_table(
    recipe: Recipe, plan: Plan, seconds: float, phase: str = FIRST_PHASE
) -> dict[str, Any]:
    """Return a layout of the search, with the edits that select it.

    seconds: the time of all steps
    """
    return job_table(plan.job, seconds) | {
        "edits": edits_in_phase(recipe, plan, phase),
        "replaced_settings": replaced_settings(recipe, plan),
    }


def search_table(
    recipe: Recipe, result: SearchResult, segments: Sequence[Segment]
) -> dict[str, Any]:
    """Return the sizes of a phase's recipe and its fastest layouts.

    segments: the segments of the phase
    """
    phase = segments[0].phase
    return {
        "name": recipe.name,
        "parameters": parameter_count(recipe.model),
        "tokens_per_step": recipe.tokens_per_step,
        "steps": recipe.training.steps,
        "tried": result.tried,
        "best": [
            plan_table(recipe, plan, seconds_of_segments(plan.job, segments), phase)
            for plan in result.plans
        ],
        "rejected": dict(result.rejected),
    }


# The planner's numbers for a run, by the name of the metric that each predicts.


def predicted_metrics_of_run(
    plan: PhasePlan, machine: Machine | None
) -> Callable[[int], Mapping[str, float]]:
    """Return a function that returns `predicted_metrics` for a step of a run.

    The batch of a step depends on the phase and on `batch.ramp`.
    """

    @lru_cache(maxsize=4)
    def of_span(first_step: int) -> Mapping[str, float]:
        return predicted_metrics(plan.at(first_step).recipe, machine)

    return lambda step: of_span(plan.at(step).first)


def predicted_metrics(recipe: Recipe, machine: Machine | None) -> dict[str, float]:
    """Return the predictions for a recipe in its own layout.

    Args:
        machine: the GPUs of the run; None if they have no datasheet

    Returns:
        `step_seconds`, `tokens_per_second` of all ranks, `tflops_per_gpu`, `mfu`, and `memory_gb`
        of rank 0, in 10^9 bytes. Empty without a datasheet, or if the planner rejects the recipe.
    """
    if machine is None:
        return {}
    try:
        job = job_of(recipe, machine)
    except UserError:  # the planner rejects some recipes that the engine accepts
        return {}
    return metrics_of_job(job)


def metrics_of_job(job: Job) -> dict[str, float]:
    """Return the predictions for a job, as `predicted_metrics` does."""
    seconds, memory = step_time(job).total, stage_memory(job)[0]
    table = rates(job, seconds)
    # The metric is what torch's allocator counts; on a CPU, it is the memory of the process.
    counted = memory.total if job.machine.gpu.device == "cpu" else memory.counted
    return {
        "step_seconds": seconds,
        "tokens_per_second": table.tokens_per_second,
        "tflops_per_gpu": table.model_tflops,
        "mfu": table.mfu,
        "memory_gb": counted / 1e9,
    }
