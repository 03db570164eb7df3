"""Calibration: a few factors for one cluster, fitted to a few of its runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import exp, log, sqrt

from threefold.plan.job import Job
from threefold.plan.software import THREEFOLD
from threefold.plan.time.step import step_time

MAX_ROWS = 8  # of a table, used for the fit
MAX_LOG_FACTOR = log(3)  # factors of published stacks stay within 1/3 .. 3
MAX_LOG_FACTOR_UNMEASURED = log(1000)  # of Threefold's factors, because its speed is only assumed
LOG_ERROR_SCALE = 0.05  # errors of logarithms count linearly above this, and squared below
MAX_ROUNDS = 40


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
                era=software.era / self.compute,
                block_seconds=software.block_seconds * self.host,
                step_seconds=software.step_seconds * self.host,
            ),
        )


# The expected standard deviation of each factor's logarithm.
PRIOR_DEVIATION = Calibration(compute=0.1, node_links=0.1, network=0.2, contention=1.0, host=0.1)
PRIOR_DEVIATION_UNMEASURED = Calibration(2.0, 2.0, 2.0, 2.0, 2.0)


def evenly_spaced_rows(count: int) -> list[int]:
    """Return at most `MAX_ROWS` of `count` indices, including the first and the last one."""
    chosen = min(count, MAX_ROWS)
    return sorted({round(k * (count - 1) / max(1, chosen - 1)) for k in range(chosen)})


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
