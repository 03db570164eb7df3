"""Racks of GPUs, matmuls in 8 and 4 bits, and tables of runs that name their models."""

import csv
import itertools
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from models.cost import parameter_count
from models.errors import UserError
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.gpus.datasheet import gpus_of_name, load_gpu
from threefold.plan.calibration import runs_table
from threefold.plan.calibration.fit import Calibration, predict, summary
from threefold.plan.calibration.published_names import model_of_name, stack_of
from threefold.plan.calibration.runs_table import (
    MAX_MEMORY_EXCESS,
    MeasuredRow,
    read_cells,
    read_row,
    read_table,
)
from threefold.plan.job import Job, Machine, PlannedLayout, job_of, recipe_on_cluster
from threefold.plan.memory.peak import GIB, fullest_stage, memory_of_stage
from threefold.plan.software import FORMATS, Quantization, load_software, quantization_of, stacks
from threefold.plan.time import block
from threefold.plan.time.step import step_time

TABLE = REPOSITORY / "benchmarks" / "planner_accuracy" / "stacks_2026.csv"
FULL_GRAPH = "megatron-bridge-full-graph"


@cache
def rows() -> dict[str, MeasuredRow]:
    return {row.row_id: row for row in read_table(TABLE)}


def cells_of(name: str) -> dict[str, str]:
    return next(cells for cells in read_cells(TABLE) if cells["row_id"] == name)


def job_of_row(name: str) -> Job:
    job = rows()[name].job
    assert job is not None, rows()[name].skipped
    return job


def seconds(job: Job) -> float:
    return step_time(job).total


# A table as its authors print it.


def test_a_table_that_names_its_models_is_read_as_it_is() -> None:
    table = list(rows().values())
    found = summary(table, predict(table, Calibration()))
    exist = [row for row in table if " has layers of Mamba" not in row.skipped]
    exist = [row for row in exist if "chunked attention" not in row.skipped]
    assert len(table) == 171 and len(exist) == 146
    assert found["predicted"] >= 0.9 * len(exist)
    assert found["false_alarms"] == 0
    assert found["mean_absolute_error_percent"] < 7.5
    skipped = Counter(row.skipped for row in table if row.job is None)
    assert skipped["seq is empty; fill it in"] == 5  # each reason says how to complete the row
    assert sum(map(len, found["skipped_rows"].values())) == 171 - found["predicted"]


def test_a_name_has_the_shape_of_the_model() -> None:
    assert round(parameter_count(model_of_name("LLAMA3.1_405B")) / 1e9) == 406
    qwen = model_of_name("Qwen3_235B_a22B (tokendrop)")
    assert qwen.experts is not None and round(parameter_count(qwen) / 1e9) == 235
    assert round(parameter_count(model_of_name("Nemotron4 340B")) / 1e9) == 341
    assert round(parameter_count(model_of_name("Grok1 314B")) / 1e9) == 316
    assert model_of_name("DeepSeekV3").prediction is not None
    assert model_of_name("DeepSeekV3 (w/o MTP)").prediction is None


@pytest.mark.parametrize(
    ("framework", "release", "stage", "stack", "nearest"),
    [
        ("Megatron-Bridge (NeMo 26.08 container)", "26.08", 1, "megatron-bridge", False),
        ("NeMo/Megatron-Core (DGXC 25.05)", "25.05.05", 1, "nemo-2025", False),
        ("torchtitan", "2025-06", 3, "torchtitan-2025", False),
        ("torchtitan FSDP2", "", 3, "torchtitan", False),
        ("Megatron-LM", "", 1, "megatron-core", True),
        ("DeepSpeed ZeRO-3 (2021)", "", 3, "deepspeed-zero3-2022", True),
        ("JAX", "", None, "maxtext", True),
        ("KempnerForge", "", 3, "torchtitan", True),
    ],
)
def test_a_framework_has_the_nearest_stack(
    framework: str, release: str, stage: int | None, stack: str, nearest: bool
) -> None:
    found, is_nearest = stack_of({"framework": framework, "release": release}, stage)
    assert found.name == stack and is_nearest is nearest
    cells = next(iter(read_cells(TABLE))) | {"framework": framework, "release": release}
    notes = " ".join(read_row(cells).assumed)
    assert (f"framework = {found.name} (nearest to {framework})" in notes) is nearest


