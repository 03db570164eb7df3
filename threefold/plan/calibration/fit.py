"""Calibration: a few factors for one cluster, fitted to some of its runs, and its errors."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import combinations
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from models.cost import flops_per_token, parameter_count
from models.errors import UserError
from threefold.pipeline.balance import evenly_spaced
from threefold.plan.calibration.runs_table import MeasuredRow, is_table_of_runs, read_table
from threefold.plan.job import Job
from threefold.plan.memory.peak import GIB, context_gib, exceeds_band, fullest_stage
from threefold.plan.search import DEFAULT_HEADROOM
from threefold.plan.software import THREEFOLD
from threefold.plan.time.step import step_time

# Calibration: a few factors for one cluster, fitted to a few of its runs.

MAX_ROWS = 8  # of a table, used for the fit
MAX_LOG_FACTOR = log(3)  # factors of published stacks stay within 1/3 .. 3
MAX_LOG_FACTOR_UNMEASURED = log(1000)  # of Threefold's factors, because its speed is only assumed
LOG_ERROR_SCALE = 0.05  # errors of logarithms count linearly above this, and squared below
MAX_ROUNDS = 40
# Quantiles of 97.5 % of Student's distribution with 1, 2, ... degrees of freedom.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Calibration:
    """Factors by which each kind of time is multiplied in the prediction."""

    compute: float = 1.0
    node_links: float = 1.0
    network: float = 1.0
    contention: float = 1.0
    host: float = 1.0

    def of(self, job: Job) -> Job:
        """Return the job on hardware and software slower by these factors."""
        software = job.software
        return replace(
            job,
            machine=replace(
                job.machine,
                node_link_gigabytes_per_second=job.machine.node_link_gigabytes_per_second
                / self.node_links,
                network_gigabytes_per_second=job.machine.network_gigabytes_per_second
                / self.network,
                network_contention=min(1.0, job.machine.network_contention / self.contention),
            ),
            software=replace(
                software,
                kernel_efficiency=software.kernel_efficiency / self.compute,
                block_seconds=software.block_seconds * self.host,
                routing_seconds=software.routing_seconds * self.host,
                step_seconds=software.step_seconds * self.host,
            ),
        )


# The expected standard deviation of each factor's logarithm.
PRIOR_DEVIATION = Calibration(compute=0.1, node_links=0.1, network=0.2, contention=1.0, host=0.1)
PRIOR_DEVIATION_UNMEASURED = Calibration(2.0, 2.0, 2.0, 2.0, 2.0)


def calibrate(measured: Sequence[tuple[Job, float]]) -> Calibration:
    """Fit the factors to measured steps.

    The fit minimizes a robust sum over the rows (Charbonnier's, which is quadratic for small
    errors and linear for large ones) plus the squares of the factors' logarithms in units of
    `PRIOR_DEVIATION`, so that a factor without effect on the rows stays at 1; the expected
    deviations of Threefold are larger. It is a coordinate descent with halving steps.

    Args:
        measured: jobs and the seconds of their steps
    """
    unmeasured = any(job.software.name == THREEFOLD.name for job, _ in measured)
    largest = MAX_LOG_FACTOR_UNMEASURED if unmeasured else MAX_LOG_FACTOR
    deviations = asdict(PRIOR_DEVIATION_UNMEASURED if unmeasured else PRIOR_DEVIATION)
    names = [field.name for field in fields(Calibration)]
    logs = dict.fromkeys(names, 0.0)

    def cost() -> float:
        factors = Calibration(**{name: exp(value) for name, value in logs.items()})
        errors = (log(step_time(factors.of(job)).total / seconds) for job, seconds in measured)
        rows = sum(2 * (sqrt(1 + (error / LOG_ERROR_SCALE) ** 2) - 1) for error in errors)
        return rows + sum((logs[name] / deviations[name]) ** 2 for name in names) / 2

    step, best = 0.2, cost()
    for _ in range(MAX_ROUNDS):
        improved = False
        for name in names:
            for change in (step, -step):
                before = logs[name]
                logs[name] = max(-largest, min(largest, before + change))
                now = cost()
                if now < best - 1e-9:
                    best, improved = now, True
                    break
                logs[name] = before
        if not improved:
            step /= 2
        if step < 1e-3:
            break
    return Calibration(**{name: exp(value) for name, value in logs.items()})


# Errors of predictions relative to measurements, by row and for a whole table.

MIN_RANKED_LAYOUTS = 3  # groups with fewer layouts of one model and batch are not ranked


@dataclass(frozen=True)
class PredictedRow:
    """A row of a table and its predictions.

    Attributes:
        memory_gib: predicted memory of the fullest stage
        fits: True if that memory leaves the search's default headroom free
    """

    row: MeasuredRow
    job: Job
    seconds: float
    memory_gib: float
    fits: bool

    @property
    def too_large(self) -> bool:
        """True if the predicted memory exceeds the GPU's by more than predictions err."""
        return exceeds_band(self.memory_gib, self.job.machine.gpu.memory_gib)

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


