"""The planner: formulas, search, tables, calibration and the command."""

import csv
import difflib
import errno
import functools
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from models import cost
from models.config import ModelConfig
from models.cost import parameter_count
from models.errors import UserError
from tests.commands import run_here
from tests.conftest import shipped_recipes
from tests.pipeline.test_order import most_in_flight
from threefold.commands import plan
from threefold.config.loading import (
    REPOSITORY,
    apply_overrides,
    load_recipe,
    parse_recipe,
)
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import FOLDER, gpus, gpus_of_name, load_gpu, read_gpu
from threefold.pipeline.balance import pass_proportions
from threefold.pipeline.gradients import MAX_RUNNING
from threefold.pipeline.schedules import SCHEDULES, Pipeline, min_micro_batches
from threefold.pipeline.simulation import pipeline_seconds
from threefold.plan import recipe_edits
from threefold.plan import search as search_module
from threefold.plan.calibration import fit as fit_module
from threefold.plan.calibration.fit import (
    MAX_ROWS,
    Calibration,
    calibrate,
    fit_table,
)
from threefold.plan.calibration.runs_table import (
    architecture_switches,
    number,
    read_row,
    read_table,
)
from threefold.plan.job import Job, Machine, PlannedLayout, job_of
from threefold.plan.memory.activations import activation_bytes, block_bytes, micro_batches_in_flight
from threefold.plan.memory.peak import (
    GIB,
    MEMORY_BAND,
    fits,
    fullest_stage,
    host_bytes,
    memory_of_stage,
    stage_memory,
    state_bytes,
    state_of_stage,
)
from threefold.plan.memory.working import loss_in_parts_bytes
from threefold.plan.recipe_edits import options_of
from threefold.plan.report import rates
from threefold.plan.search import (
    DEFAULT_HEADROOM,
    MIN_TOKENS_PER_CONTEXT_RANK,
    SearchResult,
    divisors,
    is_near_tie,
    layout_variants,
    search,
    simplicity,
    valid_sizes,
)
from threefold.plan.search import INTERLEAVED_VIRTUAL_STAGES as INTERLEAVED
from threefold.plan.software import (
    DEEPSPEED,
    MEGATRON,
    RUNNING_BUCKETS,
    THREEFOLD,
    load_software,
    stacks,
)
from threefold.plan.stage_contents import stage_parameters, table_parameters
from threefold.plan.time.block import (
    ForwardBackward,
    PassTime,
    all_reduce_seconds,
    block_job,
    block_passes,
    gather_seconds,
    matmul_seconds,
    transfer_seconds,
)
from threefold.plan.time.step import (
    MAX_WHOLE_STAGES,
    simulated_wait,
    step_time,
    timeline_of,
    zero_bubble_v_wait,
)
from threefold.plan.time.update import data_traffic, optimizer_time

PUBLISHED = REPOSITORY / "benchmarks" / "planner_accuracy"
LIMITS = {  # table -> documented limits of the mean and the largest error, in percent
    "narayanan2021": (4, 8),
    "korthikanti2022": (5, 8),
    "megascale2024": (6, 8),
}
RESULTS = ("step_time_s", "tflops_per_gpu", "mfu_pct", "mem_gb", "oom")
CHUNKS = {name: schedule.virtual_stages or 3 for name, schedule in SCHEDULES.items()}
CLUSTERED = [path for path in shipped_recipes() if path.parent.name != "recipes"]


def planned(name: str, *overrides: str) -> tuple[Recipe, Job]:
    """Return a shipped recipe and its job on its own cluster."""
    recipe = load_recipe(REPOSITORY / "recipes" / f"{name}.toml", overrides)
    return recipe, job_of(recipe, Machine.of_cluster(recipe.cluster))


def job_on_v100s(gpus: int) -> Job:
    """Return a job of Llama 13B, which fits on 16 of these GPUs, but not on 8."""
    _, job = planned("llama/13b", "deepspeed=ds_configs/zero1_fp16.json")
    return replace(job, machine=Machine.of(load_gpu("V100-32GB"), gpus=gpus))


def with_layout(job: Job, **sizes: object) -> Job:
    """Return a job in another layout, with the remaining GPUs as data-parallel replicas."""
    layout = replace(job.layout, **sizes)
    data = job.machine.gpus // (layout.tensor * layout.pipeline)
    return replace(job, layout=replace(layout, data=data))


def test_the_gradient_of_the_head_is_summed_in_fp32_if_it_has_many_parts() -> None:
    job = job_on_v100s(16)
    usual = loss_in_parts_bytes(job)
    with mock.patch.object(cost, "MAX_PARTS_IN_16_BITS", 0):
        in_fp32 = loss_in_parts_bytes(job)
    assert in_fp32 - usual == 2 * table_parameters(job.model, job.layout.tensor)


def test_zero_3_gathers_and_reduces_the_embedding_and_the_head() -> None:
    """Without overlap, each table is gathered twice and its gradient reduced; a tied one once."""
    settings = ("layout.tensor=1", "batch.global_sequences=1024")
    _, job = planned("llama/8b", *settings, "deepspeed=ds_configs/zero3_bf16.json")
    job = replace(job, software=replace(job.software, shard_overlap=0.0))
    ranks, table = job.layout.dp_cp_size, table_parameters(job.model, 1)
    sizes = 2, 2, job.software.gradient_bytes
    messages = job.software.messages_per_block
    expected = sum(
        gather_seconds(job.machine, size * table, ranks=ranks, stride=1, messages=messages)
        for size in sizes
    )
    for tied in (False, True):
        other = replace(job, model=replace(job.model, tie_embeddings=tied))
        block = block_passes(block_job(other))
        ends = step_time(other).tensor / other.micro_batches
        ends -= (block.forward.tensor + block.backward.tensor) * job.model.layers
        assert ends == pytest.approx((1 if tied else 2) * expected)


@pytest.mark.parametrize("name", ["llama/8b", "deepseek/v3"])
def test_zero_3_gathers_a_whole_module_despite_its_limit(name: str) -> None:
    """The table of Llama 8B, and the experts of a layer of DeepSeek-V3."""
    model = planned(name)[1].model
    job = with_layout(planned("llama/8b")[1], zero_stage=3, pipeline=1, tensor=1)
    job = replace(job, model=model)
    experts = model.experts
    largest = experts.count * 3 * experts.ffn_hidden_size if experts else model.vocab_size
    largest *= model.hidden_size
    limits = {elements: limited(job, elements) for elements in (0, largest, 2 * largest)}
    buffers = {limit: stage_memory(job)[0].buffers for limit, job in limits.items()}
    assert buffers[0] == buffers[largest] == buffers[2 * largest] - 2 * largest


def limited(job: Job, elements: float) -> Job:
    """Return a job whose JSON sets `stage3_max_live_parameters`."""
    footprint = replace(job.software.footprint["bf16"], gathered_elements=elements, zero1=None)
    return replace(job, software=replace(job.software, footprint={"bf16": footprint}))


@pytest.mark.parametrize("tensor", [1, 2])
def test_buckets_of_zero_3_take_all_their_memory_on_a_gpu_and_the_written_part_on_a_cpu(
    tensor: int,
) -> None:
    recipe = load_recipe(
        REPOSITORY / "recipes" / "tiny.toml",
        [
            "deepspeed=ds_configs/zero3_fp32.json",
            "layout.pipeline=1",
            f"layout.tensor={tensor}",
        ],
    )
    buffers = {
        name: stage_memory(job_of(recipe, Machine.of(load_gpu(name), gpus=4)))[0].buffers
        for name in ("cpu", "H100")
    }
    bucket = 4 * 5e8  # bytes of DeepSpeed's default
    own = 4 * parameter_count(recipe.model) / tensor
    assert buffers["H100"] >= bucket
    assert own <= buffers["cpu"] < 4 * own


@pytest.mark.parametrize("name", LIMITS)
def test_published_steps_are_predicted(name: str) -> None:
    rows = read_table(PUBLISHED / f"{name}.csv")
    summary = fit_module.summary(rows, fit_module.predict(rows, Calibration()))
    mean, largest = LIMITS[name]
    assert summary["compared"] == len(rows) > 3 and summary["skipped"] == 0
    assert summary["mean_absolute_error_percent"] < mean
    assert summary["max_absolute_error_percent"] < largest
    assert summary["false_alarms"] == 0