@pytest.mark.parametrize(
    ("name", "changes", "stack"),
    [
        ("N0001", {}, FULL_GRAPH),
        ("N0001", {"precision": "BF16"}, "megatron-bridge-graphs"),
        ("N0001", {"framework": "Megatron-Bridge", "release": "26.04"}, "megatron-bridge-graphs"),
        ("N0001", {"framework": "Megatron Bridge", "release": "27.01"}, FULL_GRAPH),
        ("N0001", {"framework": "megatron-bridge", "release": ""}, "megatron-bridge-graphs"),
        ("N0001", {"framework": "Megatron-Bridge", "release": "26.08"}, FULL_GRAPH),
        ("N0005", {"model": "gpt_oss-120B"}, FULL_GRAPH),
        ("N0001", {"framework": "NeMo_26.10"}, FULL_GRAPH),
        ("N0001", {"framework": "Megatron-Bridge", "release": "2026-08"}, FULL_GRAPH),
        ("N0053", {}, "megatron-bridge-graphs"),  # Kimi K2
        ("N0046", {}, "megatron-bridge"),  # B300
        ("N0257", {}, "megatron-bridge-token-drop"),
    ],
)
def test_a_stack_can_be_limited_to_some_rows(
    name: str, changes: dict[str, str], stack: str
) -> None:
    cells = cells_of(name) | changes
    job = read_row(cells).job
    assert job is not None and job.software.name == stack


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ep": ""}, "ep is empty; fill it in (1 if each rank has all experts)"),
        ({"model": ""}, "model is empty; fill it in"),
        ({"precision": ""}, "precision is empty; fill it in"),
        (
            {"recompute": "some"},
            "recompute is some; use none, selective or full, or leave it empty",
        ),
        ({"gpu": "H100 NVL"}, "gpu H100 NVL is another board and has no datasheet"),
        ({"gpu": "A100_PCIE"}, "gpu A100_PCIE is another board and has no datasheet"),
        ({"gpu": "H100"}, "precision mxfp8: H100 has no matmuls of this format"),
    ],
)
def test_a_row_is_skipped_with_what_it_lacks(changes: dict[str, str], reason: str) -> None:
    cells = cells_of("N0001") | changes
    assert read_row(cells).skipped == reason


def test_cells_are_read_in_usual_spellings() -> None:
    cells = cells_of("N0001")
    same = {
        "gpu": "GB300 NVL72", "precision": "fp8_mx", "model": "DEEPSEEKV3", "recompute": "n/a"
    }  # fmt: skip
    job = read_row(cells | same).job
    assert job is not None and seconds(job) == seconds(job_of_row("N0001"))
    assert stack_of(cells | {"model": "Qwen3 (token_drop)"}, 1)[0].name.endswith("token-drop")
    without = read_row(
        cells | {"model": "DeepSeekV3 (dropless, no-MTP)", "precision": "bfloat16"}
    ).job
    assert without is not None and without.model.prediction is None
    assert without.precision == "bf16" and without.quantization is None


def test_a_damaged_table_is_rejected(tmp_path: Path) -> None:
    header, first, *rest = TABLE.read_text("utf-8").splitlines()
    damaged = tmp_path / "damaged.csv"
    damaged.write_text("\n".join([header, first.replace(",", ',"', 1), *rest[:3]]), "utf-8")
    with pytest.raises(UserError, match="this is not valid CSV"):
        read_table(damaged)
    damaged.write_text("\n".join([header + ",mbs", first + ",4"]), "utf-8")
    with pytest.raises(UserError, match="two columns are named mbs; rename or delete one"):
        read_table(damaged)
    damaged.write_text("\n".join([header, first + ",,", first + ',"",4']), "utf-8")
    with pytest.raises(UserError, match="line 3 has more cells than there are columns"):
        read_table(damaged)
    damaged.write_text("\n".join([header, first + ",,"]), "utf-8")
    assert len(read_table(damaged)) == 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("step_time", "step_time_s"), ("recomputation", "recompute"),
        ("seq_paralel", "seq_parallel"), ("dataset", ""), ("hfu_pct", ""),
    ],
)  # fmt: skip
def test_a_misspelt_column_is_rejected(tmp_path: Path, name: str, meant: str) -> None:
    """A user may add columns, such as notes, that do not look like a column that is read."""
    columns = read_cells(TABLE)[0]
    value = columns.pop(meant, "none")
    table = tmp_path / "runs.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, name])
        writer.writerow([*columns.values(), value])
    if not meant:
        assert len(read_table(table)) == 1
        return
    with pytest.raises(UserError, match=f"unknown column '{name}'; did you mean {meant}\\?"):
        read_table(table)


def test_every_column_that_is_read_is_known() -> None:
    source = Path(runs_table.__file__).read_text("utf-8")
    read = set(re.findall(r'(?:cell|whole|positive|cells\.get)\(\s*"(\w+)"', source))
    words = {column for stack in stacks() for column in stack.row_words}
    assert len(read) > 40 and read | words <= runs_table.COLUMNS


