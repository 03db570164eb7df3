"""Exhaustive search for the fastest layouts of a model on a machine."""

import ctypes
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from heapq import nsmallest
from itertools import product
from math import gcd
from multiprocessing import get_context

from threefold.config.deepspeed_json import is_shipped
from threefold.config.layout import CONTEXT_ATTENTIONS, PAIRED_SCHEDULES
from threefold.pipeline.schedules import SCHEDULES, min_micro_batches
from threefold.plan.job import Job, PlannedLayout
from threefold.plan.memory.peak import (
    GIB,
    StageMemory,
    fullest_stage,
    host_bytes,
    memory_of_stage,
    state_of_first_stage,
)
from threefold.plan.time.block import context_seconds
from threefold.plan.time.step import StepTime, step_time

MAX_MICRO_SEQUENCES = 64
MIN_TOKENS_PER_CONTEXT_RANK = 2048  # fewer make matmuls inefficient
RECOMPUTE_INTERVALS = (1, 2, 4)  # with full recomputation
INTERLEAVED_VIRTUAL_STAGES = (2, 4, 8)  # virtual stages per pipeline stage
SIZES_PER_PART = 32  # sizes that a process tries at a time, which takes about half a second
MAX_SEARCH_PROCESSES = 16  # a login node has other users
PR_SET_PDEATHSIG = 1  # of prctl(2): kill this process when its parent ends
# The Ultra-Scale Playbook recommends filling 85 to 90 % of the memory. Predictions are off by a few
# per cent, and the allocator needs room.
DEFAULT_HEADROOM = 0.08
TOO_LARGE_FOR_GPU = "too large for a GPU"  # reasons of rejected layouts
TOO_LARGE_FOR_HOST = "too large for the host that builds them"
INVALID_IN_RUN = "rejected because of other keys of the recipe, a phase or batch.ramp"
NEAR_TIE = 0.02  # relative difference of predicted times that is within the prediction error


@dataclass(frozen=True)
class Plan:
    """A layout that fits, with its memory and step time."""

    job: Job
    memory: StageMemory  # of the fullest stage
    time: StepTime


@dataclass
class SearchResult:
    """The outcome of a search.

    Attributes:
        plans: the fastest layouts that fit: first the layouts within NEAR_TIE of the fastest one,
            from the simplest on, then the others, from the fastest on
        rejected: reason -> number of rejected layouts; an invalid size of an axis counts once, for
            all layouts with this size
        nearest: the layout that exceeds the GPU memory least, and its excess in GiB; None if any
            layout fits
        problem: why another step of the run rejects the fastest layout that fits, if it rejects
            all of them; empty otherwise
    """

    plans: list[Plan] = field(default_factory=list)
    tried: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    nearest: tuple[PlannedLayout, float] | None = None
    problem: str = ""


def search(
    job: Job,
    top: int,
    *,
    headroom: float = DEFAULT_HEADROOM,
    problem_of: Callable[[Plan], str] | None = None,
    processes: int = 1,
) -> SearchResult:
    """Find the `top` fastest layouts that fit for a job's model, batch and machine.

    A layout fits if it leaves the share `headroom` of a GPU's memory free.

    Args:
        problem_of: returns why the run rejects a layout; empty if it does not
        processes: maximum number of processes for a long search. They are forked; pass 1 if this
            process has threads.

    This is the procedure of the Ultra-Scale Playbook (Hugging Face 2025: fit a step in memory,
    reach the global batch, maximise throughput), with predictions instead of runs. Recomputation
    saves memory and costs time: if a layout fits, it is not tried with more recomputation, and if
    it does not fit with full recomputation, it is not tried with less.
    """
    result = SearchResult()
    limit = job.machine.gpu.memory_gib * GIB * (1 - headroom)
    sizes = list(valid_sizes(job, result.rejected))
    fitting: list[Plan] = []
    parts = try_in_parts(job, sizes, limit, processes)
    for part in parts:
        fitting += [
            Plan(job.with_layout(layout), memory, time) for layout, memory, time in part.fitting
        ]
        result.tried += part.tried
        result.rejected += part.rejected
    if not fitting:
        result.nearest = min(parts, key=lambda part: part.excess).nearest
    if problem_of:
        choose_valid_plans(result, fitting, top, problem_of)
    else:
        result.plans = nsmallest(top, fitting, key=order_of_plans(fitting))
    return result


