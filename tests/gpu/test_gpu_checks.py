"""`make gpu` on a machine without a GPU: its parts with small sizes, its budgets, its report."""

import contextlib
import itertools
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.one_step.shapes import can_compile, cpu_shape
from models.cost import parameter_count
from models.kernels.attention import causal_attention
from models.parallel import cross_entropy
from tests.conftest import each_in_turn, long_in_turn
from tests.gpu import kernels, nanogpt, training
from tests.gpu.__main__ import main, publish
from tests.gpu.environment import driver
from tests.gpu.invented_parts import (
    crash,
    lack_a_dependency,
    lack_a_module_of_ours,
    lack_a_package,
    raise_an_error,
    sleep_with_a_child,
    succeed,
)
from tests.gpu.packages import NEEDED, how_to_bring, missing
from tests.gpu.part import run as run_here
from tests.gpu.parts import BY_NAME, PARTS, Part
from tests.gpu.report import insert, section
from tests.gpu.runner import Outcome, describe, outcomes_in, run_part, run_parts
from tests.gpu.runs import (
    Failure,
    Run,
    device_environment,
    largest_difference,
    overrides,
    rank_environment,
    start,
)
from tests.gpu.setting import FAILED, PASSED, SKIPPED, Result, Setting
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.data.token_file import TokenFile
from threefold.gpus.datasheet import load_gpu, read_gpu
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.job import Machine, job_of
from threefold.plan.memory.peak import stage_memory

CPU = {"device": "cpu", "gpus": 1, "small": True}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """Return a setting with one rank on the CPU and small sizes; its parts share the corpus."""
    return Setting(output=tmp_path_factory.mktemp("gpu"), **CPU)


def run(name: str, setting: Setting) -> Outcome:
    """Run a part as the command does, with enough time for a busy machine."""
    outcome = run_part(BY_NAME[name], setting, seconds=300)
    assert outcome.status == PASSED, describe(outcome)
    return outcome


# The parts


@pytest.mark.parametrize(
    "name", each_in_turn(["losses", "resume", "export", "environment", "step-2x8"])
)
def test_a_part_passes_on_the_cpu(name: str, setting: Setting) -> None:
    outcome = run(name, setting)
    claims = {"environment": 0, "losses": 2, "resume": 3, "export": 1, "step-2x8": 1}
    assert sum(line.startswith("- yes: ") for line in outcome.lines) == claims[name]
    text = "\n".join(outcome.lines)
    if name == "environment":
        assert "| torch | 2." in text and "| small: 64 x 48 x 32 |" in text
    if name == "step-2x8":
        assert re.search(r"\| step \| \d+\.\d{3} s \| \d+\.\d{3} s \([+-]\d+%\) \|", text)
        assert "| share | ms | calls | kernel |" in text and "| `aten::" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["precisions", "deterministic"])
def test_a_part_of_several_runs_passes_on_the_cpu(name: str, setting: Setting) -> None:
    run(name, setting)


@pytest.mark.exhaustive
def test_layouts_pass_on_several_ranks(tmp_path: Path) -> None:
    outcome = run("layouts-2", Setting(output=tmp_path, **CPU))
    assert "| tensor 2 | " in "\n".join(outcome.lines)


@pytest.mark.exhaustive
def test_kernels_pass_on_two_ranks(tmp_path: Path) -> None:
    outcome = run("kernels", Setting(output=tmp_path, **CPU | {"gpus": 2}))
    rows = [line for line in outcome.lines if line.endswith("| yes |")]
    assert len(rows) == 17 and any(line.startswith("| tied GPT") for line in rows)


