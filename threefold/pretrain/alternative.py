"""The nearest layout that needs less memory than the one that ran out of it."""

from dataclasses import dataclass, replace

from threefold.config.recipe import Recipe
from threefold.plan.job import Job, Machine, job_of
from threefold.plan.memory.peak import GIB, StageMemory, fullest_stage, limit_after_shortage
from threefold.plan.recipe_edits import options_of
from threefold.plan.search import search
from threefold.plan.software import THREEFOLD
from threefold.plan.time.step import step_time

MAX_CANDIDATES = 500  # the fastest layouts that are compared


@dataclass(frozen=True)
class Alternative:
    """A layout that is predicted to need less memory.

    Attributes:
        options: the values of --set that select it
        memory: predicted memory of its fullest stage
        slowdown: predicted duration of a step, relative to that of the layout that failed
    """

    options: list[str]
    memory: StageMemory
    slowdown: float


def alternative(recipe: Recipe, machine: Machine) -> Alternative | None:
    """Return the nearest layout that needs less memory.

    Args:
        recipe: the recipe in the layout that ran out of memory
        machine: the GPUs of the run

    Returns:
        The same layout with more recomputation if that saves enough memory. Otherwise the layout
        with the fewest changed settings, the fastest on a tie. None if no layout saves enough.
    """
    job = job_of(recipe, machine, THREEFOLD)
    own = fullest_stage(job)
    limit = limit_after_shortage(own)
    headroom = max(0.0, 1 - limit / (machine.gpu.memory_gib * GIB))
    # `search` drops a layout with more recomputation if the same layout fits with less, so every
    # plan may change the parallel sizes. Changing only the recomputation is the smallest change.
    for recompute in ("selective", "full"):
        changed = replace(job, layout=replace(job.layout, recompute=recompute))
        memory = fullest_stage(changed)
        if recompute != job.layout.recompute and memory.total <= limit:
            options = [f"layout.recompute={recompute}"]
            return Alternative(options, memory, _slowdown(job, changed))
    candidates = search(job, MAX_CANDIDATES, headroom=headroom).plans
    if not candidates:
        return None
    best = min(candidates, key=lambda plan: (len(options_of(recipe, plan)), plan.time.total))
    return Alternative(options_of(recipe, best), best.memory, _slowdown(job, best.job))


def _slowdown(own: Job, other: Job) -> float:
    return step_time(other).total / step_time(own).total
