"""The profile of a step, and its operations beside the planner's seconds."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from tests.conftest import changed, small_recipe
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import load_gpu
from threefold.plan.software import THREEFOLD
from threefold.plan.time.block import BACKWARD_SLOWER, fused_attention_seconds, matmul_seconds
from threefold.run_folder.folder import RunFolder
from threefold.tracking.profiler import (
    ProfiledOperation,
    StepProfiler,
    operations_of,
    operations_table,
)

H100 = load_gpu("H100")


@pytest.mark.parametrize(
    ("name", "shapes", "batch"),
    [
        ("aten::mm", ((4096, 1024), (1024, 512)), 1),
        ("aten::addmm", ((512,), (4096, 1024), (1024, 512)), 1),
        ("aten::bmm", ((6, 4096, 1024), (6, 1024, 512)), 6),
        ("aten::baddbmm_", ((6, 4096, 512), (6, 4096, 1024), (6, 1024, 512)), 6),
    ],
)
def test_a_matmul_has_the_planners_seconds(name: str, shapes: Any, batch: int) -> None:
    gpu = THREEFOLD.kernels_on(H100)
    expected = matmul_seconds(gpu, "bf16", rows=4096, columns=512, inner=1024, batch=batch)
    operation = ProfiledOperation(name, shapes, calls=1, seconds=1.0)
    assert operation.kind == "matmul"
    assert operation.planned_seconds(H100, "bf16") == expected / THREEFOLD.kernel_efficiency
    assert operation.planned_seconds(H100, "int4") is None


def test_attention_has_the_planners_seconds() -> None:
    b, heads, s, d = 2, 16, 4096, 128
    expected = fused_attention_seconds(H100, "bf16", flops=4 * b * heads * s * s * d / 2)
    expected /= THREEFOLD.kernel_efficiency
    cudnn, expected = (
        expected / THREEFOLD.attention_speed(d, limited=limited) for limited in (False, True)
    )
    outer, inner = (b, heads, s, d), (b, s, heads, d)
    for name, shape in {
        "aten::_scaled_dot_product_flash_attention": outer,
        "aten::_flash_attention_forward": inner,
    }.items():
        operation = ProfiledOperation(name, (shape,) * 3, calls=1, seconds=1.0)
        assert operation.kind == "attention"
        assert operation.planned_seconds(H100, "bf16") == pytest.approx(expected)
    operation = ProfiledOperation("aten::_scaled_dot_product_cudnn_attention", (outer,) * 3, 1, 1.0)
    assert operation.planned_seconds(H100, "bf16") == pytest.approx(cudnn)
    name = "aten::_scaled_dot_product_flash_attention_backward"
    operation = ProfiledOperation(name, (outer,) * 4, calls=1, seconds=1.0)
    backward = expected * 2.5 * BACKWARD_SLOWER
    assert operation.planned_seconds(H100, "bf16") == pytest.approx(backward)
    several_lengths = ProfiledOperation(
        "aten::_flash_attention_forward", ((4096, 16, 128),) * 3, calls=1, seconds=1.0
    )
    assert several_lengths.planned_seconds(H100, "bf16") is None


def test_the_operations_of_a_profile() -> None:
    a, b = torch.rand(96, 64), torch.rand(64, 32)
    q = torch.rand(1, 2, 16, 8)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recording:
        for _ in range(3):
            a @ b
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.cat([a, a])
    found = {operation.name: operation for operation in operations_of(recording, on_gpu=False)}
    matmul = found["aten::mm"]
    assert matmul.calls == 3 and matmul.shapes[:2] == ((96, 64), (64, 32))
    attention = found["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert attention.kind == "attention" and attention.planned_seconds(load_gpu("cpu"), "fp32")
    assert found["aten::cat"].kind == "other"
    wrapper = ProfiledOperation("aten::scaled_dot_product_attention", attention.shapes, 1, 1.0)
    assert wrapper.planned_seconds(load_gpu("cpu"), "fp32") is None  # planned in `attention`
    # The time of an operation does not include operations that it calls.
    outer = sum(e.cpu_time_total for e in recording.key_averages() if e.key == "aten::matmul")
    assert found["aten::matmul"].seconds < outer * 1e-6


def test_the_table() -> None:
    matmul = ProfiledOperation("aten::mm", ((4096, 1024), (1024, 512)), calls=10, seconds=0.0)
    planned = matmul.planned_seconds(H100, "bf16")
    assert planned
    slow = ProfiledOperation(matmul.name, matmul.shapes, calls=10, seconds=20 * planned)
    send = ProfiledOperation("c10d::send", (), calls=2, seconds=60 * planned)
    text = operations_table([slow, send], title="title", gpu=H100, precision="bf16")
    assert text.startswith("title\n")
    assert "matmul" in text and " 25.0%, 2.00 times the planner's" in text
    assert "communication" in text and " 75.0%" in text
    rows = text.splitlines()[-2:]
    assert rows[0].endswith("c10d::send")
    assert " 2.00  aten::mm [4096, 1024] x [1024, 512]" in rows[1]
    text = operations_table([slow, send], title="title", gpu=None, precision="bf16")
    assert "no datasheet" in text and "planner's" not in text
    assert operations_table([], title="title", gpu=H100, precision="bf16")
    many = [ProfiledOperation(f"aten::{n}", (), calls=1, seconds=1.0) for n in range(100)]
    text = operations_table(many, title="title", gpu=H100, precision="bf16")
    assert text.endswith("60.0%  60 others\n")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    return SimpleNamespace(on_gpu=False, device_name="cpu")


def profiler(engine: Any, folder: RunFolder, **tracking: Any) -> StepProfiler:
    table = changed(small_recipe(folder.path), tracking={"profile_step": 2, **tracking})
    recipe = Recipe.model_validate_json(json.dumps(table))
    return StepProfiler(cast(Any, engine), recipe, folder, precision="fp32", show=lambda *_: None)


def test_the_files_of_a_profile(engine: Any, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    chosen = profiler(engine, folder, profile_ranks=[0, 1, 99])
    for step in (1, 2, 3):
        with chosen.recorded(step):
            torch.rand(8, 8 * step) @ torch.rand(8 * step, 8)
        chosen.write_after(step)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    of_step = Path("profile/step-0000002")
    assert files == [of_step / "rank-00001.json.gz", of_step / "rank-00001.txt"]
    trace = json.loads(gzip.decompress((tmp_path / files[0]).read_bytes()))
    assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])
    text = (tmp_path / files[1]).read_text()
    assert "step 2, rank 1" in text and "aten::mm [8, 16] x [16, 8]" in text


def test_a_rank_that_is_not_chosen_records_nothing(engine: Any, tmp_path: Path) -> None:
    other = profiler(engine, RunFolder(tmp_path), profile_ranks=[0])
    with other.recorded(2):
        torch.rand(8, 8) @ torch.rand(8, 8)
    other.write_after(2)
    assert not list(tmp_path.iterdir())


def test_training_continues_without_a_profile(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("a file in the way")
    chosen = profiler(engine, RunFolder(tmp_path), profile_ranks=[1])
    with chosen.recorded(2):
        torch.rand(8, 8) @ torch.rand(8, 8)
    chosen.write_after(2)
    assert "warning: no profile" in capsys.readouterr().err