def test_a_stack_may_usually_overlap_exchanges() -> None:
    note = "ep_overlap = 1 (usual with megatron-bridge-full-graph)"
    row = rows()["N0001"]
    assert job_of_row("N0001").layout.expert_overlap and note in row.assumed
    assert not job_of_row("N0005").layout.expert_overlap  # without a pipeline
    cells = cells_of("N0001")
    stated = read_row(cells | {"ep_overlap": "0"})
    assert stated.job is not None and not stated.job.layout.expert_overlap


def test_a_published_run_did_fit_although_it_seems_slightly_too_large() -> None:
    job = job_of_row("N0081")
    assert job.layout.recompute == "selective"
    memory = fullest_stage(job).total / GIB / job.machine.gpu.memory_gib
    assert 1 < memory <= 1 + MAX_MEMORY_EXCESS


def test_columns_are_read_as_megatron_core_means_them() -> None:
    """`ep` counts tensor ranks; embedding and head are blocks if that divides them equally."""
    assert job_of_row("N0096").layout.expert == 16  # ep = 32, tp = 2
    blocks = job_of_row("N0037").layout.layers_per_stage
    assert blocks == (0, *126 * (1,), 0)
    assert job_of_row("N0033").layout.layers_per_stage == (3, *30 * (4,), 3)
    assert job_of_row("N0033").layout.sequence_parallel
    assert job_of_row("N0287").layout.expert_tensor == 4  # NeMo divides each expert


# Racks.


def test_a_rack_joins_more_gpus_than_a_node() -> None:
    rack = load_gpu("GB200")
    assert Machine.of(rack, gpus=256, gpus_per_node=4).linked_gpus == 64  # equal shares of racks
    assert Machine.of(rack, gpus=144, gpus_per_node=4).linked_gpus == 72
    assert Machine.of(rack, gpus=76, gpus_per_node=4).linked_gpus == 36  # of 9 and of 10 nodes
    assert Machine.of(rack, gpus=8, gpus_per_node=4).linked_gpus == 8
    assert Machine.of(load_gpu("B200"), gpus=256).linked_gpus == 8


def test_exchanges_within_a_rack_do_not_cross_the_network() -> None:
    gpu = load_gpu("GB200")
    machine = Machine.of(gpu, gpus=128, gpus_per_node=4)
    apart = replace(machine, gpu=replace(gpu, linked_gpus=0))
    for collective in (block.all_to_all_seconds, block.gather_seconds):
        inside = collective(machine, 1e9, ranks=32, stride=1)
        assert inside < 0.6 * collective(apart, 1e9, ranks=32, stride=1)
    assert block.transfer_seconds(machine, 1e9, stride=32) < 0.1 * block.transfer_seconds(
        apart, 1e9, stride=32
    )


def test_a_token_crosses_the_network_once_for_each_node() -> None:
    job = job_of_row("N0096")  # 8 of 128 experts, 32 ranks on 4 nodes
    nodes = 4 * (1 - (3 / 4) ** 8)
    assert block._share_of_network(job) == pytest.approx(nodes / 8)
    deepseek = job_of_row("N0266")  # chooses among 4 of 8 groups
    assert block._share_of_network(deepseek) == pytest.approx(4 / 8)
    assert block._share_of_network(job_of_row("N0001")) == 1  # within a rack


def test_a_board_is_chosen_by_its_words() -> None:
    assert [gpu.name for gpu in gpus_of_name("H100 96GB HBM2e 500W")] == ["H100", "H100-96GB"]
    assert [gpu.name for gpu in gpus_of_name("DGX-H100")] == ["H100"]
    assert job_of_row("N0310").machine.gpu.name == "H100-96GB"


# Quantized matmuls.


@pytest.mark.parametrize(
    ("text", "kind", "wide"),
    [
        ("MXFP8", "mxfp8", 0),
        ("FP8-MX", "mxfp8", 0),
        ("FP8-CS (MXFP8)", "fp8-tensor", 0),
        ("FP8", "fp8-tensor", 0),
        ("float8 rowwise", "fp8-row", 0),
        ("fp8 block-wise", "fp8-block", 0),
        ("nvfp4 (last 6 of 36 layers bf16)", "nvfp4", 6),
        ("bf16", None, 0),
    ],
)
def test_a_precision_names_a_format(text: str, kind: str | None, wide: int) -> None:
    found = quantization_of(text)
    expected = Quantization(kind=kind, wide_layers=wide) if kind else None
    assert found == expected


