"""The planner counts the matrices, the memory and the work of Muon as a run does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.cost import checkpoint_elements, hidden_matrices, parameter_count
from models.layer_specs import SequentialModel, layer_specs
from models.sharding import sharding_of
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.engine.muon_exchange import Matrix, owners_by_round
from threefold.gpus.datasheet import load_gpu
from threefold.plan.goodput import own_bytes
from threefold.plan.job import Job, Machine, job_of
from threefold.plan.memory.peak import memory_of_stage
from threefold.plan.memory.working import muon_working_bytes
from threefold.plan.stage_contents import elements_of, matrices_of_layers
from threefold.plan.time.step import step_time
from threefold.plan.time.update import (
    muon_time,
    newton_schulz_seconds,
    optimizer_time,
    owner_seconds,
)
from threefold.trace.trace import trace

RECIPES = ["tiny", "gpt/125m", "llama/8b", "mixtral/8x7b", "qwen3/30b-a3b", "dots/llm1"]
MUON = 'optimizer.kind="muon"'


def path_of(name: str) -> Path:
    return REPOSITORY / "recipes" / f"{name}.toml"


def job(name: str, *overrides: str) -> Job:
    recipe = load_recipe(path_of(name), [MUON, *overrides])
    return job_of(recipe, Machine.of_cluster(recipe.cluster))


@pytest.mark.parametrize("name", RECIPES)
def test_the_matrices_are_those_that_the_model_declares(name: str) -> None:
    config = load_recipe(path_of(name)).model
    config = replace(config, layers=min(config.layers, 3))
    with torch.device("meta"):
        model = SequentialModel(layer_specs(config))
    declared: dict[tuple[int, int], int] = {}
    for parameter in model.parameters():
        sharding = sharding_of(parameter)
        if sharding.role == "hidden":
            for rows in sharding.matrices:
                shape = len(rows), sharding.shape[1]
                declared[shape] = declared.get(shape, 0) + 1
    assert hidden_matrices(config) == declared


def test_a_checkpoint_with_muon_has_one_state_less_per_matrix() -> None:
    config = load_recipe(path_of("llama/8b")).model
    in_matrices = elements_of(matrices_of_layers(config, 1.0))
    assert 0.8 < in_matrices / parameter_count(config) < 1
    assert checkpoint_elements(config, "adamw") == 3 * parameter_count(config)
    assert checkpoint_elements(config, "muon") == 3 * parameter_count(config) - in_matrices


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(("name", "expert"), [("llama/8b", 1), ("mixtral/8x7b", 8)])
def test_the_ranks_of_one_stage_write_the_whole_checkpoint(
    name: str, expert: int, kind: str
) -> None:
    planned = replace(job(name, "cluster.nodes=4"), optimizer=kind)
    layout = replace(
        planned.layout, pipeline=1, tensor=1, expert=expert, virtual_stages=1, schedule="1f1b"
    )
    planned = replace(planned, layout=layout)
    written = own_bytes(planned) * layout.optimizer_ranks
    assert written == pytest.approx(4 * checkpoint_elements(planned.model, kind), rel=1e-9)


def test_the_optimizer_state_and_the_buffers_of_the_update_agree_with_a_trace() -> None:
    overrides = ["cluster.nodes=1", "model.layers=2", "model.hidden_size=2048", "model.heads=16",
                 "model.kv_heads=8", "layout.tensor=2", "batch.global_sequences=4"]  # fmt: skip
    recipe = load_recipe(path_of("llama/8b"), [MUON, *overrides])
    planned = job_of(recipe, Machine.of_cluster(recipe.cluster))
    traced = trace(recipe, 8, 8, 0)
    assert memory_of_stage(planned, 0).optimizer == pytest.approx(
        traced.between_steps.optimizer, rel=0.01
    )
    updating = dict(traced.phase_bytes)["optimizer step"] - traced.between_steps.total
    assert muon_working_bytes(planned, 0) == pytest.approx(updating, rel=0.1)


@pytest.mark.parametrize("ranks", [1, 3, 8, 64, 200, 512])
def test_the_work_of_the_busiest_owner_is_that_of_the_run_s_plan(ranks: int) -> None:
    gpu = load_gpu("H100")
    planned = matrices_of_layers(load_recipe(path_of("llama/8b")).model, 1.0)
    run = [Matrix(shape, 0) for shape, count in planned for _ in range(int(count))]
    load = [0.0] * ranks
    for owned in owners_by_round(run, ranks):
        for rank, matrices in enumerate(owned):
            for matrix in matrices:
                count = dict(planned)[matrix.shape] / ranks
                load[rank] += newton_schulz_seconds(gpu, "bf16", matrix.shape, count)
    found = owner_seconds(gpu, "bf16", planned, ranks=ranks, layers=32)
    assert found == pytest.approx(max(load), rel=0.1)


def test_muon_adds_its_work_and_its_exchanges_to_the_update() -> None:
    planned = job("llama/8b", "cluster.nodes=8")
    adamw = replace(planned, optimizer="adamw")
    assert optimizer_time(planned) - optimizer_time(adamw) == pytest.approx(muon_time(planned))
    assert muon_working_bytes(adamw, 0) == 0
    # Twice the GPUs compute half, as long as there are more matrices than ranks.
    more = job("llama/8b", "cluster.nodes=16")
    assert 0.4 < muon_time(more) / muon_time(planned) < 0.75
    slower = replace(planned, machine=replace(planned.machine, network_gigabytes_per_second=1.0))
    assert muon_time(slower) > 1.5 * muon_time(planned)


def test_the_largest_logits_add_their_scores_to_the_backward_pass() -> None:
    path = REPOSITORY / "recipes" / "kimi" / "k2.toml"
    recipe = load_recipe(path)
    machine = Machine.of_cluster(recipe.cluster)
    clipped = job_of(recipe, machine)
    plain = replace(clipped, limits_logits=False)
    assert step_time(clipped.with_layout(clipped.layout)) == step_time(clipped)
    # The scores are one of the seven products of attention, and are written and read once more.
    assert 1.005 < step_time(clipped).total / step_time(plain).total < 1.05
    assert memory_of_stage(clipped, 0) == memory_of_stage(plain, 0)
