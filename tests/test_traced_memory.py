"""The planner's memory beside what DeepSpeed allocates: every formula against a trace."""

from pathlib import Path

import pytest

from recipes.planning.hardware import load_gpu
from recipes.planning.job import Machine, job_of
from recipes.planning.memory import memory_of_stage
from recipes.tracing.trace import trace
from recipes.training.recipe import DEFAULT_RECIPE, REPOSITORY, load_recipe, shipped_recipes

CATALOGUE = [path for path in shipped_recipes() if path != DEFAULT_RECIPE]
TOLERANCE = 0.03
GPT = [
    "model.norm=layernorm",
    "model.positions=learned",
    "model.activation=gelu",
    "model.bias=true",
]
SMALL = [  # a model of a few large blocks, as those of the large recipes are
    "model.layers=8",
    "model.hidden_size=4096",
    "model.heads=32",
    "model.kv_heads=8",
    "model.ffn_hidden_size=11008",
    "cluster.nodes=1",
    "batch.global_sequences=64",
]
VARIANTS = {
    "tensor": ["layout.tensor=4", "layout.pipeline=1"],
    "tensor, stages": ["layout.tensor=2", "layout.pipeline=4"],
    "sequence parallel, stages": [
        "layout.tensor=4", "layout.pipeline=2", "layout.sequence_parallel=true",
    ],
    "selective": ["layout.tensor=2", "layout.pipeline=4", "layout.recompute=selective"],
    "full by 2": [
        "layout.pipeline=4", "layout.recompute=full", "layout.recompute_interval=2",
    ],
    "dualpipev": ["layout.pipeline=4", "layout.schedule=dualpipev"],
    "dualpipev, tensor": [
        "layout.tensor=2", "layout.pipeline=2", "layout.schedule=dualpipev",
        "layout.sequence_parallel=true", "layout.recompute=full",
    ],
    "fp16": ["deepspeed=ds_configs/zero1_fp16.json", "layout.pipeline=4"],
    "fp32": ["deepspeed=ds_configs/zero1_fp32.json", "layout.pipeline=2"],
    "zero-2": ["deepspeed=ds_configs/zero2_bf16.json", "layout.pipeline=1"],
    "zero-3": ["deepspeed=ds_configs/zero3_bf16.json", "layout.pipeline=1", "model.layers=4"],
    "gpt, dropout": [*GPT, "model.dropout=0.1", "layout.tensor=2", "layout.pipeline=2"],
    "attention dropout": [*GPT, "model.attention_dropout=0.1", "layout.pipeline=1"],
    "qk-norm": ["model.qk_norm=true", "layout.tensor=2", "layout.pipeline=1"],
}  # fmt: skip

QUICK = ("tensor, stages", "fp16", "zero-2")  # the others only among the long tests


def differences(path: Path, overrides: list[str]) -> dict[str, float]:
    """Rank -> planned memory relative to traced, of the first stage and the last."""
    recipe = load_recipe(path, overrides)
    cluster = recipe.cluster
    machine = Machine.of(
        load_gpu(cluster.gpu),
        gpus=cluster.nodes * cluster.gpus_per_node,
        gpus_per_node=cluster.gpus_per_node,
    )
    job = job_of(recipe, machine)
    stages = {0, job.spread.pipeline - 1}
    found = {}
    for stage in sorted(stages):
        rank = 0 if stage == 0 else machine.gpus - 1
        traced = trace(recipe, machine.gpus, machine.gpus_per_node, rank)
        found[f"stage {stage}"] = memory_of_stage(job, stage).counted / traced.peak_bytes - 1
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in VARIANTS],
)
def test_the_formula_agrees_with_a_trace(name: str) -> None:
    path = REPOSITORY / "recipes" / "llama" / "7b.toml"
    found = differences(path, [*SMALL, *VARIANTS[name]])
    assert all(abs(each) < TOLERANCE for each in found.values()), found


@pytest.mark.long
@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_formula_agrees_with_a_trace_of_every_recipe(path: Path) -> None:
    found = differences(path, [])
    assert all(abs(each) < TOLERANCE for each in found.values()), found
