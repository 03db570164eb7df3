"""Predicted seconds of the communication between data ranks and of the optimizer's update."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from math import ceil

from models.cost import (
    MUON_BATCH_ELEMENTS,
    MUON_ROUND_ELEMENTS,
    NEWTON_SCHULZ_ITERATIONS,
)
from threefold.config.deepspeed_json import BYTES
from threefold.gpus.datasheet import Gpu
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.job import Job
from threefold.plan.software import RUNNING_BUCKETS
from threefold.plan.stage_contents import (
    Matrices,
    blocks_of_stages,
    blocks_share,
    elements_of,
    exchange_precision,
    last_stage,
    matrices_of_layers,
    own_parameters,
    ranks_of_exchange,
    routed_stage_parameters,
    stage_parameters,
    table_parameters,
)
from threefold.plan.time.block import (
    all_reduce_seconds,
    all_to_all_seconds,
    gather_seconds,
    matmul_seconds,
    memory_seconds,
    transfer_seconds,
    weight_bytes,
)

TENSORS_PER_BLOCK = 7  # fused q, k and v; output; gate, up and down; two norms


@dataclass(frozen=True, kw_only=True)
class DataTraffic:
    """Communication of a stage's data ranks in a step, if nothing hides it.

    Attributes:
        reduced: seconds of one reduction of all gradients
        between: seconds of the sum over shard groups, once in a step
        gathered: seconds of gathering all updated weights
        buckets: number of buckets that these are divided into
        groups: reductions of all gradients in a step
        every: micro-batches per group
        virtual_stages: number of chunks of a stage
        in_a_row: micro-batches that a chunk runs in a row: as many as an interleaved schedule has
            stages; 1 for others
        alternating: forward passes run between the backward passes, unlike in GPipe
    """

    reduced: float
    between: float = 0.0
    gathered: float = 0.0
    buckets: int = 1
    groups: int = 1
    every: int = 1
    virtual_stages: int = 1
    in_a_row: int = 1
    alternating: bool = True

    @property
    def reductions(self) -> float:
        """Seconds of all sums of gradients in a step."""
        return self.groups * self.reduced + self.between

    def exposed_reductions(self, backward: float, weights: float | None = None) -> float:
        """Return the seconds of `reductions` that Threefold's engine cannot hide.

        The last group's buckets are reduced during its last backward pass, or the last pass for
        gradients of weights, and nothing follows. If a stage has chunks, it is the pass of one
        chunk. The passes of the next group hide an earlier group, too. After a pass has started a
        third reduction, it waits for the first one. The chunks of an interleaved schedule with
        several micro-batches in a row have no such limit.

        Args:
            backward: seconds of a micro-batch's backward pass through the stage; a forward pass is
                assumed to take half as long
            weights: seconds of the part of `backward` that runs as a separate pass for gradients of
                weights; None: the schedule has no such passes
        """
        last_pass = backward if weights is None else weights
        buckets = max(1, self.buckets // self.virtual_stages)
        passing, of_chunk = last_pass / self.virtual_stages, self.reduced / self.virtual_stages
        last = exposed_after(passing, (of_chunk, self.between / self.virtual_stages), buckets)
        if self.virtual_stages > 1:  # the last passes of the next chunk hide the sums of this one
            until_next_chunk = self.in_a_row * backward / self.virtual_stages
            last += (self.virtual_stages - 1) * max(0.0, of_chunk - until_next_chunk)
        if self.groups == 1:
            return last
        is_limited = self.in_a_row == 1 or self.every == 1
        running = min(RUNNING_BUCKETS, buckets) if is_limited else buckets
        forward = backward / 2 if self.alternating else 0.0
        of_group = self.every * (forward + backward)
        until_next_bucket = of_group - last_pass + last_pass / self.buckets
        drained = min(running * of_chunk / buckets, until_next_bucket / self.virtual_stages)
        outlasting = exposed_after(passing, (of_chunk,), buckets) - drained
        earlier = max(0.0, self.virtual_stages * outlasting, self.reduced - of_group)
        return last + (self.groups - 1) * earlier

    def exposed_gathering(self, forward: float) -> float:
        """Return the seconds of `gathered` that the first forward pass cannot hide."""
        return exposed_after(forward, (self.gathered,), self.buckets)


def exposed_after(passing: float, collectives: Sequence[float], buckets: int) -> float:
    """Return the time by which collectives lengthen a pass that they overlap.

    Equal buckets go through the pass and then through each collective, or in the reverse order.
    Each handles one bucket at a time. Such a flow shop of equal jobs ends after one job's time and
    (jobs - 1) times that of the slowest machine (Pinedo, Scheduling, section 6.1).

    Args:
        collectives: seconds of each collective for all buckets together
    """
    of_bucket = [seconds / buckets for seconds in (passing, *collectives)]
    return sum(of_bucket) + (buckets - 1) * max(of_bucket) - passing


def data_time(job: Job, backward: float, weights: float = 0.0) -> float:
    """Return the exposed seconds of reducing gradients and gathering new weights in a step.

    The last backward pass can hide the reduction, and the first forward pass the gathering. With
    separate passes for gradients of weights, only the last of these can hide the reduction. For
    Threefold, this is computed bucket by bucket, except on a CPU, where the same cores run passes
    and collectives. For other stacks, a fitted share of these two passes is hidden.

    ZeRO-3 communicates in every pass, and DeepSpeed's own ZeRO-2 reduces in every backward pass;
    the times of the passes include that.

    Args:
        backward: seconds of a micro-batch's backward pass through the stage
        weights: seconds of the part of `backward` for gradients of weights
    """
    layout, software = job.layout, job.software
    if layout.dp_cp_size == 1 or layout.zero_stage == 3:
        return 0.0
    traffic = data_traffic(job)
    if not software.reduces_in_groups:
        hidden = min(traffic.reduced, backward) * software.data_overlap
        hidden += min(traffic.gathered, backward / 2) * software.gather_overlap
        return traffic.reductions + traffic.gathered - hidden
    if job.machine.gpu.device == "cpu":
        return traffic.reductions + traffic.gathered
    splits = SCHEDULES[layout.schedule].splits
    reductions = traffic.exposed_reductions(backward, weights if splits else None)
    gathering = traffic.exposed_gathering(backward / 2)
    return (
        software.data_overlap * reductions
        + (1 - software.data_overlap) * traffic.reductions
        + software.gather_overlap * gathering
        + (1 - software.gather_overlap) * traffic.gathered
    )


def data_traffic(job: Job) -> DataTraffic:
    """Return the communication of the data ranks of the stage with the most parameters."""
    layout, software = job.layout, job.software
    if layout.expert > 1:
        return _traffic_with_experts(job)
    ranks, stride = layout.dp_cp_size, layout.tensor
    parameters = max(stage_parameters(job))
    weights = parameters * weight_bytes(job)
    gradients = parameters * software.bytes_of_gradients(BYTES[job.precision])
    reduced = gather_seconds(job.machine, gradients, ranks=ranks, stride=stride)
    gathered = 0.0
    owners, between = layout.optimizer_ranks, 0.0
    if layout.zero_stage:
        tensors = TENSORS_PER_BLOCK * max(map(sum, blocks_of_stages(job))) + 1
        messages = min(owners, tensors) if software.broadcasts_weights else 1
        gathered = gather_seconds(
            job.machine, weights, ranks=owners, stride=stride, messages=messages
        )
    if owners < ranks and software.reduces_in_groups:
        # A reduce-scatter within each shard group; once in a step, an all-reduce between them.
        reduced = gather_seconds(job.machine, gradients, ranks=owners, stride=stride)
        between = all_reduce_seconds(
            job.machine,
            parameters / owners * BYTES["fp32"],
            ranks=ranks // owners,
            stride=stride * owners,
        )
    elif owners < ranks or not software.reduce_scatter:
        # A reduce-scatter in a part of the data ranks would not sum over all of them.
        reduced = all_reduce_seconds(job.machine, gradients, ranks=ranks, stride=stride)
    if job.shards_in_passes:
        reduced = 0.0
    return _in_buckets(job, parameters, reduced=reduced, between=between, gathered=gathered)


def _traffic_with_experts(job: Job) -> DataTraffic:
    """Return `data_traffic` if data ranks divide the experts.

    Experts are reduced and gathered among the ranks with the same experts, other weights among all
    data ranks.
    """
    layout, software = job.layout, job.software
    stage = max(range(layout.pipeline), key=stage_parameters(job).__getitem__)
    routed = routed_stage_parameters(job)[stage]
    spans = (
        (stage_parameters(job)[stage] - routed, layout.dp_cp_size, layout.tensor),
        (routed, layout.dp_cp_size // layout.expert, layout.tensor * layout.expert),
    )
    reduced, gathered = (
        sum(
            gather_seconds(job.machine, parameters * size, ranks=ranks, stride=stride)
            for parameters, ranks, stride in spans
            if ranks > 1
        )
        for size in (
            software.bytes_of_gradients(BYTES[job.precision]),
            weight_bytes(job),
        )
    )
    return _in_buckets(job, stage_parameters(job)[stage], reduced=reduced, gathered=gathered)


def _in_buckets(
    job: Job, parameters: float, *, reduced: float, gathered: float, between: float = 0.0
) -> DataTraffic:
    """Return traffic with the buckets and groups of a job.

    Args:
        reduced: as in DataTraffic
        gathered: as in DataTraffic
        between: as in DataTraffic
    """
    every = job.micro_batches_per_reduction
    layout = job.layout
    return DataTraffic(
        buckets=max(1, ceil(parameters / job.footprint.group_bucket_elements)),
        groups=ceil(job.micro_batches / every),
        every=every,
        virtual_stages=layout.virtual_stages,
        in_a_row=layout.pipeline if layout.schedule == "interleaved" else 1,
        alternating=layout.schedule != "gpipe",
        reduced=reduced,
        between=between,
        gathered=gathered,
    )


# Predicted seconds of the optimizer's update.

# Bytes per parameter that an AdamW step in mixed precision reads and writes: fp32 weight and two
# moments read and written (24); fp32 gradient read for the norm, read, scaled and written, and read
# for the update (16); 16-bit weight written (2).
OPTIMIZER_BYTES = 42
AVERAGING_BYTES = 12  # likewise, to average the weights: average read and written, weight read
# Reads and writes per element of a matrix, outside of the matmuls of Newton-Schulz: to assemble the
# matrix from pieces (4), for its norm and the division (3), for the scale (2), to take the result
# apart (4), and in each iteration for the addends of two of the three products (1).
NEWTON_SCHULZ_TRAFFIC = 13 + NEWTON_SCHULZ_ITERATIONS
MANY_MATRICES = 16  # per rank; more matrices are assumed to be shared equally by the ranks


def optimizer_time(job: Job) -> float:
    """Return the seconds of a rank's update, with the sum of shared embeddings and host time."""
    layout = job.layout
    parameters = max(own_parameters(job, stage) for stage in range(layout.pipeline))
    moved = OPTIMIZER_BYTES + (AVERAGING_BYTES / job.average_every if job.average_every else 0)
    update = memory_seconds(job.gpu, parameters / job.layout.optimizer_ranks * moved)
    tied = 0.0
    if job.model.copies_embedding and (last := last_stage(layout)):
        table = table_parameters(job.model, layout.tensor)
        # An all-reduce between two ranks sends as many bytes as the table has.
        tied = transfer_seconds(
            job.machine,
            table * job.software.bytes_of_gradients(BYTES[job.precision]),
            stride=layout.tensor * layout.dp_cp_size * last,
        )
    muon = muon_time(job) if job.optimizer == "muon" else 0.0
    return update + tied + muon + job.software.step_seconds


