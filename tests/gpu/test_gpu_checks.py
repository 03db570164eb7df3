"""`make gpu` on a machine without a GPU: its parts with small sizes, its budgets, its report."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.one_step.shapes import can_compile, cpu_shape
from models.kernels.attention import causal_attention
from models.parallel import cross_entropy
from models.pipeline.schedule.order import SCHEDULES
from recipes.gpus.datasheet import read_gpu
from recipes.training.recipe.deepspeed_config import build_deepspeed_config
from recipes.training.recipe.loading import REPOSITORY, load_recipe
from recipes.training.recipe.topology import World
from tests.gpu import kernels, training
from tests.gpu.__main__ import main, publish
from tests.gpu.environment import driver
from tests.gpu.packages import NEEDED, how_to_bring, missing
from tests.gpu.part import run as run_here
from tests.gpu.parts import BY_NAME, MINUTES, PARTS, Part
from tests.gpu.report import insert, section
from tests.gpu.runner import Outcome, describe, run_part, run_parts
from tests.gpu.runs import Failure, Run, device_environment, largest_difference, overrides, start
from tests.gpu.setting import FAILED, PASSED, SKIPPED, Result, Setting

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
    "name",
    ["environment", "losses", "resume", "step", pytest.param("export", marks=pytest.mark.long)],
)
def test_a_part_passes_on_the_cpu(name: str, setting: Setting) -> None:
    outcome = run(name, setting)
    claims = {"environment": 0, "losses": 2, "resume": 3, "export": 1, "step": 1}
    assert sum(line.startswith("- yes: ") for line in outcome.lines) == claims[name]
    text = "\n".join(outcome.lines)
    if name == "environment":
        assert "| torch | 2." in text and "| small: 64 x 48 x 32 |" in text
    if name == "step":
        assert re.search(r"\| step \| \d+\.\d{3} s \| \d+\.\d{3} s \([+-]\d+%\) \|", text)
        assert "| share | ms | calls | kernel |" in text and "| `aten::" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["precisions", "deterministic"])
def test_a_part_of_several_runs_passes_on_the_cpu(name: str, setting: Setting) -> None:
    run(name, setting)


@pytest.mark.exhaustive
def test_layouts_pass_on_two_ranks(tmp_path: Path) -> None:
    outcome = run("layouts", Setting(output=tmp_path, **CPU | {"gpus": 2}))
    assert "| tensor 2, 2 ranks | " in "\n".join(outcome.lines)


@pytest.mark.exhaustive
def test_kernels_pass_on_two_ranks(tmp_path: Path) -> None:
    outcome = run("kernels", Setting(output=tmp_path, **CPU | {"gpus": 2}))
    rows = [line for line in outcome.lines if line.endswith("| yes |")]
    assert len(rows) == 9 and any(line.startswith("| tied GPT") for line in rows)


@pytest.mark.parametrize(("factor", "failures"), [(1.0, 0), (1.05, 1)])
@pytest.mark.parametrize("name", kernels.COMPARISONS)
def test_a_kernel_with_another_gradient_fails(name: str, factor: float, failures: int) -> None:
    with_gradients = kernels.with_gradients

    def changed(function: Callable, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        *found, last = with_gradients(function, inputs)
        return [*found, last if last.dtype == torch.float32 else last * factor]

    result = Result()
    result.table(["", "", "", ""], [])
    with mock.patch.object(kernels, "with_gradients", changed):
        find, limit = kernels.COMPARISONS[name]
        kernels.compare_values(result, name, find, torch.device("cpu"), limit=limit)
    assert len(result.failures) == failures


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
def test_beside_transformers_on_the_cpu(setting: Setting) -> None:
    outcome = run("transformers", setting)
    assert "times as fast as transformers eager" in "\n".join(outcome.lines)


NO_COMPILER = {"CXX": "/nonexistent/g++", "CC": "/nonexistent/gcc"}


@pytest.mark.exhaustive
def test_beside_transformers_without_a_compiler(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, NO_COMPILER):
        outcome = run("transformers", Setting(output=tmp_path, **CPU))
    text = "\n".join(outcome.lines)
    assert "| transformers_eager |" in text and "transformers_compiled" not in text
    assert "Nothing is compiled: `/nonexistent/g++` or Python's headers are missing" in text


def test_without_a_compiler_nothing_is_compiled() -> None:
    from benchmarks.one_step import contestants, rows, step_report  # transformers

    can_compile.cache_clear()
    setting = rows.Setting(who="all")
    compiled = [name for name in rows.entries(setting, "bf16") if "compiled" in name]
    assert len(compiled) == 3 and cpu_shape(64, 2, 256).recipe("fp32").training.compile is True
    try:
        with (
            mock.patch.dict(os.environ, NO_COMPILER),
            mock.patch("torch.compile", side_effect=AssertionError),
        ):
            can_compile.cache_clear()
            entries = rows.entries(setting, "bf16")
            assert set(compiled) & set(entries) == set() and "transformers_eager_bare" in entries
            assert cpu_shape(64, 2, 256).recipe("fp32").training.compile is False
            contestants.warm_libraries()
    finally:
        can_compile.cache_clear()
    memory = {"ours": {"memory_gb": 1.0}, "transformers_eager": {"memory_gb": 2.0}}
    row = rows.row(cpu_shape(64, 2, 256), "fp32", {"transformers_eager": 1.5}, memory)
    assert row["over_transformers_compiled"] is None and row["memory_over_transformers"] == 0.5
    step_report.print_row(row | {"contestants": {}, "matmul_tflops": {}})


def test_layouts_are_skipped_with_one_gpu(setting: Setting) -> None:
    result = training.layouts(setting)
    assert result.status == SKIPPED and "one GPU" in result.skipped


def test_the_planners_file_is_written_into_the_output(setting: Setting) -> None:
    from benchmarks.device import device_file
    from tests.gpu import speed

    calibrated: dict[str, Any] = {"products": 3, "mean_error": 0.02, "steps": []}
    found: list[Sequence[Any]] = []

    def calibrate(name: str, like: str | None, _: object, folder: Path) -> dict[str, Any]:
        found.append((name, like))
        return calibrated | {"file": str(device_file.file_of(folder, like or name))}

    names = ("NVIDIA H200", "NVIDIA RTX PRO 6000")
    with mock.patch.object(device_file, "calibrate", calibrate):
        for name in names:
            with mock.patch.object(speed, "device_name", return_value=name):
                result = speed.device_file(setting)
    assert found == [("H200", None), ("RTX-PRO-6000", "H100")]
    assert "replace the datasheet's numbers" in result.lines[-2]
    assert read_gpu(setting.output / "gpus" / "h200.toml").name == "H200"


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
        (training.layouts, "layout-1", 1 + 2e-4, 1),
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
    [(training.precisions, "precision-zero1_bf16"), (training.layouts, "layout-0")],
)
def test_a_variant_that_fails_leaves_the_others_alone(
    part: Callable[[Setting], Result], broken: str, tmp_path: Path
) -> None:
    works = fake_runs(lambda name, lines: lines)

    def fake(setting: Setting, name: str, settings: Sequence[str], **_: Any) -> Run:
        return Broken(name, tmp_path, [], []) if name == broken else works(setting, name, settings)

    file = tmp_path / "part.json"
    saved = []
    setting = Setting(output=tmp_path, result_file=file, **CPU | {"gpus": 2})
    with (
        mock.patch.object(training, "start", fake),
        mock.patch.object(Setting, "save", lambda _, result: saved.append(len(result.lines))),
    ):
        result = part(setting)
    assert result.status == FAILED and len(result.failures) == 1
    assert f"{broken}: rank 0 ended with exit code 7" in result.failures[0]
    assert result.lines[-3].endswith("| failed |  |  |  | **NO** |")
    assert result.lines[-2].endswith("| yes |") and not result.lines[-1]
    assert saved == [4, 5]  # after each row


def test_a_run_that_hangs_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 3\n")
    commands = ["import time; time.sleep(120)", "import time; time.sleep(120)"]
    processes = [subprocess.Popen([sys.executable, "-c", text]) for text in commands]
    with pytest.raises(Failure, match=r"stuck: killed after 0\.5 seconds:\nstep 3"):
        Run("stuck", tmp_path, processes, [log, log]).finish(0.5)
    assert [process.poll() for process in processes] == [-9, -9]


LAUNCHED = {  # the environment of a rank of another job
    "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node7", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "5",
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "3", "SLURM_JOB_ID": "17",
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_do_not_wait_for_the_ranks_of_a_job_around_them(device: str) -> None:
    with mock.patch.dict(os.environ, LAUNCHED):
        environment = device_environment(device)
    assert World.from_environment(environment) == World()
    assert not environment.keys() & LAUNCHED.keys() and "PATH" in environment


def test_runs_end_soon_after_a_hang(setting: Setting) -> None:
    recipe = load_recipe(REPOSITORY / "recipes" / "tiny.toml", overrides(setting))
    assert 0 < recipe.supervision.hang_seconds <= 60


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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("small", [True, False])
def test_every_layout_is_valid(ranks: int, small: bool, tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, **CPU | {"small": small})
    schedules = set()
    for changes in training.layout_variants(ranks).values():
        settings = overrides(setting, **training.LAYOUT_SIZES | changes)
        recipe = load_recipe(REPOSITORY / "recipes" / "tiny.toml", settings)
        topology = recipe.topology(World(size=ranks, local_size=ranks))
        build_deepspeed_config(recipe, topology)
        schedules.add(recipe.layout.schedule)
    assert schedules == set(SCHEDULES)


# Budgets and errors


def sleep_with_a_child(setting: Setting) -> Result:
    found = Result()
    found.check(True, "it began")
    setting.save(found)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    (setting.output / "child").write_text(str(child.pid))
    time.sleep(120)
    return Result()


def raise_an_error(setting: Setting) -> Result:
    raise RuntimeError("no kernel image")


def crash(setting: Setting) -> Result:
    os._exit(11)


def lack_a_package(setting: Setting) -> Result:
    raise ModuleNotFoundError("No module named 'transformers'", name="transformers")


def lack_a_dependency(setting: Setting) -> Result:
    exec("import huggingface_hub_of_no_machine", {"__name__": "transformers.utils.hub"})
    return Result()


def lack_a_module_of_ours(setting: Setting) -> Result:
    import models.no_such_module  # noqa: F401

    return Result()


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
    result = run_here(f"tests.gpu.test_gpu_checks:{function.__name__}", setting)
    assert result.status == status
    assert says in "".join([result.skipped, *result.failures])


def succeed(setting: Setting) -> Result:
    result = Result()
    result.check(True, "it works")
    return result


def part(function: Callable[[Setting], Result], seconds: float = 60) -> Part:
    name = function.__name__
    return Part(name, name.replace("_", " "), f"tests.gpu.test_gpu_checks:{name}", seconds)


def test_a_failed_part_does_not_stop_the_next_one(tmp_path: Path) -> None:
    parts = [part(raise_an_error), part(crash), part(lack_a_package), part(succeed)]
    told: list[str] = []
    setting = Setting(output=tmp_path, **CPU)
    outcomes = run_parts(parts, setting, minutes=10, tell=told.append)
    assert [each.status for each in outcomes] == [FAILED, FAILED, SKIPPED, PASSED]
    broken, crashed, lacking, _ = outcomes
    assert broken.failures == ["RuntimeError: no kernel image"]
    assert "its process ended with 11" in crashed.failures[0]
    assert lacking.skipped == "the package transformers is not installed"
    text = "\n".join(told)
    assert "Traceback" in text and "- yes: it works" in text and "[4/4] succeed" in text


@pytest.mark.long
def test_a_part_ends_with_its_time_and_its_children(tmp_path: Path) -> None:
    parts = [part(sleep_with_a_child, 20), part(succeed)]
    setting = Setting(output=tmp_path, **CPU)
    slow, after = run_parts(parts, setting, minutes=10, tell=lambda text: None)
    assert (slow.status, after.status) == (FAILED, PASSED)
    assert slow.failures == ["ended after 20 seconds, which is its time"]
    assert slow.seconds < 60
    assert slow.lines == ["- yes: it began"]
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_parts_are_skipped_when_the_time_of_all_is_over(tmp_path: Path) -> None:
    setting = Setting(output=tmp_path, **CPU)
    (outcome,) = run_parts([part(succeed)], setting, minutes=0.1, tell=lambda text: None)
    assert outcome.status == SKIPPED and "--minutes" in outcome.skipped


def test_a_part_may_use_the_time_that_others_have_left(tmp_path: Path) -> None:
    given = []

    def run_part(each: Part, setting: Setting, *, seconds: float) -> Outcome:
        given.append(round(seconds))
        status = SKIPPED if each.seconds == 420 else PASSED
        return Outcome(each, status, 10.0, tmp_path)

    parts = [part(succeed, seconds) for seconds in (30, 420, 5, 400, 60)]
    with mock.patch("tests.gpu.runner.run_part", run_part):
        run_parts(parts, Setting(output=tmp_path, **CPU), minutes=6, tell=lambda text: None)
    assert given == [30, 360, 25, 360, 360]


def test_the_parts_of_one_gpu_fit_into_ten_minutes_the_most_important_first() -> None:
    assert MINUTES <= 10
    assert sum(each.seconds for each in PARTS if each.name != "layouts") <= 60 * MINUTES
    assert list(BY_NAME)[:4] == ["environment", "losses", "step", "device"]


def test_all_parts_have_a_function() -> None:
    for each in PARTS:
        module, name = each.function.split(":")
        file = REPOSITORY / (module.replace(".", "/") + ".py")
        assert f"\ndef {name}(setting: Setting) -> Result:" in file.read_text()
        assert each.seconds <= 60 * MINUTES


# The command


def command(*arguments: str) -> subprocess.CompletedProcess:
    environment = {key: text for key, text in os.environ.items() if key != "DS_ACCELERATOR"}
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu", *arguments],
        cwd=REPOSITORY,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    done = command()
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "finds no GPU on this machine" in done.stderr and "nvidia-smi" in done.stderr


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


def test_every_package_has_a_pin() -> None:
    pins = (REPOSITORY / "requirements.txt").read_text().lower().replace("_", "-")
    for package in NEEDED.values():
        assert f"\n{package.lower().replace('_', '-')}==" in pins, package
    assert "deepspeed" in how_to_bring(["deepspeed"])


def test_parts_are_listed_and_unknown_ones_rejected(capsys: pytest.CaptureFixture) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BY_NAME)
    assert main(["--only", "speed"]) == 2
    assert "--only speed: use one of environment, losses" in capsys.readouterr().err


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
    failing = {"environment": part(raise_an_error), "layouts": part(succeed)}
    with (
        mock.patch("tests.gpu.parts.BY_NAME", failing),
        mock.patch.dict("os.environ"),
    ):
        options = ["--device", "cpu", "--small", "--output", str(tmp_path)]
        assert main([*options, "--only", "environment"]) == 1
        assert main([*options, "--only", "layouts"]) == 0
    assert "**succeed** (passed" in (tmp_path / "report.md").read_text()


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


def outcomes() -> list[Outcome]:
    lines = ["| a | b |", "| --- | --- |", "| 1 | 2 |", ""]
    return [
        Outcome(BY_NAME["losses"], PASSED, 30.0, Path(), lines=lines),
        Outcome(BY_NAME["export"], SKIPPED, 0.0, Path(), skipped="no transformers"),
        Outcome(BY_NAME["step"], FAILED, 30.0, Path(), failures=["out of memory\nmore"]),
    ]


def test_a_section_has_command_versions_date_and_figures() -> None:
    text = section(outcomes(), device="H100", date="2026-11-22", versions=[("torch", "2.13.0")])
    assert "\nmake gpu\n" in text and "2026-11-22; torch 2.13.0; 1.0 minutes" in text
    assert "losses passed, export skipped, step failed" in text
    assert "\n\n| a | b |\n" in text and "- skipped: no transformers" in text
    assert "- **failed**: out of memory\n" in text and "\n\n\n" not in text


def test_results_are_inserted_into_the_repository(tmp_path: Path) -> None:
    output, repository = tmp_path / "output", tmp_path / "repository"
    (output / "gpus").mkdir(parents=True)
    (output / "gpus" / "h200.toml").write_text("measured")
    (repository / "recipes" / "gpus" / "datasheets").mkdir(parents=True)
    (repository / "BENCHMARKS.md").write_text("# Benchmarks\n")
    text = section(outcomes(), device="H200", date="2026-11-22", versions=[])
    publish(output, text, device="H200", repository=repository)
    assert (repository / "BENCHMARKS.md").read_text() == f"# Benchmarks\n\n{text}"
    assert (repository / "recipes/gpus/datasheets/h200.toml").read_text() == "measured"


def test_a_section_replaces_that_of_the_same_device() -> None:
    def of(device: str, date: str) -> str:
        return section(outcomes(), device=device, date=date, versions=[])

    document = "# Benchmarks\n\n## One GPU\n\ntext\n"
    for device, date in (("H100", "day 1"), ("H200", "day 2"), ("H100", "day 3")):
        document = insert(document, of(device, date), device=device)
    assert "day 1" not in document and document.startswith("# Benchmarks\n\n## One GPU\n\ntext\n")
    assert document.index("day 3") < document.index("day 2")
    assert document.count("make gpu: H100 -->") == 2
