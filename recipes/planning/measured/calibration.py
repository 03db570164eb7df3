"""A few factors for one cluster, fitted to a few of its runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import exp, log, sqrt

from recipes.planning.inputs.job import Job
from recipes.planning.time.step_time import step_time

MOST_ROWS = 8
BOUND = log(3)  # no factor leaves 1/3 .. 3
TOLERANCE = 0.05  # of a row's logarithm; rows beyond it count less and less
ROUNDS = 40


@dataclass(frozen=True)
class Calibration:
    """Times of a kind, relative to the prediction without calibration."""

    compute: float = 1.0
    node_links: float = 1.0
    network: float = 1.0
    contention: float = 1.0
    host: float = 1.0

    def of(self, job: Job) -> Job:
        """The job on hardware and software that take this much longer."""
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


# How far a factor usually is from 1, as a standard deviation of its logarithm.
USUAL = Calibration(compute=0.1, node_links=0.1, network=0.2, contention=1.0, host=0.1)


def evenly_spread(count: int) -> list[int]:
    """At most `MOST_ROWS` of `count` indices, the first and the last among them."""
    chosen = min(count, MOST_ROWS)
    return sorted({round(k * (count - 1) / max(1, chosen - 1)) for k in range(chosen)})


def calibrate(measured: Sequence[tuple[Job, float]]) -> Calibration:
    """The factors that explain measured steps best.

    measured: jobs and the seconds of their steps

    Minimizes a robust sum over the rows (Charbonnier's, which is quadratic for small errors and
    linear for large ones) plus the squares of the factors' logarithms in units of `USUAL`, so that
    what the rows do not show stays at 1. One factor after the other, by halving steps.
    """
    names = [field.name for field in fields(Calibration)]
    logs = dict.fromkeys(names, 0.0)

    def cost() -> float:
        factors = Calibration(**{name: exp(value) for name, value in logs.items()})
        errors = (log(step_time(factors.of(job)).total / seconds) for job, seconds in measured)
        rows = sum(2 * (sqrt(1 + (error / TOLERANCE) ** 2) - 1) for error in errors)
        usual = asdict(USUAL)
        return rows + sum((logs[name] / usual[name]) ** 2 for name in names) / 2

    step, best = 0.2, cost()
    for _ in range(ROUNDS):
        improved = False
        for name in names:
            for change in (step, -step):
                before = logs[name]
                logs[name] = max(-BOUND, min(BOUND, before + change))
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
