"""Predictions beside measurements: each row, and how far off in all."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from models.cost import flops_per_token
from recipes.planning.inputs.job import Job
from recipes.planning.measured.calibration import Calibration
from recipes.planning.measured.table import Row
from recipes.planning.memory.peak import GIB, fullest_stage
from recipes.planning.time.step_time import step_time

LEAST_GROUP = 3  # layouts of one model and batch that are ranked


@dataclass(frozen=True)
class Prediction:
    """A row and what was predicted of it.

    seconds: of a step
    memory_gib: of the fullest stage
    fits: into the GPU's memory
    """

    row: Row
    job: Job
    seconds: float
    memory_gib: float
    fits: bool

    @property
    def error(self) -> float | None:
        """Of the time, relative; None: not measured."""
        measured = self.row.measured.step_seconds
        return self.seconds / measured - 1 if measured else None

    @property
    def memory_error(self) -> float | None:
        """Of the memory, relative; None: not measured."""
        measured = self.row.measured.memory_gib
        return self.memory_gib / measured - 1 if measured else None


def predict(rows: Iterable[Row], calibration: Calibration) -> list[Prediction]:
    """All rows that can be predicted."""
    found = []
    for row in rows:
        if row.job is None:
            continue
        job = calibration.of(row.job)
        memory = fullest_stage(job)
        found.append(
            Prediction(
                row=row,
                job=row.job,
                seconds=step_time(job).total,
                memory_gib=memory.total / GIB,
                fits=memory.total <= job.machine.gpu.memory_gib * GIB,
            )
        )
    return found


def row_table(prediction: Prediction) -> dict[str, Any]:
    """A row for --json."""
    job = prediction.job
    flops = flops_per_token(job.model) * job.tokens_per_step
    rate = flops / prediction.seconds / job.machine.gpus / 1e12
    return {
        "row_id": prediction.row.row_id,
        "predicted_step_seconds": prediction.seconds,
        "measured_step_seconds": prediction.row.measured.step_seconds,
        "error_percent": percent(prediction.error),
        "predicted_tflops_per_gpu": rate,
        "predicted_memory_gb": prediction.memory_gib,
        "measured_memory_gb": prediction.row.measured.memory_gib,
        "memory_error_percent": percent(prediction.memory_error),
        "fits": prediction.fits,
        "measured_out_of_memory": prediction.row.measured.out_of_memory,
        "assumed": list(prediction.row.assumed),
    }


def summary(rows: Sequence[Row], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """How far off the predictions are in all; None where nothing was measured.

    Kendall's tau and the regret are over groups of rows that differ in their layout alone: the
    share of pairs in the right order less that of pairs in the wrong one, and how much slower the
    layout that is predicted to be the fastest was than the fastest one.
    """
    errors = [p.error for p in predictions if p.error is not None]
    memory = [p.memory_error for p in predictions if p.memory_error is not None]
    groups = ranked_groups(predictions)
    taus = [kendall_tau(group) for group in groups]
    regrets = [regret(group) for group in groups]
    too_large = [p for p in predictions if p.row.measured.out_of_memory]
    ran = [p for p in predictions if not p.row.measured.out_of_memory]
    return {
        "rows": len(rows),
        "predicted": len(predictions),
        "compared": len(errors),
        "mean_absolute_error_percent": percent(mean(map(abs, errors))),
        "max_absolute_error_percent": percent(max(map(abs, errors), default=None)),
        "bias_percent": percent(mean(errors)),
        "kendall_tau": mean(taus),
        "mean_regret_percent": percent(mean(regrets)),
        "max_regret_percent": percent(max(regrets, default=None)),
        "groups": len(groups),
        "memory_compared": len(memory),
        "memory_mean_absolute_error_percent": percent(mean(map(abs, memory))),
        "memory_max_absolute_error_percent": percent(max(map(abs, memory), default=None)),
        "out_of_memory_rows": len(too_large),
        "out_of_memory_flagged": sum(not p.fits for p in too_large),
        "false_alarms": sum(not p.fits for p in ran),
        "skipped": sum(row.job is None for row in rows),
        "skipped_reasons": dict(Counter(row.skipped for row in rows if row.job is None)),
    }


def ranked_groups(predictions: Iterable[Prediction]) -> list[list[Prediction]]:
    """Measured rows of one model, batch and machine, where there are enough."""
    groups: dict[Any, list[Prediction]] = defaultdict(list)
    for each in predictions:
        if each.error is not None:
            job = each.job
            key = (job.model, job.global_sequences, job.machine, job.precision, job.software)
            groups[key].append(each)
    return [group for group in groups.values() if len(group) >= LEAST_GROUP]


def kendall_tau(group: Sequence[Prediction]) -> float:
    """Kendall 1938: (concordant - discordant) pairs / all pairs; ties are neither."""
    score = pairs = 0
    for a, b in combinations(group, 2):
        predicted = a.seconds - b.seconds
        measured = a.row.measured.step_seconds - b.row.measured.step_seconds
        score += (predicted * measured > 0) - (predicted * measured < 0)
        pairs += 1
    return score / pairs


def regret(group: Sequence[Prediction]) -> float:
    """How much slower than the fastest the one was that is predicted to be it."""
    chosen = min(group, key=lambda p: p.seconds).row.measured.step_seconds
    return chosen / min(p.row.measured.step_seconds for p in group) - 1


def calibration_table(calibration: Calibration, rows: Sequence[Row]) -> dict[str, Any]:
    """The factors and the rows that they are from."""
    return {"factors": asdict(calibration), "rows": [row.row_id for row in rows]}


def mean(values: Iterable[float]) -> float | None:
    """The mean; None: of nothing."""
    found = list(values)
    return fmean(found) if found else None


def percent(share: float | None) -> float | None:
    """A share as a percentage."""
    return None if share is None else 100 * share