def predict(rows: Iterable[MeasuredRow], calibration: Calibration) -> list[PredictedRow]:
    """Predict all rows that describe a job."""
    predictions = []
    for row in rows:
        if row.job is None:
            continue
        job = calibration.of(row.job)
        memory = fullest_stage(job)
        limit = job.machine.gpu.memory_gib * GIB
        predictions.append(
            PredictedRow(
                row=row,
                job=row.job,
                seconds=step_time(job).total,
                memory_gib=memory.total / GIB,
                fits=memory.total <= limit * (1 - DEFAULT_HEADROOM),
            )
        )
    return predictions


def row_table(prediction: PredictedRow) -> dict[str, Any]:
    """Return a row for --json."""
    job, measured = prediction.job, prediction.measured_seconds
    flops = flops_per_token(job.model) * job.tokens_per_step
    rate = flops / prediction.seconds / job.machine.gpus / 1e12
    peak = job.peak_tflops
    return {
        "row_id": prediction.row.row_id,
        "parameters": prediction.row.parameters or parameter_count(job.model),
        "sequence_length": job.model.sequence_length,
        "tokens_per_step": job.tokens_per_step,
        "gpu": job.machine.gpu.name,
        "gpus": job.machine.gpus,
        "gpus_per_node": job.machine.gpus_per_node,
        "precision": job.matmul_format,
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


def summary(rows: Sequence[MeasuredRow], predictions: Sequence[PredictedRow]) -> dict[str, Any]:
    """Return the errors of a whole table; None for quantities that were not measured.

    Kendall's tau and the regret are means over groups of rows that differ only in their layout. Tau
    leaves out pairs that differ by less than the noise between the rounds of a sweep. A row that
    ran out of memory counts as flagged if the prediction does not fit with headroom. A row that ran
    counts as a false alarm only if the prediction exceeds the GPU's whole memory by more than
    `MEMORY_BAND`, because some runs used 99 % of it.
    """
    errors = [p.error for p in predictions if p.error is not None]
    memory = [p.memory_error for p in predictions if p.memory_error is not None]
    ranking = Ranking.of(predictions)
    too_large = [p for p in predictions if p.row.measured.out_of_memory]
    ran = [p for p in predictions if not p.row.measured.out_of_memory]
    return {
        "rows": len(rows),
        "predicted": len(predictions),
        "compared": len(errors),
        "mean_absolute_error_percent": percent(mean(map(abs, errors))),
        "max_absolute_error_percent": percent(max(map(abs, errors), default=None)),
        "bias_percent": percent(mean(errors)),
        "kendall_tau": ranking.tau,
        "pairs": ranking.pairs,
        "pairs_within_noise": ranking.within_noise,
        "mean_regret_percent": percent(ranking.mean_regret),
        "max_regret_percent": percent(ranking.max_regret),
        "groups": ranking.groups,
        "memory_compared": len(memory),
        "memory_mean_absolute_error_percent": percent(mean(map(abs, memory))),
        "memory_max_absolute_error_percent": percent(max(map(abs, memory), default=None)),
        "out_of_memory_rows": len(too_large),
        "out_of_memory_flagged": sum(not p.fits for p in too_large),
        "false_alarms": sum(p.too_large for p in ran),
        "without_headroom": sum(not p.fits and not p.too_large for p in ran),
        "skipped": sum(row.job is None for row in rows),
        "skipped_rows": skipped_rows(rows),
    }


def skipped_rows(rows: Iterable[MeasuredRow]) -> dict[str, list[str]]:
    """Return the rows that cannot be predicted, by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.job is None:
            by_reason[row.skipped].append(row.row_id)
    return dict(by_reason)


def errors_by_group(results: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[Any]]:
    """Return the predicted rows of all tables by software, GPU and format of the matmuls."""
    groups: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for result in results:
        for row in result["rows"]:
            groups[row["software"], row["gpu"], row["precision"]].append(row)
    return dict(sorted(groups.items()))


def ranked_groups(predictions: Iterable[PredictedRow]) -> list[list[PredictedRow]]:
    """Group measured rows of one model, batch and machine; small groups are left out."""
    groups: dict[Any, list[PredictedRow]] = defaultdict(list)
    for prediction in predictions:
        if prediction.error is not None:
            job = prediction.job
            key = (job.model, job.global_sequences, job.machine, job.precision, job.software)
            groups[key].append(prediction)
    return [group for group in groups.values() if len(group) >= MIN_RANKED_LAYOUTS]


@dataclass(frozen=True)
class RankedTime:
    """The predicted and the measured seconds of a layout, and those of each round of a sweep."""

    predicted: float
    measured: float
    rounds: Sequence[float] = ()


@dataclass(frozen=True)
class Ranking:
    """Agreement of the predicted with the measured order of layouts, in groups that compete.

    Attributes:
        tau: Kendall's tau as a mean over groups, without the pairs within noise; None if no pair
            is left
        pairs: number of pairs of layouts in all groups
        within_noise: number of those pairs that rounds do not tell apart
        mean_regret, max_regret: slowdown of the predicted-fastest layout relative to the
            measured-fastest one, over the groups; None without a group
    """

    tau: float | None
    pairs: int
    within_noise: int
    mean_regret: float | None
    max_regret: float | None
    groups: int

    @classmethod
    def of(cls, predictions: Iterable[PredictedRow]) -> "Ranking":
        """Return the ranking of all groups of a table's predictions."""
        groups = ranked_groups(predictions)
        return cls.of_groups([[time_of(one) for one in group] for group in groups])

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[RankedTime]]) -> "Ranking":
        """Return the ranking of groups of competing layouts."""
        pairs = [list(combinations(group, 2)) for group in groups]
        clear = [[pair for pair in group if told_apart(*pair)] for group in pairs]
        taus = [
            rank_correlation(
                [((a.predicted, a.measured), (b.predicted, b.measured)) for a, b in group]
            )
            for group in clear
            if group
        ]
        regrets = [regret(group) for group in groups]
        return cls(
            tau=mean(taus),
            pairs=sum(map(len, pairs)),
            within_noise=sum(map(len, pairs)) - sum(map(len, clear)),
            mean_regret=mean(regrets),
            max_regret=max(regrets, default=None),
            groups=len(groups),
        )


