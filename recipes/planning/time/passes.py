"""A job's pipeline pass by pass: their order, and what each takes."""

from collections.abc import Callable

from models.pipeline.schedule.balance import pass_proportions
from models.pipeline.schedule.order import BACKWARD, FORWARD, WEIGHT, Kind, Pass, Pipeline
from models.pipeline.schedule.simulation import Timeline, simulate
from recipes.planning.inputs.job import Job
from recipes.planning.time.step_time import position_passes, transfer_time


def pipeline_of(job: Job) -> Pipeline:
    """What decides the order of a job's passes.

    Raises:
        UserError: the schedule does not support this number of micro-batches.
    """
    spread = job.spread
    return Pipeline(
        stages=spread.pipeline,
        chunks=spread.chunks,
        micro_batches=job.micro_batches,
        schedule=spread.schedule,
        proportions=pass_proportions(job.model, spread.recompute),
    )


def pass_seconds(job: Job) -> Callable[[Pass], float]:
    """What each pass takes."""
    pipeline = pipeline_of(job)
    spent: dict[tuple[Kind, int], float] = {}
    for position, each in enumerate(position_passes(job)):
        later = each.weights.total if pipeline.splits else 0.0
        spent[FORWARD, position] = each.forward.total
        spent[BACKWARD, position] = each.backward.total - later
        spent[WEIGHT, position] = later
    return lambda work: spent[work.kind, pipeline.virtual_stage(work.stage, work.chunk)]


def timeline_of(job: Job) -> Timeline:
    """When each pass runs; transfers take their time, and stages wait where they have to.

    Raises:
        UserError: the schedule does not support this number of micro-batches.
    """
    return simulate(pipeline_of(job), pass_seconds(job), transfer=transfer_time(job))