@pytest.mark.parametrize(("factor", "failures"), [(1.0, 0), (1.05, 1)])
@pytest.mark.parametrize("name", kernels.COMPARISONS)
def test_a_kernel_with_another_gradient_fails(name: str, factor: float, failures: int) -> None:
    with_gradients, factors = kernels.with_gradients, [factor]

    def changed(function: Callable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        *found, last = with_gradients(function, inputs)
        return [*found, last * (factors.pop() if factors else 1)]  # one side of the comparison

    result = Result()
    result.table(["", "", "", ""], [])
    with mock.patch.object(kernels, "with_gradients", changed):
        find, limit = kernels.COMPARISONS[name]
        kernels.compare_values(result, name, find, torch.device("cpu"), limit=limit)
    assert len(result.failures) == failures


@pytest.mark.parametrize(("first", "is_same"), [(0, True), (1, False)])
def test_sums_without_a_micro_batch_fail(first: int, is_same: bool) -> None:
    """The product of the second micro-batch takes the place of the first one's."""
    add, numbers = kernels.add_product, itertools.count()

    def changed(*tensors: torch.Tensor, replace: bool) -> None:
        add(*tensors, replace=replace or next(numbers) < first)

    with mock.patch.object(kernels, "add_product", changed):
        for find in kernels.SUMS.values():
            numbers = itertools.count()
            error = find(torch.device("cpu"))
            assert (error <= kernels.LIMIT_OF_SUMS["cpu"]) == is_same
            assert error > kernels.LIMIT_OF_SUMS["cuda"], "a CPU rounds the products"


def test_an_embedding_that_rounds_each_sum_fails() -> None:
    with mock.patch.object(kernels, "look_up", torch.nn.functional.embedding):
        assert kernels.repeated_tokens(torch.device("cpu")) > 0.4


def test_attention_across_documents_fails() -> None:
    def joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        return causal_attention(q, k, v)

    with mock.patch.object(kernels, "document_attention", joined):
        assert kernels.documents_at_once(torch.device("cpu")) > kernels.ROUNDED


def test_the_loss_is_compared_in_several_parts() -> None:
    found = []

    def noted(*arguments: Any) -> list[slice]:
        found.append(divide(*arguments))
        return found[-1]

    divide = cross_entropy._chunks
    with mock.patch.object(cross_entropy, "_chunks", noted):
        kernels.loss_in_parts(torch.device("cpu"))
    assert [len(chunks) for chunks in found] == [kernels.PARTS_OF_LOSS]


def test_a_kernel_that_does_not_run_fails_its_row_alone() -> None:
    result = Result()
    result.table(["", "", "", ""], [])

    def broken(device: torch.device) -> float:
        raise RuntimeError("CUDA error: misaligned address")

    kernels.compare_values(result, "loss", broken, torch.device("cpu"))
    assert result.failures == ["loss: RuntimeError('CUDA error: misaligned address')"]


@pytest.mark.parametrize("wrong", ["gpt", "documents-bf16", "tied-stages"])
def test_other_losses_of_kernels_fail(wrong: str, tmp_path: Path) -> None:
    def change(name: str, lines: list[dict]) -> list[dict]:
        return scaled(lines, 1.04) if name == wrong else lines

    with mock.patch.object(kernels, "start", fake_runs(change)):
        result = kernels.kernels(Setting(output=tmp_path, **CPU | {"gpus": 2}))
    assert len(result.failures) == 1


@pytest.mark.exhaustive
def test_compared_with_transformers_on_the_cpu(setting: Setting) -> None:
    outcome = run("transformers", setting)
    assert "times as fast as transformers eager" in "\n".join(outcome.lines)


NO_COMPILER = {"CXX": "/nonexistent/g++", "CC": "/nonexistent/gcc"}


@pytest.mark.exhaustive
def test_compared_with_transformers_without_a_compiler(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, NO_COMPILER):
        outcome = run("transformers", Setting(output=tmp_path, **CPU))
    text = "\n".join(outcome.lines)
    assert "| transformers_eager |" in text and "transformers_compiled" not in text
    assert "Nothing is compiled: `/nonexistent/g++` or Python's headers are missing" in text


@pytest.mark.long
def test_without_a_compiler_nothing_is_compiled() -> None:
    from benchmarks.one_step import contestants, rows, step_report  # transformers

    can_compile.cache_clear()
    setting = rows.Setting(who="all")
    compiled = [
        name for name in rows.entries(setting, cpu_shape(64, 2, 256), "bf16") if "compiled" in name
    ]
    assert len(compiled) == 3 and cpu_shape(64, 2, 256).recipe("fp32").training.compile is True
    try:
        with (
            mock.patch.dict(os.environ, NO_COMPILER),
            mock.patch("torch.compile", side_effect=AssertionError),
        ):
            can_compile.cache_clear()
            entries = rows.entries(setting, cpu_shape(64, 2, 256), "bf16")
            assert set(compiled) & set(entries) == set() and "transformers_eager_bare" in entries
            assert cpu_shape(64, 2, 256).recipe("fp32").training.compile is False
            contestants.warm_libraries()
    finally:
        can_compile.cache_clear()
    memory = {"ours": {"memory_gb": 1.0}, "transformers_eager": {"memory_gb": 2.0}}
    row = rows.row(cpu_shape(64, 2, 256), "fp32", {"transformers_eager": 1.5}, memory)
    assert row["over_transformers_compiled"] is None and row["memory_over_transformers"] == 0.5
    step_report.print_row(row | {"contestants": {}, "matmul_tflops": {}})


def test_the_models_that_are_compared_fit_into_an_h100(tmp_path: Path) -> None:
    from tests.gpu import speed

    recipe = speed.compared_shape(Setting(output=tmp_path, device="cuda", gpus=1)).recipe("bf16")
    job = job_of(recipe, Machine.of(load_gpu("H100"), gpus=1, gpus_per_node=1))
    assert 3 * stage_memory(job)[0].counted < 60 * 2**30  # three contestants


def test_ranks_that_share_a_gpu_claim_different_hosts(tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, device="cuda", gpus=1)
    ranks = [rank_environment(setting, rank, 4, 29500, share_gpu=True) for rank in range(4)]
    assert [each["LOCAL_RANK"] for each in ranks] == ["0"] * 4
    assert [each["RANK"] for each in ranks] == ["0", "1", "2", "3"]
    assert len({each["NCCL_HOSTID"] for each in ranks}) == 4
    assert {each["NCCL_NET"] for each in ranks} == {"Socket"}
    alone = rank_environment(setting, 1, 2, 29500)
    assert alone["LOCAL_RANK"] == "1" and "NCCL_HOSTID" not in alone


def test_layouts_are_skipped_if_nccl_accepts_one_rank_per_gpu(tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, device="cuda", gpus=1)
    refusal = "ncclInvalidUsage: Duplicate GPU detected"
    with mock.patch.object(training, "refused_by_nccl", return_value=refusal):
        result = training.layouts(setting, "2")
    assert result.status == SKIPPED and refusal in result.skipped


def test_the_error_of_nccl_is_reported_within_its_time(tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, **CPU)
    for code, refusal in (
        ("raise RuntimeError('Duplicate GPU detected')", "RuntimeError: Duplicate GPU detected"),
        ("import time; time.sleep(60)", "no answer within 0.3 seconds"),
        ("pass", ""),
    ):
        seconds = 0.3 if "sleep" in code else 30
        with (
            mock.patch.object(training, "NCCL_PROBE", code),
            mock.patch.object(training, "PROBE_SECONDS", seconds),
        ):
            assert training.refused_by_nccl(setting) == refusal


def test_the_planners_file_is_written_into_the_output(setting: Setting) -> None:
    from benchmarks.device import device_file
    from tests.gpu import speed

    calibrated: dict[str, Any] = {"products": 3, "mean_error": 0.02, "steps": []}
    found: list[Sequence[Any]] = []

    def calibrate(
        name: str, like: str | None, _: object, folder: Path, **settings: Any
    ) -> dict[str, Any]:
        found.append((name, like))
        return calibrated | {"file": str(device_file.file_of(folder, like or name))}

    names = ("NVIDIA H200", "NVIDIA RTX PRO 6000")
    with mock.patch.object(device_file, "calibrate", calibrate):
        for name in names:
            with mock.patch.object(speed, "device_name", return_value=name):
                result = speed.device_file(setting)
            (file,) = (setting.output / "gpus").glob("*.toml")  # of all only the measured one
            assert read_gpu(file).name == ("H200" if name == "NVIDIA H200" else "H100")
    assert found == [("H200", None), ("RTX-PRO-6000", "H100")]
    assert "replace the datasheet's numbers" in result.lines[-2]


# Checks fail


def fake_runs(change: Callable[[str, list[dict]], list[dict]]) -> Callable[..., Run]:
    """Return a replacement for `start`, whose runs have invented metrics, changed by `change`."""

    def fake(setting: Setting, name: str, settings: Sequence[str], **_: Any) -> Run:
        lines = [
            {"step": step, "loss": 5.0 - 0.05 * step, "grad_norm": 1.0} for step in range(1, 13)
        ]
        log = setting.output / f"{name}.txt"
        log.write_text("small: 0.1 M parameters, resumed after step 8, into x\n")
        made = mock.Mock(spec=Run, logs=[log])
        made.finish.return_value = change(name, lines)
        made.kill_after.return_value = 9
        return made

    return fake


def scaled(lines: list[dict], factor: float) -> list[dict]:
    return [line | {"loss": line["loss"] * factor} for line in lines]


@pytest.mark.parametrize(
    ("part", "wrong", "factor", "failures"),
    [
        (training.fp32_losses, "fp32", 1.0, 0),
        (training.fp32_losses, "fp32", 1 + 2e-4, 1),
        (training.precisions, "precision-zero1_bf16", 1.01, 0),
        (training.precisions, "precision-zero1_bf16", 1.04, 1),
        (training.precisions, "precision-zero3_fp32", 1 + 2e-4, 1),
        (training.deterministic, "deterministic-bf16-2", 1.0, 0),
        (training.deterministic, "deterministic-bf16-2", 1 + 1e-9, 1),
        (training.resume, "killed", 1.0, 0),
        (training.resume, "killed", 1 + 2e-4, 1),
        (partial(training.layouts, ranks="2"), "tensor-2", 1 + 2e-5, 1),
        (partial(training.layouts, ranks="2"), "experts-on-2", 1 + 2e-5, 1),
        (partial(training.layouts, ranks="2"), "pipeline-2-zb-v", 1 + 5e-6, 0),
    ],
)
def test_different_losses_fail(
    part: Callable[[Setting], Result], wrong: str, factor: float, failures: int, tmp_path: Path
) -> None:
    def change(name: str, lines: list[dict]) -> list[dict]:
        return scaled(lines, factor) if name == wrong else lines

    with mock.patch.object(training, "start", fake_runs(change)):
        result = part(Setting(output=tmp_path, **CPU | {"gpus": 2}))
    assert len(result.failures) == failures, result.failures
    assert result.status == (FAILED if failures else PASSED)


def test_steps_that_are_missing_or_a_run_that_starts_afresh_fail(tmp_path: Path) -> None:
    def lose(name: str, lines: list[dict]) -> list[dict]:
        return [{**line, "step": line["step"] + 1} for line in lines] if name == "killed" else lines

    with (
        mock.patch.object(training, "start", fake_runs(lose)),
        mock.patch.object(training, "_resumed_steps", return_value=[]),
    ):
        result = training.resume(Setting(output=tmp_path, **CPU))
    assert len(result.failures) == 2


class Broken(Run):
    """A run that fails."""

    def finish(self, seconds: float | None = None) -> list[dict]:
        raise Failure(f"{self.name}: rank 0 ended with exit code 7")


@pytest.mark.parametrize(
    ("part", "broken"),
    [
        (training.precisions, "precision-zero1_bf16"),
        (partial(training.layouts, ranks="2"), "pipeline-2-1f1b"),
    ],
)
def test_a_variant_that_fails_leaves_the_others_alone(
    part: Callable[[Setting], Result], broken: str, tmp_path: Path
) -> None:
    works = fake_runs(lambda name, lines: lines)

    def fake(setting: Setting, name: str, settings: Sequence[str], **_: Any) -> Run:
        return Broken(name, tmp_path, [], []) if name == broken else works(setting, name, settings)

    saved = []
    setting = Setting(output=tmp_path, **CPU | {"gpus": 2})
    with (
        mock.patch.object(training, "start", fake),
        mock.patch.object(Setting, "save", lambda _, result: saved.append(len(result.lines))),
    ):
        result = part(setting)
    assert result.status == FAILED and len(result.failures) == 1
    assert f"{broken}: rank 0 ended with exit code 7" in result.failures[0]
    *_, last, end = result.lines
    rows = [line for line in result.lines if line.startswith("|")][2:]
    assert rows[0].endswith("| failed |  |  |  | **NO** |")
    assert all(row.endswith("| yes |") for row in rows[1:]) and last == rows[-1] and not end
    assert saved == list(range(saved[0], len(result.lines) + 1))  # after each row


def test_a_run_that_hangs_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 3\n")
    commands = ["import time; time.sleep(120)", "import time; time.sleep(120)"]
    processes = [subprocess.Popen([sys.executable, "-c", text]) for text in commands]
    with pytest.raises(Failure, match=r"stuck: killed after 0\.5 seconds:\nstep 3\n\nstep 3"):
        Run("stuck", tmp_path, processes, [log, log]).finish(0.5)
    assert [process.poll() for process in processes] == [-9, -9]


def test_the_log_of_the_rank_that_failed_first_is_shown(tmp_path: Path) -> None:
    logs = [tmp_path / "0", tmp_path / "1"]
    codes = ["import time; time.sleep(120)", "raise SystemExit(7)"]  # rank 0 waits for rank 1
    for rank, log in enumerate(logs):
        log.write_text(f"the end of rank {rank}\n")
    processes = [subprocess.Popen([sys.executable, "-c", text]) for text in codes]
    with (
        mock.patch("tests.gpu.runs.SECONDS_FOR_OTHER_RANKS", 0.1),
        pytest.raises(Failure, match=r"rank 1 ended with exit code 7:\nthe end of rank 1\n$"),
    ):
        Run("broken", tmp_path, processes, logs).finish()
    assert processes[0].poll() == -9


LAUNCHED = {  # the environment of a rank of another job
    "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node7", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "5",
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3", "SLURM_JOB_ID": "17",
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_do_not_wait_for_the_ranks_of_a_job_around_them(device: str) -> None:
    with mock.patch.dict(os.environ, LAUNCHED):
        environment = device_environment(device)
    assert LaunchEnvironment.from_environment(environment) == LaunchEnvironment()
    assert not environment.keys() & LAUNCHED.keys() and "PATH" in environment


def test_runs_end_soon_after_a_hang(setting: Setting) -> None:
    recipe = load_recipe(REPOSITORY / "recipes" / "tiny.toml", overrides(setting))
    assert 0 < recipe.supervision.hang_seconds < training.VARIANT_SECONDS


def test_a_loss_that_is_not_a_number_differs() -> None:
    assert not largest_difference([1.0, float("nan"), 1.0], [1.0, 1.0, 1.0]) <= 1e9


def test_a_run_that_fails_shows_its_log(setting: Setting) -> None:
    settings = overrides(setting, training__steps=-1)
    with pytest.raises(Failure, match=r"exit code 2:(?s:.*)training\.steps = -1"):
        start(setting, "rejected", settings).finish()


def test_the_full_sizes_are_a_legal_recipe(tmp_path: Path) -> None:
    full = Setting(output=tmp_path, **CPU | {"small": False, "device": "cuda"})
    file = REPOSITORY / "recipes" / "tiny.toml"
    recipe = load_recipe(file, overrides(full, training__deterministic=True))
    assert recipe.model.vocab_size == 2048 and recipe.training.deterministic
    assert recipe.layout.pipeline == 1


@pytest.mark.parametrize("small", [True, False])
def test_every_layout_is_valid(small: bool, tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, **CPU | {"small": small})
    schedules, contexts = set(), set()
    for ranks in (2, 4):
        for changes in training.layout_variants(ranks).values():
            settings = overrides(setting, **training.LAYOUT_SIZES | changes)
            recipe = load_recipe(REPOSITORY / "recipes" / "tiny.toml", settings)
            dims = recipe.parallel_dims(LaunchEnvironment(size=ranks, local_size=ranks))
            build_deepspeed_config(recipe, dims)
            schedules.add(recipe.layout.schedule)
            contexts.add((recipe.layout.context, recipe.layout.context_attention))
        assert set(training.SMALL_LAYOUTS[ranks]) <= training.layout_variants(ranks).keys()
    assert schedules == set(SCHEDULES)
    assert {(2, "gather"), (2, "ring"), (2, "ulysses")} <= contexts


@pytest.mark.parametrize("small", [True, False])
def test_the_recipe_of_nanogpt_is_valid(small: bool, tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, **CPU | {"small": small})
    settings = nanogpt.settings_of(setting, nanogpt.write_characters(tmp_path / "text"))
    changes = [f"{key}={value}" for key, value in settings.items()]
    recipe = load_recipe(REPOSITORY / nanogpt.RECIPE, changes)
    assert recipe.model.vocab_size == 65 and recipe.model.tie_embeddings
    train, validation = (TokenFile(tmp_path / "text" / name) for name in ("train", "validation"))
    assert (train.count, validation.count) == (1_003_854, 111_540)  # as nanoGPT's prepare.py
    if not small:
        windows = (validation.count - 1) // recipe.model.sequence_length
        assert windows <= recipe.training.evaluation_batches * recipe.batch.global_sequences
        assert parameter_count(recipe.model) == pytest.approx(10.65e6 + 256 * 384, rel=0.02)


# Budgets and errors


@pytest.mark.parametrize(
    ("function", "status", "says"),
    [
        (lack_a_package, SKIPPED, "the package transformers is not installed"),
        (lack_a_dependency, SKIPPED, "transformers cannot be imported: No module named 'hugging"),
        (lack_a_module_of_ours, FAILED, "No module named 'models.no_such_module'"),
    ],
)
def test_only_what_an_optional_package_lacks_skips_a_part(
    function: Callable[[Setting], Result], status: str, says: str, setting: Setting
) -> None:
    result = run_here(f"{function.__module__}:{function.__name__}", setting)
    assert result.status == status
    assert says in "".join([result.skipped, *result.failures])


def part(function: Callable[[Setting], Result], seconds: float = 60) -> Part:
    name = function.__name__
    return Part(name, name.replace("_", " "), f"{function.__module__}:{name}", seconds)


def test_a_failed_part_does_not_stop_the_next_one(tmp_path: Path) -> None:
    parts = [part(raise_an_error), part(crash), part(lack_a_package), part(succeed)]
    told: list[str] = []
    setting = Setting(output=tmp_path, **CPU)
    outcomes = list(run_parts(parts, setting, minutes=10, tell=told.append))
    assert [each.status for each in outcomes] == [FAILED, FAILED, SKIPPED, PASSED]
    broken, crashed, lacking, _ = outcomes
    assert broken.failures == ["RuntimeError: no kernel image"]
    assert "its process ended with 11" in crashed.failures[0]
    assert lacking.skipped == "the package transformers is not installed"
    text = "\n".join(told)
    assert "Traceback" in text and "- yes: it works" in text and "succeed: succeed" in text


def test_an_error_keeps_the_results_before_it_and_a_crash_those_of_earlier_invocations(
    tmp_path: Path,
) -> None:
    setting = Setting(output=tmp_path, part="step-4x4", about=(("device", "H100"),), **CPU)
    result = run_here("tests.gpu.invented_parts:save_and_raise", setting)
    assert result.lines == ["MFU 52 %", ""]
    assert result.failures == ["RuntimeError: CUDA out of memory"]
    setting.save(result, result.status)
    crashing = replace(part(crash), name="step-4x4")
    outcome = run_part(crashing, setting, seconds=60)
    assert outcome.status == FAILED and outcome.failures == ["its process ended with 11"]
    (kept,) = outcomes_in(setting, PARTS)
    assert kept.lines == ["MFU 52 %", ""] and kept.failures == result.failures


def test_a_part_that_the_commands_time_ends_has_not_failed(tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, **CPU)
    outcome = run_part(part(sleep_with_a_child), setting, seconds=0.3)
    assert outcome.status == "unfinished" and "time limit" in outcome.failures[0]


@pytest.mark.long
def test_a_part_ends_with_its_time_and_its_children(tmp_path: Path) -> None:
    parts = [part(sleep_with_a_child, 5), part(succeed)]
    setting = Setting(output=tmp_path, **CPU)
    slow, after = run_parts(parts, setting, minutes=10, tell=lambda text: None)
    assert (slow.status, after.status) == (FAILED, PASSED)
    assert slow.failures == ["killed after 5 seconds, its time limit"]
    assert slow.lines == ["- yes: it began"]
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_parts_are_skipped_when_the_time_of_all_is_over(tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, **CPU)
    (outcome,) = run_parts([part(succeed)], setting, minutes=0.1, tell=lambda text: None)
    assert outcome.status == SKIPPED and "--missing" in outcome.skipped


def test_parts_that_measure_no_speed_run_side_by_side(tmp_path: Path) -> None:
    running, most = [], dict[str, int]()

    def run_part(each: Part, setting: Setting, *, seconds: float) -> Outcome:
        running.append(each.name)
        time.sleep(0.05)
        most[each.name] = len(running)
        running.remove(each.name)
        return Outcome(each, PASSED)

    parts = [replace(each, side_by_side=number < 3) for number, each in enumerate(PARTS[:6])]
    setting = Setting(output=tmp_path, **CPU)
    for cores, together in ((16, 3), (10, 2), (2, 1)):
        with (
            mock.patch("tests.gpu.runner.run_part", run_part),
            mock.patch("tests.gpu.runner.cores", return_value=cores),
        ):
            outcomes = list(run_parts(parts, setting, minutes=6, tell=lambda text: None))
        assert [outcome.part for outcome in outcomes] == parts
        assert max(most[each.name] for each in parts[:3]) == together
        assert all(most[each.name] == 1 for each in parts[3:])


def test_correctness_runs_before_speed() -> None:
    assert list(BY_NAME)[:4] == ["losses", "kernels", "precisions", "resume"]
    usual = [each for each in PARTS if each.usual]
    assert usual == list(PARTS[: len(usual)])


def fake_part(killed: str = "") -> Callable[..., Outcome]:
    """Return a replacement for `run_part` with invented results; it is killed in one part."""

    def run_part(each: Part, setting: Setting, *, seconds: float) -> Outcome:
        setting = replace(setting, part=each.name)
        result = Result()
        result.table(["number", "value"], [[str(number), each.name] for number in range(3)])
        setting.save(result)
        if each.name == killed:
            raise KeyboardInterrupt
        result.check(True, f"{each.name} is complete")
        setting.save(result, PASSED)
        return Outcome(each, PASSED)

    return run_part


def report_of(folder: Path, *options: str, killed: str = "") -> str:
    """Return the report of an invocation without durations; with `killed`, of what it has left."""
    arguments = ["--device", "cpu", "--small", "--output", str(folder)]
    with (
        mock.patch("tests.gpu.runner.run_part", fake_part(killed)),
        mock.patch("tests.gpu.runner.cores", return_value=1),
        mock.patch.dict("os.environ"),
    ):
        if killed:
            with pytest.raises(KeyboardInterrupt):
                main([*arguments, *options])
            assert main([*arguments, "--report"]) == 0
        else:
            assert main([*arguments, *options]) == 0
    return re.sub(r"\b\d+ s\b|[\d.]+ minutes", "", (folder / "report.md").read_text())


def test_two_invocations_have_the_report_of_one(tmp_path: Path) -> None:
    whole = report_of(tmp_path / "whole", "--all")
    assert "Not run" not in whole and "interrupted" not in whole
    for part_killed in PARTS[:: len(PARTS) // 2]:
        folder = tmp_path / part_killed.name
        interrupted = report_of(folder, "--all", killed=part_killed.name)
        assert f"{part_killed.name} unfinished" in interrupted
        assert interrupted.count("**interrupted**") == 1
        assert f"| 2 | {part_killed.name} |" in interrupted  # known before the part was killed
        assert f"{part_killed.name} is complete" not in interrupted
        after = [each.name for each in PARTS[PARTS.index(part_killed) + 1 :]]
        assert (f"Not run: {', '.join(after)}." in interrupted) == bool(after)
        assert report_of(folder, "--all", "--missing") == whole


def test_results_of_another_gpu_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    report_of(tmp_path, "--only", "losses")
    file = tmp_path / "results.json"
    file.write_text(file.read_text().replace('"cpu, small sizes"', '"H100"'))
    arguments = ["--device", "cpu", "--small", "--output", str(tmp_path)]
    with mock.patch.dict("os.environ"):
        before = file.read_text()
        assert main([*arguments, "--only", "export"]) == 2
        assert (
            "would mix results of H100, cpu, small sizes; use another folder"
            in capsys.readouterr().err
        )
        assert file.read_text() == before
        assert main([*arguments, "--report"]) == 0  # on any machine
        assert main(["--report", "--output", str(tmp_path / "empty")]) == 2
    assert "### H100" in (tmp_path / "report.md").read_text()
    assert "results.json has no results; use another folder" in capsys.readouterr().err


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose command line names a folder, once those killed have ended."""
    for _ in range(100):
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                if str(folder) in entry.read_text() and int(entry.parent.name) != os.getpid():
                    found.append(int(entry.parent.name))
        if not found:
            break
        time.sleep(0.1)
    return found


@long_in_turn(5)
def test_a_killed_command_keeps_its_results_and_continues(tmp_path: Path) -> None:
    names = ["nanogpt", "step-2x8", "step-4x4"]
    options = [word for name in names for word in ("--only", name)]
    arguments = ["--device", "cpu", "--small", "--output", str(tmp_path), *options]
    first = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu", *arguments], cwd=REPOSITORY, start_new_session=True
    )
    file, name = tmp_path / "results.json", random.choice(names)
    print(f"killed during {name}")
    while name not in (json.loads(file.read_text()) if file.exists() else {}):
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not processes_in(tmp_path)
    left = json.loads(file.read_text())
    assert left[name]["status"] == "unfinished"
    assert [left[each]["status"] for each in names[: names.index(name)]] == [
        PASSED for each in names[: names.index(name)]
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", *arguments, "--missing"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {entry["status"] for entry in json.loads(file.read_text()).values()} == {PASSED}
    ran = [line.partition(":")[0] for line in done.stdout.splitlines() if ": " in line]
    assert [each for each in names if each in ran] == names[names.index(name) :]


def test_all_parts_have_a_function() -> None:
    for each in PARTS:
        module, name = each.function.split(":")
        file = REPOSITORY / (module.replace(".", "/") + ".py")
        more = r", \w+: str" if each.argument else ""
        assert re.search(rf"\ndef {name}\(setting: Setting{more}\) -> Result:", file.read_text())
        assert each.seconds <= 300


# The command


def test_without_a_gpu_it_says_so_and_exits_with_2(capsys: pytest.CaptureFixture) -> None:
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert main([]) == 2
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1
    assert "finds no GPU on this machine" in said.err and "nvidia-smi" in said.err


def test_a_gpu_that_torch_has_no_code_for_exits_with_2(capsys: pytest.CaptureFixture) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch("torch.cuda.get_device_name", return_value="Tesla V100-SXM2-32GB"),
        mock.patch("torch.cuda.get_device_capability", return_value=(7, 0)),
        mock.patch("torch.cuda.get_arch_list", return_value=["sm_75", "sm_90"]),
    ):
        assert main([]) == 2
    assert "make gpu: Tesla V100-SXM2-32GB is sm_70" in capsys.readouterr().err


def test_packages_that_are_missing_are_named(capsys: pytest.CaptureFixture) -> None:
    assert missing(NEEDED) == []
    assert missing({"no_such_module": "no-such-package"}) == ["no-such-package"]
    with mock.patch("tests.gpu.__main__.missing", return_value=["deepspeed", "hjson"]):
        assert main([]) == 2
    said = capsys.readouterr().err
    assert "lacks deepspeed, hjson." in said and "^(deepspeed|hjson)==" in said
    assert "pip install --no-index" in said and "make gpu PYTHON=" in said


def test_an_export_needs_no_pyarrow() -> None:
    file = REPOSITORY / "threefold" / "prepare_data" / "formats.py"
    with mock.patch.dict(sys.modules, {"pyarrow": None}):
        assert set(runpy.run_path(str(file))["READ_ERRORS"]) == {OSError}


def test_every_package_has_a_pin() -> None:
    pins = (REPOSITORY / "requirements.txt").read_text().lower().replace("_", "-")
    for package in NEEDED.values():
        assert f"\n{package.lower().replace('_', '-')}==" in pins, package
    assert "deepspeed" in how_to_bring(["deepspeed"])


def test_parts_are_listed_and_unknown_ones_rejected(capsys: pytest.CaptureFixture) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BY_NAME)
    assert main(["--only", "speed"]) == 2
    assert "--only speed: use one of losses, kernels" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0", "-2"])
def test_fewer_ranks_than_one_are_rejected(ranks: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["--device", "cpu", "--small", "--ranks", ranks]) == 2
    assert f"invalid --ranks {ranks}: expected 1 or more" in capsys.readouterr().err


def test_a_driver_that_lists_nothing_is_unknown() -> None:
    for output, says in (("", "unknown: nvidia-smi lists no GPU"), ("580.95\n580.95\n", "580.95")):
        done = subprocess.CompletedProcess([], 0, stdout=output)
        with mock.patch("subprocess.run", return_value=done):
            assert driver() == says


def test_a_failure_is_the_exit_code_and_in_the_report(tmp_path: Path) -> None:
    failing = {
        "losses": replace(part(raise_an_error), name="losses"),
        "layouts-2": replace(part(succeed), name="layouts-2"),
    }
    with (
        mock.patch("tests.gpu.parts.BY_NAME", failing),
        mock.patch.dict("os.environ"),
    ):
        options = ["--device", "cpu", "--small", "--output", str(tmp_path)]
        assert main([*options, "--only", "losses"]) == 1
        assert main([*options, "--only", "layouts-2"]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "losses failed, layouts-2 passed" in text and "RuntimeError: no kernel image" in text


def test_make_gpu_uses_the_given_python_and_installs_nothing() -> None:
    def planned(*arguments: str) -> str:
        return subprocess.run(
            ["make", "--no-print-directory", "-n", "gpu", *arguments],
            cwd=REPOSITORY,
            env=outside_make,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    # Under `make test`, an inner make would inherit the outer one's options and variables.
    inherited = ("ARGS", "PYTHON", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS")
    outside_make = {key: value for key, value in os.environ.items() if key not in inherited}
    assert planned("PYTHON=/opt/python3").strip() == "/opt/python3 -m tests.gpu"
    assert "-m tests.gpu --only step" in planned("ARGS=--only step")
    assert "pip" not in planned() + planned("PYTHON=/opt/python3")


# The report


DAY, ABOUT = "2026-11-22", [["device", "H100"], ["torch", "2.13.0"]]


def outcomes() -> list[Outcome]:
    lines = ["| a | b |", "| --- | --- |", "| 1 | 2 |", ""]
    return [
        Outcome(BY_NAME["losses"], PASSED, 30.0, lines=lines, date=DAY, about=ABOUT),
        Outcome(BY_NAME["export"], SKIPPED, 0.0, skipped="no transformers", date=DAY, about=ABOUT),
        Outcome(
            BY_NAME["step-2x8"], FAILED, 30.0, failures=["out of memory\nmore"], date=DAY,
            about=ABOUT,
        ),
    ]  # fmt: skip


def test_a_section_has_command_versions_date_and_figures() -> None:
    text = section(outcomes(), missing=[BY_NAME["nanogpt"]], device="H100")
    assert "\nmake gpu\n" in text and text.count("2026-11-22: torch 2.13.0.") == 1
    assert "their durations sum to 1.0 minutes" in text and "Not run: nanogpt." in text
    assert "losses passed, export skipped, step-2x8 failed" in text
    assert "\n\n| a | b |\n" in text and "- skipped: no transformers" in text
    assert "- **failed**: out of memory more\n" in text and "\n\n\n" not in text


def test_results_are_inserted_into_the_repository(tmp_path: Path) -> None:
    output, repository = tmp_path / "output", tmp_path / "repository"
    (output / "gpus").mkdir(parents=True)
    (output / "gpus" / "h200.toml").write_text("measured")
    (repository / "threefold" / "gpus" / "datasheets").mkdir(parents=True)
    (repository / "BENCHMARKS.md").write_text("# Benchmarks\n")
    text = section(outcomes(), missing=[], device="H200")
    publish(output, text, device="H200", repository=repository)
    assert (repository / "BENCHMARKS.md").read_text() == f"# Benchmarks\n\n{text}"
    assert (repository / "threefold/gpus/datasheets/h200.toml").read_text() == "measured"


def test_a_section_replaces_that_of_the_same_device() -> None:
    def of(device: str, date: str) -> str:
        new = [replace(outcome, date=date) for outcome in outcomes()]
        return section(new, missing=[], device=device)

    document = "# Benchmarks\n\n## One GPU\n\ntext\n"
    for device, date in (("H100", "day 1"), ("H200", "day 2"), ("H100", "day 3")):
        document = insert(document, of(device, date), device=device)
    assert "day 1" not in document and document.startswith("# Benchmarks\n\n## One GPU\n\ntext\n")
    assert document.index("day 3") < document.index("day 2")
    assert document.count("make gpu: H100 -->") == 2
