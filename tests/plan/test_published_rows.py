"""Rows of published tables: their stack, memory, measured time and fit."""

import csv
from dataclasses import replace

import pytest

from models.cost import flops_per_token
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.gpus.datasheet import load_gpu
from threefold.plan.calibration import fit
from threefold.plan.calibration.fit import Calibration
from threefold.plan.calibration.runs_table import MeasuredRow, read_row
from threefold.plan.job import Machine, PlannedLayout, job_of
from threefold.plan.memory.peak import GIB, context_gib, fullest_stage
from threefold.plan.report import rates
from threefold.plan.software import load_software
from threefold.plan.time.block import all_reduce_seconds, gather_seconds
from threefold.plan.time.step import data_time, step_time

PUBLISHED = REPOSITORY / "benchmarks" / "planner_accuracy"


def row(**changes: str) -> MeasuredRow:
    """Return Narayanan's first row with other cells."""
    with (PUBLISHED / "narayanan2021.csv").open(newline="") as file:
        found = read_row(next(csv.DictReader(file)) | changes)
    assert found.job is not None, found.skipped
    return found


@pytest.mark.parametrize(
    ("cells", "stack"),
    [
        ({"framework": "Megatron-DeepSpeed", "zero_stage": "1"}, "megatron-deepspeed"),
        ({"framework": "Megatron-DeepSpeed", "zero_stage": "3"}, "deepspeed-zero3-2022"),
        (
            {"framework": "Megatron-DeepSpeed", "arch": "gpt alibi"},
            "megatron-deepspeed-bigscience",
        ),
        ({"framework": "Megatron-Core (0.14)"}, "megatron-core-without-overlap"),
        ({"framework": "Megatron-Core r0.8.0"}, "megatron-core"),
        ({"framework": "NeMo/Megatron-Core (24.12)"}, "nemo"),
    ],
)
def test_the_stack_of_a_row(cells: dict[str, str], stack: str) -> None:
    job = row(**cells).job
    assert job is not None and job.software.name == stack


def test_a_time_is_computed_from_an_mfu() -> None:
    found = row(step_time_s="", mfu_pct="40", gpu_peak_tflops="312")
    job = found.job
    assert job is not None and found.measured.step_seconds is not None
    flops = flops_per_token(job.model) * job.tokens_per_step / job.machine.gpus
    assert flops / found.measured.step_seconds == pytest.approx(0.4 * 312e12)
    assert row(step_time_s="3", mfu_pct="40").measured.step_seconds == 3
    assert row(step_time_s="", mfu_pct="40", usable_for_time="0").measured.step_seconds is None


def test_the_error_is_positive_for_a_prediction_that_is_too_long() -> None:
    found = row(step_time_s="2")
    assert found.job is not None
    gib = found.job.machine.gpu.memory_gib
    prediction = fit.PredictedRow(found, found.job, 3.0, 1.2 * gib, fits=False)
    assert prediction.error == pytest.approx(0.5) and prediction.too_large
    assert not replace(prediction, memory_gib=1.1 * gib).too_large  # within the error


def test_a_board_with_another_memory_has_it() -> None:
    job = row(gpu="H100", gpu_mem_gb="96").job
    assert job is not None and job.machine.gpu.memory_gib == pytest.approx(94.6, abs=0.1)
    again = row(gpu="H100", gpu_mem_gb="96").job
    assert again is not None and again.machine.gpu is job.machine.gpu  # rows can be grouped
    usual = row(gpu="H100", gpu_mem_gb="80").job
    assert usual is not None and usual.machine.gpu is load_gpu("H100")


def test_memory_is_compared_as_it_was_measured() -> None:
    cells = {"mem_gb": "40", "mem_kind": "peak reserved"}
    (reserved,) = fit.predict([row(**cells)], Calibration())
    (whole,) = fit.predict([row(**cells | {"mem_kind": "nvidia-smi"})], Calibration())
    assert reserved.memory_error is not None and whole.memory_error is not None
    difference = 40 * (whole.memory_error - reserved.memory_error)
    assert difference == pytest.approx(context_gib(whole.job))


def test_headroom_decides_the_fit_of_a_row() -> None:
    """A run that worked is a false alarm only if it exceeds the memory by more than the band."""
    found = row()
    assert found.job is not None
    memory = fullest_stage(found.job).total / GIB
    summaries = []
    for share in (0.90, 0.95, 1.16):
        gpu = replace(found.job.machine.gpu, memory_gib=memory / share)
        job = replace(found.job, machine=replace(found.job.machine, gpu=gpu))
        for out_of_memory in (False, True):
            measured = replace(found.measured, out_of_memory=out_of_memory)
            rows = [replace(found, job=job, measured=measured)]
            summaries.append(fit.summary(rows, fit.predict(rows, Calibration())))
    keys = ("without_headroom", "false_alarms", "out_of_memory_flagged")
    assert [tuple(each[key] for key in keys) for each in summaries] == [
        (0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 1),
    ]  # fmt: skip


