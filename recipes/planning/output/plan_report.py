"""What plan.py prints: a plan, the ones that are better, a table's errors."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from models.cost import flops_per_token, parameter_count, recomputed_flops_per_token
from models.pipeline.schedule.order import SCHEDULES, schedule_name
from recipes.planning.inputs.job import Job, Spread
from recipes.planning.inputs.stage_contents import stage_imbalance, stages_text
from recipes.planning.memory.peak import GIB, StageMemory, host_bytes, stage_memory
from recipes.planning.search.layout_search import Found, Plan, deepspeed_json
from recipes.planning.time.step_time import StepTime, step_time
from recipes.training.recipe.deepspeed_config import read_deepspeed_json, zero_stage
from recipes.training.recipe.loading import REPOSITORY
from recipes.training.recipe.schema import Recipe

SECONDS = [field.name for field in fields(StepTime) if field.name not in ("forward", "backward")]
MEMORY = [field.name for field in fields(StageMemory)]


@dataclass(frozen=True)
class Rates:
    """What a step's seconds mean.

    model_tflops: per GPU, without what is computed again
    hardware_tflops: per GPU, with it
    """

    model_tflops: float
    hardware_tflops: float
    mfu: float
    tokens_per_second: float
    days: float
    gpu_hours: float
    dollars: float


def rates(job: Job, seconds: float, steps: int) -> Rates:
    """The rates of a job whose step takes so long, over so many steps."""
    gpus, gpu = job.machine.gpus, job.machine.gpu
    flops = flops_per_token(job.model) * job.tokens_per_step
    again = recomputed_flops_per_token(job.model, job.spread.recompute) * job.tokens_per_step
    model_tflops = flops / seconds / gpus / 1e12
    hours = steps * seconds / 3600
    return Rates(
        model_tflops=model_tflops,
        hardware_tflops=(flops + again) / seconds / gpus / 1e12,
        mfu=model_tflops / gpu.peak_tflops[job.precision],
        tokens_per_second=job.tokens_per_step / seconds,
        days=hours / 24,
        gpu_hours=hours * gpus,
        dollars=hours * gpus * gpu.dollars_per_hour,
    )


def head(recipe: Recipe, job: Job) -> str:
    """What is planned, in two lines."""
    machine = job.machine
    tokens = recipe.training.steps * recipe.tokens_per_step
    return (
        f"{recipe.name}: {short(parameter_count(recipe.model))} parameters, "
        f"{recipe.tokens_per_step:,} tokens a step, {recipe.training.steps:,} steps, "
        f"{short(tokens)} tokens\n"
        f"{machine.gpus:,} x {machine.gpu.name} on {machine.nodes} "
        f"node{'s' * (machine.nodes > 1)}, "
        f"{machine.node_link_gigabytes_per_second:g} GB/s inside and "
        f"{machine.network_gigabytes_per_second:g} GB/s between them per GPU, {job.precision}, "
        f"as {job.software.name}"
    )


def short(count: float) -> str:
    """A count in thousands, millions, billions or trillions: 70.6 B."""
    for size, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:,.3g}{letter}"
    return f"{count:.3g}"


def words(spread: Spread) -> str:
    """A spread in a line."""
    recompute = spread.recompute
    if spread.recompute_interval > 1:
        recompute += f" by {spread.recompute_interval}"
    return (
        f"tensor {spread.tensor} x pipeline {spread.pipeline} x data {spread.data}, "
        f"ZeRO-{spread.zero_stage}, {schedule_name(spread.schedule, spread.chunks)}"
        + (", sequence parallel" if spread.sequence_parallel else "")
        + f", recompute {recompute}, micro-batches of {spread.micro_sequences}"
    )


def plan_text(job: Job, steps: int) -> Iterator[str]:
    """A layout's memory by stage and its step's seconds, line by line."""
    time, memory = step_time(job), stage_memory(job)
    yield f"{words(job.spread)}, {job.micro_batches} of them"
    if job.spread.pipeline > 1:
        yield stages_text(job)
    yield ""
    yield "GiB on each GPU " + "".join(f"{name:>12}" for name in [*MEMORY, "total"])
    for name, stage in distinct(memory):
        cells = [getattr(stage, each) for each in MEMORY] + [stage.total]
        yield f"{name:16}" + "".join(f"{cell / GIB:12.2f}" for cell in cells)
    fullest = max(stage.total for stage in memory) / GIB
    room = job.machine.gpu.memory_gib
    if fullest > room:
        yield f"DOES NOT FIT: {fullest:.1f} GiB of {room:g}"
    else:
        yield f"fits: {fullest:.1f} GiB of {room:g}"
    host, there = host_bytes(job) / GIB, job.machine.gpu.node_memory_gib
    if host > there:
        yield f"IS NOT BUILT: a node's processes need {host:,.0f} GiB of {there:,.0f} in its host"
    yield ""
    yield "seconds a step  " + "".join(f"{name:>12}" for name in [*SECONDS, "total"])
    spent = [getattr(time, name) for name in SECONDS]
    yield f"{'':16}" + "".join(f"{seconds:12.3f}" for seconds in [*spent, time.total])
    yield f"{'':16}" + "".join(f"{seconds / time.total:12.1%}" for seconds in spent)
    yield ""
    yield rates_text(rates(job, time.total, steps))


def rates_text(rate: Rates) -> str:
    """Rates in two lines."""
    again = ""
    if rate.hardware_tflops > rate.model_tflops:
        again = f" ({rate.hardware_tflops:.3g} with what is computed again)"
    days = f"{rate.days:,.1f} days" if rate.days >= 1 else f"{24 * rate.days:.2g} hours"
    return (
        f"{rate.model_tflops:.3g} TFLOP/s per GPU{again}, MFU {rate.mfu:.1%}, "
        f"{rate.tokens_per_second:,.0f} tokens/s\n"
        f"{days}, {short(rate.gpu_hours)} GPU hours, about ${short(rate.dollars)}"
    )


def distinct(memory: Sequence[StageMemory]) -> list[tuple[str, StageMemory]]:
    """Stages with equal neighbours as one: "stage 2 .. 7"."""
    groups: list[tuple[int, int, StageMemory]] = []
    for number, stage in enumerate(memory):
        if groups and groups[-1][2] == stage:
            groups[-1] = (groups[-1][0], number, stage)
        else:
            groups.append((number, number, stage))
    if len(groups) > 4:  # 1F1B: each stage holds one micro-batch less; the ends and the fullest
        fullest = max(groups[1:-1], key=lambda group: group[2].total)
        groups = [groups[0], fullest, groups[-1]]
    return [
        (f"stage {first}" + (f" .. {last}" if last > first else ""), stage)
        for first, last, stage in groups
    ]


def found_text(found: Found, own: float | None) -> Iterator[str]:
    """The best layouts, and what was refused, line by line.

    own: seconds of a step in the recipe's own layout; None: it cannot run
    """
    if found.plans:
        yield f"The best of {found.tried:,} layouts:"
    for place, plan in enumerate(found.plans, start=1):
        seconds = plan.time.total
        yield (
            f"{place:3}. {seconds:9.3f} s"
            + (f" ({seconds / own - 1:+.1%})" if own else "")
            + f"  {plan.memory.total / GIB:5.1f} GiB  {words(plan.job.spread)}"
        )
    if not found.plans:
        yield f"None of {found.tried:,} layouts fits."
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.refused.most_common())
    if reasons:
        yield f"Refused: {reasons}."
    if found.nearest and not found.plans:
        spread, lacking = found.nearest
        yield f"The nearest lacks {lacking:.1f} GiB: {words(spread)}"


def edits(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """The keys of a recipe that ask for a plan's layout; a JSON of its ZeRO stage stays."""
    spread, layout = plan.job.spread, recipe.layout
    deepspeed = recipe.deepspeed
    if zero_stage(read_deepspeed_json(deepspeed)) != spread.zero_stage:
        shipped = deepspeed_json(spread.zero_stage, plan.job.precision)
        deepspeed = str(shipped.relative_to(REPOSITORY))
    others = {}
    if SCHEDULES[spread.schedule].chunks is None or "chunks" in layout.model_fields_set:
        others["layout.chunks"] = spread.chunks
    if layout.layers_per_stage is not None:  # it cannot be left out by an option
        others["layout.layers_per_stage"] = list(plan.job.blocks_of_positions)
    return {
        "deepspeed": deepspeed,
        "layout.tensor": spread.tensor,
        "layout.pipeline": spread.pipeline,
        "layout.schedule": spread.schedule,
        "layout.sequence_parallel": spread.sequence_parallel,
        "layout.recompute": spread.recompute,
        "layout.recompute_interval": spread.recompute_interval,
        "batch.micro_sequences": spread.micro_sequences,
        **others,
    }