def test_published_memory_is_predicted() -> None:
    """Figure 1 of Rajbhandari et al. 2020: GB of 7.5 B parameters on 64 ranks by ZeRO stage."""
    for stage, published in enumerate((120.0, 31.41, 16.64, 1.88)):
        layout = PlannedLayout(data=64, zero_stage=stage)
        held = sum(state_bytes(replace(MEGATRON, gradient=2), layout, 7.5e9))
        assert held / 1e9 == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("sizes", "layout", "published"),
    [  # figures 1 and 7 of Korthikanti et al. 2022: GiB of the first stage, with tensor = 8
        ((96, 12288, 96, 8, 3, 1), {}, 66.84),
        ((105, 20480, 128, 35, 3, 1), {"sequence_parallel": True, "recompute": "selective"}, 23.08),
    ],
)
def test_korthikantis_memory_is_predicted(
    sizes: tuple[int, ...], layout: dict, published: float
) -> None:
    layers, hidden, heads, pipeline, virtual_stages, micro_sequences = sizes
    model = ModelConfig(
        layers=layers, hidden_size=hidden, heads=heads, kv_heads=heads, vocab_size=51200,
        ffn_hidden_size=4 * hidden, sequence_length=2048, **architecture_switches("gpt"),
    )  # fmt: skip
    base = PlannedLayout(
        tensor=8, pipeline=pipeline, virtual_stages=virtual_stages, schedule="interleaved",
        zero_stage=0, micro_sequences=micro_sequences, **layout,
    )  # fmt: skip
    blocks = micro_batches_in_flight(base, 0, 64 * pipeline) * layers / pipeline
    held = blocks * activation_bytes(model, base, MEGATRON, fused_attention=False)
    assert held / GIB == pytest.approx(published, rel=0.01)


def test_narayanans_trillion_has_its_published_rate() -> None:
    """Table 1: 163 TFLOP/s on each of 3,072 A100, 502 PFLOP/s in all, recomputation counted."""
    _, job = planned("megatron/1t")
    software = next(stack for stack in stacks() if stack.name == "megatron-lm-2021")
    job = replace(job, software=software)
    rate = rates(job, step_time(job).total)
    assert rate.hardware_tflops == pytest.approx(163, rel=0.04)
    assert rate.hardware_tflops * 3072 / 1000 == pytest.approx(502, rel=0.04)


def test_results_do_not_enter_predictions(tmp_path: Path) -> None:
    with (PUBLISHED / "narayanan2021.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    for cells in lines:
        without = cells | dict.fromkeys(RESULTS, "")
        other = cells | {"step_time_s": "1e6", "mem_gb": "1", "oom": "1", "mfu_pct": "99"}
        jobs = [read_row(each).job for each in (cells, without, other)]
        assert jobs[0] is not None and jobs[0] == jobs[1] == jobs[2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "fp8"}, "precision fp8 is not modelled on A100-80GB"),
        ({"framework": ""}, "framework is empty"),
        ({"gpu": "TPU v4"}, "gpu TPU v4 has no datasheet"),
        ({"layers": ""}, "model GPT-1.7B has no shape"),
        ({"layers": "", "model": ""}, "layers is empty; fill it in"),
        ({"pp": "unstated"}, "pp is unstated"),
        ({"dp": "7"}, "tp x pp x cp x dp = 7 and gpus = 32"),
        ({"heads": "23"}, "heads = 23 does not divide hidden_size = 2304"),
        ({"precision": "int8"}, "precision int8 is not modelled"),
        ({"gpu": "H100 PCIe"}, "gpu H100 PCIe is another board"),
        ({"gpu": "A100-SXM4-64GB"}, "A100-SXM4-64GB with 64 GB has no datasheet"),
        ({"gpus_per_node": "0"}, "gpus_per_node is 0"),
        ({"inter_gbps_per_gpu": "-1"}, "inter_gbps_per_gpu is -1"),
        ({"mbs": "0.5"}, "mbs is 0.5"),
        ({"mbs": "1e400"}, "mbs is 1e400"),
        ({"mbs": "1.2.3"}, "mbs is 1.2.3"),
        ({"gbs": "4"}, "gbs = 4 is less than dp x mbs = 512"),
        ({"zero_stage": "7"}, "zero_stage is 7"),
        ({"seq_parallel": "perhaps"}, "seq_parallel is perhaps"),
        ({"recompute": "block"}, "recompute is block"),
        ({"tp": "32", "dp": "1"}, "heads = 24 over tp = 32 is not modelled"),
        ({"pp": "32", "dp": "1"}, "pp x vpp = 32 is more than layers = 24"),
        ({"pp": "1", "vpp": "5"}, "vpp = 5 needs pp > 1"),
        ({"outcome": "rejected", "reason": "odd"}, "the sweep rejected the trial: odd"),
    ],
)
def test_an_incomplete_row_is_skipped_with_the_reason(changes: dict[str, str], reason: str) -> None:
    with (PUBLISHED / "narayanan2021.csv").open(newline="") as file:
        cells = next(csv.DictReader(file))
    row = read_row(cells | changes)
    assert row.job is None and reason in row.skipped


def test_assumptions_about_a_row_are_reported() -> None:
    with (PUBLISHED / "narayanan2021.csv").open(newline="") as file:
        cells = next(csv.DictReader(file))
    row = read_row(cells | {"vocab": "unstated", "recompute": "", "inter_gbps_per_gpu": ""})
    assert row.job is not None and len(row.assumed) == 3
    assert "recompute = full (the least that fits)" in row.assumed  # 32 layers' scores do not


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("1,024", 1024),
        ("1e3", 1000),
        (" 8 (presumed)", 8),
        ("unstated (51200 presumed)", 51200),
        ("1: zero1=8", 1),
        ("unstated", None),
        ("1,02", None),
        ("12abc", None),
        ("-3", None),
        ("1e400", None),
        ("", None),
    ],
)
def test_numbers_of_cells(cell: str, expected: float | None) -> None:
    assert number(cell) == expected