def muon_time(job: Job) -> float:
    """Return the seconds by which Muon lengthens the update, compared with AdamW.

    The ranks of a stage exchange the elements of matrices twice, to the owners and back, and each
    owner orthogonalizes its matrices. The exchanges of one round overlap with the computation of
    another one. The element-wise work on the shards is assumed to take as long as AdamW's.
    """
    ranks = ranks_of_exchange(job)
    share = max(blocks_share(job, stage) for stage in range(job.layout.pipeline))
    matrices = matrices_of_layers(job.model, share)
    precision = exchange_precision(job)
    layers = max(sum(chunks) for chunks in blocks_of_stages(job))
    computed = owner_seconds(job.gpu, precision, matrices, ranks=ranks, layers=layers)
    if ranks == 1:
        return computed
    elements = elements_of(matrices)
    moved = elements / ranks * BYTES[precision]
    exchanged = all_to_all_seconds(job.machine, moved, ranks=ranks, stride=1)
    rounds = 1
    # DeepSpeed updates one optimizer group at a time, except in bf16 without ZeRO-3.
    if job.precision == "bf16" and job.layout.zero_stage < 3 and job.machine.gpu.device != "cpu":
        rounds = max(1, ceil(elements / (MUON_ROUND_ELEMENTS * ranks)))
    of_round = exchanged / rounds
    hidden = min(2 * of_round, computed / rounds) * (rounds - 1)
    return computed + 2 * exchanged - hidden


