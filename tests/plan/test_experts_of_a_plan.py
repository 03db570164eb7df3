"""Experts in the planner: parameters, optimizer shards, exchanges, search, imbalance."""

import json
import subprocess
from dataclasses import replace

import pytest

from models.cost import active_parameter_count, parameter_count
from models.errors import UserError
from tests.commands import run_here
from threefold.commands.plan import main
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.recipe import Recipe
from threefold.plan.job import Job, Machine, job_of, with_gradient_bytes
from threefold.plan.memory.activations import micro_batches_in_flight
from threefold.plan.memory.peak import (
    first_chunk_parameters,
    memory_of_stage,
    peak_candidates,
    stage_memory,
)
from threefold.plan.recipe_edits import in_layout
from threefold.plan.search import search
from threefold.plan.stage_contents import (
    blocks_by_kind,
    blocks_of_stages,
    exchanged_rows,
    routed_rows,
    routed_stage_parameters,
    stage_parameters,
    table_parameters,
)
from threefold.plan.time.step import step_time

MIXTRAL = REPOSITORY / "recipes" / "mixtral" / "8x7b.toml"


def planned(*overrides: str) -> tuple[Recipe, Job]:
    recipe = load_recipe(MIXTRAL, overrides)
    assert recipe.cluster is not None
    return recipe, job_of(recipe, Machine.of_cluster(recipe.cluster))


@pytest.mark.parametrize("expert", [1, 2, 8])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_ranks_of_a_replica_hold_the_whole_model(expert: int, tensor: int) -> None:
    """Every tensor and expert rank holds the replicated weights: norms, routers and positions."""
    if expert * tensor > 8:
        return
    settings = (f"layout.expert={expert}", f"layout.tensor={tensor}")
    _, job = planned(*settings, "model.experts.dense_layers=3", "layout.pipeline=2")
    model, held = job.model, sum(stage_parameters(job))
    routed = sum(routed_stage_parameters(job))
    assert model.experts is not None
    each = 3 * model.hidden_size * model.experts.ffn_hidden_size
    assert routed * tensor * expert == 29 * 8 * each
    replicated = model.layers * 2 * model.hidden_size + model.hidden_size
    replicated += model.expert_layers * model.experts.count * model.hidden_size
    padding = 2 * (table_parameters(model, tensor) * tensor - model.vocab_size * model.hidden_size)
    whole = (held - routed - replicated) * tensor + routed * tensor * expert + replicated
    assert whole - padding == parameter_count(model)
    experts, dense = blocks_by_kind(job).values()
    assert dense == ((3, 0, 0, 0), (0, 0, 0, 0)) and sum(map(sum, experts)) == 29
    assert active_parameter_count(model) == parameter_count(model) - 29 * 6 * each


def test_the_optimizer_state_of_experts_is_divided_among_fewer_ranks() -> None:
    """All ranks together hold 12 bytes per parameter, whatever the number of expert ranks."""
    settings = ("layout.pipeline=1", "layout.schedule=1f1b", "layout.virtual_stages=1")
    by_expert = {
        size: memory_of_stage(planned(*settings, f"layout.expert={size}")[1], 0) for size in (1, 8)
    }
    assert by_expert[8].optimizer == pytest.approx(by_expert[1].optimizer, rel=1e-3)
    assert by_expert[8].weights < 0.2 * by_expert[1].weights


def test_a_first_chunk_has_its_blocks_and_the_embedding() -> None:
    _, job = planned("layout.tensor=2", "layout.expert=4")
    table = table_parameters(job.model, 2)
    blocks = blocks_of_stages(job)[0]
    assert len(blocks) == job.layout.virtual_stages > 1
    block = (stage_parameters(job)[0] - table) / sum(blocks)
    assert first_chunk_parameters(job, 0) == table + blocks[0] * block


def test_copies_of_the_other_chunks_gradients_exist_during_the_first_chunks_pass() -> None:
    """Also in a step whose first micro-batch is its peak."""
    _, job = planned("deepspeed=ds_configs/zero1_bf16.json", "batch.global_sequences=64")
    assert job.micro_batches <= micro_batches_in_flight(job.layout, 0, job.micro_batches)
    parameters, last = stage_parameters(job)[0], []
    for sent in (2, 4):  # fp32 gradients are not copied
        footprints = {"bf16": with_gradient_bytes(job.footprint, sums=4, sent=sent)}
        stack = replace(job.software, footprint=footprints)
        last.append(peak_candidates(replace(job, software=stack), 0, parameters)[-1].gradients)
    assert last[0] - last[1] == 2 * (parameters - first_chunk_parameters(job, 0))


def test_more_expert_ranks_exchange_more_and_reduce_less() -> None:
    times = {size: step_time(planned(f"layout.expert={size}")[1]) for size in (1, 2, 8)}
    assert times[1].expert == 0 < times[2].expert < times[8].expert
    assert times[1].data > times[8].data


def test_expert_tensor_parallelism_gathers_the_rows_of_all_tensor_ranks() -> None:
    """Each rank has the same weights and FLOPs, but the inputs of both tensor ranks."""
    whole, columns = (
        planned("layout.tensor=2", "layout.expert=4", f"layout.expert_tensor_parallel={split}")[1]
        for split in ("false", "true")
    )
    assert routed_rows(columns) == 2 * routed_rows(whole)
    assert exchanged_rows(columns) == exchanged_rows(whole)
    memory = [stage_memory(job)[0] for job in (whole, columns)]
    assert memory[0].weights == memory[1].weights
    assert memory[0].activations < memory[1].activations
    times = [step_time(job) for job in (whole, columns)]
    assert times[0].tensor < times[1].tensor and times[0].expert > times[1].expert > 0


