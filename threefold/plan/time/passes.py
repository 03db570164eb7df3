"""Order and duration of each pass of a job's pipeline."""

from collections.abc import Callable

from threefold.pipeline.balance import pass_proportions
from threefold.pipeline.schedules import BACKWARD, FORWARD, WEIGHT, Kind, Pass, Pipeline
from threefold.pipeline.simulation import Timeline, simulate
from threefold.plan.job import Job
from threefold.plan.time.step import transfer_time, virtual_stage_passes


def pipeline_of(job: Job) -> Pipeline:
    """Return the pipeline of a job, which determines the order of its passes.

    Raises:
        UserError: the schedule does not support this number of micro-batches.
    """
    layout = job.layout
    return Pipeline(
        stages=layout.pipeline,
        chunks=layout.chunks,
        micro_batches=job.micro_batches,
        schedule=layout.schedule,
        proportions=pass_proportions(job.model, layout.recompute),
        paired=layout.expert_overlap,
    )


def pass_seconds(job: Job) -> Callable[[Pass], float]:
    """Return a function from a pass to its predicted seconds."""
    pipeline = pipeline_of(job)
    seconds: dict[tuple[Kind, int], float] = {}
    for virtual_stage, each in enumerate(virtual_stage_passes(job)):
        deferred = each.weights.total if pipeline.splits else 0.0
        seconds[FORWARD, virtual_stage] = each.forward.total
        seconds[BACKWARD, virtual_stage] = each.backward.total - deferred
        seconds[WEIGHT, virtual_stage] = deferred
    return lambda work: seconds[work.kind, pipeline.virtual_stage(work.stage, work.chunk)]


def timeline_of(job: Job) -> Timeline:
    """Simulate the start and end of each pass, including transfers and idle times.

    Raises:
        UserError: the schedule does not support this number of micro-batches.
    """
    return simulate(pipeline_of(job), pass_seconds(job), transfer=transfer_time(job))
