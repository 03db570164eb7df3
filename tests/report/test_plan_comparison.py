"""The planner's numbers in a report are those of plan.py."""

from pathlib import Path

import pytest

from models.errors import UserError
from tests.report.synthetic import recipe_of, write_run
from threefold.gpus.datasheet import load_gpu
from threefold.plan.job import Machine, job_of
from threefold.plan.time.step import step_time
from threefold.report.run_record import RunRecord, read_run
from threefold.report.summaries import predict


def record_of(folder: Path, *overrides: str, mfu: float | None, peak: float = 1.0) -> RunRecord:
    recipe = recipe_of('deepspeed="ds_configs/zero1_bf16.json"', *overrides)
    flops = read_run(write_run(folder, recipe=recipe), "run").flops_per_token or 0

    def change(line: dict) -> None:
        rate = flops * line["tokens_per_second"] / 2 / 1e12
        line |= {"tflops_per_gpu": rate, "mfu": mfu and rate / peak}

    return read_run(write_run(folder, recipe=recipe, change=change), "run")


def test_the_prediction_is_that_of_the_planner(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", mfu=1.0, peak=load_gpu("A100-80GB").peak_tflops["bf16"])
    found = predict(record, "H100")
    assert record.recipe is not None
    job = job_of(record.recipe, Machine.of(load_gpu("H100"), gpus=2, gpus_per_node=2))
    assert (found.gpu, found.ranks) == ("H100", 2)
    assert found.step_seconds == step_time(job).total
    assert 0 < found.memory_gb < found.fullest_gib * 1.08 < found.device_gib * 1.08


def test_the_gpu_follows_from_the_recipe_or_the_peak(tmp_path: Path) -> None:
    peak = load_gpu("MI355X").peak_tflops["bf16"]
    assert predict(record_of(tmp_path / "a", mfu=1.0, peak=peak), None).gpu == "MI355X"
    shared = record_of(tmp_path / "b", mfu=1.0, peak=load_gpu("H100").peak_tflops["bf16"])
    with pytest.raises(UserError, match=r"fits .*H100.*H200.*; use --gpu NAME"):
        predict(shared, None)
    cluster = 'cluster={nodes=1,gpus_per_node=2,gpu="H200"}'
    named = record_of(tmp_path / "c", cluster, mfu=1.0, peak=989.0)
    assert predict(named, None).gpu == "H200"


def test_a_run_on_a_cpu_has_no_prediction_unless_one_is_wanted(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run", mfu=None)
    with pytest.raises(UserError, match="on a CPU, or on a device without a datasheet"):
        predict(record, None)
    assert predict(record, "cpu").step_seconds > 0


def test_a_recipe_that_cannot_be_read_has_no_prediction(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "recipe.toml").write_text('name = "x"\n')
    with pytest.raises(UserError, match="the recipe cannot be read"):
        predict(read_run(run, "run"), "cpu")
