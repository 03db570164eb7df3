"""Blocks, parameters and matrices for Muon of each pipeline stage."""

from collections import Counter
from functools import lru_cache
from itertools import islice
from typing import Any

from models.config import ModelConfig
from models.context_parallel.division import received_keys
from models.cost import (
    block_parameters,
    hidden_matrices,
    kind_of_predictions,
    kinds_of_layers,
    norm_parameters,
    position_parameters,
    prediction_parameters,
    routed_parameters,
)
from threefold.pipeline import schedules
from threefold.pipeline.balance import balance_text, imbalance, layer_costs
from threefold.pipeline.schedules import virtual_stage_of
from threefold.plan.job import Job, PlannedLayout, once_per_job


@once_per_job
def blocks_of_stages(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return the number of blocks of each chunk of each stage."""
    layout = job.layout
    blocks = job.blocks_of_virtual_stages
    return _blocks_of_stages(blocks, layout.schedule, layout.pipeline, layout.virtual_stages)


@lru_cache(maxsize=4096)
def _blocks_of_stages(
    blocks: tuple[int, ...], schedule: str, pipeline: int, virtual_stages: int
) -> tuple[tuple[int, ...], ...]:
    chunks = range(virtual_stages)
    return tuple(
        tuple(blocks[virtual_stage_of(schedule, pipeline, stage, chunk)] for chunk in chunks)
        for stage in range(pipeline)
    )


def stage_imbalance(job: Job) -> float:
    """Return the slowest stage's work relative to the mean of all stages."""
    return imbalance(job.blocks_of_virtual_stages, **_sharing(job))


def stages_text(job: Job) -> str:
    """Describe the division of the blocks over the stages in one line."""
    return balance_text(job.blocks_of_virtual_stages, **_sharing(job))


def _sharing(job: Job) -> dict[str, Any]:
    layout = job.layout
    costs = layer_costs(job.model, layout.recompute)
    return {"costs": costs, "schedule": layout.schedule, "stages": layout.pipeline}


@once_per_job
def blocks_by_kind(job: Job) -> dict[ModelConfig, tuple[tuple[int, ...], ...]]:
    """Return the number of blocks of each kind in each chunk of each stage.

    The kinds are those of `kinds_of_layers`.
    """
    layout = job.layout
    return {
        kind: _blocks_of_stages(blocks, layout.schedule, layout.pipeline, layout.virtual_stages)
        for kind, blocks in kinds_of_virtual_stages(job.model, job.blocks_of_virtual_stages).items()
    }


@lru_cache(maxsize=4096)
def kinds_of_virtual_stages(
    model: ModelConfig, blocks: tuple[int, ...]
) -> dict[ModelConfig, tuple[int, ...]]:
    """Return the number of blocks of each kind in each virtual stage.

    Args:
        blocks: number of all blocks of each virtual stage
    """
    kinds = kinds_of_layers(model)
    if len(kinds) == 1:
        return dict.fromkeys(kinds, blocks)
    layers = iter(model.uniform_models)
    counts = [Counter(islice(layers, count)) for count in blocks]
    return {kind: tuple(of_stage[kind] for of_stage in counts) for kind in kinds}


@once_per_job
def stage_parameters(job: Job) -> tuple[int, ...]:
    """Return the parameters per rank of each stage; both ends count an embedding that both hold."""
    layout, last = job.layout, last_stage(job.layout)
    blocks = tuple(blocks_by_kind(job).values())
    return _stage_parameters(job.model, layout.tensor, layout.expert, last, blocks)


@once_per_job
def routed_stage_parameters(job: Job) -> tuple[int, ...]:
    """Return the parameters of experts per rank of each stage."""
    held = [0] * job.layout.pipeline
    for kind, stages in blocks_by_kind(job).items():
        block = routed_parameters(kind, job.layout.tensor, job.layout.expert)
        for stage, chunks in enumerate(stages):
            held[stage] += block * sum(chunks)
    predictions = routed_parameters(
        kind_of_predictions(job.model), job.layout.tensor, job.layout.expert
    )
    held[last_stage(job.layout)] += job.model.prediction_depth * predictions
    return tuple(held)


def own_parameters(job: Job, stage: int) -> float:
    """Return `replicas` times the parameters that a rank updates.

    A replicated weight counts once, a weight of an expert `expert` times.
    """
    routed = routed_stage_parameters(job)[stage]
    return stage_parameters(job)[stage] + routed * (job.layout.expert - 1)


@lru_cache(maxsize=4096)
def _stage_parameters(
    model: ModelConfig,
    tensor: int,
    expert: int,
    last: int,
    blocks: tuple[tuple[tuple[int, ...], ...], ...],
) -> tuple[int, ...]:
    held = [0] * len(blocks[0])
    for kind, stages in zip(kinds_of_layers(model), blocks, strict=True):
        block = block_parameters(kind, tensor, expert)
        for stage, chunks in enumerate(stages):
            held[stage] += block * sum(chunks)
    table = table_parameters(model, tensor)
    held[0] += table + position_parameters(model)
    held[last] += norm_parameters(model)
    held[last] += model.prediction_depth * prediction_parameters(model, tensor, expert)
    if not model.tie_embeddings:
        held[last] += table
    if last != 0 and model.copies_embedding:
        held[last] += table
    return tuple(held)


def table_parameters(model: ModelConfig, tensor: int) -> int:
    """Return the parameters of a tensor rank's part of the embedding or output matrix."""
    return model.padded_vocab_size(tensor) // tensor * model.hidden_size


def last_stage(layout: PlannedLayout) -> int:
    """Return the stage that computes the logits."""
    return schedules.last_stage(layout.schedule, layout.pipeline, layout.virtual_stages)


def routed_rows(job: Job) -> float:
    """Return the rows that a rank's experts compute of a micro-batch, on the busiest rank.

    A token is a row for each of its experts. Expert ranks exchange equal numbers of tokens. With
    expert tensor parallelism, each tensor rank computes the rows of all tensor ranks.
    """
    return exchanged_rows(job) * job.layout.expert_tensor


def exchanged_rows(job: Job) -> float:
    """Return the rows that a rank receives from the expert ranks, on the busiest rank."""
    model, layout = job.model, job.layout
    if model.experts is None:
        return 0.0
    own = tokens_per_micro_batch(model, layout) / layout.tensor
    return own * model.experts.per_token * load_factor(layout, job.expert_imbalance)


def load_factor(layout: PlannedLayout, imbalance: float) -> float:
    """Return the busiest rank's rows relative to the mean of all ranks.

    It is `imbalance` if ranks have different experts. Tensor ranks that divide the columns of the
    same experts compute the same rows.
    """
    return imbalance if layout.ep_size > 1 else 1.0


def tokens_per_micro_batch(model: ModelConfig, layout: PlannedLayout) -> int:
    """Return the tokens of a micro-batch on one rank."""
    return layout.micro_sequences * model.sequence_length // layout.context


def reached_keys_of(model: ModelConfig, layout: PlannedLayout) -> int | None:
    """Return the keys on other context ranks that the windows of the busiest rank reach.

    They are those of one sequence in the last block. None: the rank gets the keys of all other
    ranks, or whole sequences.
    """
    window = model.window_size(model.layers - 1)
    is_windowed = window is not None and window < model.sequence_length
    if not is_windowed or layout.context_attention == "ulysses" or model.attention_dropout:
        return None
    return _most_received(model.sequence_length, layout.context, window)


@lru_cache(maxsize=1024)
def _most_received(length: int, ranks: int, window: int) -> int:
    return max(received_keys(length, ranks, window))


# The matrices that Muon orthogonalizes in a job, and the ranks that share this work.

Matrices = tuple[tuple[tuple[int, int], float], ...]  # (rows, columns) and number, by shape


def ranks_of_exchange(job: Job) -> int:
    """Return the number of ranks that hold one copy of a stage's optimizer state."""
    return job.layout.tensor * job.layout.optimizer_ranks


def exchange_precision(job: Job) -> str:
    """Return the precision in which matrices are exchanged and orthogonalized."""
    return "bf16" if job.precision == "bf16" else "fp32"


def blocks_share(job: Job, stage: int) -> float:
    """Return the fraction of the layers, with those of prediction modules, that a stage holds."""
    blocks, predictions = sum(blocks_of_stages(job)[stage]), job.model.prediction_depth
    if stage == last_stage(job.layout):
        blocks += predictions
    return blocks / (job.model.layers + predictions)


@lru_cache(maxsize=1024)
def matrices_of_layers(model: ModelConfig, share: float) -> Matrices:
    """Return the shapes of the hidden matrices, and the number of each shape in some layers.

    If the matrices of the layers differ, those of all layers are averaged.

    Args:
        share: fraction of the layers
    """
    return tuple((shape, n * share) for shape, n in hidden_matrices(model).items())


def elements_of(matrices: Matrices) -> float:
    """Return the number of elements of all matrices."""
    return sum(rows * columns * n for (rows, columns), n in matrices)
