"""Two stages of a real model on two cores with one thread each: our engine, others, and a bound.

Each of our schedules is compared with its rivals separately; in each round, all run a step in turn
with the same batch.
"""

import os
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pipelines.real_contestants import (
    ONE,
    OURS,
    RIVALS,
    STAGES,
    STOCK,
    TORCH,
    Setting,
    Turn,
    build_match,
)
from tests.ranks import join_world, run_ranks
from threefold.pipeline.engine import passes_of
from threefold.pipeline.schedules import Pipeline
from threefold.pipeline.simulation import pipeline_seconds, simulate, typical_seconds
from threefold.runtime.processes import keep_memory

MATCH_TIMEOUT_SECONDS = 600
TOLERANCE = 1e-4  # of losses


class RankStep(NamedTuple):
    """A step of one rank."""

    start: float
    end: float
    turn: Turn


Steps = Sequence[tuple[RankStep, ...]]  # steps of a contestant by round, then by rank


def compare(setting: Setting) -> dict[str, object]:
    """Compare each of our schedules with its rivals, and return the figures of the best one.

    Raises:
        AssertionError: the contestants have not computed the same.
    """
    matches = {name: match(setting, name) for name in OURS}
    best = max(OURS, key=lambda name: matches[name]["speed_up"][name])
    return {
        "best": best,
        "of_bound": matches[best]["of_bound"],
        "over_stock": matches[best]["over"][STOCK],
        "over_torch_pipelining": min(
            matches[name]["over_until_the_gradients"][rival] for name, rival in TORCH.items()
        ),
        "matches": matches,
    }


def match(setting: Setting, name: str) -> dict[str, Any]:
    """Compare a schedule with its rivals by each contestant's best round.

    of_bound: speed-up over one process relative to its upper bound
    over: rivals' time relative to ours; also until the gradients are computed, without optimizer
    """
    ranks = run_ranks(STAGES, time_rank, setting, name, seconds=MATCH_TIMEOUT_SECONDS)
    steps = {each: list(zip(*(rank[each] for rank in ranks), strict=True)) for each in ranks[0]}
    check_losses(steps)
    seconds = {each: min(map(step_seconds, turns)) for each, turns in steps.items()}
    rivals = RIVALS[name]
    computed = {
        each: min(map(computed_seconds, turns))
        for each, turns in steps.items()
        if each == name or each in TORCH.values()
    }
    return {
        "of_bound": bound(setting, name, steps) / seconds[name],
        "over": {rival: seconds[rival] / seconds[name] for rival in rivals},
        "over_until_the_gradients": {
            rival: computed[rival] / computed[name] for rival in rivals if rival in computed
        },
        "speed_up": {each: seconds[ONE] / each_seconds for each, each_seconds in seconds.items()},
        "speed_up_bound": seconds[ONE] / bound(setting, name, steps),
        "seconds": seconds,
        "median_seconds": {each: median(map(step_seconds, turns)) for each, turns in steps.items()},
    }


def check_losses(steps: Mapping[str, Steps]) -> None:
    """Check that all contestants compute the same loss."""
    for name, rounds in steps.items():
        for one, ranks in zip(steps[ONE], rounds, strict=True):
            found = [rank.turn.loss for rank in ranks if rank.turn.loss is not None]
            expected = one[0].turn.loss
            assert expected is not None
            assert all(abs(loss - expected) < TOLERANCE for loss in found), (name, found, expected)


def step_seconds(ranks: Sequence[RankStep]) -> float:
    """Return the seconds from the barrier until the last rank has ended."""
    return max(rank.end for rank in ranks) - min(rank.start for rank in ranks)


def computed_seconds(ranks: Sequence[RankStep]) -> float:
    """Return the seconds until all gradients exist; torch's pipelining has no optimizer."""
    return max(rank.turn.computed for rank in ranks) - min(rank.start for rank in ranks)


def bound(setting: Setting, name: str, steps: Mapping[str, Steps]) -> float:
    """Return the seconds of our engine's step if only the passes and the optimizer took time.

    All passes together take what one process takes for them, divided as it was measured; they run
    as the schedule's simulation says. The optimizer's time is halved.
    """
    schedule, virtual_stages = OURS[name]
    pipeline = Pipeline(
        stages=STAGES,
        micro_batches=setting.micro_batches,
        virtual_stages=virtual_stages,
        schedule=schedule,
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


def time_rank(setting: Setting, name: str) -> dict[str, list[RankStep]]:
    """Run the steps of a match's contestants on a rank, which is pinned to a core."""
    keep_memory()
    cores = sorted(os.sched_getaffinity(0))[-STAGES:]  # systems like to run on the first ones
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"])]})  # before there are other threads
    join_world()
    contestants = dict(build_match(setting, name))
    steps: dict[str, list[RankStep]] = {each: [] for each in contestants}
    for number in range(1 + setting.rounds):
        tokens, labels = draw_batch(setting, seed=number)
        for each, contestant in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            turn = contestant(tokens, labels)
            end = time.perf_counter()
            steps[each].append(RankStep(start, end, turn))
    return {each: timed[1:] for each, timed in steps.items()}


def draw_batch(setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels of a step, int64 [b, s]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (setting.micro_sequences * setting.micro_batches, setting.sequence_length + 1)
    drawn = torch.randint(setting.vocab_size, shape, generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