def time_of(prediction: PredictedRow) -> RankedTime:
    """Return the times of a row with a measured step."""
    measured = prediction.row.measured
    assert measured.step_seconds is not None
    return RankedTime(prediction.seconds, measured.step_seconds, measured.round_seconds)


def told_apart(left: RankedTime, right: RankedTime) -> bool:
    """Return True if two layouts differ by more than the noise between the rounds of a sweep.

    This is the paired t-test of the logarithms of the times (Student 1908), at 95 %. The times of a
    round are paired, because a disturbance that lasts changes both. Without two common rounds, the
    noise is not known, and the layouts count as different.
    """
    ratios = [log(a / b) for a, b in zip(left.rounds, right.rounds, strict=False)]
    if len(ratios) < 2:
        return True
    quantile = STUDENT_T[min(len(ratios) - 1, len(STUDENT_T)) - 1]
    return abs(fmean(ratios)) > quantile * stdev(ratios) / sqrt(len(ratios))


def leading(times: Sequence[RankedTime]) -> list[int]:
    """Return the indices of the fastest layout and of those that noise may make slower than it."""
    fastest = min(times, key=lambda time: time.measured)
    return [i for i, time in enumerate(times) if time is fastest or not told_apart(time, fastest)]


def rank_correlation(pairs: Iterable[tuple[tuple[float, float], tuple[float, float]]]) -> float:
    """Return the rank correlation of the coordinates of pairs of points (tau of Kendall 1938).

    It is (concordant - discordant) pairs / all pairs; ties are neither. At least one pair.
    """
    score = count = 0
    for (x_a, y_a), (x_b, y_b) in pairs:
        x, y = x_a - x_b, y_a - y_b
        score += (x * y > 0) - (x * y < 0)
        count += 1
    return score / count


def regret(group: Sequence[RankedTime]) -> float:
    """Return the slowdown of the predicted-fastest layout relative to the measured-fastest one."""
    chosen = min(group, key=lambda time: time.predicted)
    return chosen.measured / min(time.measured for time in group) - 1


def mean(values: Iterable[float]) -> float | None:
    """Return the mean of the values; None if there are none."""
    listed = list(values)
    return fmean(listed) if listed else None


def percent(share: float | None) -> float | None:
    """Return a share as a percentage."""
    return None if share is None else 100 * share