def test_matmuls_in_fewer_bits_are_faster_by_less_than_their_peaks() -> None:
    gpu = load_gpu("GB300")
    sizes = {"rows": 8192, "columns": 8192, "inner": 8192}
    wide = block.matmul_seconds(gpu, "bf16", **sizes)
    eight = block.matmul_seconds(gpu, "bf16", **sizes, operands=FORMATS["mxfp8"])
    four = block.matmul_seconds(gpu, "bf16", **sizes, operands=FORMATS["nvfp4"])
    assert wide / 2.5 < eight < wide / 1.5 and eight / 2.5 < four < eight / 1.2
    short = sizes | {"inner": 256}  # the start and end of a tile do not become faster
    gain = block.matmul_seconds(gpu, "bf16", **short)
    gain /= block.matmul_seconds(gpu, "bf16", **short, operands=FORMATS["mxfp8"])
    assert 1 < gain < 0.8 * wide / eight


def test_casts_and_layers_in_16_bits_count() -> None:
    job = job_of_row("N0033")
    assert job.quantization is not None
    narrow = block.block_job(job)
    wide = replace(narrow, quantization=None)
    without = replace(narrow, software=replace(narrow.software, elementwise=0.0))
    unquantized = replace(without, quantization=None)
    # Casts move bytes in proportion to the element-wise operations.
    casts = block._matmuls(narrow).backward - block._matmuls(without).backward
    assert casts > 0 == block._matmuls(wide).backward - block._matmuls(unquantized).backward
    half = replace(narrow, quantization=replace(job.quantization, wide_layers=63))
    times = [block.block_passes(each).total for each in (narrow, half, wide)]
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)


def test_scales_of_rows_are_slower_in_torchtitan() -> None:
    row, tensor = (seconds(job_of_row(name)) for name in ("N0320", "N0318"))
    assert row > 1.1 * tensor


def test_weights_and_inputs_are_gathered_in_8_bits() -> None:
    job = job_of_row("N0071")
    assert block.weight_bytes(job) == 1
    other = replace(job, software=replace(job.software, gathers_quantized=False))
    assert block.weight_bytes(other) == 2
    assert sum(block._tensor_collectives(job)) < 0.8 * sum(block._tensor_collectives(other))
    blocks = replace(job, quantization=Quantization(kind="mxfp8"))
    assert block._tensor_collectives(blocks) == block._tensor_collectives(other)


def test_inputs_of_quantized_matmuls_are_kept_in_fewer_bits() -> None:
    job = job_of_row("N0033")
    wide = memory_of_stage(replace(job, quantization=None), 0).activations
    kept = [
        memory_of_stage(replace(job, quantization=Quantization(kind=kind)), 0).activations
        for kind in ("mxfp8", "nvfp4")
    ]
    assert kept[1] < kept[0] < wide
    layers = Quantization(kind="nvfp4", wide_layers=63)
    half = memory_of_stage(replace(job, quantization=layers), 0).activations
    assert half == pytest.approx((wide + kept[1]) / 2)


# Experts under ZeRO-3, and recomputation.


def test_zero_3_shards_experts_among_the_ranks_with_the_same_experts() -> None:
    model = load_recipe(REPOSITORY / "recipes" / "qwen3" / "30b-a3b.toml").model
    machine = Machine.of(load_gpu("H100"), gpus=16)
    jobs = {
        expert: Job(
            model=model, machine=machine, global_sequences=64, precision="bf16",
            software=load_software("automodel"),
            layout=PlannedLayout(data=16, expert=expert, zero_stage=3),
        )
        for expert in (1, 8)
    }  # fmt: skip
    whole = parameter_count(model)
    for job in jobs.values():
        stage = memory_of_stage(job, 0)
        assert stage.weights == pytest.approx(2 * whole / 16, rel=0.01)
    exposed = {expert: replace(job.software, shard_overlap=0.0) for expert, job in jobs.items()}
    gathers = [
        step_time(replace(job, software=exposed[expert])).tensor for expert, job in jobs.items()
    ]
    assert gathers[1] < 0.6 * gathers[0]  # each rank gathers an eighth of the experts


