"""Goodput of a run that fails at random: the share of wall time spent on steps that are kept.

Failures are a Poisson process. After each one the run restarts from the newest complete checkpoint.
Saves happen in the background: a save pauses the steps for a moment, and the checkpoint counts only
once it is on the disk. With instant saves this is the model of Young 1974 (Communications of the
ACM 17, 530) and Daly 2006 (Future Generation Computer Systems 22, 303).

Let l be the rate of failures, t the time of the steps between two saves, c the pause of a save, d
the time from the pause until the checkpoint is on the disk, and r the time of a restart. The k-th
checkpoint since a restart is complete after k (t + c) + d. The expected number of complete
checkpoints before the next failure is therefore

    sum over k >= 1 of exp(-l (k (t + c) + d)) = exp(-l d) q / (1 - q), with q = exp(-l (t + c)),

and each of them keeps t. A restart may fail too, so it takes (exp(l r) - 1) / l on average, and the
time between two successful restarts is 1 / l + (exp(l r) - 1) / l = exp(l r) / l.
"""

import math
from dataclasses import dataclass

SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True)
class FaultCosts:
    """The times that saves and failures cost.

    Attributes:
        pause_seconds: pause of the steps for a save
        write_seconds: from the pause until the checkpoint is on the disk
        restart_seconds: from a failure to the first step of the next attempt
    """

    pause_seconds: float
    write_seconds: float
    restart_seconds: float


@dataclass(frozen=True)
class Goodput:
    """The shares of wall time; they add up to 1.

    Attributes:
        kept: in steps that are kept
        repeated: in steps that are lost and repeated
        saving: in pauses for saves
        restarting: in restarts
    """

    kept: float
    repeated: float
    saving: float
    restarting: float


def goodput(interval_seconds: float, costs: FaultCosts, failures_per_day: float) -> Goodput:
    """Return the expected goodput.

    Args:
        interval_seconds: time of the steps between two saves, above 0
        costs: the times that saves and failures cost
        failures_per_day: failures of the whole run, at least 0
    """
    period = _period(interval_seconds, costs)
    if failures_per_day == 0:
        return Goodput(interval_seconds / period, 0.0, 1 - interval_seconds / period, 0.0)
    rate = failures_per_day / SECONDS_PER_DAY
    up = math.exp(-rate * costs.restart_seconds)  # share of the time outside of restarts
    kept = math.exp(_log_kept(interval_seconds, costs, rate))
    saving = up * (1 - interval_seconds / period)
    return Goodput(kept, max(0.0, up - kept - saving), min(saving, up - kept), 1 - up)


def _period(interval_seconds: float, costs: FaultCosts) -> float:
    """Return the time from save to save: a save waits until the previous one is complete."""
    return max(interval_seconds + costs.pause_seconds, costs.write_seconds)


def _log_kept(interval_seconds: float, costs: FaultCosts, rate: float) -> float:
    """Return the logarithm of the share of kept steps, which may be too small for a float.

    Args:
        interval_seconds: time of the steps between two saves, above 0
        costs: the times that saves and failures cost
        rate: failures per second
    """
    exponent = rate * _period(interval_seconds, costs)
    # log(exp(x) - 1) = x + log(1 - exp(-x))
    checkpoints = -rate * costs.write_seconds - exponent - math.log(-math.expm1(-exponent))
    return math.log(rate * interval_seconds) + checkpoints - rate * costs.restart_seconds


def best_interval(
    step_seconds: float, costs: FaultCosts, failures_per_day: float, *, max_steps: int
) -> int:
    """Return the number of steps between saves that keeps most of the time.

    Args:
        step_seconds: duration of a step
        costs: the times that saves and failures cost
        failures_per_day: failures of the whole run, above 0
        max_steps: the largest number of steps, at least 1

    Returns:
        From 1 to `max_steps`, and long enough that a save ends before the next one begins.
    """
    shortest = math.ceil((costs.write_seconds - costs.pause_seconds) / step_seconds)
    low, high = min(max_steps, max(1, shortest)), max_steps
    rate = failures_per_day / SECONDS_PER_DAY

    def log_kept(steps: int) -> float:
        return _log_kept(steps * step_seconds, costs, rate)

    while high - low > 2:  # the share rises up to its maximum and falls after it
        third = (high - low) // 3
        left, right = low + third, high - third
        if log_kept(left) < log_kept(right):
            low = left
        else:
            high = right
    return max(range(low, high + 1), key=log_kept)
