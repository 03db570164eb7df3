"""The predicted goodput of a recipe, as text and as a table."""

from dataclasses import asdict, dataclass
from typing import Any

from threefold.config.recipe import Recipe
from threefold.plan.costs import SnapshotCosts
from threefold.plan.goodput import FaultCosts, Goodput, best_interval, goodput

BEST = "; the best interval"


@dataclass(frozen=True)
class GoodputCase:
    """A recipe and the failures that its goodput is predicted for.

    Attributes:
        recipe: the recipe
        step_seconds: predicted duration of a step
        costs: the times that saves and failures cost, without snapshots
        snapshots: the costs of snapshots in memory
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

    def best_every(self) -> int:
        """Return the number of steps between saves that keeps most of the time."""
        return best_interval(
            self.step_seconds,
            self.costs,
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
        found = goodput(steps * self.step_seconds, self.snapshots.times, self.failures_per_day)
        return Goodput(
            kept=up * found.kept,
            repeated=up * found.repeated,
            saving=up * found.saving + 1 - up,
            restarting=up * found.restarting,
        )

    def best_snapshot_every(self) -> int:
        """Return the number of steps between snapshots that keeps most of the time."""
        return best_interval(
            self.step_seconds,
            self.snapshots.times,
            self.failures_per_day,
            max_steps=self.recipe.training.steps,
        )


def goodput_lines(case: GoodputCase) -> list[str]:
    """Return the lines about the goodput."""
    costs, every, best = case.costs, case.recipe.checkpoint.every, case.best_every()
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
    costs, times, best = case.snapshots, case.snapshots.times, case.best_snapshot_every()
    own = case.recipe.checkpoint.snapshot_every
    lines = [
        f"With snapshots in memory (each pauses the steps for {duration(times.pause_seconds)}, is "
        f"complete after {duration(times.write_seconds)}, and lets each node send "
        f"{costs.sent_bytes / 1e9:.3g} GB; they need {costs.memory_bytes / 2**30:.3g} GiB of host "
        f"memory per node; a restart takes {duration(times.restart_seconds)}):"
    ]
    for steps in dict.fromkeys((own or best, best)):
        line = _line(case, "snapshot_every", steps, case.with_snapshots_every(steps))
        lines.append(line + (BEST if steps == best else ""))
    return lines


def goodput_table(case: GoodputCase) -> dict[str, Any]:
    """Return the goodput as a JSON object."""
    every, best = case.recipe.checkpoint.every, case.best_every()
    own, best_snapshots = case.recipe.checkpoint.snapshot_every, case.best_snapshot_every()
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


def _line(case: GoodputCase, key: str, every: int, found: Goodput) -> str:
    interval = duration(every * case.step_seconds)
    return (
        f"  checkpoint.{key} = {every} ({interval}): {found.kept:.1%} of the time in "
        f"kept steps, {found.repeated:.1%} in repeated steps, {found.restarting:.1%} in restarts, "
        f"{found.saving:.1%} in saves"
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