@dataclass(frozen=True)
class Quality:
    """Errors of predictions relative to measured steps.

    Attributes:
        before: mean relative error without calibration; None without steps
        after: the same with calibration
        ranking: order of predicted and measured times with calibration
        tau_before: Kendall's tau without calibration, as in `Ranking`
    """

    steps: int
    before: float | None
    after: float | None
    ranking: Ranking
    tau_before: float | None


@dataclass(frozen=True)
class Fit:
    """A calibration, the rows that it was fitted to, and its errors.

    Attributes:
        factors: the calibration; all factors are 1 without a table
        source: the table; None without one
        rows: rows that the factors were fitted to
        used: errors on these rows
        others: errors on the table's other rows, which the fit has not seen
        left_out: number of measured rows on other GPUs than the planned one
    """

    factors: Calibration = field(default_factory=Calibration)
    source: Path | None = None
    rows: tuple[MeasuredRow, ...] = ()
    used: Quality | None = None
    others: Quality | None = None
    left_out: int = 0

    def table(self) -> dict[str, Any] | None:
        """Return the fit for --json; None without a table."""
        if self.source is None:
            return None
        return {
            "source": str(self.source),
            "factors": asdict(self.factors),
            "rows": [row.row_id for row in self.rows],
            "used": asdict(self.used) if self.used else None,
            "others": asdict(self.others) if self.others else None,
            "left_out": self.left_out,
        }


def fit_table(path: Path | None, gpu: str | None = None) -> Fit:
    """Fit a calibration to at most `MAX_ROWS` measured steps; without a table, all factors are 1.

    Args:
        gpu: name of the planned GPU, whose runs are used; None: all runs

    Raises:
        UserError: the table cannot be read, or no row has both a layout and a measured time on the
            planned GPU.
    """
    if path is None:
        return Fit()
    all_rows = read_table(path)
    timed = [row for row in all_rows if row.job and row.measured.step_seconds]
    if not timed:
        reasons = "; ".join(dict.fromkeys(row.skipped for row in all_rows if row.skipped))
        raise UserError(
            f"--calibrate {path}: no row has a layout and a measured step_time_s"
            + (f"; rows were skipped: {reasons}" if reasons else "; use a finished sweep.csv")
        )
    measured_gpus = sorted({row.job.machine.gpu.name for row in timed if row.job})
    rows = [row for row in timed if row.job and gpu in (None, row.job.machine.gpu.name)]
    if not rows:
        raise UserError(
            f"--calibrate {path}: its runs are on {', '.join(measured_gpus)}, and the plan is for "
            f"{gpu}; use runs on {gpu}, or --gpu {measured_gpus[0]}"
        )
    chosen = set(evenly_spaced(len(rows), MAX_ROWS))
    used = tuple(row for index, row in enumerate(rows) if index in chosen)
    others = [row for index, row in enumerate(rows) if index not in chosen]
    measured = [(row.job, row.measured.step_seconds) for row in used]
    factors = calibrate([(job, seconds) for job, seconds in measured if job and seconds])
    return Fit(
        factors,
        path,
        used,
        quality(used, factors),
        quality(others, factors),
        left_out=len(timed) - len(rows),
    )


def quality(rows: Sequence[MeasuredRow], factors: Calibration) -> Quality:
    """Return the errors of predictions for measured rows, with and without calibration."""
    before = predict(rows, Calibration())
    after = predict(rows, factors)
    return Quality(
        steps=len(rows),
        before=_mean_error(before),
        after=_mean_error(after),
        ranking=Ranking.of(after),
        tau_before=Ranking.of(before).tau,
    )


def _mean_error(predictions: Sequence[PredictedRow]) -> float | None:
    return mean(abs(row.error) for row in predictions if row.error is not None)


# Comparison of predictions with one table of measurements, or with all tables of a folder.


def compare(path: Path, factors: Calibration) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Predict the runs of a table, or of all tables in a folder.

    Returns:
        name -> rows and errors of each table, and the files that are not tables

    Raises:
        UserError: there is no table, or a table cannot be read.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    left_out = [file for file in files if path.is_dir() and not is_table_of_runs(file)]
    results = {file.stem: compared(file, factors) for file in files if file not in left_out}
    if not results:
        raise UserError(f"{path}: the folder has no table of runs; use another folder")
    return results, left_out


def compared(path: Path, factors: Calibration) -> dict[str, Any]:
    """Return the rows and the errors of a table."""
    rows = read_table(path)
    predictions = predict(rows, factors)
    return {
        "rows": [row_table(prediction) for prediction in predictions],
        "summary": summary(rows, predictions),
    }
