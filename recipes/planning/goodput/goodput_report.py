"""The predicted goodput of a recipe, as text and as a table."""

from dataclasses import asdict, dataclass
from typing import Any

from recipes.planning.goodput.renewal import FaultCosts, Goodput, best_interval, goodput
from recipes.training.recipe.schema import Recipe


@dataclass(frozen=True)
class GoodputCase:
    """A recipe and the failures that its goodput is predicted for.

    Attributes:
        recipe: the recipe
        step_seconds: predicted duration of a step
        costs: the times that saves and failures cost
        failures_per_day: failures of the whole run
    """

    recipe: Recipe
    step_seconds: float
    costs: FaultCosts
    failures_per_day: float

    def with_saves_every(self, steps: int) -> Goodput:
        """Return the goodput with a number of steps between saves."""
        return goodput(steps * self.step_seconds, self.costs, self.failures_per_day)

    def best_every(self) -> int:
        """Return the number of steps between saves that keeps most of the time."""
        most = self.recipe.training.steps
        return best_interval(self.step_seconds, self.costs, self.failures_per_day, most=most)


def goodput_lines(case: GoodputCase) -> list[str]:
    """Return the lines about the goodput."""
    costs, every, best = case.costs, case.recipe.checkpoint.every, case.best_every()
    lines = [
        f"With {case.failures_per_day:g} failures per day (a save pauses the steps for "
        f"{duration(costs.pause)} and is complete after {duration(costs.write)}; a restart takes "
        f"{duration(costs.restart)}):",
        _line(case, every),
    ]
    if best != every:
        lines.append(_line(case, best) + "; the best interval")
    return lines


def goodput_table(case: GoodputCase) -> dict[str, Any]:
    """Return the goodput as a JSON object."""
    every, best = case.recipe.checkpoint.every, case.best_every()
    return {
        "failures_per_day": case.failures_per_day,
        "costs_seconds": asdict(case.costs),
        "own": {"every": every} | asdict(case.with_saves_every(every)),
        "best": {"every": best} | asdict(case.with_saves_every(best)),
    }


def _line(case: GoodputCase, every: int) -> str:
    found, interval = case.with_saves_every(every), duration(every * case.step_seconds)
    return (
        f"  checkpoint.every = {every} ({interval}): {found.kept:.1%} of the time in "
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
