"""Memory that Muon needs while it updates the weights."""

from math import ceil

from models.cost import MUON_BATCH_ELEMENTS, MUON_ROUND_ELEMENTS
from recipes.planning.inputs.hidden_matrices import (
    elements_of,
    exchange_precision,
    matrices_of_stage,
    ranks_of_exchange,
)
from recipes.planning.inputs.job import Job
from recipes.training.recipe.deepspeed_config import BYTES


def momentum_parameters(job: Job, stage: int) -> float:
    """Return `optimizer_ranks` times the parameters of a rank that have a momentum only."""
    if job.optimizer != "muon":
        return 0.0
    return elements_of(matrices_of_stage(job, stage)) / job.layout.tensor


def muon_working_bytes(job: Job, stage: int) -> float:
    """Return the bytes of exchanged matrices and of Newton-Schulz iterations; 0 with AdamW.

    Three messages of a round exist at the same time, and two of the following round. A batch of
    matrices exists three times (input, current and next iterate), with two square matrices.
    """
    if job.optimizer != "muon":
        return 0.0
    ranks, matrices = ranks_of_exchange(job), matrices_of_stage(job, stage)
    own = elements_of(matrices) / ranks
    of_round = min(own, MUON_ROUND_ELEMENTS)
    messages = of_round if ranks == 1 else 3 * of_round + 2 * min(own - of_round, of_round)
    most = 0.0
    for shape, count in matrices.items():
        short, long = sorted(shape)
        of_rank = max(1, ceil(count / ranks))
        batch = max(1, min(of_rank, MUON_BATCH_ELEMENTS // (short * long)))
        most = max(most, batch * (3 * short * long + 2 * short * short))
    return BYTES[exchange_precision(job)] * (messages + most)