def changes(recipe: Recipe, plan: Plan) -> str:
    """What makes a recipe's layout that of a plan, as options of pretrain.py; empty: nothing."""
    words = []
    for key, value in edits(recipe, plan).items():
        section, _, name = key.rpartition(".")
        if getattr(getattr(recipe, section) if section else recipe, name) != value:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            words.append(f"--set {key}={text}")
    return " ".join(words)


def job_table(job: Job, steps: int) -> dict[str, Any]:
    """A layout for --json; memory in bytes."""
    time, memory = step_time(job), stage_memory(job)
    return {
        "layout": asdict(job.spread),
        "micro_batches": job.micro_batches,
        "blocks": job.blocks_of_positions,
        "imbalance": stage_imbalance(job),
        "fits": fits(job),
        "memory_bytes": [asdict(stage) | {"total": stage.total} for stage in memory],
        "gpu_memory_bytes": job.machine.gpu.memory_gib * GIB,
        "step_seconds": asdict(time) | {"total": time.total},
        **asdict(rates(job, time.total, steps)),
    }


def plan_table(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """A found layout for --json, with the edits that ask for it."""
    return job_table(plan.job, recipe.training.steps) | {"edits": edits(recipe, plan)}


def evaluation_text(name: str, summary: Mapping[str, Any]) -> str:
    """A table's errors in a line of Markdown."""

    def cell(key: str, form: str = ".1f") -> str:
        value = summary.get(key)
        return "" if value is None else format(value, form)

    false_alarms = ""
    if summary.get("predicted"):
        false_alarms = f"{summary['false_alarms']} of {summary['predicted']}"
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


EVALUATION_HEAD = (
    "| table | rows | mean error, % | largest | bias | tau | regret, % | memory error, % | "
    "false alarms | skipped |\n|---|---|---|---|---|---|---|---|---|---|"
)


def calibration_text(calibration: Mapping[str, Any]) -> str:
    """The factors and their rows, in a line each."""
    factors = ", ".join(f"{name} x {factor:.3f}" for name, factor in calibration["factors"].items())
    return f"calibrated: {factors}\nfrom {', '.join(calibration['rows'])}\n"


def skipped(results: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Why rows were skipped, and how many, most first."""
    reasons: Counter[str] = Counter()
    for result in results:
        reasons.update(result["summary"].get("skipped_reasons", {}))
    return reasons.most_common()


def fits(job: Job) -> bool:
    """Whether every stage fits into its GPU, and into its host while it is built."""
    gpu = job.machine.gpu
    fullest = max(stage.total for stage in stage_memory(job))
    return fullest <= gpu.memory_gib * GIB and host_bytes(job) <= gpu.node_memory_gib * GIB
