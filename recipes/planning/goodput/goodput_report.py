"""The predicted goodput of a recipe, as text and as a table."""

from dataclasses import asdict
from typing import Any

from recipes.planning.goodput.renewal import FaultCosts, Goodput, best_interval, goodput
from recipes.training.recipe.schema import Recipe


def goodput_lines(
    recipe: Recipe, step: float, costs: FaultCosts, failures_per_day: float
) -> list[str]:
    """Return the lines about the goodput.

    Args:
        recipe: the recipe
        step: predicted duration of a step, in seconds
        costs: the times that saves and failures cost
        failures_per_day: failures of the whole run
    """
    every = recipe.checkpoint.every
    best = best_interval(step, costs, failures_per_day, most=recipe.training.steps)
    lines = [
        f"With {failures_per_day:g} failures per day (a save pauses the steps for "
        f"{duration(costs.pause)} and is complete after {duration(costs.write)}; a restart takes "
        f"{duration(costs.restart)}):",
        _line(every, step, goodput(every * step, costs, failures_per_day)),
    ]
    if best != every:
        found = goodput(best * step, costs, failures_per_day)
        lines.append(_line(best, step, found) + "; the best interval")
    return lines


def goodput_table(
    recipe: Recipe, step: float, costs: FaultCosts, failures_per_day: float
) -> dict[str, Any]:
    """Return the goodput as a JSON object; the arguments are those of `goodput_lines`."""
    every = recipe.checkpoint.every
    best = best_interval(step, costs, failures_per_day, most=recipe.training.steps)
    return {
        "failures_per_day": failures_per_day,
        "costs_seconds": asdict(costs),
        "own": {"every": every} | asdict(goodput(every * step, costs, failures_per_day)),
        "best": {"every": best} | asdict(goodput(best * step, costs, failures_per_day)),
    }


def _line(every: int, step: float, found: Goodput) -> str:
    return (
        f"  checkpoint.every = {every} ({duration(every * step)}): {found.kept:.1%} of the time in "
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