@dataclass
class TriedLayouts:
    """Layouts that a search has tried; `tried`, `rejected` and `nearest` are as in SearchResult.

    Attributes:
        limit: bytes on a GPU that a layout may need
        finds_nearest: find `nearest`, which is slower until a layout fits
        fitting: the layouts that fit, in the order in which they were tried
    """

    limit: float
    finds_nearest: bool = True
    fitting: list[tuple[PlannedLayout, StageMemory, StepTime]] = field(default_factory=list)
    tried: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    nearest: tuple[PlannedLayout, float] | None = None

    @property
    def needs_nearest(self) -> bool:
        """True if the layout that exceeds the limit least is to be found, as none fits so far."""
        return self.finds_nearest and not self.fitting

    @property
    def excess(self) -> float:
        """GiB by which `nearest` exceeds the limit; infinite without it."""
        return self.nearest[1] if self.nearest else math.inf

    @property
    def state_limit(self) -> float:
        """Bytes of state that rule out a layout: it cannot fit, and exceeds more than `nearest`."""
        return self.limit + (self.excess * GIB if self.needs_nearest else 0.0)

    def try_sizes(self, job: Job, sizes: Sequence[PlannedLayout]) -> None:
        """Try all layouts of some sizes."""
        for each in sizes:
            for layouts in layout_variants(job, each, self.rejected):
                self._try_recomputations(job, layouts)

    def _try_recomputations(self, job: Job, layouts: Sequence[PlannedLayout]) -> None:
        """Try layouts that differ only in recomputation, from none to full, until one fits."""
        self.tried += len(layouts)
        hopeless = False  # the layout does not even fit with full recomputation
        recomputed: tuple[Job, StageMemory] | None = None
        for layout in layouts:
            candidate = job.with_layout(layout)
            if host_bytes(candidate) > job.machine.gpu.node_memory_gib * GIB:
                self.rejected[TOO_LARGE_FOR_HOST] += 1
                continue
            if layout.recompute == "none":
                hopeless = state_exceeds(candidate, self.state_limit)
            if not hopeless:
                if layout.recompute != "full":
                    memory = memory_within(candidate, self.limit)
                else:
                    candidate, memory = recomputed or with_full_recomputation(
                        candidate, self.limit, least=self.needs_nearest
                    )
                if memory.total <= self.limit:
                    self.fitting.append((candidate.layout, memory, step_time(candidate)))
                    return
                if layout.recompute == "none":
                    recomputed = with_full_recomputation(
                        candidate, self.limit, least=self.needs_nearest
                    )
                    hopeless = recomputed[1].total > self.limit
                    self._note_excess(*recomputed)
            self.rejected[TOO_LARGE_FOR_GPU] += 1

    def _note_excess(self, job: Job, memory: StageMemory) -> None:
        excess = (memory.total - self.limit) / GIB
        if self.needs_nearest and 0 < excess < self.excess:
            self.nearest = job.layout, excess