def test_a_share_of_the_blocks_is_recomputed_or_offloaded() -> None:
    job = job_of_row("N0279")
    full = replace(job, layout=replace(job.layout, recompute="full"))
    half = replace(full, recomputed_share=0.5)
    shared = [block.block_passes(block.block_job(each)).total for each in (job, half, full)]
    assert shared[1] == pytest.approx((shared[0] + shared[2]) / 2) and shared[0] < shared[2]
    held = [memory_of_stage(each, 0).activations for each in (full, half, job)]
    assert held == sorted(held)
    offloading = replace(job, offloaded_share=0.25)
    assert memory_of_stage(offloading, 0).activations < 0.8 * held[2]
    modules = replace(job, layout=replace(job.layout, recompute="selective"))
    assert held[0] < memory_of_stage(modules, 0).activations < held[2]
    assert seconds(job) < seconds(modules) < seconds(full)


def test_a_local_batch_of_a_pipeline_is_divided() -> None:
    cells = next(c for c in read_cells(TABLE) if c["row_id"] == "N0310")
    found = read_row(cells | {"pp": "8", "tp": "4", "dp": "8", "fsdp": "8", "gbs": "128"}).job
    assert found is not None
    assert found.layout.micro_sequences == 1 and found.micro_batches == 16
    sharded = replace(found.software.footprint["bf16"], keeps_gathered=False)
    software = replace(found.software, footprint={"bf16": sharded})
    assert fullest_stage(found).total > 1.2 * fullest_stage(replace(found, software=software)).total


def test_a_recipe_is_planned_for_a_rack() -> None:
    path, times = REPOSITORY / "recipes" / "llama" / "8b.toml", {}
    for name in ("H100", "GB200", "GB300", "B300", "MI325X", "MI355X"):
        ranks = load_gpu(name).gpus_per_node
        options = {"nodes": 64 // ranks, "gpus_per_node": ranks, "gpu": name}
        recipe, cluster = recipe_on_cluster(path, [], **options)
        times[name] = seconds(job_of(recipe, Machine.of_cluster(cluster)))
    assert times.pop("H100") > max(times.values()) and times["GB300"] < times["GB200"]


@pytest.mark.parametrize("gpu", ["H100", "B200"])
def test_the_own_fp8_gathers_inputs_as_bytes_and_expands_latents_in_16_bits(gpu: str) -> None:
    path, width = REPOSITORY / "recipes" / "deepseek" / "v3.toml", (1 + 4 / 128) / 2
    passes = {}
    for precision, recompute in itertools.product(("weights", "fp8"), ("none", "selective")):
        keys = ["layout.tensor=2", "layout.sequence_parallel=true"]
        keys += [f'training.matmul_precision="{precision}"', f"layout.recompute={recompute}"]
        recipe, cluster = recipe_on_cluster(path, keys, gpu=gpu)
        job = block.block_job(job_of(recipe, Machine.of_cluster(cluster)))
        passes[precision, recompute] = block.block_passes(job)
    wide, narrow = passes["weights", "none"], passes["fp8", "none"]
    for part, ratio in (
        ("forward", (1 + width) / 2), ("backward", (2 + width) / 3), ("weights", width),
    ):  # fmt: skip
        seconds = (getattr(each, part).tensor for each in (narrow, wide))
        assert next(seconds) == pytest.approx(ratio * next(seconds))
    again = [
        passes[precision, "selective"].total - passes[precision, "none"].total
        for precision in ("weights", "fp8")
    ]
    assert again[1] == pytest.approx(again[0]) and again[0] > 0


@pytest.mark.parametrize(("gpu", "kind"), [("H100", "fp8-tiles"), ("B200", "fp8-dequantized")])
def test_the_own_fp8_is_faster_only_where_matmuls_have_its_scales(gpu: str, kind: str) -> None:
    recipes = REPOSITORY / "recipes"
    seconds = {}
    for name in ("llama/7b", "mixtral/8x7b"):
        for precision in ("weights", "fp8"):
            keys = [f'training.matmul_precision="{precision}"', "layout.pipeline=2"]
            recipe = load_recipe(recipes / f"{name}.toml", keys)
            gpus = 8 * recipe.cluster.nodes
            job = job_of(recipe, Machine.of(load_gpu(gpu), gpus=gpus, gpus_per_node=8))
            assert job.matmul_format == (kind if precision == "fp8" else "bf16")
            seconds[name, precision] = step_time(job).total
    dense = seconds["llama/7b", "fp8"] / seconds["llama/7b", "weights"]
    experts = seconds["mixtral/8x7b", "fp8"] / seconds["mixtral/8x7b", "weights"]
    assert 0.6 < dense < 0.9 if kind == "fp8-tiles" else 1 < dense < 1.5
    assert 1 < experts < 1.7  # their experts multiply dequantized matrices
    peak = "fp8" if kind == "fp8-tiles" else "bf16"
    assert job.peak_tflops == load_gpu(gpu).peak_tflops[peak]
