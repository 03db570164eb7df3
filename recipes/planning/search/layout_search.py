"""The best ways to spread a model over a machine, found by trying them all."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import nsmallest
from itertools import product
from pathlib import Path

from models.pipeline.schedule.order import SCHEDULES, least_micro_batches
from recipes.planning.inputs.job import Job, Spread
from recipes.planning.memory.peak import (
    GIB,
    StageMemory,
    fullest_stage,
    host_bytes,
    memory_of_stage,
)
from recipes.planning.time.step_time import StepTime, step_time
from recipes.training.recipe.loading import REPOSITORY

MOST_MICRO_SEQUENCES = 64
INTERVALS = (1, 2, 4)  # of full recomputation
CHUNKS = (2, 4, 8)  # of interleaved stages


@dataclass(frozen=True)
class Plan:
    """A spread that fits, with what it costs."""

    job: Job
    memory: StageMemory  # of the fullest stage
    time: StepTime


@dataclass
class Found:
    """What a search has seen.

    plans: the best ones, best first
    refused: what it is -> how many; sizes that are refused are not tried in all their variants
    nearest: of those that do not fit, the one that lacks least, and what it lacks in GiB
    """

    plans: list[Plan] = field(default_factory=list)
    tried: int = 0
    refused: Counter = field(default_factory=Counter)
    nearest: tuple[Spread, float] | None = None


def search(job: Job, top: int) -> Found:
    """The `top` fastest spreads of a job's model, batch and machine that fit into its memory.

    The procedure of the Ultra-Scale Playbook (Hugging Face 2025: fit a step in memory, reach the
    global batch, maximise throughput), by computation instead of by runs. Where a layout fits, more
    that is computed again would only be slower; where it does not with full recomputation, it does
    not with less.
    """
    found = Found()
    fitting = []
    room = job.machine.gpu.memory_gib * GIB
    fits = hopeless = False  # the same layout with less, or with more that is computed again
    for spread in spreads(job, found.refused):
        found.tried += 1
        candidate = replace(job, spread=spread)
        if host_bytes(candidate) > job.machine.gpu.node_memory_gib * GIB:
            found.refused["too large for the host that builds them"] += 1
            continue
        if spread.recompute == "none":
            memory = memory_within(candidate, room)
            fits = memory.total <= room
            if not fits:
                again, needed = recomputed(candidate, room)
                hopeless = needed.total > room
                lacking = (needed.total - room) / GIB
                if hopeless and (found.nearest is None or lacking < found.nearest[1]):
                    found.nearest = again.spread, lacking
        elif fits:
            continue
        elif not hopeless:
            if spread.recompute == "full":
                candidate, memory = again, needed
            else:
                memory = memory_within(candidate, room)
            fits = memory.total <= room
        if fits:
            fitting.append(Plan(candidate, memory, step_time(candidate)))
        else:
            found.refused["too large for a GPU"] += 1
    found.plans = nsmallest(top, fitting, key=lambda plan: (plan.time.total, plan.memory.total))
    return found


@cache
def deepspeed_json(zero_stage: int, precision: str) -> Path:
    """The shipped config of a ZeRO stage and a precision; there may be none."""
    return REPOSITORY / "ds_configs" / f"zero{zero_stage}_{precision}.json"


def recomputed(job: Job, room: float) -> tuple[Job, StageMemory]:
    """The job with full recomputation, by the first interval that fits, or else the best."""
    found = []
    for interval in INTERVALS:
        spread = replace(job.spread, recompute="full", recompute_interval=interval)
        candidate = replace(job, spread=spread)
        memory = memory_within(candidate, room)
        if memory.total <= room:
            return candidate, memory
        found.append((candidate, memory))
        if memory.state > room:  # no interval makes that less
            break
    return min(found, key=lambda each: each[1].total)


def memory_within(job: Job, room: float) -> StageMemory:
    """The fullest stage's memory or, where the first one's is more than `room`, that one's."""
    memory = memory_of_stage(job, 0)
    return memory if memory.total > room else fullest_stage(job, first=memory)


def spreads(job: Job, refused: Counter) -> Iterator[Spread]:
    """All spreads that a recipe may ask for on a job's machine; what it may not is counted."""
    gpus, sequences = job.machine.gpus, job.global_sequences
    for tensor in divisors(gpus):
        if reason := tensor_refusal(job, tensor):
            refused[reason] += 1
            continue
        for pipeline in divisors(gpus // tensor):
            if pipeline > job.model.layers:
                refused["pipelines with more stages than blocks"] += 1
                continue
            data = gpus // tensor // pipeline
            if sequences % data:
                refused["data ranks that do not divide the global batch"] += 1
                continue
            for micro_sequences in divisors(sequences // data):
                if micro_sequences > MOST_MICRO_SEQUENCES:
                    break
                sizes = Spread(
                    tensor=tensor, pipeline=pipeline, data=data, micro_sequences=micro_sequences
                )
                yield from variants(job, sizes, refused)


def tensor_refusal(job: Job, tensor: int) -> str:
    """Why a tensor size is not possible; empty: it is."""
    model = job.model
    if job.machine.gpus_per_node % tensor:
        return "tensor groups across nodes"
    if any(size % tensor for size in (model.heads, model.kv_heads, model.ffn_hidden_size)):
        return "tensor sizes that do not divide heads, kv_heads or ffn_hidden_size"
    return ""


def variants(job: Job, sizes: Spread, refused: Counter) -> Iterator[Spread]:
    """Schedules, ZeRO stages, sequence parallelism and recomputation of these sizes.

    Recomputation comes last, from none to full; selective only where it saves anything, that is
    where scores are written.
    """
    micro_batches = replace(job, spread=sizes).micro_batches
    schedules = []
    for schedule, chunks in schedules_of(sizes.pipeline, job.model.layers):
        if micro_batches >= least_micro_batches(schedule, sizes.pipeline):
            schedules.append((schedule, chunks))
        else:
            refused["dualpipev with fewer than two micro-batches a stage"] += 1
    stages = [1]
    if sizes.pipeline == 1 and sizes.data > 1:
        stages = [n for n in (1, 2, 3) if deepspeed_json(n, job.precision).exists()]
    splits = [False]
    if sizes.tensor > 1 and job.model.sequence_length % sizes.tensor == 0:
        splits.append(True)
    recomputations = ["none", "full"]
    if job.writes_scores:
        recomputations.insert(1, "selective")
    for (schedule, chunks), stage, split in product(schedules, stages, splits):
        for recompute in recomputations:
            yield replace(
                sizes,
                schedule=schedule,
                chunks=chunks,
                zero_stage=stage,
                sequence_parallel=split,
                recompute=recompute,
            )


@cache
def schedules_of(pipeline: int, layers: int) -> list[tuple[str, int]]:
    """(schedule, chunks) for so many stages of a model."""
    if pipeline == 1:
        return [("1f1b", 1)]
    return [
        (name, chunks)
        for name, schedule in SCHEDULES.items()
        for chunks in ((schedule.chunks,) if schedule.chunks else CHUNKS)
        if pipeline * chunks <= layers
    ]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]