def test_selective_recomputation_of_fsdp_is_extended_until_it_fits() -> None:
    cells = {"framework": "torchtitan", "recompute": "selective", "zero_stage": "3"}
    sizes = {
        "layers": "80",
        "hidden": "8192",
        "heads": "64",
        "kv_heads": "8",
        "ffn": "28672",
        "seq": "4096",
    }
    large = row(**cells, **sizes, gpus="128", dp="128", tp="1", pp="1", mbs="2", gbs="256")
    assert "selective recomputation keeps 25% (to fit)" in large.assumed
    assert large.job is not None and large.job.footprint.selective == 0.25
    assert large.job.layout.recompute == "selective"


def test_messages_over_many_nodes_cost_latency() -> None:
    """A message passes each rank of a ring; a tree has a logarithmic depth."""
    machine = Machine.of(load_gpu("A100-80GB"), gpus=1024)
    latency = machine.gpu.network_latency_seconds
    one, four = (
        gather_seconds(machine, 1e6, ranks=1024, stride=1, messages=count) for count in (1, 4)
    )
    assert four - one == pytest.approx(3 * 128 * latency)
    assert all_reduce_seconds(machine, 0.0, ranks=1024, stride=1) == pytest.approx(2 * 8 * latency)


def test_zero3_gathers_released_weights_again() -> None:
    """With full recomputation, blocks above the reuse distance are gathered a third time."""
    job = row(framework="Megatron-DeepSpeed").job
    assert job is not None
    layout = PlannedLayout(data=32, zero_stage=3, recompute="full", micro_sequences=1)
    software = replace(load_software("deepspeed-zero3-2022"), shard_overlap=0.0)
    kept, released = (
        step_time(replace(job, layout=layout, software=replace(software, kept_elements=elements)))
        for elements in (1e9, 0.0)
    )
    assert kept.tensor > 0
    assert released.tensor == pytest.approx(kept.tensor * 4 / 3)


def test_a_small_group_of_optimizer_ranks_gathers_within_itself() -> None:
    job = row(framework="InternEvo", zero_stage="1").job
    assert job is not None
    job = replace(job, layout=PlannedLayout(data=1024))
    with_group = replace(job, layout=PlannedLayout(data=1024, dp_shard=8))
    whole, grouped = data_time(job, 0.0), data_time(with_group, 0.0)
    plain = replace(job.software, broadcasts_weights=False)
    assert grouped < whole
    assert data_time(replace(job, software=plain), 0.0) < whole


@pytest.mark.parametrize(
    ("nodes", "sequence", "context", "published", "predicted", "own"),
    [
        (1024, 8192, 1, 43, 44.2, 50.2),
        (2048, 8192, 1, 41, 39.1, 44.9),
        (2048, 131072, 16, 38, 44.2, 36.6),
    ],
)
def test_llama_405b_on_meta_s_cluster_is_predicted_as_documented(
    nodes: int, sequence: int, context: int, published: float, predicted: float, own: float
) -> None:
    """Dubey et al. 2024, table 4. All three have batches of 16 M tokens."""
    settings = {
        "layout.recompute": "none", "layout.schedule": "interleaved", "layout.virtual_stages": 4,
        "layout.context": context, "model.sequence_length": sequence, "cluster.nodes": nodes,
        "batch.global_sequences": 2**24 // sequence,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in settings.items()]
    recipe = load_recipe(REPOSITORY / "recipes" / "llama" / "405b.toml", overrides)
    assert (recipe.layout.tensor, recipe.layout.pipeline) == (8, 16)
    for name, expected in (("megatron-core-without-overlap", predicted), ("threefold", own)):
        job = job_of(recipe, Machine.of_cluster(recipe.cluster), load_software(name))
        mfu = 100 * rates(job, step_time(job).total).mfu
        assert mfu == pytest.approx(expected, abs=0.05)
    assert predicted == pytest.approx(published, abs=6.3)
    row = f"{8 * nodes:,} | {sequence:,} |"
    text = (REPOSITORY / "docs" / "planner.md").read_text()
    cells = f"| {published}% | {predicted}% | {own}% |"
    assert any(row in line and cells in line for line in text.split("\n"))
