"""Time and memory of each stage of a run, and the totals."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from models.errors import counted
from threefold.config.phases import Span, StagePlan
from threefold.plan.job import Job, Machine, own_job
from threefold.plan.memory.peak import GIB, fits, fullest_stage
from threefold.plan.report import short_count
from threefold.plan.software import Software
from threefold.plan.time.step import step_time

HEADER = (
    "stage              steps   length   batch   layout                 s/step    hours   tokens"
    "  GiB of fullest GPU"
)


@dataclass(frozen=True)
class StageRow:
    """The predictions for a stage, or for the part of it with one batch size.

    Attributes:
        stage: name of the stage
        first_step, last_step: its steps
        sequence_length: tokens of a sequence
        global_sequences: sequences of a step
        layout: sizes of the axes that have more than one rank
        tokens: tokens of all its steps
        step_seconds: predicted time of a step; None if the layout is not valid
        seconds: predicted time of all its steps
        memory_bytes: predicted memory of the fullest GPU
        gpu_memory_bytes: memory of a GPU
        fits: True if the layout is valid and fits into memory
        problem: the reason why the layout is not valid; empty if it is
    """

    stage: str
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


def stage_rows(
    plan: StagePlan, machine: Machine, software: Software, adjust: Callable[[Job], Job]
) -> list[StageRow]:
    """Return the predictions for each span of a run.

    Args:
        plan: the stages of the run
        machine: the cluster
        software: the software that the times are predicted for
        adjust: applies a calibration to a job
    """
    return [_row(span, machine, software, adjust) for span in plan.spans]


def _row(
    span: Span, machine: Machine, software: Software, adjust: Callable[[Job], Job]
) -> StageRow:
    recipe = span.recipe
    job, problem = own_job(recipe, machine, software)
    job = adjust(job) if job else None
    seconds = step_time(job).total if job else None
    layout = recipe.layout
    sizes = {"pp": layout.pipeline, "tp": layout.tensor, "cp": layout.context, "ep": layout.expert}
    text = " ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return StageRow(
        stage=span.stage,
        first_step=span.first,
        last_step=span.last,
        sequence_length=recipe.model.sequence_length,
        global_sequences=recipe.batch.global_sequences,
        layout=f"{text or 'data only'}{', recompute' * (layout.recompute == 'full')}",
        tokens=span.steps * recipe.tokens_per_step,
        step_seconds=seconds,
        seconds=None if seconds is None else seconds * span.steps,
        memory_bytes=fullest_stage(job).total if job else None,
        gpu_memory_bytes=machine.gpu.memory_gib * GIB,
        fits=job is not None and fits(job),
        problem=problem,
    )


def stages_table(rows: Sequence[StageRow]) -> dict[str, Any]:
    """Return the predictions for all stages, and their totals, for `--json`."""
    return {
        "rows": [asdict(row) for row in rows],
        "total_tokens": sum(row.tokens for row in rows),
        "total_seconds": _total_seconds(rows),
        "do_not_fit": do_not_fit(rows),
    }


def do_not_fit(rows: Sequence[StageRow]) -> list[str]:
    """Return the names of the stages that are not valid or do not fit into memory."""
    return list(dict.fromkeys(row.stage for row in rows if not row.fits))


def stages_lines(rows: Sequence[StageRow]) -> list[str]:
    """Return a table of the stages, the totals, and a line for each stage that cannot run."""
    lines = [HEADER, *(_line(row) for row in rows)]
    total = _total_seconds(rows)
    hours = f"{total / 3600:,.1f} h" if total is not None else "unknown time"
    steps, tokens = rows[-1].last_step, short_count(sum(row.tokens for row in rows))
    lines.append(f"all stages: {counted(steps, 'step')}, {tokens} tokens, {hours}")
    for row in rows:
        if row.problem:
            lines.append(f'stage "{row.stage}": {row.problem}')
        elif not row.fits:
            lines.append(
                f'stage "{row.stage}" does not fit into the {row.gpu_memory_bytes / GIB:.0f} GiB '
                f"of a GPU; plan.py --stage {row.stage} lists layouts that do"
            )
    return lines


def _line(row: StageRow) -> str:
    steps = f"{row.first_step} .. {row.last_step}"
    start = (
        f"{row.stage:12} {steps:>11} {row.sequence_length:>8,} {row.global_sequences:>7,}   "
        f"{row.layout:20}"
    )
    if row.step_seconds is None or row.seconds is None or row.memory_bytes is None:
        return f"{start}  not valid"
    mark = "" if row.fits else "  does not fit"
    return (
        f"{start} {row.step_seconds:>8.3g} {row.seconds / 3600:>8,.1f} "
        f"{short_count(row.tokens):>8} {row.memory_bytes / GIB:>6.1f}{mark}"
    )


def _total_seconds(rows: Sequence[StageRow]) -> float | None:
    seconds = [row.seconds for row in rows if row.seconds is not None]
    return sum(seconds) if len(seconds) == len(rows) else None
