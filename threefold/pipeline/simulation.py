"""Simulation of the times of passes. Arithmetic only."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

from threefold.pipeline.schedules import Kind, Order, Pass, Pipeline


class TimedPass(NamedTuple):
    """A pass and its seconds since the step's start."""

    work: Pass
    start: float
    end: float


Timeline = list[list[TimedPass]]  # by stage, in the stage's order


def simulate(
    pipeline: Pipeline,
    seconds: Callable[[Pass], float],
    *,
    transfer: float = 0.0,
    orders: Sequence[Order] | None = None,
) -> Timeline:
    """Return the timeline in which a pass runs as soon as its stage is idle and its input is there.

    A result is sent at once, and neither stage waits during the transfer. A pair takes the sum of
    both durations. The timeline has its passes one after the other, but both results are available
    at the end of the pair.

    Args:
        transfer: seconds of a transfer between two stages
        orders: the order of passes of each stage, if it differs from the pipeline's

    Raises:
        ValueError: the stages wait for each other.
    """
    orders = pipeline.orders if orders is None else orders
    done: Timeline = [[] for _ in orders]
    ends: dict[Pass, float] = {}
    units = [deque(pipeline.units(order)) for order in orders]

    def run_next(stage: int) -> bool:
        unit = units[stage][0]
        start = done[stage][-1].end if done[stage] else 0.0
        for needed in filter(None, map(pipeline.needed, unit)):
            if needed not in ends:
                return False
            arrival = ends[needed] + (transfer if needed.stage != stage else 0.0)
            start = max(start, arrival)
        for work in unit:
            done[stage].append(TimedPass(work, start, start + seconds(work)))
            start = done[stage][-1].end
        ends.update(dict.fromkeys(unit, start))
        units[stage].popleft()
        return True

    progress = True
    while progress:
        progress = False
        for stage in range(len(orders)):
            while units[stage] and run_next(stage):
                progress = True
    stuck = [left[0] for left in units if left]
    if stuck:
        raise ValueError(f"the stages wait for each other: {stuck}")
    return done


def pipeline_seconds(timeline: Timeline) -> float:
    """Return the seconds from the start of the step to the end of the last pass."""
    return max(stage[-1].end for stage in timeline)


def idle_share(timeline: Timeline) -> float:
    """Return the share of the stages' time that is idle, in bubbles and transfers."""
    busy = sum(timed.end - timed.start for stage in timeline for timed in stage)
    return 1 - busy / (len(timeline) * pipeline_seconds(timeline))


def typical_seconds(timeline: Timeline) -> Callable[[Pass], float]:
    """Return a function that gives the median duration of a pass's kind, stage and chunk."""
    spans: dict[tuple[Kind, int, int], list[float]] = {}
    for timed in chain.from_iterable(timeline):
        work = timed.work
        spans.setdefault((work.kind, work.stage, work.chunk), []).append(timed.end - timed.start)
    medians = {key: median(seconds) for key, seconds in spans.items()}
    return lambda work: medians[work.kind, work.stage, work.chunk]
