"""The matrices that Muon orthogonalizes in a job, and the ranks that share this work."""

from functools import lru_cache

from models.config import ModelConfig
from models.cost import hidden_matrices
from recipes.planning.inputs.job import Job
from recipes.planning.inputs.stage_contents import blocks_of_stages

Matrices = tuple[tuple[tuple[int, int], float], ...]  # (rows, columns) and number, by shape


def ranks_of_exchange(job: Job) -> int:
    """Return the number of ranks that hold one copy of a stage's optimizer state."""
    return job.layout.tensor * job.layout.optimizer_ranks


def exchange_precision(job: Job) -> str:
    """Return the precision in which matrices are exchanged and orthogonalized."""
    return "bf16" if job.precision == "bf16" else "fp32"


def blocks_share(job: Job, stage: int) -> float:
    """Return the share of a stage in the layers of the model."""
    return sum(blocks_of_stages(job)[stage]) / job.model.layers


@lru_cache(maxsize=1024)
def matrices_of_layers(model: ModelConfig, share: float) -> Matrices:
    """Return the shapes of matrices, and their number in a share of the layers.

    In a model whose layers differ, a part of the layers has the same share of all matrices.
    """
    return tuple((shape, n * share) for shape, n in hidden_matrices(model).items())


def elements_of(matrices: Matrices) -> float:
    """Return the elements of all matrices."""
    return sum(rows * columns * n for (rows, columns), n in matrices)
