"""Predicted seconds of the optimizer's update."""

from functools import lru_cache
from math import ceil

from models.cost import (
    MUON_BATCH_ELEMENTS,
    MUON_ROUND_ELEMENTS,
    NEWTON_SCHULZ_ITERATIONS,
)
from recipes.gpus.datasheet import Gpu
from recipes.planning.inputs.hidden_matrices import (
    Matrices,
    blocks_share,
    elements_of,
    exchange_precision,
    matrices_of_layers,
    ranks_of_exchange,
)
from recipes.planning.inputs.job import Job
from recipes.planning.inputs.kernels import matmul_seconds, memory_seconds
from recipes.planning.inputs.stage_contents import (
    routed_stage_parameters,
    stage_parameters,
    table_parameters,
)
from recipes.planning.time.network import all_to_all_seconds, transfer_seconds
from recipes.training.recipe.deepspeed_config import BYTES

# Bytes per parameter that an AdamW step in mixed precision reads and writes: fp32 weight and two
# moments read and written (24); fp32 gradient read for the norm, read, scaled and written, and read
# for the update (16); 16-bit weight written (2).
OPTIMIZER_BYTES = 42
# Elements of a matrix that Newton-Schulz reads and writes outside of its matmuls: to assemble the
# matrix from pieces (4), for its norm and the division (3), for the scale (2), to take the result
# apart (4), and in each iteration the addends of two of the three products (1).
NEWTON_SCHULZ_TRAFFIC = 13 + NEWTON_SCHULZ_ITERATIONS


def optimizer_time(job: Job) -> float:
    """Return the seconds of a rank's update, the reduction of tied embeddings, and host time."""
    layout = job.layout
    both = zip(stage_parameters(job), routed_stage_parameters(job), strict=True)
    parameters = max(all_of + routed * (layout.expert - 1) for all_of, routed in both)
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
    another one. The element-wise work on the shards takes as long as AdamW's.
    """
    ranks = ranks_of_exchange(job)
    share = max(blocks_share(job, stage) for stage in range(job.layout.pipeline))
    matrices = matrices_of_layers(job.model, share)
    precision = exchange_precision(job)
    computed = owner_seconds(job.machine.gpu, precision, matrices, ranks)
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
def owner_seconds(gpu: Gpu, precision: str, matrices: Matrices, ranks: int) -> float:
    """Return the seconds of the rank with the most work, if each matrix has one owner.

    The work is at least the mean of the ranks. If k matrices take at least t each, some rank has
    k / ranks of them, rounded up, and takes that many times t.
    """
    costs = sorted(
        ((newton_schulz_seconds(gpu, precision, shape, n / ranks), n) for shape, n in matrices),
        reverse=True,
    )
    most = sum(seconds * n for seconds, n in costs) / ranks
    count = 0.0
    for seconds, n in costs:
        count += n
        most = max(most, ceil(count / ranks) * seconds)
    return most


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
