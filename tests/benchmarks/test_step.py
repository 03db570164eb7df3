"""The benchmark of a step: contestants compute the same, ratios are right, files are kept."""

import json
import re
import tomllib
from dataclasses import replace

import pytest
import torch

from benchmarks import step
from benchmarks.device import device_file
from benchmarks.device.fit import BOUNDS, Product, fit_products
from benchmarks.one_step import rows
from benchmarks.one_step.bare_loop import BareLoop
from benchmarks.one_step.contestants import Entry, draw_batch
from benchmarks.one_step.probes import MKL_LINE, ONEDNN_LINE
from benchmarks.one_step.shapes import cpu_shape, step_flops
from benchmarks.one_step.transformers_model import TransformersModel
from benchmarks.taking_turns import Turn, check_first_losses, cores_at_hand, ratio
from models.errors import UserError
from threefold.gpus.datasheet import FOLDER, Gpu, load_gpu, read_gpu
from threefold.plan.time.block import matmul_seconds

TINY = cpu_shape(64, 2, 256, micro_batches=2)
SIZES = ("rows", "columns", "inner")
KEYS = {
    "shape", "precision", "over_transformers_eager", "over_transformers_compiled",
    "memory_over_transformers", "engine_overhead",
}  # fmt: skip


def turns(*seconds: float) -> list[Turn]:
    """Return steps with these durations."""
    return [Turn(10.0, 10.0 + each) for each in seconds]


def test_ratios_are_medians_over_rounds() -> None:
    assert ratio(turns(3, 4, 90), turns(1, 2, 10)) == pytest.approx(3)


def test_other_losses_are_rejected() -> None:
    alike = {"ours": [Turn(0, 1, 5.0)], "theirs": [Turn(0, 1, 5.00001)]}
    check_first_losses(alike, 1e-5)
    with pytest.raises(AssertionError, match="theirs"):
        check_first_losses(alike | {"theirs": [Turn(0, 1, 5.1)]}, 1e-5)


@pytest.mark.exhaustive
def test_a_row_of_two_contestants() -> None:
    """Each contestant runs in its own process, uncompiled because compiling takes too long."""
    eager = {rows.OURS: Entry("ours"), rows.EAGER: Entry("transformers")}
    setting = rows.Setting(rounds=2, warm_up=1, cores=tuple(cores_at_hand()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "entries", lambda *_: eager | {rows.COMPILED: eager["ours"]})
        row = rows.compare(setting, TINY, "fp32", step.matmul(setting.cores, "fp32"))
    assert row.keys() >= KEYS
    assert all(0.01 < row[key] < 100 for key in KEYS if "over_" in key)
    assert row["engine_overhead"] is None
    for each in row["contestants"].values():
        assert each["memory_gb"] > 0
        assert sum(each["gemm"].values()) == pytest.approx(1)
        assert each["mfu_measured"] < each["mfu_measured_full"]
    json.dumps(row)


def test_autocast_keeps_weights_and_gradients_in_fp32() -> None:
    recipe = TINY.recipe("bf16")
    loop = BareLoop(TransformersModel(recipe, autocast=True), recipe, autocast=True)
    seen = set()
    for weight in loop.trained:
        assert weight.dtype == torch.float32
        weight.register_post_accumulate_grad_hook(lambda weight: seen.add(weight.grad.dtype))
    loop.train(draw_batch(recipe, 1, torch.device("cpu")))
    assert seen == {torch.float32}


def test_masked_attention_is_counted_as_half() -> None:
    flops = step_flops(TINY.recipe("fp32").model, TINY.tokens)
    model = TINY.recipe("fp32").model
    scores = 3 * 2 * 2 * model.sequence_length * model.hidden_size * model.layers * TINY.tokens
    assert flops["full"] - flops["causal"] == scores / 2


def test_lines_of_libraries_are_parsed() -> None:
    line = "MKL_VERBOSE SGEMM(N,N,2048,2048,2048,0x7f,0x56,2048) 102.55ms CNR:OFF Dyn:1 FastMM:1"
    assert MKL_LINE.match(line).groups() == ("SGEMM", "102.55", "ms")
    line = (
        "onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,"
        "src:bf16::blocked:ab::f0 wei:bf16::blocked:ab::f0 dst:bf16::blocked:ab::f0,"
        "attr-scratchpad:user,,2048x2048:2048x2048,18.5608"
    )
    assert ONEDNN_LINE.match(line).groups() == ("bf16", "18.5608")


def test_calibration_recovers_the_values_of_a_device() -> None:
    device = load_gpu("H100")
    sizes = ((4096, 4096, 4096), (2048, 8192, 2048), (512, 512, 512), (8192, 1024, 8192))
    products = []
    for size in sizes:
        seconds = matmul_seconds(device, "bf16", **dict(zip(SIZES, size, strict=True)))
        products.append(Product("bf16", *size, seconds))
    start = replace(device, matmul_efficiency=0.5, matmul_depth_cost=300.0)
    found = fit_products(start, products, tuple(BOUNDS))
    for product in products:
        size = {name: getattr(product, name) for name in SIZES}
        assert matmul_seconds(found, "bf16", **size) == pytest.approx(product.seconds, rel=0.03)


@pytest.mark.parametrize("name", ["cpu", "H100", "H200"])
def test_a_file_keeps_values_that_were_not_measured(name: str, tmp_path) -> None:
    before = device_file.file_of(FOLDER, name)
    measured = replace(read_gpu(before), matmul_efficiency=0.123, kernel_seconds=1.5e-6)
    after = tmp_path / before.name
    text = device_file.rewritten(before.read_text(), measured, "a device")
    after.write_text(text)
    assert vars(read_gpu(after)) == vars(measured)
    assert text.splitlines()[0] == before.read_text().splitlines()[0]
    assert len(re.findall("efficiency]", text)) == 1
    assert tomllib.loads(text)["efficiency"]["matmul_efficiency"] == 0.123


def test_another_devices_datasheet_is_not_written_over() -> None:
    def check(name: str, device: str, is_new: bool = False) -> Gpu:
        return device_file.checked(device_file.file_of(FOLDER, name), device, is_new=is_new)

    assert check("cpu", "cpu").name == "cpu"
    assert check("H100", "NVIDIA H100 80GB HBM3").name == "H100"
    assert check("H100", "NVIDIA GH200 480GB", is_new=True).name == "H100"
    for name, device in (("H100", "cpu"), ("cpu", "NVIDIA A100"), ("H100", "NVIDIA A100")):
        with pytest.raises(UserError, match="--like"):
            check(name, device)
    with pytest.raises(UserError, match="not there"):
        check("Z1", "cpu")


def test_help_shows_the_gpu_command() -> None:
    assert "On a GPU" in step.build_parser().format_help()
