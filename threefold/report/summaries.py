"""A run's plan and its data mixture, and curves reduced to what a screen can show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.errors import UserError
from threefold.config.deepspeed_json import precision, read_deepspeed_json
from threefold.config.recipe import Recipe
from threefold.config.sections import whole_shares
from threefold.data.sample_order import one_period
from threefold.gpus.datasheet import gpus, load_gpu
from threefold.plan.job import Machine, own_job
from threefold.plan.memory.peak import GIB, fullest_stage
from threefold.plan.report import metrics_of_job
from threefold.plan.software import THREEFOLD
from threefold.report.run_record import RunRecord

PEAK_TOLERANCE = 1e-3  # relative, of the peak that the metrics imply
USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """The planner's numbers for a run.

    Attributes:
        gpu: name of the datasheet
        tokens_per_second: throughput of all ranks
        mfu: model FLOP/s as a share of the GPU's peak
        tflops_per_gpu: model TFLOP/s per GPU, without recomputation
        memory_gb: peak of what rank 0 allocates, in 10^9 bytes, as in the metric `memory_gb`
        fullest_gib: memory of the fullest pipeline stage with CUDA and NCCL, in 2^30 bytes
        device_gib: memory of the device, in 2^30 bytes
    """

    gpu: str
    ranks: int
    step_seconds: float
    tokens_per_second: float
    mfu: float
    tflops_per_gpu: float
    memory_gb: float
    fullest_gib: float
    device_gib: float


def predict(record: RunRecord, gpu: str | None) -> PredictedRun:
    """Predict the speed and the memory of a run.

    Args:
        gpu: name of a datasheet; None for the GPU that the recipe names or the metrics imply

    Raises:
        UserError: the reason why there is no prediction.
    """
    if record.phase_plan is None:
        raise UserError("the recipe cannot be read")
    recipe, ranks = record.phase_plan.at(record.newest_step).recipe, record.world_size
    if ranks is None:
        raise UserError("the metrics do not tell the number of ranks")
    kind = precision(read_deepspeed_json(recipe.deepspeed))
    name = gpu or gpu_of_run(record, recipe, kind)
    cluster = recipe.cluster
    per_node = cluster.gpus_per_node if cluster else USUAL_GPUS_PER_NODE
    machine = Machine.of(load_gpu(name), gpus=ranks, gpus_per_node=min(ranks, per_node))
    job, problem = own_job(recipe, machine, THREEFOLD)
    if job is None:
        raise UserError(problem)
    return PredictedRun(
        gpu=name,
        ranks=ranks,
        **metrics_of_job(job),
        fullest_gib=fullest_stage(job).total / GIB,
        device_gib=machine.gpu.memory_gib,
    )


def gpu_of_run(record: RunRecord, recipe: Recipe, kind: str) -> str:
    """Return the name of the datasheet of the run's GPU.

    The run folder does not name the device. The metrics give its peak, `tflops_per_gpu / mfu`, and
    have no `mfu` on devices without a datasheet, such as CPUs.

    Raises:
        UserError: the GPU has no datasheet, or the peak fits several GPUs.
    """
    rate, mfu = record.steps.last("tflops_per_gpu"), record.steps.last("mfu")
    if not (rate and mfu):
        raise UserError(
            "the run is on a CPU, or on a device without a datasheet, because its metrics have no "
            "mfu; use --gpu NAME to compare it with a datasheet, for example --gpu cpu"
        )
    if recipe.cluster:
        return recipe.cluster.gpu
    peak = rate / mfu
    fitting = [
        gpu.name
        for gpu in gpus()
        if abs(gpu.peak_tflops.get(kind, 0.0) / peak - 1) < PEAK_TOLERANCE
    ]
    if len(fitting) != 1:
        which = f"fits {', '.join(fitting)}" if fitting else "fits no datasheet"
        example = fitting[0] if fitting else "H100"
        raise UserError(
            f"the recipe has no [cluster], and the peak of {peak:.0f} TFLOP/s {which}; use --gpu "
            f"NAME, for example --gpu {example}"
        )
    return fitting[0]


# The samples that a run has read from each source of its mixture.


@dataclass(frozen=True)
class SourceShare:
    """A source of the mixture.

    Attributes:
        path: path of the corpus, as in the recipe
        wanted: share that its weight asks for
        samples: samples of this source that the kept steps have read
        share: `samples` as a share of all samples that the kept steps have read; 0 if none
    """

    path: str
    wanted: float
    samples: int
    share: float


def shares_read(
    sources: Mapping[str, float], ends: Sequence[tuple[int, int]], jumps: Mapping[int, int],
    *, batch: int,
) -> list[SourceShare]:  # fmt: skip
    """Return the share of each source in the samples that the kept steps have read.

    Args:
        sources: weights of the mixture, by path
        ends: (step, number of samples read when it ended) of each kept step, in increasing order
        jumps: step -> the next sample that is read, for steps after which the run skipped samples
        batch: samples per step, used for steps whose predecessor is not in `ends`
    """
    weights = list(sources.values())
    shares = whole_shares(weights)
    read = sum((_samples_until(stop, shares) - _samples_until(start, shares)
                for start, stop in _ranges(ends, jumps, batch)),
               start=np.zeros(len(shares), np.int64))  # fmt: skip
    total = max(1, int(read.sum()))
    return [
        SourceShare(path, weight / sum(weights), int(samples), int(samples) / total)
        for (path, weight), samples in zip(sources.items(), read, strict=True)
    ]


def _ranges(
    ends: Sequence[tuple[int, int]], jumps: Mapping[int, int], batch: int
) -> list[tuple[int, int]]:
    """Return the ranges of samples that some steps have read; adjacent ranges are joined."""
    ranges: list[tuple[int, int]] = []
    known = {0: 0}
    for step, end in ends:
        start = jumps.get(step - 1, known.get(step - 1, end - batch))
        known = {step: end}
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges


def _samples_until(stop: int, shares: tuple[int, ...]) -> np.ndarray:
    """Return how many of the samples 0 .. stop - 1 each source gives; int64 [sources]."""
    order, _ = one_period(shares)
    periods, rest = divmod(stop, len(order))
    begun = np.bincount(order[:rest], minlength=len(shares))
    return periods * np.array(shares, np.int64) + begun


# Reduction of a long curve to as many points as a screen can show.
#
# The points of a curve are divided into buckets, and each bucket keeps its minimum and its
# maximum. A spike of a single step is therefore always drawn at its full height, which averaging
# or taking every n-th point would not guarantee.


def reduced(values: np.ndarray, buckets: int) -> np.ndarray:
    """Return the indices of the points to draw, in increasing order; int64.

    Args:
        values: the curve, [n]; points that are not finite are left out
        buckets: at most this many buckets; each gives up to two points. The first and the last
            point are always kept.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= 2 * buckets:
        return finite
    heights = values[finite]
    edges = np.linspace(0, len(finite), buckets + 1).astype(np.int64)[:-1]
    lowest = _first_equal(heights, np.minimum.reduceat(heights, edges), edges)
    highest = _first_equal(heights, np.maximum.reduceat(heights, edges), edges)
    ends = [0, len(finite) - 1]
    return finite[np.unique(np.concatenate([lowest, highest, ends]))]


def trend(values: np.ndarray, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each bucket, for a line through a noisy curve.

    Args:
        values: the curve, [n]; points that are not finite are left out
        buckets: number of buckets; each has at least one finite point

    Returns:
        The index of the middle point of each bucket, int64 [buckets], and the means, [buckets].
    """
    finite = np.flatnonzero(np.isfinite(values))
    edges = np.linspace(0, len(finite), buckets + 1).astype(np.int64)
    sizes = np.diff(edges)
    means = np.add.reduceat(values[finite], edges[:-1]) / sizes
    return finite[edges[:-1] + sizes // 2], means


def _first_equal(heights: np.ndarray, wanted: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the index of the first point of each bucket that equals the bucket's wanted height."""
    sizes = np.diff(np.append(edges, len(heights)))
    candidates = np.flatnonzero(heights == np.repeat(wanted, sizes))
    buckets = np.searchsorted(edges, candidates, side="right")
    _, firsts = np.unique(buckets, return_index=True)
    return candidates[firsts]
