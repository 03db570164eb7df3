"""The best ways to spread a model over a machine, found by trying them all."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import nsmallest

from models.config import ModelConfig
from recipes.planning.job import Job, Machine, Spread
from recipes.planning.memory import GIB, StageMemory, fullest_stage, host_bytes, memory_of_stage
from recipes.planning.step_time import StepTime, step_time
from recipes.training.recipe import REPOSITORY

MOST_MICRO_SEQUENCES = 64
INTERVALS = (1, 2, 4)  # of full recomputation


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
    stages, room = zero_stages(job.precision), job.machine.gpu.memory_gib * GIB
    fits = hopeless = False  # the same layout with less, or with more that is computed again
    for spread in spreads(job.model, job.machine, job.global_sequences, found.refused):
        if spread.zero_stage not in stages:
            continue
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


def zero_stages(precision: str) -> set[int]:
    """The ZeRO stages that there is a JSON for."""
    return {n for n in (1, 2, 3) if (REPOSITORY / deepspeed_json(n, precision)).exists()}


def deepspeed_json(zero_stage: int, precision: str) -> str:
    """The shipped config of a ZeRO stage and a precision, as a recipe names it."""
    return f"ds_configs/zero{zero_stage}_{precision}.json"


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
    return min(found, key=lambda each: each[1].total)


def memory_within(job: Job, room: float) -> StageMemory:
    """The fullest stage's memory or, where the first one's is more than `room`, that one's."""
    memory = memory_of_stage(job, 0)
    return memory if memory.total > room else fullest_stage(job, first=memory)


def spreads(
    model: ModelConfig, machine: Machine, global_sequences: int, refused: Counter
) -> Iterator[Spread]:
    """All spreads that a recipe may ask for on this machine; what it may not is counted."""
    gpus = machine.gpus
    for tensor in divisors(gpus):
        if reason := tensor_refusal(model, machine, tensor):
            refused[reason] += 1
            continue
        for pipeline in divisors(gpus // tensor):
            if pipeline > model.layers:
                refused["pipelines with more stages than blocks"] += 1
                continue
            data = gpus // tensor // pipeline
            if global_sequences % data:
                refused["data ranks that do not divide the global batch"] += 1
                continue
            for micro_sequences in divisors(global_sequences // data):
                if micro_sequences > MOST_MICRO_SEQUENCES:
                    break
                count = global_sequences // data // micro_sequences
                yield from variants(model, tensor, pipeline, data, micro_sequences, count, refused)


def tensor_refusal(model: ModelConfig, machine: Machine, tensor: int) -> str:
    """Why a tensor size is not possible; empty: it is."""
    if machine.gpus_per_node % tensor:
        return "tensor groups across nodes"
    if any(size % tensor for size in (model.heads, model.kv_heads, model.ffn_hidden_size)):
        return "tensor sizes that do not divide heads, kv_heads or ffn_hidden_size"
    return ""


def variants(
    model: ModelConfig, tensor: int, pipeline: int, data: int, micro_sequences: int, count: int,
    refused: Counter,
) -> Iterator[Spread]:  # fmt: skip
    """Schedules, ZeRO stages, sequence parallelism and recomputation of these sizes."""
    schedules = [("1f1b", 1)]
    if pipeline > 1 and 2 * pipeline <= model.layers:
        if count >= 2 * pipeline:
            schedules.append(("dualpipev", 2))
        else:
            refused["dualpipev with fewer than two micro-batches a stage"] += 1
    stages = (1, 2, 3) if pipeline == 1 and data > 1 else (1,)
    sequence_parallel_choices = (
        (False, True) if tensor > 1 and model.sequence_length % tensor == 0 else (False,)
    )
    for schedule, chunks in schedules:
        for zero_stage in stages:
            for sequence_parallel in sequence_parallel_choices:
                for recompute in ("none", "selective", "full"):
                    yield Spread(
                        tensor=tensor,
                        pipeline=pipeline,
                        chunks=chunks,
                        data=data,
                        zero_stage=zero_stage,
                        schedule=schedule,
                        sequence_parallel=sequence_parallel,
                        recompute=recompute,
                        micro_sequences=micro_sequences,
                    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]
