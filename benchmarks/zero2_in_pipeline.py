"""Predict with the planner whether ZeRO-2 would be faster than ZeRO-1 in a pipeline.

ZeRO-2 would shard gradients over the data ranks while micro-batches accumulate. That saves 4 bytes
per parameter, but gradients would have to be reduced for each micro-batch instead of once per step.
For every recipe of the catalogue with a cluster of 16 GPUs or more, this prints the step time of
the best layout with ZeRO-1, and the gain with ZeRO-2: once with as much of the communication hidden
as the backward passes allow, and once with none of it hidden. Layouts with context ranks are left
out.

    python benchmarks/zero2_in_pipeline.py [--json]
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.planning.inputs.footprint import Footprint
from recipes.planning.inputs.job import Job, Machine, job_of
from recipes.planning.inputs.kernels import BYTES
from recipes.planning.inputs.stage_contents import stage_parameters
from recipes.planning.search.layout_search import search
from recipes.planning.time.network import gather_seconds
from recipes.planning.time.step_time import StepTime, step_time
from recipes.training.recipe.loading import load_recipe, shipped_recipes

MIN_GPUS = 16


class ShardedGradientsJob(Job):
    """A job whose pipelines shard gradients over the data ranks, as under ZeRO-2."""

    @property
    @override
    def footprint(self) -> Footprint:
        shares = self.layout.replicas if self.layout.pipeline > 1 else 1
        footprint = super().footprint
        return replace(footprint, gradient=footprint.gradient / shares)


def step_time_with_zero2(job: Job, *, hidden: bool) -> StepTime:
    """Predict a step in which a pipeline reduces the gradients of every micro-batch.

    Args:
        hidden: the micro-batch's backward pass hides as much of the reduction as it can
    """
    time, layout = step_time(job), job.layout
    if layout.pipeline == 1 or layout.replicas == 1:
        return time
    exposed = max(0.0, reduction_seconds(job) - (max(time.backward) if hidden else 0.0))
    return replace(time, data=time.data + job.micro_batches * exposed)


def without_context(predict_time: Callable[[Job], StepTime]) -> Callable[[Job], StepTime]:
    """Return a prediction by which layouts with context ranks are never the fastest."""

    def predicted(job: Job) -> StepTime:
        time = predict_time(job)
        return time if job.layout.context == 1 else replace(time, data=math.inf)

    return predicted


def reduction_seconds(job: Job) -> float:
    """Return the time of one reduce-scatter of a stage's gradients over the data ranks."""
    size = job.software.bytes_of_gradients(BYTES[job.precision]) * max(stage_parameters(job))
    return gather_seconds(job.machine, size, ranks=job.layout.replicas, stride=job.layout.tensor)


def main() -> None:
    """Run three searches for each recipe, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = {}
    for path in shipped_recipes():
        recipe = load_recipe(path)
        if recipe.cluster is None:
            continue
        job = job_of(recipe, Machine.of_cluster(recipe.cluster))
        if job.machine.gpus < MIN_GPUS or job.layout.context > 1:
            continue
        values = {each.name: getattr(job, each.name) for each in fields(Job)}
        sharded = ShardedGradientsJob(**values)
        now = search(job, 1, predict_time=without_context(step_time)).plans[0]
        hidden, exposed = (
            search(
                sharded, 1, predict_time=without_context(partial(step_time_with_zero2, hidden=each))
            ).plans[0]
            for each in (True, False)
        )
        rows[f"{path.parent.name}/{path.stem}"] = {
            "seconds": now.time.total,
            "pipeline": now.job.layout.pipeline,
            "gained_if_hidden": now.time.total / hidden.time.total - 1,
            "gained": now.time.total / exposed.time.total - 1,
        }
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'recipe':<16}{'best step, s':>14}{'stages':>8}{'all hidden':>13}{'none hidden':>13}")
    for name, row in rows.items():
        print(
            f"{name:<16}{row['seconds']:14.3f}{row['pipeline']:8}"
            f"{row['gained_if_hidden']:13.1%}{row['gained']:13.1%}"
        )


if __name__ == "__main__":
    main()