def test_imbalance_matters_only_to_ranks_with_different_experts() -> None:
    settings = ("layout.tensor=2", "layout.expert=1")
    for split, factor in (("false", 1.5), ("true", 1.0)):
        _, job = planned(*settings, f"layout.expert_tensor_parallel={split}")
        busy = replace(job, expert_imbalance=1.5)
        assert routed_rows(busy) == factor * routed_rows(job)
        activations = [stage_memory(each)[0].activations for each in (busy, job)]
        assert (activations[0] > activations[1]) == (factor > 1)


def test_a_search_divides_columns_only_if_there_are_too_few_experts() -> None:
    """With 4 experts, 4 expert ranks with 4 tensor ranks need a part of an expert each."""
    recipe, job = planned(
        "model.experts.count=4", "layout.expert=4", "cluster.nodes=2", "batch.global_sequences=16"
    )
    plans = search(job, 100_000).plans
    divided = [plan.job.layout for plan in plans if plan.job.layout.expert_tensor > 1]
    assert {(each.tensor, each.expert) for each in divided} >= {(8, 2), (2, 4), (4, 4)}
    assert all(4 % (each.tensor * each.expert) for each in divided)
    plan = next(plan for plan in plans if plan.job.layout.expert_tensor == 8)
    assert in_layout(recipe, plan, "test").layout.expert_tensor == 8


def test_shared_experts_and_weight_gradients_hide_exchanges() -> None:
    """With 8 narrow experts per token, an exchange takes longer than what hides it."""
    settings = (
        "layout.expert=8", "model.experts.per_token=8", "model.experts.ffn_hidden_size=512",
        "layout.virtual_stages=1",
    )  # fmt: skip
    shared = "model.experts.shared=1"

    def exposed(schedule: str, *more: str, overlap: float | None = None) -> float:
        _, job = planned(*settings, f"layout.schedule={schedule}", *more)
        if overlap is not None:
            job = replace(job, software=replace(job.software, expert_overlap=overlap))
        return step_time(job).expert

    def share(schedule: str, *more: str) -> float:
        return exposed(schedule, *more) / exposed(schedule, *more, overlap=0.0)

    assert share("zb-h1") == 1.0 > share("1f1b") > share("1f1b", shared) > 0.0
    assert share("1f1b", shared) < share("zb-h1", shared) < 1.0


def test_a_busier_expert_rank_takes_longer_and_needs_more_memory() -> None:
    _, job = planned()
    busy = replace(job, expert_imbalance=1.5)
    assert step_time(busy).compute > 1.2 * step_time(job).compute
    assert stage_memory(busy)[0].activations > 1.2 * stage_memory(job)[0].activations
    assert stage_memory(busy)[0].weights == stage_memory(job)[0].weights


def test_the_layouts_of_a_search_are_valid() -> None:
    recipe, job = planned("cluster.nodes=2", "batch.global_sequences=32")
    plans = search(job, 40).plans
    assert {plan.job.layout.expert for plan in plans} > {8}
    for plan in plans:
        assert in_layout(recipe, plan, "test").layout.expert == plan.job.layout.expert


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(main, *arguments)


def test_the_command_reads_the_imbalance() -> None:
    recipe = "recipes/mixtral/8x7b.toml"
    plain, busy = (
        json.loads(run_plan(recipe, "--json", "--top", "0", *more).stdout)["own"]
        for more in ((), ("--expert-imbalance", "1.3"))
    )
    assert busy["step_seconds"]["compute"] > plain["step_seconds"]["compute"]
    dense = run_plan("--expert-imbalance", "1.3")
    assert dense.returncode == 2 and "has no effect on tiny, which has no experts" in dense.stderr
    for ratio in ("0.5", "nan", "x"):
        assert "expected 1 (equal tokens) to 1,000" in run_plan("--expert-imbalance", ratio).stderr


def test_dense_layers_are_planned_as_dense() -> None:
    """A model of 16 dense layers and one with experts lies between the two whole models."""
    settings = ("layout.pipeline=1", "layout.schedule=1f1b", "layout.virtual_stages=1")
    _, mixed = planned(*settings, "model.experts.dense_layers=16")
    _, experts = planned(*settings)
    dense = replace(mixed, model=mixed.model.uniform_models[0])
    for value in (
        lambda job: step_time(job).compute,
        lambda job: memory_of_stage(job, 0).activations,
    ):
        assert value(mixed) == pytest.approx((value(experts) + value(dense)) / 2, rel=1e-6)


def test_a_width_without_effect_rejects_no_layout() -> None:
    _, job = planned("layout.tensor=2", "layout.expert=4", "model.ffn_hidden_size=14335")
    assert job.layout.tensor == 2
    with pytest.raises(UserError, match=r"model\.ffn_hidden_size = 14335 is not divisible"):
        planned(
            "layout.tensor=2", "layout.expert=4", "model.ffn_hidden_size=14335",
            "model.experts.dense_layers=1",
        )  # fmt: skip


def test_a_search_leaves_out_lengths_that_tensor_ranks_cannot_divide() -> None:
    recipe, job = planned(
        "model.sequence_length=4098", "cluster.nodes=2", "batch.global_sequences=32"
    )
    result = search(job, 1000)
    assert {plan.job.layout.tensor for plan in result.plans} == {1, 2}
    assert result.rejected["tensor ranks that cannot divide the tokens among experts"] > 0
    for plan in result.plans:
        in_layout(recipe, plan, "test")
