"""Predicted seconds of the optimizer's update."""

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
from threefold.plan.hidden_matrices import (
    Matrices,
    blocks_share,
    elements_of,
    exchange_precision,
    matrices_of_layers,
    ranks_of_exchange,
)
from threefold.plan.job import Job
from threefold.plan.stage_contents import (
    blocks_of_stages,
    own_parameters,
    table_parameters,
)
from threefold.plan.time.kernels import matmul_seconds, memory_seconds
from threefold.plan.time.network import all_to_all_seconds, transfer_seconds

# Bytes per parameter that an AdamW step in mixed precision reads and writes: fp32 weight and two
# moments read and written (24); fp32 gradient read for the norm, read, scaled and written, and read
# for the update (16); 16-bit weight written (2).
OPTIMIZER_BYTES = 42
# Reads and writes per element of a matrix, outside of the matmuls of Newton-Schulz: to assemble the
# matrix from pieces (4), for its norm and the division (3), for the scale (2), to take the result
# apart (4), and in each iteration for the addends of two of the three products (1).
NEWTON_SCHULZ_TRAFFIC = 13 + NEWTON_SCHULZ_ITERATIONS
MANY_MATRICES = 16  # per rank; more matrices are assumed to be shared equally by the ranks


def optimizer_time(job: Job) -> float:
    """Return the seconds of a rank's update, with the sum of tied embeddings and host time."""
    layout = job.layout
    parameters = max(own_parameters(job, stage) for stage in range(layout.pipeline))
    update = memory_seconds(
        job.machine.gpu, parameters / job.layout.optimizer_ranks * OPTIMIZER_BYTES
    )
    tied = 0.0
    if job.model.tie_embeddings and layout.pipeline > 1:
        table = table_parameters(job.model, layout.tensor)
        tied = 2 * transfer_seconds(
            job.machine,
            table * job.software.bytes_of_gradients(BYTES[job.precision]),
            stride=layout.tensor * layout.replicas,
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
    computed = owner_seconds(job.machine.gpu, precision, matrices, ranks=ranks, layers=layers)
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
        gpu: the GPU
        precision: precision of the matmuls
        matrices: the matrices of a stage
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
    for each in sorted(seconds, reverse=True):
        heapreplace(loads, loads[0] + each)


def newton_schulz_seconds(gpu: Gpu, precision: str, shape: tuple[int, int], count: float) -> float:
    """Return the seconds in which a rank orthogonalizes a matrix.

    Args:
        gpu: the GPU
        precision: precision of the matmuls
        shape: rows and columns
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
