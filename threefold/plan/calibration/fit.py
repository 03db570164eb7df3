"""The fit of a calibration to a table of measured runs, and its quality."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from models.errors import UserError
from threefold.plan.calibration import evaluation
from threefold.plan.calibration.calibration import Calibration, calibrate, evenly_spaced_rows
from threefold.plan.calibration.evaluation import Prediction
from threefold.plan.calibration.table import Row, read_table


@dataclass(frozen=True)
class Quality:
    """Errors of predictions relative to measured steps.

    Attributes:
        steps: number of measured steps
        before: mean relative error without calibration; None without steps
        after: the same with calibration
        tau: Kendall's tau of predicted and measured times with calibration, as a mean over groups
            of layouts of one model, batch and machine; None without such a group
        tau_before: the same without calibration
    """

    steps: int
    before: float | None
    after: float | None
    tau: float | None
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
    rows: tuple[Row, ...] = ()
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
        path: the table
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
    chosen = set(evenly_spaced_rows(len(rows)))
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


def quality(rows: Sequence[Row], factors: Calibration) -> Quality:
    """Return the errors of predictions for measured rows, with and without calibration."""
    before = evaluation.predict(rows, Calibration())
    after = evaluation.predict(rows, factors)
    return Quality(
        steps=len(rows),
        before=_mean_error(before),
        after=_mean_error(after),
        tau=_tau(after),
        tau_before=_tau(before),
    )


def _mean_error(predictions: Sequence[Prediction]) -> float | None:
    return evaluation.mean(abs(each.error) for each in predictions if each.error is not None)


def _tau(predictions: Sequence[Prediction]) -> float | None:
    groups = evaluation.ranked_groups(predictions)
    return evaluation.mean(evaluation.kendall_tau(group) for group in groups)
