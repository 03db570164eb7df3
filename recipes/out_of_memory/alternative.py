"""The nearest layout that needs less memory than the one that ran out of it."""

from dataclasses import dataclass, replace

from recipes.planning.inputs.job import Job, Machine, job_of
from recipes.planning.inputs.software import THREEFOLD
from recipes.planning.memory.peak import GIB, StageMemory, fullest_stage, memory_of_stage
from recipes.planning.output.recipe_edits import options_of
from recipes.planning.search.layout_search import search
from recipes.planning.time.step_time import step_time
from recipes.training.recipe.schema import Recipe

SAVING = 0.15  # share of the program's memory that another layout must save
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


def predicted(job: Job, stage: int) -> StageMemory:
    """Return the predicted memory of a rank of a stage."""
    return memory_of_stage(job, stage)


def alternative(recipe: Recipe, machine: Machine) -> Alternative | None:
    """Return the layout with the fewest changed settings that needs less memory.

    Args:
        recipe: the recipe in the layout that ran out of memory
        machine: the GPUs of the run

    Returns:
        Among layouts that need SAVING less and leave the usual headroom, the one with the fewest
        changes, and among those the fastest; None if there is none.
    """
    job = job_of(recipe, machine, THREEFOLD)
    own = fullest_stage(job)
    limit = (1 - SAVING) * own.counted + own.overhead
    headroom = max(0.0, 1 - limit / (machine.gpu.memory_gib * GIB))
    candidates = search(job, MAX_CANDIDATES, headroom=headroom).plans
    # A search leaves out layouts with more recomputation if less is enough, so its plans may all
    # change the sizes; the own sizes with more recomputation are the nearest ones.
    for recompute in ("selective", "full"):
        changed = replace(job, layout=replace(job.layout, recompute=recompute))
        memory = fullest_stage(changed)
        if recompute != job.layout.recompute and memory.total <= limit:
            options = [f"layout.recompute={recompute}"]
            return Alternative(options, memory, _slowdown(job, changed))
    if not candidates:
        return None
    best = min(candidates, key=lambda plan: (len(options_of(recipe, plan)), plan.time.total))
    return Alternative(options_of(recipe, best), best.memory, _slowdown(job, best.job))


def _slowdown(own: Job, other: Job) -> float:
    return step_time(other).total / step_time(own).total
