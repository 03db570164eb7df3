"""Memory that Muon needs while it updates the weights."""

from functools import lru_cache
from math import ceil

from models.cost import MUON_BATCH_ELEMENTS, MUON_ROUND_ELEMENTS
from threefold.config.deepspeed_json import BYTES
from threefold.plan.hidden_matrices import (
    Matrices,
    blocks_share,
    elements_of,
    exchange_precision,
    matrices_of_layers,
    ranks_of_exchange,
)
from threefold.plan.job import Job


def momentum_parameters(job: Job, stage: int) -> float:
    """Return the parameters of a tensor rank in a stage that have one state, not two; 0 with AdamW.

    `optimizer_ranks` ranks share these states.
    """
    if job.optimizer != "muon":
        return 0.0
    return elements_of(matrices_of_layers(job.model, blocks_share(job, stage))) / job.layout.tensor


def muon_working_bytes(job: Job, stage: int) -> float:
    """Return the bytes of exchanged matrices and of Newton-Schulz iterations; 0 with AdamW.

    The sent and received messages of a round and of the following one exist at the same time. Of a
    batch of matrices, the input, the current and the next iterate exist at the same time, and two
    square matrices: A = X X^T and its polynomial.
    """
    if job.optimizer != "muon":
        return 0.0
    matrices = matrices_of_layers(job.model, blocks_share(job, stage))
    elements = _working_elements(matrices, ranks_of_exchange(job))
    return BYTES[exchange_precision(job)] * elements


@lru_cache(maxsize=1024)
def _working_elements(matrices: Matrices, ranks: int) -> float:
    """Return the number of elements of the messages and of the largest batch of matrices."""
    own = elements_of(matrices) / ranks
    of_round = min(own, MUON_ROUND_ELEMENTS)
    messages = (1 if ranks == 1 else 2) * min(own, 2 * of_round)
    most = 0.0
    for shape, count in matrices:
        short, long = sorted(shape)
        of_rank = max(1, ceil(count / ranks))
        batch = max(1, min(of_rank, MUON_BATCH_ELEMENTS // (short * long)))
        most = max(most, batch * (3 * short * long + 2 * short * short))
    return messages + most
