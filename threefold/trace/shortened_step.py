"""A step with few micro-batches that reaches the peak memory of the whole step.

Its communication is scaled to all micro-batches of the step.
"""

import math
import operator
from collections import Counter
from dataclasses import replace

from threefold.config.parallel_dims import Topology
from threefold.config.recipe import Recipe
from threefold.engine.build import pipeline_of
from threefold.pipeline.schedules import BACKWARD, FORWARD, WEIGHT, Order
from threefold.trace.collective_counter import CollectiveCounter, Traffic

# Phases that occur once per step; all others occur once per micro-batch.
PHASES_ONCE_PER_STEP = ("", "ReduceGrads", "OptimizerStep", "optimizer step")
# Passes of a pipeline. Data ranks communicate only in the last of them in a step.
BACKWARD_PHASES = ("BackwardPass", "WeightPass")


def enough_micro_batches(recipe: Recipe, topology: Topology, rank: int) -> int:
    """Return the number of micro-batches with which this rank reaches its peak memory.

    With this number the stage passes through all states that may be the fullest, each with and
    without gradients of an earlier micro-batch. A larger number adds only one loss per micro-batch.
    """
    pipeline = pipeline_of(recipe, topology)
    stage = topology.coordinates(rank).pipeline
    wanted = fullest_moments(pipeline.orders[stage])
    least = pipeline.min_micro_batches
    for fewer in range(least, pipeline.micro_batches):
        if fullest_moments(replace(pipeline, micro_batches=fewer).orders[stage]) == wanted:
            return fewer
    return pipeline.micro_batches


def fullest_moments(order: Order) -> set[tuple[int, ...]]:
    """Return the contents of a stage at its fullest moments; no moment is exceeded by another.

    A moment counts, for each chunk, the micro-batches before their backward pass, those before
    their weight pass, and 1 if gradients exist.
    """
    chunks = 1 + max(work.chunk for work in order)
    before = [0] * chunks
    left = [0] * chunks
    ended = [0] * chunks
    ending = WEIGHT if any(work.kind == WEIGHT for work in order) else BACKWARD
    moments = set()
    for work in order:
        before[work.chunk] += (work.kind == FORWARD) - (work.kind == BACKWARD)
        if ending == WEIGHT:
            left[work.chunk] += (work.kind == BACKWARD) - (work.kind == WEIGHT)
        ended[work.chunk] |= work.kind == ending
        moments.add((*before, *left, *ended))
    return {
        moment
        for moment in moments
        if not any(moment != other and all(map(operator.le, moment, other)) for other in moments)
    }


def with_micro_batches(recipe: Recipe, topology: Topology, count: int) -> Recipe:
    """Return the recipe with `count` micro-batches per step."""
    sequences = count * recipe.batch.micro_sequences * topology.data
    batch = recipe.batch.model_copy(update={"global_sequences": sequences})
    every = recipe.layout.reduce_every
    layout = recipe.layout.model_copy(update={"reduce_every": min(every, count)})
    return recipe.model_copy(update={"batch": batch, "layout": layout})


def per_step(
    counted: CollectiveCounter, micro_batches: int, traced: int, *, every: int = 0
) -> tuple[Traffic, ...]:
    """Return the traffic of a step with all its micro-batches.

    Every micro-batch communicates the same, except that a pipeline reduces its gradients once, or
    with ZeRO-2 once per group of micro-batches.

    every: number of micro-batches in a group; 0: all of the step
    """
    groups = math.ceil(micro_batches / every) / math.ceil(traced / every) if every else 1.0
    counts: Counter[tuple[str, str]] = Counter()
    totals: Counter[tuple[str, str]] = Counter()
    for (phase, axis, kind), count in counted.counts.items():
        size = counted.totals[phase, axis, kind]
        is_reduction = axis == "data" and phase in (*BACKWARD_PHASES, "ReduceGrads")
        if is_reduction:
            count, size = (round(n * groups) for n in (count, size))
        elif phase not in PHASES_ONCE_PER_STEP:
            count, size = (round(n * micro_batches / traced) for n in (count, size))
        counts[axis, kind] += count
        totals[axis, kind] += size
    return tuple(Traffic(*key, counts[key], totals[key]) for key in sorted(counts))
