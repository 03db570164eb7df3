"""Two stages of a real model on two cores, one thread each: our engine, others, and the bound.

In each round one contestant after the other takes a step with the same batch.
"""

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from models.pipeline.order import Pipeline
from models.pipeline.recording import passes_of
from models.pipeline.simulation import pipeline_seconds, simulate, typical_seconds
from tests.benchmarks.real_contestants import (
    ONE,
    OURS,
    STAGES,
    STOCK,
    TORCH,
    TWO,
    Setting,
    Turn,
    build_all,
)
from tests.ranks import join_world, run_ranks

SECONDS = 1200  # for all rounds
TOLERANCE = 1e-4  # of losses


class RankStep(NamedTuple):
    """A step of one rank."""

    start: float
    end: float
    turn: Turn


Steps = Sequence[tuple[RankStep, ...]]  # of a contestant: by round, then by rank


def compare(setting: Setting) -> dict[str, object]:
    """The speed-ups, by each contestant's best round: what else runs here only makes them slower.

    Raises:
        AssertionError: the contestants have not computed the same.
    """
    ranks = run_ranks(STAGES, time_rank, setting, seconds=SECONDS)
    steps = {name: list(zip(*(rank[name] for rank in ranks), strict=True)) for name in ranks[0]}
    check_losses(steps)
    seconds = {name: min(map(step_seconds, each)) for name, each in steps.items()}
    bounds = {name: bound(setting, name, steps) for name in OURS}
    best = min(OURS, key=seconds.__getitem__)
    over_stock = {name: seconds[name] / seconds[best] for name in STOCK}
    computed = {name: min(map(computed_seconds, steps[name])) for name in (*OURS, *TORCH)}
    over_torch = torch_ratios(computed)
    return {
        "best": best,
        "of_bound": bounds[best] / seconds[best],
        "over_stock": over_stock["DeepSpeed's 1f1b"],
        "over_torch_pipelining": min(over_torch.values()),
        "of_bound_by_schedule": {name: bounds[name] / seconds[name] for name in OURS},
        "over_stock_by_schedule": over_stock,
        "over_torch_by_schedule": over_torch,
        "over_torch_with_optimizer": torch_ratios(seconds),
        "speed_up": {name: seconds[ONE] / each for name, each in seconds.items()},
        "speed_up_bound": {name: seconds[ONE] / each for name, each in bounds.items()},
        "seconds": seconds,
        "median_seconds": {name: median(map(step_seconds, each)) for name, each in steps.items()},
        "cores_slow_each_other": seconds[TWO] / seconds[ONE],
    }


def check_losses(steps: Mapping[str, Steps]) -> None:
    """All contestants compute the same."""
    for name, rounds in steps.items():
        for one, ranks in zip(steps[ONE], rounds, strict=True):
            found = [rank.turn.loss for rank in ranks if rank.turn.loss is not None]
            expected = one[0].turn.loss
            assert all(abs(loss - expected) < TOLERANCE for loss in found), (name, found, expected)


def step_seconds(ranks: Sequence[RankStep]) -> float:
    """From the barrier until the last rank is through."""
    return max(rank.end for rank in ranks) - min(rank.start for rank in ranks)


def computed_seconds(ranks: Sequence[RankStep]) -> float:
    """From the barrier until all gradients are there; torch's pipelining has no optimizer."""
    return max(rank.turn.computed for rank in ranks) - min(rank.start for rank in ranks)


def torch_ratios(seconds: Mapping[str, float]) -> dict[str, float]:
    """torch's pipelining over ours: schedule by schedule, and each one's best."""
    best = min(seconds[name] for name in TORCH) / min(seconds[name] for name in OURS)
    return {
        "best of both": best,
        **{name: seconds[f"torch's {name}"] / seconds[name] for name in ("1f1b", "interleaved")},
    }


def bound(setting: Setting, name: str, steps: Mapping[str, Steps]) -> float:
    """Seconds of a step of our engine if nothing but the passes and the optimizer took time.

    All passes together take what one process takes for them, divided as it was measured; they run
    as the schedule's simulation says. The optimizer's time is halved.
    """
    schedule, chunks = OURS[name]
    pipeline = Pipeline(
        stages=STAGES, micro_batches=setting.micro_batches, chunks=chunks, schedule=schedule
    )
    seconds = typical_seconds(
        [
            [timed for ranks in steps[name] for timed in passes_of(ranks[stage].turn.events, stage)]
            for stage in range(STAGES)
        ]
    )
    passes, optimizer = min((ranks[0].turn.parts for ranks in steps[ONE]), key=sum)
    scale = passes / sum(seconds(work) for order in pipeline.orders for work in order)
    timeline = simulate(pipeline, lambda work: scale * seconds(work))
    return pipeline_seconds(timeline) + optimizer / STAGES


def time_rank(setting: Setting) -> dict[str, list[RankStep]]:
    """On a rank, which keeps to a core of its own: the steps of every contestant."""
    keep_memory()
    cores = sorted(os.sched_getaffinity(0))[-STAGES:]  # systems like to run on the first ones
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"])]})  # before there are other threads
    join_world()
    contestants = dict(build_all(setting))
    steps: dict[str, list[RankStep]] = {name: [] for name in contestants}
    for number in range(1 + setting.rounds):
        tokens, labels = draw_batch(setting, seed=number)
        for name, contestant in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            turn = contestant(tokens, labels)
            end = time.perf_counter()
            steps[name].append(RankStep(start, end, turn))
    return {name: timed[1:] for name, timed in steps.items()}


def keep_memory() -> None:
    """Let malloc keep what is freed, as torch does on a GPU.

    Given back to the system, it is faulted in again page by page by whoever has the turn.
    """
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_max = -1, -4  # of malloc.h
    assert libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, -1)


def draw_batch(setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step, int64 [b, s]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (setting.micro_sequences * setting.micro_batches, setting.sequence_length + 1)
    drawn = torch.randint(setting.vocab_size, shape, generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