def test_cells_accept_synonyms(tmp_path: Path) -> None:
    with (PUBLISHED / "korthikanti2022.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    words = {"zero_stage": "ZeRO-0", "recompute": "Full", "precision": "FP16", "gbs": "4.0"}
    assert read_row(lines[0] | words).job == read_row(lines[0]).job
    assert read_row(lines[1] | {"seq_parallel": "true"}).job == read_row(lines[1]).job
    marked = tmp_path / "excel.csv"  # as Excel writes "CSV UTF-8"
    marked.write_text((PUBLISHED / "korthikanti2022.csv").read_text(), encoding="utf-8-sig")
    assert read_table(marked) == read_table(PUBLISHED / "korthikanti2022.csv")


def test_attention_dropout_writes_the_scores() -> None:
    fused, written = (
        step_time(planned("llama/8b", f"model.attention_dropout={p}")[1]) for p in (0.0, 0.1)
    )
    assert written.compute > 1.5 * fused.compute


def test_an_odd_number_of_tokens_is_not_misaligned() -> None:
    even, odd = (
        step_time(planned("llama/7b", f"model.sequence_length={s}")[1]) for s in (2048, 2047)
    )
    assert odd.total < 1.05 * even.total


def test_calibration_finds_the_factors_of_a_cluster() -> None:
    """The rows are predictions for a machine with known factors."""
    truth = Calibration(compute=1.2, network=1.5)
    jobs = [
        with_layout(planned("llama/70b", "layout.recompute=full")[1], **changes)
        for changes in (
            {"tensor": 8, "pipeline": 1},
            {"tensor": 8, "pipeline": 2},
            {"tensor": 4, "pipeline": 4},
            {"tensor": 4, "pipeline": 1, "zero_stage": 3},
            {"tensor": 2, "pipeline": 1, "zero_stage": 3},
            {"tensor": 1, "pipeline": 1, "zero_stage": 3},
        )
    ]
    found = calibrate([(job, step_time(truth.of(job)).total) for job in jobs])
    assert found.compute == pytest.approx(1.2, rel=0.05)
    assert found.network > 1.05  # a factor with little influence is pulled towards 1
    errors = [step_time(found.of(j)).total / step_time(truth.of(j)).total - 1 for j in jobs]
    assert max(map(abs, errors)) < 0.03
    unfitted = [step_time(j).total / step_time(truth.of(j)).total - 1 for j in jobs]
    assert min(map(abs, unfitted)) > 0.1


@pytest.fixture
def fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit the factors to the same rows only once."""
    fit = functools.cache(calibrate)
    monkeypatch.setattr(fit_module, "calibrate", lambda measured: fit(tuple(measured)))


@pytest.mark.long
@pytest.mark.usefixtures("fitted_once")
def test_runs_on_other_gpus_do_not_calibrate_a_plan(tmp_path: Path) -> None:
    table = PUBLISHED / "narayanan2021.csv"
    done = run_plan("recipes/llama/7b.toml", "--gpu", "H100", "--calibrate", str(table))
    assert done.returncode == 2
    assert "its runs are on A100-80GB, and the plan is for H100; use runs on H100" in done.stderr
    lines = table.read_text().splitlines()
    both = tmp_path / "both.csv"
    both.write_text(
        "\n".join([*lines, *(each.replace("A100-SXM4-80GB", "H100") for each in lines[1:3])])
    )
    fit = fit_table(both, "H100")
    assert fit.left_out == len(lines) - 1 and len(fit.rows) == 2
    assert fit_table(both).left_out == 0
    own = ("recipes/llama/7b.toml", "--gpu", "H100", "--top", "0")
    text = run_plan(*own, "--calibrate", str(both)).stdout
    assert f"left out {len(lines) - 1} rows on other GPUs" in text


@pytest.mark.parametrize("time", ["fast", "-5", "nan", "inf", "0"])
def test_a_row_whose_time_cannot_be_read_is_skipped(time: str, tmp_path: Path) -> None:
    header, line, *_ = (PUBLISHED / "narayanan2021.csv").read_text().splitlines()
    column = header.split(",").index("step_time_s")
    cells = line.split(",")
    cells[column] = time
    row = read_row(dict(zip(f"{header},mfu_pct".split(","), [*cells, "40"], strict=True)))
    assert row.job is None and row.skipped == f"step_time_s is {time}"
    table = tmp_path / "table.csv"
    table.write_text(f"{header}\n{','.join(cells)}\n")
    with pytest.raises(UserError, match=f"rows were skipped: step_time_s is {time}"):
        fit_table(table)


@pytest.mark.parametrize("column", ["mfu_pct", "mem_gb", "gpu_peak_tflops", "params_b"])
def test_a_row_whose_measurements_cannot_be_read_is_skipped(column: str) -> None:
    with (PUBLISHED / "narayanan2021.csv").open(encoding="utf-8") as file:
        cells = next(csv.DictReader(file))
    for text in ("much", "41.2%", "80GB", "-5"):
        assert read_row(cells | {column: text}).skipped == f"{column} is {text}"
    for text in ("", "N/A", "unstated", "41.2 (mean)"):
        assert read_row(cells | {column: text}).job is not None


@pytest.mark.long
@pytest.mark.usefixtures("fitted_once")
def test_calibration_of_threefold_may_go_far(tmp_path: Path) -> None:
    """A table that is 20 times slower than planned is fitted, and the plan uses the fit."""
    header = "row_id,framework,arch,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpu,gpus,"
    header += "gpus_per_node,precision,tp,pp,vpp,dp,zero_stage,schedule,mbs,gbs,step_time_s"
    lines, truth = [header], Calibration(compute=20.0, node_links=4.0)
    for index, (tp, pp, dp, mbs) in enumerate(
        [(1, 1, 2, 1), (1, 1, 2, 2), (1, 1, 2, 4), (2, 1, 1, 1), (2, 1, 1, 4), (1, 2, 1, 1),
         (1, 2, 1, 2), (1, 2, 1, 4), (2, 1, 1, 2), (2, 1, 1, 8), (1, 2, 1, 8), (1, 1, 2, 8)]
    ):  # fmt: skip
        cells = (
            f"r{index},Threefold,llama,4,192,6,2,512,2048,256,cpu,2,2,fp32,{tp},{pp},1,{dp},1,1f1b"
        )
        row = read_row(dict(zip(header.split(","), f"{cells},{mbs},32,1".split(","), strict=True)))
        assert row.job is not None, row.skipped
        lines.append(f"{cells},{mbs},32,{step_time(truth.of(row.job)).total}")
    table = tmp_path / "sweep.csv"
    table.write_text("\n".join(lines) + "\n")
    fit = fit_table(table)
    assert fit.used is not None and fit.others is not None
    assert (fit.used.steps, fit.others.steps) == (MAX_ROWS, 12 - MAX_ROWS)
    assert fit.others.before > 0.8 and fit.others.after < 0.1
    own = ("recipes/tiny.toml", "--json", "--top", "0")
    plain, fitted = run_plan(*own), run_plan(*own, "--calibrate", str(table))
    assert json.loads(plain.stdout)["calibration"] is None
    calibration = json.loads(fitted.stdout)["calibration"]
    assert calibration["factors"]["compute"] == pytest.approx(fit.factors.compute)
    times = [json.loads(done.stdout)["own"]["step_seconds"]["total"] for done in (plain, fitted)]
    assert times[1] > 10 * times[0]
    text = run_plan("recipes/tiny.toml", "--top", "0", "--calibrate", str(table)).stdout
    assert "mean error on the other rows (4): " in text and "without calibration" in text


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"schedule": "zb-v", "vpp": "1"}, "schedule zb-v needs vpp = 2, not 1"),
        ({"schedule": "looped-bfs"}, "schedule looped-bfs is not modelled"),
        ({"layers_per_stage": "3 1 0"}, "layers_per_stage is 3 1 0, for 2 stages of 4"),
        ({"layers_per_stage": "3;1"}, "layers_per_stage is 3;1"),
        ({"precision": "fp32", "gpu": "MI300X"}, ""),
    ],
)
def test_columns_of_threefold_are_read(cells: dict[str, str], reason: str) -> None:
    row = {
        "row_id": "a", "framework": "Threefold", "arch": "llama", "layers": "4", "hidden": "192",
        "heads": "6", "kv_heads": "2", "ffn": "512", "vocab": "2048", "seq": "256", "gpu": "cpu",
        "gpus": "2", "gpus_per_node": "2", "precision": "fp32", "tp": "1", "pp": "2", "vpp": "1",
        "dp": "1", "zero_stage": "1", "schedule": "zb-h1", "recompute": "full",
        "recompute_interval": "2", "layers_per_stage": "3 1", "mbs": "2", "gbs": "8",
    }  # fmt: skip
    job = read_row(row).job
    assert job is not None and job.precision == "fp32" and job.software.name == "threefold"
    layout = job.layout
    assert (layout.schedule, layout.layers_per_stage) == ("zb-h1", (3, 1))
    assert (layout.recompute, layout.recompute_interval) == ("full", 2)
    if reason:
        assert read_row(row | cells).skipped == reason


def test_the_search_leaves_headroom_and_puts_simple_near_ties_first() -> None:
    job = planned("gpt/6.7b", "cluster.nodes=1")[1]
    limit = job.machine.gpu.memory_gib * GIB
    full = search(job, 10_000, headroom=0.0)
    found = search(job, 10_000, headroom=0.3)
    assert max(plan.memory.total for plan in full.plans) > 0.9 * limit
    assert max(plan.memory.total for plan in found.plans) <= 0.7 * limit
    assert len(found.plans) < len(full.plans)
    plans = full.plans
    fastest = min(plan.time.total for plan in plans)
    ties = [plan for plan in plans if is_near_tie(plan.time.total, fastest)]
    assert plans[: len(ties)] == ties and len(ties) > 1
    assert simplicity(ties[0].job.layout) == min(simplicity(each.job.layout) for each in ties)
    assert ties[0].time.total > fastest  # otherwise the order by time would be the same


def test_a_plan_warns_of_full_memory_and_of_idle_stages() -> None:
    text = run_plan("recipes/llama/7b.toml", "--top", "0", "--set", "batch.global_sequences=64")
    assert "Warning: 4 micro-batches for 2 stages" in text.stdout
    assert "Use a smaller layout.pipeline, or" in text.stdout  # micro-batches have one sequence
    larger = ["--set", "batch.micro_sequences=2", "--set", "batch.global_sequences=128"]
    text = run_plan("recipes/llama/7b.toml", "--top", "0", *larger)
    assert "Use a smaller batch.micro_sequences or layout.pipeline, or" in text.stdout
    assert "Warning" not in run_plan("recipes/llama/7b.toml", "--top", "0").stdout
    keys = ("layout.tensor=4", "layout.schedule=interleaved", "layout.virtual_stages=8")
    options = [word for key in keys for word in ("--set", key)]
    full = run_plan("recipes/llama/70b.toml", "--top", "0", *options)
    assert "% of the GPU memory is free; leave 8%" in full.stdout
    done = run_plan("recipes/llama/7b.toml", "--headroom", "8")
    assert (
        done.returncode == 2 and "8 is not at least 0 and below 1; for 8 % use 0.08" in done.stderr
    )


def test_the_gain_of_the_first_layout_is_explained() -> None:
    text = run_plan("recipes/llama/13b.toml", "--top", "1", "--nodes", "1").stdout
    line = next(line for line in text.splitlines() if line.startswith("Layout 1 is "))
    gained = float(re.search(r"is ([0-9.]+) s faster", line)[1])
    parts = [float(each) for each in re.findall(r" [-+][0-9]+\.[0-9]+", line.partition(":")[2])]
    assert parts and sum(parts) == pytest.approx(-gained, rel=0.4)


def test_ranking_is_measured_by_pairs_and_by_the_first() -> None:
    rows = read_table(PUBLISHED / "narayanan2021.csv")[:3]
    predictions = []
    for row, predicted, measured in zip(rows, (2.0, 1.0, 3.0), (20.0, 30.0, 60.0), strict=True):
        row = replace(row, measured=replace(row.measured, step_seconds=measured))
        predictions.append(fit_module.PredictedRow(row, row.job, predicted, 1.0, True))
    group = [fit_module.time_of(one) for one in predictions]
    ranking = fit_module.Ranking.of_groups([group])
    assert ranking.tau == pytest.approx((2 - 1) / 3) and ranking.pairs == 3
    assert ranking.mean_regret == ranking.max_regret == pytest.approx(30 / 20 - 1)
    noisy = [
        replace(time, rounds=tuple(time.measured * factor for factor in factors))
        for time, factors in zip(
            group, ((1.0, 1.2, 1.0), (1.0, 0.75, 1.0), (1.0, 1.0, 1.0)), strict=True
        )
    ]  # noise hides the difference of the first two, whose predicted order is wrong
    ranking = fit_module.Ranking.of_groups([noisy])
    assert (ranking.tau, ranking.pairs, ranking.within_noise) == (1.0, 3, 1)
    hidden = [replace(time, rounds=(1.0, 2.0)) for time in group]
    assert fit_module.Ranking.of_groups([hidden]).tau is None


def test_a_difference_in_every_round_is_no_noise() -> None:
    def times(*rounds: float) -> Any:
        return fit_module.RankedTime(1.0, min(rounds), rounds)

    slow, fast = times(2.0, 4.0, 2.1), times(1.9, 3.8, 2.0)  # a disturbance of both in one round
    assert fit_module.told_apart(slow, fast) and fit_module.told_apart(fast, slow)
    assert not fit_module.told_apart(times(2.0, 4.0), times(1.9, 3.9))  # two rounds say little
    assert not fit_module.told_apart(slow, slow) and fit_module.told_apart(times(2.0), times(1.9))
    # The limit of three rounds is 4.303 standard errors.
    assert fit_module.told_apart(times(1.0, 1.0, 1.0), times(1.03, 1.05, 1.06))
    assert not fit_module.told_apart(times(1.0, 1.0, 1.0), times(1.01, 1.02, 1.05))
    assert fit_module.leading([slow, fast, times(2.0, 3.8, 1.9)]) == [1, 2]


def test_every_recipe_fits_the_cluster_that_it_names() -> None:
    for path in CLUSTERED:
        _, job = planned(f"{path.parent.name}/{path.stem}")
        assert fullest_stage(job).total <= job.machine.gpu.memory_gib * GIB, path
        time = step_time(job)
        assert time.total > 0 and all(getattr(time, each) >= 0 for each in ("bubble", "data")), path
        rate = rates(job, time.total)
        assert 0.1 < rate.mfu < 0.75, path


def test_stage_parameters_are_the_models() -> None:
    """Without padding, all stages and tensor ranks together hold each parameter, norms t times."""
    for name in ("gpt/125m", "llama/7b"):
        job = planned(name, "model.vocab_size=32768")[1]
        model = job.model
        whole = held_by_all(job, PlannedLayout())
        assert whole == parameter_count(model)
        tied = model.vocab_size * model.hidden_size if model.tie_embeddings else 0
        interleaved = PlannedLayout(pipeline=4, virtual_stages=3, schedule="interleaved")
        assert held_by_all(job, PlannedLayout(pipeline=4)) == whole + tied
        assert held_by_all(job, interleaved) == whole + tied
        assert (
            held_by_all(job, PlannedLayout(pipeline=4, virtual_stages=2, schedule="zb-v")) == whole
        )
        assert held_by_all(job, PlannedLayout(tensor=2)) * 2 > whole


def held_by_all(job: Job, layout: PlannedLayout) -> int:
    """Return the parameters of one rank of each stage, summed over the stages."""
    return sum(stage_parameters(replace(job, layout=layout)))


def test_a_job_fits_if_the_gpu_has_its_memory() -> None:
    _, job = planned("llama/7b")
    gib = fullest_stage(job).total / GIB
    for memory, expected in ((1.001 * gib, True), (0.999 * gib, False)):
        memory /= 1 + MEMORY_BAND
        gpu = replace(job.machine.gpu, memory_gib=memory)
        assert fits(replace(job, machine=replace(job.machine, gpu=gpu))) is expected


def test_our_stages_are_balanced_and_published_stages_are_unchanged() -> None:
    _, job = planned("llama/70b")
    assert job.blocks_of_virtual_stages == (20, 20, 21, 19)
    _, other = planned("llama/70b", "layout.layers_per_stage=[18, 20, 20, 22]")
    assert other.blocks_of_virtual_stages == (18, 20, 20, 22)
    assert step_time(other).total > step_time(job).total
    theirs = replace(job, software=next(s for s in stacks() if s.name == "megatron-core"))
    assert theirs.blocks_of_virtual_stages == (20, 20, 20, 20)


@pytest.mark.parametrize(
    ("layout", "stage", "micro_batches", "expected"),
    [
        (PlannedLayout(), 0, 8, 1),
        (PlannedLayout(pipeline=4), 0, 8, 4),
        (PlannedLayout(pipeline=4), 3, 8, 1),
        (PlannedLayout(pipeline=4), 0, 2, 2),
        # Korthikanti et al. 2022, section 4.2.3: p (1 + (p - 1) / (p m)) of a stage's layers
        (
            PlannedLayout(pipeline=8, virtual_stages=3, schedule="interleaved"),
            0,
            64,
            8 * (1 + 7 / (8 * 3)),
        ),
        (PlannedLayout(pipeline=4, virtual_stages=2, schedule="dualpipev"), 2, 8, 4.5),
    ],
)
def test_micro_batches_in_flight(
    layout: PlannedLayout, stage: int, micro_batches: int, expected: float
) -> None:
    assert micro_batches_in_flight(layout, stage, micro_batches) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight_match_the_orders(schedule: str) -> None:
    virtual_stages = CHUNKS[schedule]
    for p in (2, 3, 4, 7):
        for m in (1, 2, p, p + 1, 2 * p, 2 * p + 3, 4 * p):
            if m < min_micro_batches(schedule, p):
                continue
            pipeline = Pipeline(
                stages=p, virtual_stages=virtual_stages, micro_batches=m, schedule=schedule
            )
            layout = PlannedLayout(pipeline=p, virtual_stages=virtual_stages, schedule=schedule)
            held = [most_in_flight(order) / virtual_stages for order in pipeline.orders]
            assert [micro_batches_in_flight(layout, i, m) for i in range(p)] == held, (p, m)


@pytest.mark.parametrize("path", CLUSTERED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_formula_of_the_step_is_the_simulation(path: Path) -> None:
    _, job = planned(f"{path.parent.name}/{path.stem}")
    # The simulation does not hide exchanges of tokens behind other passes.
    job = replace(job, layout=replace(job.layout, expert_overlap=False))
    assert bubble_error(job) < 0.02


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["llama/70b", "llama/405b", "gpt/175b", "qwen3/32b", "llama/7b"])
def test_the_formula_of_every_schedule_is_the_simulation(name: str, schedule: str) -> None:
    _, job = planned(name)
    layout = replace(job.layout, schedule=schedule, virtual_stages=CHUNKS[schedule])
    for recompute in ("none", "full"):
        other = replace(job, layout=replace(layout, recompute=recompute))
        assert bubble_error(other) < (0.05 if schedule == "zb-v" else 0.03)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(8, 8), (8, 12), (16, 16), (16, 20)])
def test_a_zb_v_step_of_few_micro_batches_is_the_simulation(
    stages: int, micro_batches: int, recompute: str
) -> None:
    _, job = planned("llama/405b")
    layout = PlannedLayout(pipeline=stages, schedule="zb-v", virtual_stages=2, recompute=recompute)
    job = replace(job, layout=layout, global_sequences=micro_batches)
    proportions = pass_proportions(job.model, recompute)
    forward, backward, weights = proportions
    stage = ForwardBackward(PassTime(forward), PassTime(backward + weights), PassTime(weights))
    exact = simulated_wait(stages, micro_batches, proportions, proportions)
    error = zero_bubble_v_wait(job, stage) - exact
    step = exact + micro_batches * stage.total
    assert abs(error / step) < (0.05 if stages > MAX_WHOLE_STAGES else 1e-6)


def bubble_error(job: Job) -> float:
    """Return the relative error of the formula for a step's passes against the simulation."""
    time = step_time(job)
    passes = time.compute + time.tensor + time.context + time.expert
    formula = passes + time.pipeline + time.bubble
    return abs(formula / pipeline_seconds(timeline_of(job)) - 1)


def test_a_gpt_block_keeps_what_korthikanti_counts() -> None:
    """Their equation 2: s b h (10 + 24 / t + 5 a s / (h t)), and table 2 with sequence parallel."""
    model = ModelConfig(
        layers=1, hidden_size=6144, heads=64, kv_heads=64, ffn_hidden_size=24576,
        vocab_size=51200, sequence_length=2048, norm="layernorm", positions="learned",
        activation="gelu", bias=True, tie_embeddings=True,
    )  # fmt: skip
    row = 2048 * 4 * 6144
    scores = 5 * 64 * 2048 / 6144
    for t, split, expected in (
        (1, False, 34 + scores),
        (8, False, 10 + (24 + scores) / 8),
        (8, True, (34 + scores) / 8),
    ):
        layout = PlannedLayout(tensor=t, sequence_parallel=split, micro_sequences=4)
        assert block_bytes(model, layout, MEGATRON, False) == pytest.approx(
            row * expected, rel=1e-3
        )


def test_each_zero_stage_shards_the_documented_state() -> None:
    """Rajbhandari et al. 2020, section 5: optimizer, then gradients, then weights."""
    held = {
        stage: state_bytes(DEEPSPEED["bf16"], PlannedLayout(data=10, zero_stage=stage), 10**9)
        for stage in (1, 2, 3)
    }
    assert held[1] == (2e9, 4e9, 1.2e9)
    assert held[2] == (2e9, 4e8, 1.2e9)
    assert held[3] == (2e8, 4e8, 1.2e9)


def test_a_ring_moves_its_share_and_uses_all_links_of_a_node() -> None:
    machine = Machine.of(load_gpu("H100"), gpus=64)
    gpu, size = machine.gpu, 1e12  # large enough for latencies to be negligible
    inside = gather_seconds(machine, size, ranks=8, stride=1)
    assert inside == pytest.approx(7 / 8 * size / (450e9 * gpu.node_link_efficiency), rel=1e-3)
    one_link = gather_seconds(machine, size, ranks=8, stride=8)
    assert one_link == pytest.approx(7 / 8 * size / (50e9 * gpu.network_efficiency), rel=1e-3)
    all_links = gather_seconds(machine, size, ranks=64, stride=1)
    links = min(450e9 * gpu.node_link_efficiency, 8 * 50e9 * gpu.network_efficiency)
    assert all_links == pytest.approx(63 / 64 * size / links, rel=1e-3)
    assert all_reduce_seconds(machine, size, ranks=64, stride=1) == pytest.approx(
        2 * all_links, rel=1e-3
    )
    assert gather_seconds(machine, size, ranks=1, stride=1) == 0


def test_a_matmul_with_short_misaligned_rows_is_slow() -> None:
    gpu = load_gpu("A100-80GB")

    def seconds(inner: int) -> float:
        return matmul_seconds(gpu, "bf16", rows=4096, columns=4096, inner=inner, batch=32)

    assert seconds(112) < 1.1 * seconds(104) and seconds(108) > 2 * seconds(112)


def test_more_micro_batches_mean_less_bubble() -> None:
    job = planned("llama/70b")[1]
    shares = []
    for sequences in (512, 2048, 8192):
        time = step_time(replace(job, global_sequences=sequences))
        shares.append(time.bubble / time.total)
    assert shares == sorted(shares, reverse=True) and shares[0] > 2 * shares[2]


def test_a_step_is_the_sum_of_its_parts() -> None:
    time = step_time(planned("llama/405b")[1])
    parts = ("compute", "tensor", "pipeline", "bubble", "data", "optimizer", "waiting")
    assert time.total == pytest.approx(sum(getattr(time, part) for part in parts))
    assert len(time.forward) == len(time.backward) == 16


@pytest.mark.parametrize(
    ("settings", "stride"),
    [
        ({}, 12),  # ranks 0 and 12 are on different nodes, unlike neighboring stages
        ({"data": 1}, 6),
        ({"schedule": "zb-v", "virtual_stages": 2}, None),  # stage 0 holds both ends
    ],
)
def test_the_stages_that_share_an_embedding_sum_its_gradient(
    settings: dict[str, Any], stride: int | None
) -> None:
    layout = replace(PlannedLayout(pipeline=4, tensor=2, data=2), **settings)
    _, job = planned("llama/1b")
    job = replace(job, layout=layout)
    untied = replace(job, model=replace(job.model, tie_embeddings=False))
    expected = 0.0
    if stride:
        table = table_parameters(job.model, layout.tensor)
        expected = transfer_seconds(job.machine, 4 * table, stride=stride)
    seconds = optimizer_time(job) - optimizer_time(untied)
    # With zb-v, the untied model has one more table on stage 0, whose update takes 1 ms.
    assert seconds == pytest.approx(expected, rel=0.1, abs=1e-3)


@functools.cache
def searched(name: str, nodes: int) -> tuple[Recipe, Job, SearchResult]:
    """Return a recipe on some nodes, its job, and the five best layouts."""
    recipe, job = planned(name, f"cluster.nodes={nodes}")
    return recipe, job, search(job, 5)


@pytest.mark.parametrize(("name", "nodes"), [("llama/405b", 16), ("gpt/350m", 1)])  # in fp16 too
def test_the_best_layouts_can_be_run_and_match_the_prediction(name: str, nodes: int) -> None:
    recipe, job, found = searched(name, nodes)
    assert len(found.plans) == 5
    seconds = [plan.time.total for plan in found.plans]
    ties = [is_near_tie(each, min(seconds)) for each in seconds]
    assert ties == sorted(ties, reverse=True) and min(seconds) <= step_time(job).total
    slower = [each for each, tie in zip(seconds, ties, strict=True) if not tie]
    assert slower == sorted(slower)
    for fitting in found.plans:
        assert fitting.memory.total <= job.machine.gpu.memory_gib * GIB * (1 - DEFAULT_HEADROOM)
        table = recipe.model_dump(mode="json", exclude_none=True)
        apply_overrides(table, options_of(recipe, fitting))
        again = job_of(parse_recipe(table, "edited"), job.machine)  # reads the DeepSpeed JSON too
        assert again.layout == fitting.job.layout
        assert step_time(again).total == fitting.time.total


def test_the_options_for_a_layout_select_it() -> None:
    few = "cluster.nodes=1"
    recipe, job = planned("gpt/13b", few)
    best, *others = search(job, 20).plans
    own = job.layout.zero_stage
    another = next(each for each in others if each.job.layout.zero_stage != own)
    for fitting in (best, another):
        options = options_of(recipe, fitting)
        assert options and planned("gpt/13b", few, *options)[1].layout == fitting.job.layout


def all_layouts(job: Job, rejected: Counter[str]) -> list[PlannedLayout]:
    """Return all valid layouts of a job, and count rejected sizes by reason."""
    return [
        layout
        for sizes in valid_sizes(job, rejected)
        for layouts in layout_variants(job, sizes, rejected)
        for layout in layouts
    ]


def test_a_search_finds_every_layout_of_a_recipe() -> None:
    """By brute force over all sizes, on a small machine."""
    small = ("cluster.nodes=1", "cluster.gpus_per_node=4", "batch.global_sequences=4")
    recipe, job = planned("llama/7b", *small)
    machine = job.machine
    rejected: Counter[str] = Counter()
    seen = set(all_layouts(job, rejected))
    table = recipe.model_dump(mode="json", exclude_none=True)
    valid = set()
    ways = [
        (schedule, virtual_stages)
        for schedule, kind in SCHEDULES.items()
        for virtual_stages in ((kind.virtual_stages,) if kind.virtual_stages else INTERLEAVED)
        if schedule != "gpipe"  # as fast as 1F1B, with more memory
    ]
    sizes = product(range(1, 5), range(1, 5), range(1, 5), (1, 2, 4), ways)
    for tensor, pipeline, context, micro_sequences, (schedule, virtual_stages) in sizes:
        short = recipe.model.sequence_length // context < MIN_TOKENS_PER_CONTEXT_RANK
        if context > 1 and (short or gcd(context, micro_sequences) > 1):
            continue  # one with fewer context ranks is as good
        table["layout"] |= {
            "tensor": tensor, "pipeline": pipeline, "context": context, "schedule": schedule,
            "virtual_stages": virtual_stages,
        }  # fmt: skip
        table["batch"]["micro_sequences"] = micro_sequences
        try:
            valid.add(job_of(parse_recipe(table, "valid"), machine).layout)
        except UserError:
            continue
    # The search chooses the way to other context ranks' keys.
    plain = {
        replace(s, context_attention="gather")
        for s in seen
        if s.zero_stage == 1 and s.recompute == "none"
    }
    assert {s.context for s in plain} == {1, 2}
    assert {s for s in plain if not s.sequence_parallel} == valid
    assert {s.recompute for s in seen} == {
        "none",
        "full",
    }  # selective recomputation would save nothing
    latents = "{key_value_rank=512, rotary_size=64, value_size=128}"
    for settings in (
        ["model.attention_dropout=0.1"],
        ["model.kv_heads=32", "model.head_size=128", f"model.latent={latents}"],
    ):
        _, saving = planned("llama/7b", "cluster.nodes=1", *settings)
        assert "selective" in {s.recompute for s in all_layouts(saving, rejected)}


def test_rejected_layouts_are_counted_by_reason() -> None:
    _, _, found = searched("llama/405b", 16)
    assert found.rejected["too large for a GPU"] > 100
    assert found.rejected["tensor groups across nodes"] > 0
    _, job = planned("llama/70b")
    small = replace(job, machine=Machine.of(load_gpu("V100-32GB"), gpus=8), precision="fp16")
    nothing = search(small, 1)
    assert not nothing.plans and nothing.nearest is not None and nothing.nearest[1] > 10


@pytest.mark.parametrize(("gpus", "any_fits"), [(8, False), (16, True)])
def test_skipping_layouts_that_cannot_fit_changes_nothing(
    gpus: int, any_fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_on_v100s(gpus)
    computed = []
    memory_of = search_module.memory_of_stage
    monkeypatch.setattr(
        search_module, "memory_of_stage", lambda *of: computed.append(of) or memory_of(*of)
    )
    found = search(job, 3)
    with_skipping = len(computed)
    assert bool(found.plans) == any_fits
    assert (found.nearest is None) == any_fits
    computed.clear()
    monkeypatch.setattr(search_module, "state_exceeds", lambda job, limit: False)
    assert search(job, 3) == found
    without_skipping = len(computed)
    assert without_skipping > with_skipping
    computed.clear()
    recomputed = search_module.with_full_recomputation
    monkeypatch.setattr(
        search_module,
        "with_full_recomputation",
        lambda job, limit, least: recomputed(job, limit, least=True),  # tries all intervals
    )
    assert search(job, 3) == found
    assert (len(computed) > without_skipping) == any_fits


def end_process(first: int, *, finds_nearest: bool) -> None:
    os._exit(1)


@pytest.mark.parametrize(("gpus", "any_fits"), [(8, False), (16, True)])
def test_several_processes_find_what_one_finds(
    gpus: int, any_fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_on_v100s(gpus)
    found = search(job, 3)
    assert bool(found.plans) == any_fits != bool(found.nearest)
    monkeypatch.setattr(search_module, "SIZES_PER_PART", 4)
    with mock.patch.object(search_module, "memory_of_stage", side_effect=AssertionError):
        with pytest.raises(AssertionError):
            search(job, 3)
        monkeypatch.setattr(search_module, "_start_worker", unpatched_worker)
        assert search(job, 3, processes=2) == found
    monkeypatch.setattr(search_module, "_try_part", end_process)
    assert search(job, 3, processes=2) == found  # the processes were killed


def unpatched_worker(*arguments: Any) -> None:
    """Start a process of a search in which memory can be computed, unlike in its parent."""
    search_module.memory_of_stage = memory_of_stage
    search_module._work = arguments[:3]


def test_layouts_that_fit_into_the_host_only_with_recomputation_are_tried_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_on_v100s(16)
    monkeypatch.setattr(
        search_module,
        "host_bytes",
        lambda job: math.inf if job.layout.recompute == "none" else 0.0,
    )
    plans = search(job, 10**6).plans
    assert len({each.job.layout for each in plans}) == len(plans) > 1
    for each in plans:
        assert each.job.layout.recompute == "full" and each.memory == fullest_stage(each.job)


def test_a_layout_is_skipped_only_if_its_state_is_too_large_with_any_recomputation() -> None:
    """Full recomputation may leave fewer blocks, or more, on the first stage."""
    _, job = planned("qwen3/30b-a3b")
    fewer = PlannedLayout(pipeline=2, schedule="interleaved", virtual_stages=8, context=2, data=2)
    more = PlannedLayout(pipeline=2, schedule="zb-v", virtual_stages=2, data=4)
    for sizes in (fewer, more):
        plain = replace(job, layout=sizes)
        full = replace(job, layout=replace(sizes, recompute="full"))
        state, recomputed = (sum(state_of_stage(each, 0)) for each in (plain, full))
        assert (recomputed < state) == (sizes is fewer)
        assert not search_module.state_exceeds(plain, max(state, recomputed))
        assert not search_module.state_exceeds(plain, min(state, recomputed))
        assert search_module.state_exceeds(plain, 0.999 * min(state, recomputed))


def test_rejected_context_sizes_are_counted() -> None:
    _, job = planned("llama/7b")
    machine = Machine.of(load_gpu("H100"), gpus=8, gpus_per_node=1)
    job = replace(job, machine=machine, global_sequences=3)
    few = "context sizes with fewer than 2,048 tokens per rank"
    uneven = "context sizes that do not divide a sequence into two slices per rank"
    for length, reasons in (
        (2048, {few: 5}),
        (4098, {few: 3, uneven: 2}),
        (12290, {few: 1, uneven: 4}),
    ):
        model = replace(job.model, layers=2, sequence_length=length)
        nothing = search(replace(job, model=model), 1)
        assert not nothing.tried
        expected = {"data ranks that do not divide the global batch": 2, **reasons}
        rest = {"pipelines with more stages than blocks": 2, "tensor groups across nodes": 3}
        assert nothing.rejected == expected | rest


def test_layouts_too_large_for_the_host_are_rejected() -> None:
    """Each process builds its stage with 4 bytes per parameter, but only its shard with ZeRO-3."""
    _, job = planned("llama/70b")
    gpus = job.machine.gpus
    whole = replace(job, layout=PlannedLayout(data=gpus, zero_stage=2))
    assert host_bytes(whole) == pytest.approx(8 * 4 * parameter_count(job.model), rel=0.01)
    sharded = replace(job, layout=PlannedLayout(data=gpus // 2, context=2, zero_stage=3))
    shard = 2 * parameter_count(job.model) / gpus  # bf16
    assert host_bytes(sharded) == pytest.approx(8 * shard, rel=0.01)
    job = replace(job, machine=Machine.of(job.machine.gpu, gpus=16))
    assert search(job, 1).rejected["too large for the host that builds them"] > 0
    roomy = replace(job.machine, gpu=replace(job.machine.gpu, node_memory_gib=10**6))
    assert "too large for the host" not in str(search(replace(job, machine=roomy), 1).rejected)


def test_runs_that_were_out_of_memory_are_counted() -> None:
    with (PUBLISHED / "narayanan2021.csv").open(newline="") as file:
        cells = next(csv.DictReader(file))
    large = {"mbs": "512", "gbs": "16384", "recompute": "none", "step_time_s": ""}
    rows = [read_row(cells | large | {"oom": "1"}), read_row(cells), read_row(cells | large)]
    summary = fit_module.summary(rows, fit_module.predict(rows, Calibration()))
    assert (summary["out_of_memory_rows"], summary["out_of_memory_flagged"]) == (1, 1)
    assert summary["false_alarms"] == 1


def test_divisors_are_complete_and_sorted() -> None:
    for whole in (1, 12, 49, 97, 4096):
        assert divisors(whole) == [n for n in range(1, whole + 1) if whole % n == 0]


def test_hardware_files_are_complete_and_found_by_name() -> None:
    names = {gpu.name for gpu in gpus()}
    assert names >= {"V100-32GB", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "MI300X", "cpu"}
    with pytest.raises(UserError, match='gpu = "A100" is not known; use one of A100-40GB'):
        load_gpu("A100")


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("NVIDIA A100", ["A100-40GB", "A100-80GB"]),
        ("a100-80gb", ["A100-40GB", "A100-80GB"]),
        ("A100-80GB", ["A100-80GB"]),
        ("RTX A1000", []),
        ("GH200", []),
    ],
)
def test_a_name_means_whole_models(name: str, gpus: list[str]) -> None:
    assert [gpu.name for gpu in gpus_of_name(name)] == gpus


def test_a_hardware_file_with_a_wrong_key_is_rejected(tmp_path: Path) -> None:
    text = (FOLDER / "h100.toml").read_text()
    broken = tmp_path / "h100.toml"
    broken.write_text(text.replace("straggling", "stragling"))
    with pytest.raises(UserError, match="missing or unknown: straggling, stragling"):
        read_gpu(broken)


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in this process."""
    return run_here(plan.main, *arguments)


def test_the_command_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; sys.argv = ['plan.py', 'recipes/llama/7b.toml', '--nodes', '1', '--json']\n"
        "from threefold.commands import plan\n"
        "try:\n    plan.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'deepspeed', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == 6_738_415_616 and found["own"]["fits"] and found["best"]


def test_the_command_plans_another_machine_and_writes_a_recipe_for_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    done = run_plan("recipes/llama/7b.toml", "--nodes", "1", "--gpu", "H200", "--write", str(file))
    assert "8 x H200 on 1 node" in done.stdout and file.exists()
    recipe = load_recipe(file)
    about = "# The comments below are those of recipes/llama/7b.toml, whose values may differ.\n"
    assert about in file.read_text("utf-8")
    assert (recipe.cluster.nodes, recipe.cluster.gpu, recipe.name) == (1, "H200", "llama-7b")
    again = json.loads(run_plan(str(file), "--json").stdout)
    assert again["own"]["layout"] == again["best"][0]["layout"]
    rejected = run_plan("recipes/llama/7b.toml", "--write", str(file))
    assert rejected.returncode == 2 and "the file exists; use another name" in rejected.stderr
    with pytest.raises(UserError, match=r"folder .*/none does not exist; create it"):
        recipe_edits.check_file(tmp_path / "none" / "mine.toml")
    with pytest.raises(UserError, match=r"name of a recipe must end in \.toml; use .*/mine\.toml$"):
        recipe_edits.check_file(tmp_path / "mine.txt")
    result = search_module.SearchResult(plans=[mock.Mock()])
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(recipe_edits, "in_layout", return_value=recipe),
        mock.patch.object(recipe_edits, "edited_text", return_value="text"),
        mock.patch.object(Path, "open", side_effect=full),
        pytest.raises(UserError, match=r"No space left on device\); free disk space, or use"),
    ):
        recipe_edits.write_recipe(recipe, result, tmp_path / "full.toml", file)


def test_a_written_recipe_keeps_the_comments_and_the_order_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "commented.toml"
    text = TINY
    for section in ("batch", "training"):
        text = text.replace(f"[{section}]", f"# about the {section}\n[{section}]")
    file.write_text(text, encoding="utf-8")
    lines = file.read_text(encoding="utf-8").splitlines()
    table = load_recipe(file).model_dump(mode="json", exclude_none=True)
    table["cluster"] = {"nodes": 2, "gpus_per_node": 8, "gpu": "H100"}
    table["layout"] |= {"schedule": "zb-h1"}
    table["optimizer"]["average"] = {"decay": 0.9}
    table["training"]["evaluation_batches"] = 1
    table["data"]["train"][0]["weight"] = 2.0
    wanted = parse_recipe(table, "wanted")
    written = recipe_edits.edited_text(file, wanted).splitlines()
    changes = [line for line in difflib.ndiff(lines, written) if line[0] in "+-"]
    assert changes == [
        '+ schedule = "zb-h1"',
        "+ [optimizer.average]",
        "+ decay = 0.9",
        "+ ",
        "- evaluation_batches = 2",
        "+ evaluation_batches = 1",
        '- train = [{ path = "data/stdlib/train", weight = 1.0 }]',
        '+ train = [{ path = "data/stdlib/train", weight = 2.0 }]',
        "+ ",
        "+ [cluster]",
        "+ nodes = 2",
        "+ gpus_per_node = 8",
        '+ gpu = "H100"',
    ]
    assert written.index('schedule = "zb-h1"') < written.index("# about the batch")
    assert written.index("decay = 0.9") < written.index("# about the training")


def test_every_recipe_can_be_written_with_changes() -> None:
    for path in shipped_recipes():
        options = ["name=other", "layout.reduce_every=1", "optimizer.average.decay=0.9"]
        wanted = load_recipe(path, options)
        written = recipe_edits.edited_text(path, wanted)
        assert written and parse_recipe(tomllib.loads(written), str(path)) == wanted
        lost = set(path.read_text("utf-8").splitlines()) - set(written.splitlines())
        assert all(line.startswith("name =") for line in lost), lost


def dotted(text: str) -> str:
    """Write a recipe's sections as dotted keys."""
    lines, prefix = [], ""
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(.+)\]", line):
            prefix = f"{match[1]}."
        elif line and line[0] != "#":
            lines.append(prefix + line)
    return "\n".join([*lines, ""])


TINY, PHASES = (
    (REPOSITORY / "recipes" / name).read_text("utf-8") for name in ("tiny.toml", "tiny-phases.toml")
)
SCALING = '{ type = "linear", factor = 2.0 }'
FORMS = {  # text of a recipe, options, and lines of the copy
    "comment above a subsection": (
        TINY.replace("[optimizer.schedule]", "# schedule\n[optimizer.schedule]"),
        ["optimizer.kind=muon"],
        'gradient_clipping = 1.0\nkind = "muon"\n\n# schedule\n[optimizer.schedule]\n',
    ),
    "comment above a phase": (
        PHASES.replace('[[phase]]\nname = "decay"', '# decay\n[[phase]]\nname = "decay"'),
        ["phase.long.layout.pipeline=1"],
        '\n\n[phase.layout]\npipeline = 1\n\n# decay\n[[phase]]\nname = "decay"\n',
    ),
    "list of sections": (
        TINY.replace('train = [{ path = "data/stdlib/train", weight = 1.0 }]\n', "").replace(
            "[checkpoint]", '[[data.train]]\npath = "a"\n\n# checkpoints\n[checkpoint]'
        ),
        ['data.train=[{path="b"}, {path="c"}]'],
        "\n\n# checkpoints\n[checkpoint]\n",
    ),
    "no phases": (
        PHASES + "\n# supervision\n[supervision]\nhang_seconds = 100\n",
        ["phase=[]"],
        "\n\n# supervision\n[supervision]\n",
    ),
    "dotted keys": (
        dotted(TINY),
        ["optimizer.average.decay=0.9"],
        "optimizer.average = {decay = 0.9}\n",
    ),
    "dotted keys of a phase": (
        PHASES.replace(
            f"model = {{ sequence_length = 512, rope_scaling = {SCALING} }}",
            "model.sequence_length = 512",
        ),
        [f"phase.long.model.rope_scaling={SCALING}"],
        '= 512\nmodel.rope_scaling = {type = "linear", factor = 2.0}\nbatch =',
    ),
    "no end of the last line": (
        TINY.rstrip(),
        ['cluster={nodes=1, gpus_per_node=2, gpu="cpu"}'],
        'tags = ["tiny"]\n\n[cluster]\nnodes = 1\n',
    ),
    "key that the file lacks": (TINY.replace("seed = 1234\n", ""), ["seed=3"], "seed = 3\n"),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_recipe_are_edited(form: str, tmp_path: Path) -> None:
    text, options, lines = FORMS[form]
    file = tmp_path / "form.toml"
    file.write_text(text, encoding="utf-8")
    wanted = load_recipe(file, options)
    written = recipe_edits.edited_text(file, wanted)
    assert written and lines in written
    assert parse_recipe(tomllib.loads(written), "written") == wanted


def test_a_recipe_that_cannot_be_edited_is_written_without_comments(tmp_path: Path) -> None:
    recipe = load_recipe(REPOSITORY / "recipes/tiny.toml", ["seed=3"])
    result, file = search_module.SearchResult(plans=[mock.Mock()]), tmp_path / "new\nline.toml"
    file.write_text(TINY, encoding="utf-8")
    with (
        mock.patch.object(recipe_edits, "in_layout", return_value=recipe),
        mock.patch.object(recipe_edits, "_edit"),  # the text then has another seed
    ):
        recipe_edits.write_recipe(recipe, result, tmp_path / "copy.toml", file)
    copy = (tmp_path / "copy.toml").read_text("utf-8")
    assert copy.startswith("# tiny with layout 1 of plan.py, without the comments of ")
    assert parse_recipe(tomllib.loads(copy), "copy") == recipe
    file.write_bytes(b"\xff")  # during the search
    assert recipe_edits.edited_text(file, recipe) is None
    file.unlink()
    assert recipe_edits.edited_text(file, recipe) is None
    with pytest.raises(UserError, match="File name too long; use another name"):
        recipe_edits.check_file(tmp_path / ("a" * 300))


def test_a_recipe_of_an_older_run_is_edited(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    text = PHASES.replace("[[phase]]", "[[stage]]").replace("[phase.", "[stage.")
    file.write_text(text.replace("[batch]", "# batch\n[batch]"), encoding="utf-8")
    recipe = load_recipe(file, ["seed=3"])
    written = recipe_edits.edited_text(file, recipe)
    assert written and "\n\n# batch\n[batch]\n" in written
    assert parse_recipe(tomllib.loads(written), "written") == recipe


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], "The time excludes validation, which adds up to 67%."),
        (["layout.recompute=full"], "The time excludes validation, which adds up to 50%."),
        (
            ["optimizer.average={decay = 0.9, start_step = 2}"],
            "The time excludes validation, which adds up to 133%.",
        ),
        (
            ["data.separate_documents=true"],
            "per document, at the speed of the kernel for documents (data.separate_documents).",
        ),
        (
            ["data.separate_documents=true", "model.attention_dropout=0.1"],
            "attention over whole sequences, not per document (data.separate_documents).",
        ),
    ],
)
def test_a_plan_states_what_its_time_leaves_out(settings: list[str], line: str) -> None:
    options = ["training.evaluate_every=1", *settings]
    arguments = ["recipes/tiny.toml", "--top=0", "--gpu=H100"]
    done = run_plan(*arguments, *(f"--set={option}" for option in options))
    assert f"{line}\n" in done.stdout, done.stderr


