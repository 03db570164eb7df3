"""Predict with the planner whether ZeRO-2 would be faster than ZeRO-1 in a pipeline.

ZeRO-2 would split gradients over the data ranks while micro-batches accumulate. That saves 4 bytes
per parameter, but the gradients of each micro-batch would have to be reduced, instead of once per
step. For every recipe of the catalogue with a cluster of 16 GPUs or more, this prints the time of
the best layout with ZeRO-1, then that with ZeRO-2: once with as much of the communication hidden as
the backward passes allow, and once with none of it hidden.

    python benchmarks/zero2_in_pipeline.py [--json]
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipes.planning.inputs.job import Job, JobLayout, Machine, job_of
from recipes.planning.inputs.stage_contents import stage_parameters
from recipes.planning.memory import peak
from recipes.planning.search import layout_search
from recipes.planning.time.network import gather_seconds
from recipes.planning.time.step_time import StepTime
from recipes.training.recipe.loading import load_recipe, shipped_recipes

LEAST_GPUS = 16
Bytes = tuple[float, float, float]

state_bytes, step_time = peak.state_bytes, layout_search.step_time


def shared_gradients(footprint, layout: JobLayout, parameters: float, *more) -> Bytes:
    """Weights, gradients and optimizer's state if pipelines shared gradients too."""
    weights, gradients, optimizer = state_bytes(footprint, layout, parameters, *more)
    shares = layout.data if layout.pipeline > 1 else 1
    return weights, gradients / shares, optimizer


def reduced_each_time(job: Job, *, hidden: bool) -> StepTime:
    """A step in which a pipeline reduces the gradients of every micro-batch.

    hidden: as far as that can be behind this micro-batch's backward pass
    """
    time, layout = step_time(job), job.layout
    if layout.pipeline == 1 or layout.data == 1:
        return time
    seen = max(0.0, reduction_seconds(job) - (max(time.backward) if hidden else 0.0))
    return replace(time, data=time.data + job.micro_batches * seen)


def reduction_seconds(job: Job) -> float:
    """Return the time of one reduce-scatter of a stage's gradients over the data ranks."""
    size = job.software.gradient_bytes * max(stage_parameters(job))
    return gather_seconds(job.machine, size, ranks=job.layout.data, stride=job.layout.tensor)


def best(
    job: Job, state: Callable[..., Bytes], time: Callable[[Job], StepTime]
) -> layout_search.Plan:
    """The fastest layout that fits."""
    with (
        mock.patch.object(peak, "state_bytes", state),
        mock.patch.object(layout_search, "step_time", time),
    ):
        return layout_search.search(job, 1).plans[0]


def main() -> None:
    """Search thrice for each recipe; print a line for each that has a pipeline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = {}
    for path in shipped_recipes():
        recipe = load_recipe(path)
        if recipe.cluster is None:
            continue
        job = job_of(recipe, Machine.of_cluster(recipe.cluster))
        if job.machine.gpus < LEAST_GPUS:
            continue
        now = best(job, state_bytes, step_time)
        hidden = best(job, shared_gradients, partial(reduced_each_time, hidden=True))
        seen = best(job, shared_gradients, partial(reduced_each_time, hidden=False))
        rows[f"{path.parent.name}/{path.stem}"] = {
            "seconds": now.time.total,
            "pipeline": now.job.layout.pipeline,
            "gained_if_hidden": now.time.total / hidden.time.total - 1,
            "gained": now.time.total / seen.time.total - 1,
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