def try_in_parts(
    job: Job, sizes: Sequence[PlannedLayout], limit: float, processes: int
) -> list[TriedLayouts]:
    """Try all layouts of the given sizes, in several processes if there are many sizes.

    The processes first look only for layouts that fit. If none does, a second pass finds the layout
    that exceeds the memory least.

    Returns:
        The outcomes, in the order of the sizes.
    """
    firsts = range(0, len(sizes), SIZES_PER_PART)
    processes = min(processes, MAX_SEARCH_PROCESSES, len(firsts) // 2)  # two parts each, or more
    if processes > 1:
        with (
            suppress(BrokenProcessPool),  # a process was killed
            ProcessPoolExecutor(
                processes,
                # A forked process has all imports. Forking is safe, as the search has no threads.
                mp_context=get_context("fork"),
                initializer=_start_worker,
                initargs=(job, sizes, limit, os.getpid()),
            ) as pool,
        ):
            for finds_nearest in (False, True):
                parts = list(pool.map(partial(_try_part, finds_nearest=finds_nearest), firsts))
                if finds_nearest or any(part.fitting for part in parts):
                    return parts
    whole = TriedLayouts(limit)
    whole.try_sizes(job, sizes)
    return [whole]


_work: tuple[Job, Sequence[PlannedLayout], float]  # of a process of `try_in_parts`


def _start_worker(job: Job, sizes: Sequence[PlannedLayout], limit: float, parent: int) -> None:
    global _work
    _work = job, sizes, limit
    # Ctrl-C reaches all processes of the command; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl was called
        os._exit(0)


def _try_part(first: int, *, finds_nearest: bool) -> TriedLayouts:
    job, sizes, limit = _work
    part = TriedLayouts(limit, finds_nearest)
    part.try_sizes(job, sizes[first : first + SIZES_PER_PART])
    return part


def choose_valid_plans(
    result: SearchResult, plans: Sequence[Plan], top: int, problem_of: Callable[[Plan], str]
) -> None:
    """Add the `top` fastest plans that the run does not reject; count those rejected before them.

    `problem_of` takes milliseconds per plan, so it is called only until enough plans are found.
    """
    by_time = sorted(plans, key=lambda plan: plan.time.total)
    valid = (number for number, plan in enumerate(by_time) if not problem_of(plan))
    rejected = next(valid, len(by_time))
    remaining = by_time[rejected:]
    if by_time and not remaining:
        result.problem = problem_of(by_time[0])
    for plan in sorted(remaining, key=order_of_plans(remaining)):
        if len(result.plans) == top:
            break
        if plan is remaining[0] or not problem_of(plan):
            result.plans.append(plan)
        else:
            rejected += 1
    result.rejected += Counter({INVALID_IN_RUN: rejected})  # no key for 0


def state_exceeds(job: Job, limit: float) -> bool:
    """Return True if the first stage's state exceeds a limit with no and with full recomputation.

    The two differ because the recomputation changes the division of the blocks over the stages.
    """
    if sum(state_of_first_stage(job)) <= limit:
        return False
    full = job.with_layout(replace(job.layout, recompute="full"))
    return sum(state_of_first_stage(full)) > limit


def order_of_plans(plans: Sequence[Plan]) -> Callable[[Plan], tuple[float, ...]]:
    """Return the sort key of plans: near-ties come first, by simplicity; the others by time."""
    fastest = min((plan.time.total for plan in plans), default=0.0)

    def key(plan: Plan) -> tuple[float, ...]:
        if is_near_tie(plan.time.total, fastest):
            return (0, *simplicity(plan.job.layout), plan.time.total, plan.memory.total)
        return (1, plan.time.total, plan.memory.total)

    return key


def is_near_tie(seconds: float, fastest: float) -> bool:
    """Return True if a time differs from the fastest one by less than the prediction error."""
    return seconds <= fastest * (1 + NEAR_TIE)


def simplicity(layout: PlannedLayout) -> tuple[int, ...]:
    """Return the sort key of a layout's simplicity: fewer axes, then plainer settings, first."""
    return (
        (layout.tensor > 1) + (layout.pipeline > 1) + (layout.context > 1) + (layout.expert > 1),
        layout.expert_tensor > 1,
        layout.expert_overlap,
        list(SCHEDULES).index(layout.schedule),
        layout.virtual_stages,
        layout.zero_stage,
        layout.dp_shard > 0,
        layout.sequence_parallel,
        ("none", "selective", "full").index(layout.recompute),
        layout.pipeline,
        layout.tensor,
        layout.context,
        layout.expert,
    )


def with_full_recomputation(job: Job, limit: float, *, least: bool) -> tuple[Job, StageMemory]:
    """Return the job with full recomputation, and its memory.

    Of the recomputation intervals, choose the first that fits, or else the one with the least
    memory.

    least: False: if none fits, any of them will do
    """
    tried = []
    for interval in RECOMPUTE_INTERVALS:
        layout = replace(job.layout, recompute="full", recompute_interval=interval)
        candidate = job.with_layout(layout)
        memory = memory_within(candidate, limit)
        if memory.total <= limit:
            return candidate, memory
        tried.append((candidate, memory))
        if least:
            lowest = memory.state  # which does not depend on the interval
        else:  # an interval of N keeps at least 1 / N of the activations, and everything else
            saved = memory.activations * (1 - 1 / RECOMPUTE_INTERVALS[-1])
            lowest = memory.total - (1 + candidate.footprint.fragmentation) * saved
        if lowest > limit:
            break
    return min(tried, key=lambda pair: pair[1].total)


def memory_within(job: Job, limit: float) -> StageMemory:
    """Return the fullest stage's memory, or the first stage's if that already exceeds `limit`."""
    memory = memory_of_stage(job, 0)
    return memory if memory.total > limit else fullest_stage(job, first=memory)


def valid_sizes(job: Job, rejected: Counter[str]) -> Iterator[PlannedLayout]:
    """Yield all valid combinations of axes and micro-batch, and count rejected sizes by reason."""
    gpus, sequences = job.machine.gpus, job.global_sequences
    for tensor in divisors(gpus):
        if reason := tensor_rejection(job, tensor):
            rejected[reason] += 1
            continue
        for pipeline in divisors(gpus // tensor):
            if pipeline > job.model.layers:
                rejected["pipelines with more stages than blocks"] += 1
                continue
            for context in divisors(gpus // tensor // pipeline):
                if reason := context_rejection(job, context):
                    rejected[reason] += 1
                    continue
                data = gpus // tensor // pipeline // context
                if job.model.experts and job.model.sequence_length // context % tensor:
                    rejected["tensor ranks that cannot divide the tokens among experts"] += 1
                    continue
                if sequences % data:
                    rejected["data ranks that do not divide the global batch"] += 1
                    continue
                for micro_sequences in divisors(sequences // data):
                    if micro_sequences > MAX_MICRO_SEQUENCES:
                        break
                    if gcd(context, micro_sequences) > 1:
                        # A smaller context and micro-batch have the same tokens per rank and
                        # communicate less.
                        continue
                    sizes = PlannedLayout(
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        data=data,
                        micro_sequences=micro_sequences,
                    )
                    sizes = with_context_attention(job, sizes)
                    yield from expert_divisions(job, sizes)


def expert_divisions(job: Job, sizes: PlannedLayout) -> Iterator[PlannedLayout]:
    """Yield `sizes` with every valid division of the experts.

    Tensor ranks have whole experts where that is possible, because dividing the columns of each
    expert communicates more and needs more memory.
    """
    experts = job.model.experts
    if experts is None:
        yield sizes
        return
    for expert in divisors(sizes.dp_cp_size):
        if experts.count % (expert * sizes.tensor) == 0:
            yield replace(sizes, expert=expert)
        elif experts.count % expert == 0 and experts.ffn_hidden_size % sizes.tensor == 0:
            yield replace(sizes, expert=expert, expert_tensor=sizes.tensor)


def context_rejection(job: Job, context: int) -> str:
    """Return the reason why a context size is not tried; empty if it is, as 1 always is."""
    length = job.model.sequence_length
    if context > 1 and length // context < MIN_TOKENS_PER_CONTEXT_RANK:
        return f"context sizes with fewer than {MIN_TOKENS_PER_CONTEXT_RANK:,} tokens per rank"
    if context > 1 and length % (2 * context):
        return "context sizes that do not divide a sequence into two slices per rank"
    return ""


def with_context_attention(job: Job, sizes: PlannedLayout) -> PlannedLayout:
    """Return the sizes with the way to reach other ranks' keys that exposes the least time."""
    if sizes.context == 1:
        return replace(sizes, context_attention="gather")
    kinds = [kind for kind in CONTEXT_ATTENTIONS if context_attention_is_valid(job, sizes, kind)]
    layouts = [replace(sizes, context_attention=kind) for kind in kinds]
    return min(layouts, key=lambda layout: context_seconds(job.with_layout(layout)))


def context_attention_is_valid(job: Job, sizes: PlannedLayout, kind: str) -> bool:
    """Return True unless a context rank would get a fraction of a key-value head."""
    return kind != "ulysses" or job.model.kv_heads // sizes.tensor % sizes.context == 0


def tensor_rejection(job: Job, tensor: int) -> str:
    """Return the reason why a tensor-parallel size is not valid; empty if it is valid."""
    model = job.model
    if job.machine.gpus_per_node % tensor:
        return "tensor groups across nodes"
    dense = model.ffn_hidden_size if model.has_dense_layers else 0
    if any(size % tensor for size in (model.heads, model.kv_heads, dense)):
        return "tensor sizes that do not divide heads, kv_heads or ffn_hidden_size"
    experts = model.experts
    if experts:
        divides = experts.count % tensor == 0 or experts.ffn_hidden_size % tensor == 0
        if not divides:
            return "tensor sizes that divide neither the experts nor their columns"
        if experts.shared_ffn_hidden_size % tensor:
            return "tensor sizes that do not divide the shared experts"
    return ""


def layout_variants(
    job: Job, sizes: PlannedLayout, rejected: Counter[str]
) -> Iterator[list[PlannedLayout]]:
    """Yield the layouts of these sizes with each schedule, ZeRO stage and sequence parallelism.

    Those of a list differ only in recomputation, from none to full. Selective recomputation is
    included only if attention scores are written or latents are expanded to keys and values;
    otherwise it saves nothing.
    """
    micro_batches = job.with_layout(sizes).micro_batches
    schedules = []
    for schedule, virtual_stages in schedules_of(sizes.pipeline, job.model.layers):
        if micro_batches >= min_micro_batches(schedule, sizes.pipeline):
            schedules.append((schedule, virtual_stages))
        else:
            rejected["dualpipev with fewer than two micro-batches per stage"] += 1
    stages = [1]
    if sizes.dp_cp_size > 1:
        possible = {2} if job.software.reduces_in_groups else set()
        if sizes.pipeline == 1 and sizes.expert == 1:
            possible = {2, 3}
        stages += [n for n in sorted(possible) if is_shipped(n, job.precision)]
    splits = [False]
    if sizes.tensor > 1 and job.model.sequence_length // sizes.context % sizes.tensor == 0:
        splits.append(True)
    recomputations = ["none", "full"]
    if job.writes_scores or job.model.latent is not None:
        recomputations.insert(1, "selective")
    sharded = [(stage, 0) for stage in stages]
    if group := dp_shard_of_node(job, sizes):
        sharded += [(stage, group) for stage in stages if stage == 2]
    variants = [(*kind, overlap) for kind in schedules for overlap in overlaps(job, sizes, *kind)]
    for (schedule, virtual_stages, overlap), (stage, group), split in product(
        variants, sharded, splits
    ):
        settings = vars(sizes) | {
            "schedule": schedule,
            "virtual_stages": virtual_stages,
            "expert_overlap": overlap,
            "zero_stage": stage,
            "dp_shard": group,
            "sequence_parallel": split,
        }
        yield [  # faster than `replace`
            PlannedLayout(**(settings | {"recompute": kind})) for kind in recomputations
        ]


def overlaps(job: Job, sizes: PlannedLayout, schedule: str, virtual_stages: int) -> list[bool]:
    """Return the settings of `expert_overlap` that are possible with a schedule."""
    exchanges = job.model.experts and sizes.ep_size > 1
    hides = job.software.expert_overlap > 0 and job.machine.gpu.device != "cpu"
    if not (exchanges and hides and schedule in PAIRED_SCHEDULES):
        return [False]
    layout = replace(sizes, schedule=schedule, virtual_stages=virtual_stages)
    least = min_micro_batches(schedule, sizes.pipeline, paired=True)
    return [False, True] if job.with_layout(layout).micro_batches >= least else [False]


def dp_shard_of_node(job: Job, sizes: PlannedLayout) -> int:
    """Return the replicas of a node if they can be a shard group of several, otherwise 0.

    It is tried with ZeRO-2, which may reduce gradients several times per step. ZeRO-1 reduces them
    once, and a shard group makes that slower. Other software is planned without shard groups.
    """
    group = job.machine.gpus_per_node // sizes.tensor
    possible = job.software.reduces_in_groups and sizes.expert == 1 and group > 1
    return group if possible and sizes.dp_cp_size > group and sizes.dp_cp_size % group == 0 else 0


@cache
def schedules_of(pipeline: int, layers: int) -> list[tuple[str, int]]:
    """Return the schedules of a pipeline with their numbers of chunks.

    GPipe is not among them: it is as fast as 1F1B and needs more memory.
    """
    if pipeline == 1:
        return [("1f1b", 1)]
    return [
        (name, virtual_stages)
        for name, schedule in SCHEDULES.items()
        for virtual_stages in (
            (schedule.virtual_stages,) if schedule.virtual_stages else INTERLEAVED_VIRTUAL_STAGES
        )
        if pipeline * virtual_stages <= layers and name != "gpipe"
    ]


def divisors(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n < number]
