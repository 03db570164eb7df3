"""The matrices that Muon orthogonalizes in a job, and the ranks that share this work."""

from functools import lru_cache

from models.config import ModelConfig
from models.cost import hidden_matrices
from threefold.plan.job import Job
from threefold.plan.stage_contents import blocks_of_stages

Matrices = tuple[tuple[tuple[int, int], float], ...]  # (rows, columns) and number, by shape


def ranks_of_exchange(job: Job) -> int:
    """Return the number of ranks that hold one copy of a stage's optimizer state."""
    return job.layout.tensor * job.layout.optimizer_ranks


def exchange_precision(job: Job) -> str:
    """Return the precision in which matrices are exchanged and orthogonalized."""
    return "bf16" if job.precision == "bf16" else "fp32"


def blocks_share(job: Job, stage: int) -> float:
    """Return the fraction of the model's layers that a stage holds."""
    return sum(blocks_of_stages(job)[stage]) / job.model.layers


@lru_cache(maxsize=1024)
def matrices_of_layers(model: ModelConfig, share: float) -> Matrices:
    """Return the shapes of the hidden matrices, and the number of each shape in some layers.

    If layers differ (dense and with experts), the matrices of all layers are averaged.

    Args:
        model: the model
        share: fraction of the layers
    """
    return tuple((shape, n * share) for shape, n in hidden_matrices(model).items())


def elements_of(matrices: Matrices) -> float:
    """Return the number of elements of all matrices."""
    return sum(rows * columns * n for (rows, columns), n in matrices)