def test_the_exit_code_reports_the_fit() -> None:
    assert run_plan("recipes/llama/7b.toml", "--top", "0").returncode == 0
    large = run_plan("recipes/llama/405b.toml", "--nodes", "8", "--top", "0")
    assert large.returncode == 1 and "The recipe's own layout is not valid" in large.stdout
    full = run_plan(
        "recipes/llama/7b.toml", "--set", "batch.micro_sequences=8", "--top", "0", "--gpu", "H100"
    )
    assert full.returncode == 1 and "DOES NOT FIT" in full.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes/llama/7b.toml", "--gpu", "A100"], 'gpu = "A100" is not known; use one of'),
        (["recipes/llama/7b.toml", "--nodes", "0"], "invalid number 0"),
        (["recipes/llama/7b.toml", "--software", "x"], "invalid --software x: expected one of"),
        (
            ["recipes/llama/8b.toml", "--gpu", "V100-32GB"],
            "bf16, which the GPU V100-32GB",
        ),
        (["nowhere.toml"], "no such recipe"),
        (["table", "nowhere.csv"], "nowhere.csv"),
        (["table", "requirements.txt"], "it is not a table of runs"),
        (["--top", "-1"], "invalid --top -1"),
        (["trace", "--write", "mine.toml"], "unrecognized arguments: --write"),
        (["--json", "trace"], "trace must be the first argument: use plan.py trace --json"),
        (
            ["--trace", "recipes/tiny.toml"],
            "--trace: now a command of its own; use plan.py trace\n",
        ),
        (["a.toml", "--largest", "30"], "use plan.py largest --days DAYS\n"),
        (["--table=a b.csv", "--json"], "use plan.py table FILE\n"),
    ],
)
def test_bad_options_are_rejected(arguments: list[str], message: str) -> None:
    done = run_plan(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_table_is_compared_as_json(tmp_path: Path) -> None:
    table = PUBLISHED / "narayanan2021.csv"
    other = PUBLISHED / "korthikanti2022.csv"
    found = json.loads(run_plan("table", str(table), "--calibrate", str(other), "--json").stdout)
    assert [set(row) >= {"row_id", "predicted_step_seconds"} for row in found["rows"]] == [True] * 6
    assert found["summary"]["skipped"] == 0
    assert set(found["calibration"]["factors"]) >= {"compute", "network"}
    assert len(found["calibration"]["rows"]) == 6


def test_a_folder_of_tables_is_compared(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "runs.csv").write_bytes((PUBLISHED / "narayanan2021.csv").read_bytes())
    found = json.loads(run_plan("table", str(tmp_path), "--json").stdout)
    assert list(found) == ["runs"] and found["runs"]["summary"]["rows"] == 6
    text = run_plan("table", str(tmp_path)).stdout
    assert "| runs | 6 |" in text


def test_later_stages_hold_fewer_activations() -> None:
    memory = stage_memory(planned("llama/70b")[1])
    activations = [stage.activations for stage in memory]
    assert activations == sorted(activations, reverse=True)
    assert all(stage.total > stage.counted > 0 for stage in memory)


def test_the_default_software_is_threefold_and_names_are_unique() -> None:
    names = [stack.name for stack in stacks()]
    assert names[0] == THREEFOLD.name and len(set(names)) == len(names)


@pytest.mark.parametrize(("precision", "sent_bytes"), [("fp32", 4), ("bf16", 2)])
def test_gradients_are_counted_as_the_json_sends_them(
    precision: str, sent_bytes: int, tmp_path: Path
) -> None:
    config = json.loads((REPOSITORY / "ds_configs" / "zero1_bf16.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"communication_data_type": precision}))
    recipe, job = planned("llama/7b", f'deepspeed="{file}"')
    ranks, stride = job.layout.data, job.layout.tensor
    parameters = max(stage_parameters(job))
    reduced, gathered = (
        gather_seconds(job.machine, size * parameters, ranks=ranks, stride=stride)
        for size in (sent_bytes, 2)
    )
    traffic = data_traffic(job)
    assert (traffic.reduced, traffic.gathered) == pytest.approx((reduced, gathered))
    # Other stacks have their own precision.
    for name, expected in (("megatron-lm-2021", 2), ("megatron-lm-2023", 4)):
        other = job_of(recipe, job.machine, load_software(name))
        assert other.software.bytes_of_gradients(2) == expected


def test_the_planner_knows_how_many_buckets_are_sent_at_once() -> None:
    """The planner does not import the engine, because that would import torch."""
    assert RUNNING_BUCKETS == MAX_RUNNING


def test_a_plan_needs_no_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `>&-` in a shell."""
    monkeypatch.setattr(sys, "argv", ["plan.py", "recipes/tiny.toml", "--top", "0"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        plan.main()
    assert ended.value.code == 0


def test_no_layout_of_a_rack_has_tensor_ranks_on_several_nodes() -> None:
    changes = "cluster={nodes=8, gpus_per_node=4, gpu='GB200'}", "layout={tensor=4, pipeline=8}"
    job = planned("llama/70b", *changes)[1]
    rejected = Counter[str]()
    assert {sizes.tensor for sizes in valid_sizes(job, rejected)} == {1, 2, 4}
    assert rejected["tensor groups across nodes"]
