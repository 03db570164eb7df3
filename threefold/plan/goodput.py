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
from dataclasses import asdict, dataclass
from typing import Any

from models.cost import checkpoint_elements
from threefold.config.recipe import Recipe
from threefold.plan.job import Job
from threefold.plan.memory.working import momentum_parameters
from threefold.plan.stage_contents import own_parameters, stage_parameters

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
        failures_per_day: failures of the whole run, above 0
    """
    period = _period(interval_seconds, costs)
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


# Predicted times of saves, snapshots and restarts of a job, for the goodput.

ELEMENT_BYTES = 4  # of weights and optimizer state in a checkpoint, which are in fp32
HOST_BYTES_PER_SECOND = 20e9  # of a copy from a GPU to pinned host memory (PCIe 4.0 x16), assumed
STORAGE_BYTES_PER_SECOND_OF_NODE = 1e9  # share of each node in the storage's rate, assumed
PAUSE_SHARE = 0.05  # of a background write, lost to slower steps; measured on CPUs: 0.048
HASH_BYTES_PER_SECOND = 1.4e9  # SHA-256 on one core; each rank hashes its own files; measured
NODE_BYTES_PER_SECOND = 5e9  # of a node, from memory to memory over TCP, assumed
COPIES = 2  # of each file of a snapshot, on different nodes
START_SECONDS = 60.0  # assumed: joining, building and warming up, without detection and reading


@dataclass(frozen=True)
class SnapshotCosts:
    """The costs of snapshots in the memory of the nodes.

    Attributes:
        times: of a snapshot, and of a restart from it
        memory_bytes: host memory of a node, as if all ranks of a stage wrote equally much: two
            snapshots, each with the copies of a partner, and the staged state of its ranks
        sent_bytes: what a node sends for each snapshot
    """

    times: FaultCosts
    memory_bytes: float
    sent_bytes: float


def snapshot_costs(
    job: Job, *, detection_seconds: float, restart_seconds: float | None = None
) -> SnapshotCosts:
    """Return the costs of snapshots for the nodes with the largest stage.

    Args:
        detection_seconds: from a failure to its detection
        restart_seconds: from a failure to the next step; None for detection, the assumed start,
            verification and reading
    """
    own, node_ranks = own_bytes(job), job.machine.gpus_per_node
    copies = min(COPIES, job.machine.nodes)
    # The ranks of a stage exchange parts to assemble logical tensors, then send copies.
    sent = copies * own * node_ranks
    write = own / HASH_BYTES_PER_SECOND + sent / NODE_BYTES_PER_SECOND
    if restart_seconds is None:
        # A rank reads all its weights, and its own shard of the optimizer state.
        weights = ELEMENT_BYTES * max(stage_parameters(job))
        state = own - weights / job.layout.optimizer_ranks
        read = node_ranks * (weights + state) / NODE_BYTES_PER_SECOND
        restart_seconds = detection_seconds + START_SECONDS + own / HASH_BYTES_PER_SECOND + read
    times = FaultCosts(
        pause_seconds=own / HOST_BYTES_PER_SECOND + PAUSE_SHARE * write,
        write_seconds=write,
        restart_seconds=restart_seconds,
    )
    memory = (2 * copies + 1) * own * node_ranks
    return SnapshotCosts(times, memory, sent)


def fault_costs(
    job: Job,
    *,
    detection_seconds: float,
    storage_bytes_per_second: float | None = None,
    restart_seconds: float | None = None,
) -> FaultCosts:
    """Return the times that saves and failures cost a job.

    Args:
        storage_bytes_per_second: rate at which all nodes together write and read checkpoints; None
            for the assumed rate per node
        restart_seconds: from a failure to the next step; None for detection, the assumed start and
            reading the checkpoint
    """
    rate = storage_bytes_per_second or STORAGE_BYTES_PER_SECOND_OF_NODE * job.machine.nodes
    has_average = job.average_every > 0
    elements = checkpoint_elements(job.model, job.optimizer, has_average=has_average)
    write = ELEMENT_BYTES * elements / rate
    if restart_seconds is None:
        restart_seconds = detection_seconds + START_SECONDS + write  # reading takes as long
    return FaultCosts(
        pause_seconds=own_bytes(job) / HOST_BYTES_PER_SECOND + PAUSE_SHARE * write,
        write_seconds=write,
        restart_seconds=restart_seconds,
    )


def own_bytes(job: Job) -> float:
    """Return the bytes of a checkpoint that a rank of the largest stage writes."""
    states = 4 if job.average_every else 3
    elements = max(
        states * own_parameters(job, stage) - momentum_parameters(job, stage)
        for stage in range(job.layout.pipeline)
    )
    return ELEMENT_BYTES * elements / job.layout.optimizer_ranks


# The predicted goodput of a recipe, as text and as a table.

BEST = "; the best interval"


@dataclass(frozen=True)
class GoodputCase:
    """A recipe and the failures that its goodput is predicted for.

    Attributes:
        step_seconds: predicted duration of a step
        costs: the times that saves and failures cost, without snapshots
        failures_per_day: failures of the whole run
    """

    recipe: Recipe
    step_seconds: float
    costs: FaultCosts
    snapshots: SnapshotCosts
    failures_per_day: float

    def with_saves_every(self, steps: int) -> Goodput:
        """Return the goodput with a number of steps between saves."""
        return goodput(steps * self.step_seconds, self.costs, self.failures_per_day)

    def best_every(self, costs: FaultCosts) -> int:
        """Return the number of steps between saves or snapshots that keeps most of the time."""
        return best_interval(
            self.step_seconds,
            costs,
            self.failures_per_day,
            max_steps=self.recipe.training.steps,
        )

    def with_snapshots_every(self, steps: int) -> Goodput:
        """Return the goodput with a number of steps between snapshots.

        The run also saves to the disk, every `checkpoint.every` steps. Failures of a node and its
        partner at the same time, which need the disk, are neglected.
        """
        interval = self.recipe.checkpoint.every * self.step_seconds
        up = interval / (interval + self.costs.pause_seconds)
        shares = goodput(steps * self.step_seconds, self.snapshots.times, self.failures_per_day)
        return Goodput(
            kept=up * shares.kept,
            repeated=up * shares.repeated,
            saving=up * shares.saving + 1 - up,
            restarting=up * shares.restarting,
        )


def goodput_lines(case: GoodputCase) -> list[str]:
    """Return the lines about the goodput."""
    costs, every, best = case.costs, case.recipe.checkpoint.every, case.best_every(case.costs)
    lines = [
        f"With {case.failures_per_day:g} failures per day (a save pauses the steps for "
        f"{duration(costs.pause_seconds)} and is complete after {duration(costs.write_seconds)}; a "
        f"restart takes {duration(costs.restart_seconds)}):",
    ]
    for steps in dict.fromkeys((every, best)):
        line = _line(case, "every", steps, case.with_saves_every(steps))
        lines.append(line + (BEST if steps == best else ""))
    return lines + _snapshot_lines(case)


def _snapshot_lines(case: GoodputCase) -> list[str]:
    """Return the lines about snapshots in the memory of the nodes."""
    costs, times = case.snapshots, case.snapshots.times
    own, best = case.recipe.checkpoint.snapshot_every, case.best_every(times)
    lines = [
        f"With snapshots in memory (each pauses the steps for {duration(times.pause_seconds)}, is "
        f"complete after {duration(times.write_seconds)}, and lets each node send "
        f"{costs.sent_bytes / 1e9:.3g} GB; they need {costs.memory_bytes / 2**30:.3g} GiB of host "
        f"memory per node on average; a restart takes {duration(times.restart_seconds)}):"
    ]
    for steps in dict.fromkeys((own or best, best)):
        line = _line(case, "snapshot_every", steps, case.with_snapshots_every(steps))
        lines.append(line + (BEST if steps == best else ""))
    return lines


def goodput_table(case: GoodputCase) -> dict[str, Any]:
    """Return the goodput as a JSON object."""
    every, best = case.recipe.checkpoint.every, case.best_every(case.costs)
    own, best_snapshots = (
        case.recipe.checkpoint.snapshot_every,
        case.best_every(case.snapshots.times),
    )
    snapshots: dict[str, Any] = {
        "costs": asdict(case.snapshots.times),
        "memory_bytes_per_node": case.snapshots.memory_bytes,
        "sent_bytes_per_node": case.snapshots.sent_bytes,
        "best": {"every": best_snapshots} | asdict(case.with_snapshots_every(best_snapshots)),
    }
    if own:
        snapshots["own"] = {"every": own} | asdict(case.with_snapshots_every(own))
    return {
        "failures_per_day": case.failures_per_day,
        "costs": asdict(case.costs),
        "own": {"every": every} | asdict(case.with_saves_every(every)),
        "best": {"every": best} | asdict(case.with_saves_every(best)),
        "snapshots": snapshots,
    }


def _line(case: GoodputCase, key: str, every: int, shares: Goodput) -> str:
    interval = duration(every * case.step_seconds)
    return (
        f"  checkpoint.{key} = {every} ({interval}): {shares.kept:.1%} of the time in "
        f"kept steps, {shares.repeated:.1%} in repeated steps, {shares.restarting:.1%} in "
        f"restarts, {shares.saving:.1%} in saves"
    )


def duration(seconds: float) -> str:
    """Return a duration for a message: "0.21 s", "35 s", "12 min" or "3.5 h"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
