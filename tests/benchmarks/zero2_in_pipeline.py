"""Would ZeRO-2 pay under a pipeline? What it saves and costs, as the planner sees it.

Gradients would be shared by the data ranks while micro-batches accumulate: 4 bytes per parameter
less, and each micro-batch's gradients reduced in 16 bits instead of a step's. For every recipe of
the catalogue with a cluster of 16 GPUs or more, the best layout as it is, then with this saving for
nothing, then with its communication as far as backward passes do not hide it.

    python tests/benchmarks/zero2_in_pipeline.py [--json]
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.planning import memory, search
from recipes.planning.job import Job, Machine, Spread, job_of
from recipes.planning.network import gather_seconds
from recipes.planning.stages import stage_parameters
from recipes.planning.step_time import StepTime
from recipes.training.recipe import load_recipe, shipped_recipes

LEAST_GPUS = 16
Bytes = tuple[float, float, float]

state_bytes, step_time = memory.state_bytes, search.step_time


def shared_gradients(footprint, spread: Spread, parameters: float, *more) -> Bytes:
    """Weights, gradients and optimizer's state if pipelines shared gradients too."""
    weights, gradients, optimizer = state_bytes(footprint, spread, parameters, *more)
    shares = spread.data if spread.pipeline > 1 else 1
    return weights, gradients / shares, optimizer


def reduced_each_time(job: Job) -> StepTime:
    """A step in which a pipeline reduces the gradients of every micro-batch."""
    time, spread = step_time(job), job.spread
    if spread.pipeline == 1 or spread.data == 1:
        return time
    once = reduction_seconds(job)
    return replace(time, data=time.data + job.micro_batches * max(0.0, once - max(time.backward)))


def reduction_seconds(job: Job) -> float:
    """One reduce-scatter of a stage's gradients in 16 bits over the data ranks."""
    size = 2 * max(stage_parameters(job))
    return gather_seconds(job.machine, size, ranks=job.spread.data, stride=job.spread.tensor)


def best(job: Job, state: Callable[..., Bytes], time: Callable[[Job], StepTime]) -> search.Plan:
    """The fastest layout that fits."""
    with (
        mock.patch.object(memory, "state_bytes", state),
        mock.patch.object(search, "step_time", time),
    ):
        return search.search(job, 1).plans[0]


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
        free = best(job, shared_gradients, step_time)
        paid = best(job, shared_gradients, reduced_each_time)
        rows[f"{path.parent.name}/{path.stem}"] = {
            "seconds": now.time.total,
            "pipeline": now.job.spread.pipeline,
            "gained_for_nothing": now.time.total / free.time.total - 1,
            "gained": now.time.total / paid.time.total - 1,
        }
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'recipe':<16}{'best step, s':>14}{'stages':>8}{'for nothing':>13}{'with cost':>11}")
    for name, row in rows.items():
        print(
            f"{name:<16}{row['seconds']:14.3f}{row['pipeline']:8}"
            f"{row['gained_for_nothing']:13.1%}{row['gained']:11.1%}"
        )


if __name__ == "__main__":
    main()
