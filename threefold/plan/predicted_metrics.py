"""The planner's numbers for a run, by the name of the metric that each predicts."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from models.errors import UserError
from threefold.config.phases import StagePlan
from threefold.config.recipe import Recipe
from threefold.plan.job import Job, Machine, job_of
from threefold.plan.memory.peak import stage_memory
from threefold.plan.report import rates
from threefold.plan.time.step import step_time


def predicted_metrics_of_run(
    plan: StagePlan, machine: Machine | None
) -> Callable[[int], Mapping[str, float]]:
    """Return a function that returns `predicted_metrics` for a step of a run.

    The batch of a step depends on the stage and on `batch.ramp`.
    """

    @lru_cache(maxsize=4)
    def of_span(first_step: int) -> Mapping[str, float]:
        return predicted_metrics(plan.at(first_step).recipe, machine)

    return lambda step: of_span(plan.at(step).first)


def predicted_metrics(recipe: Recipe, machine: Machine | None) -> dict[str, float]:
    """Return the predictions for a recipe in its own layout.

    Args:
        recipe: the recipe of the run
        machine: the GPUs of the run; None if they have no datasheet

    Returns:
        `step_seconds`, `tokens_per_second` of all ranks, `tflops_per_gpu`, `mfu`, and `memory_gb`
        of rank 0, in 10^9 bytes. Empty without a datasheet, or if the planner rejects the recipe.
    """
    if machine is None:
        return {}
    try:
        job = job_of(recipe, machine)
    except UserError:  # the planner rejects some recipes that the engine accepts
        return {}
    return metrics_of_job(job, recipe.training.steps)


def metrics_of_job(job: Job, steps: int) -> dict[str, float]:
    """Return the predictions for a job of a number of steps, as `predicted_metrics` does."""
    seconds, memory = step_time(job).total, stage_memory(job)[0]
    found = rates(job, seconds, steps)
    # The metric is what torch's allocator counts; on a CPU, it is the memory of the process.
    counted = memory.total if job.machine.gpu.device == "cpu" else memory.counted
    return {
        "step_seconds": seconds,
        "tokens_per_second": found.tokens_per_second,
        "tflops_per_gpu": found.model_tflops,
        "mfu": found.mfu,
        "memory_gb": counted / 1e9,
    }
