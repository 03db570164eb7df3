"""Errors of predictions relative to measurements, by row and for a whole table."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from models.cost import flops_per_token, parameter_count
from threefold.plan.calibration.calibration import Calibration
from threefold.plan.calibration.table import Row
from threefold.plan.job import Job
from threefold.plan.memory.peak import GIB, context_gib, fullest_stage
from threefold.plan.search import DEFAULT_HEADROOM
from threefold.plan.time.step import step_time

MIN_RANKED_LAYOUTS = 3  # groups with fewer layouts of one model and batch are not ranked


@dataclass(frozen=True)
class Prediction:
    """A row of a table and its predictions.

    Attributes:
        seconds: predicted seconds of a step
        memory_gib: predicted memory of the fullest stage
        fits: True if that memory leaves the search's default headroom free
    """

    row: Row
    job: Job
    seconds: float
    memory_gib: float
    fits: bool

    @property
    def too_large(self) -> bool:
        """True if the predicted memory exceeds the GPU's; with less, a run may still work."""
        return self.memory_gib > self.job.machine.gpu.memory_gib

    @property
    def error(self) -> float | None:
        """The relative error of the time; None if it was not measured."""
        measured = self.measured_seconds
        return self.seconds / measured - 1 if measured else None

    @property
    def measured_seconds(self) -> float | None:
        """The measured seconds of a step; None if they were not measured."""
        return self.row.measured.step_seconds

    @property
    def memory_error(self) -> float | None:
        """The relative error of the memory; None if it was not measured."""
        measured = self.row.measured.memory_gib
        if not measured:
            return None
        left_out = context_gib(self.job) if self.row.measured.by_allocator else 0.0
        return (self.memory_gib - left_out) / measured - 1


def predict(rows: Iterable[Row], calibration: Calibration) -> list[Prediction]:
    """Predict all rows that describe a job."""
    predictions = []
    for row in rows:
        if row.job is None:
            continue
        job = calibration.of(row.job)
        memory = fullest_stage(job)
        limit = job.machine.gpu.memory_gib * GIB
        predictions.append(
            Prediction(
                row=row,
                job=row.job,
                seconds=step_time(job).total,
                memory_gib=memory.total / GIB,
                fits=memory.total <= limit * (1 - DEFAULT_HEADROOM),
            )
        )
    return predictions


def row_table(prediction: Prediction) -> dict[str, Any]:
    """Return a row for --json."""
    job, measured = prediction.job, prediction.measured_seconds
    flops = flops_per_token(job.model) * job.tokens_per_step
    rate = flops / prediction.seconds / job.machine.gpus / 1e12
    peak = job.machine.gpu.peak_tflops[job.precision]
    return {
        "row_id": prediction.row.row_id,
        "parameters": prediction.row.parameters or parameter_count(job.model),
        "sequence_length": job.model.sequence_length,
        "tokens_per_step": job.tokens_per_step,
        "gpu": job.machine.gpu.name,
        "gpus": job.machine.gpus,
        "gpus_per_node": job.machine.gpus_per_node,
        "precision": job.precision,
        "software": job.software.name,
        "layout": asdict(job.layout),
        "micro_batches": job.micro_batches,
        "predicted_step_seconds": prediction.seconds,
        "measured_step_seconds": measured,
        "error_percent": percent(prediction.error),
        "predicted_tflops_per_gpu": rate,
        "predicted_mfu_percent": percent(rate / peak),
        "measured_mfu_percent": (
            percent(rate / peak * prediction.seconds / measured) if measured else None
        ),
        "predicted_memory_gb": prediction.memory_gib,
        "measured_memory_gb": prediction.row.measured.memory_gib,
        "memory_error_percent": percent(prediction.memory_error),
        "fits": prediction.fits,
        "too_large": prediction.too_large,
        "measured_out_of_memory": prediction.row.measured.out_of_memory,
        "assumed": list(prediction.row.assumed),
    }


def summary(rows: Sequence[Row], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the errors of a whole table; None for quantities that were not measured.

    Kendall's tau and the regret are means over groups of rows that differ only in their layout.
    A row that ran out of memory counts as flagged if the prediction does not fit with headroom. A
    row that ran counts as a false alarm only if the prediction exceeds the GPU's whole memory,
    because some runs used 99 % of it.
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
        "false_alarms": sum(p.too_large for p in ran),
        "without_headroom": sum(not p.fits and not p.too_large for p in ran),
        "skipped": sum(row.job is None for row in rows),
        "skipped_reasons": dict(Counter(row.skipped for row in rows if row.job is None)),
    }


def ranked_groups(predictions: Iterable[Prediction]) -> list[list[Prediction]]:
    """Group measured rows of one model, batch and machine; small groups are left out."""
    groups: dict[Any, list[Prediction]] = defaultdict(list)
    for each in predictions:
        if each.error is not None:
            job = each.job
            key = (job.model, job.global_sequences, job.machine, job.precision, job.software)
            groups[key].append(each)
    return [group for group in groups.values() if len(group) >= MIN_RANKED_LAYOUTS]


def kendall_tau(group: Sequence[Prediction]) -> float:
    """Return the rank correlation of predicted and measured times."""
    return rank_correlation(_times(group))


def rank_correlation(points: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of the two coordinates of points (tau of Kendall 1938).

    It is (concordant - discordant) pairs / all pairs; ties are neither. At least two points.
    """
    score = pairs = 0
    for (x_a, y_a), (x_b, y_b) in combinations(points, 2):
        x, y = x_a - x_b, y_a - y_b
        score += (x * y > 0) - (x * y < 0)
        pairs += 1
    return score / pairs


def regret(group: Sequence[Prediction]) -> float:
    """Return the slowdown of the predicted-fastest layout relative to the measured-fastest one."""
    times = _times(group)
    chosen = min(times, key=lambda time: time[0])[1]
    return chosen / min(measured for _, measured in times) - 1


def _times(group: Sequence[Prediction]) -> list[tuple[float, float]]:
    """Return the predicted and the measured seconds of the measured rows."""
    return [
        (each.seconds, each.measured_seconds) for each in group if each.measured_seconds is not None
    ]


def mean(values: Iterable[float]) -> float | None:
    """Return the mean of the values; None if there are none."""
    listed = list(values)
    return fmean(listed) if listed else None


def percent(share: float | None) -> float | None:
    """Return a share as a percentage."""
    return None if share is None else 100 * share