@lru_cache(maxsize=4096)
def owner_seconds(
    gpu: Gpu, precision: str, matrices: Matrices, *, ranks: int, layers: int
) -> float:
    """Return the seconds of the rank with the most work, if each matrix has one owner.

    With few matrices per rank, they are assigned as in a run (`owners_by_round`): round by round,
    the most expensive ones first, to the rank with the least work so far.

    Args:
        ranks: ranks that share the work
        layers: number of layers of the stage, which have equal matrices
    """
    seconds = {
        shape: newton_schulz_seconds(gpu, precision, shape, n / ranks) for shape, n in matrices
    }
    if sum(n for _, n in matrices) > MANY_MATRICES * ranks:
        return sum(seconds[shape] * n for shape, n in matrices) / ranks
    loads = [0.0] * ranks
    of_layer = [(shape, round(n / layers)) for shape, n in matrices]
    size = 0
    together: list[float] = []
    for shape, n in of_layer * layers:
        for _ in range(n):
            if together and size + shape[0] * shape[1] > MUON_ROUND_ELEMENTS * ranks:
                _assign(together, loads)
                together, size = [], 0
            together.append(seconds[shape])
            size += shape[0] * shape[1]
    _assign(together, loads)
    return max(loads)


def _assign(seconds: list[float], loads: list[float]) -> None:
    """Give each matrix, from the most expensive one on, to the rank with the smallest load."""
    heapify(loads)
    for duration in sorted(seconds, reverse=True):
        heapreplace(loads, loads[0] + duration)


def newton_schulz_seconds(gpu: Gpu, precision: str, shape: tuple[int, int], count: float) -> float:
    """Return the seconds in which a rank orthogonalizes a matrix.

    Args:
        count: number of matrices of this shape per rank, which share kernels
    """
    short, long = sorted(shape)
    batch = max(1, min(ceil(count), MUON_BATCH_ELEMENTS // (short * long)))
    products = sum(
        matmul_seconds(gpu, precision, rows=short, columns=columns, inner=inner, batch=batch)
        for columns, inner in ((short, long), (short, short), (long, short))
    )
    moved = NEWTON_SCHULZ_TRAFFIC * short * long * BYTES[precision]
    return NEWTON_SCHULZ_ITERATIONS * products / batch + memory_seconds(gpu, moved)
