"""The matrices that Muon orthogonalizes in a job, and the ranks that share this work."""

from models.cost import hidden_matrices
from recipes.planning.inputs.job import Job
from recipes.planning.inputs.stage_contents import blocks_of_stages


def ranks_of_exchange(job: Job) -> int:
    """Return the number of ranks that hold one copy of a stage's optimizer state."""
    return job.layout.tensor * job.layout.optimizer_ranks


def exchange_precision(job: Job) -> str:
    """Return the precision in which matrices are exchanged and orthogonalized."""
    return "bf16" if job.precision == "bf16" else "fp32"


def matrices_of_stage(job: Job, stage: int) -> dict[tuple[int, int], float]:
    """Return the number of matrices of a stage by shape, rows x columns.

    In a model whose layers differ, a stage has a share of all matrices.
    """
    share = sum(blocks_of_stages(job)[stage]) / job.model.layers
    return {shape: n * share for shape, n in hidden_matrices(job.model).items()}


def elements_of(matrices: dict[tuple[int, int], float]) -> float:
    """Return the elements of all matrices, given their number by shape."""
    return sum(rows * columns * n for (rows, columns), n in matrices.items())
