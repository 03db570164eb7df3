"""The command pretrain.py, started as a user starts it, with a small recipe."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w
import torch.distributed as dist

from models.errors import UserError
from tests.conftest import changed, small_recipe
from tests.ranks import start_ranks
from threefold.checkpoint.format import Manifest
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.data.token_file import TokenFile
from threefold.pretrain import after_step
from threefold.pretrain.experiment import parse_command_line
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import published, step_of
from threefold.runtime.launchers import free_port
from threefold.runtime.processes import check_machine
from threefold.supervision.hang_report import Breadcrumb
from threefold.supervision.supervisor import Supervisor

# pretrain.py on a machine whose second rank computes different weights from step 2 on.
FAULTY = """
import os
from recipes import pretrain
from threefold.engine.engine import Engine

healthy, steps = Engine.train_step, []

def train_step(self, *arguments):
    result = healthy(self, *arguments)
    steps.append(result)
    if os.environ["RANK"] == "1" and len(steps) >= 2:
        dict(self.parameters())["blocks.1.mlp_norm.weight"].data[3] += 1e-3
    return result

Engine.train_step = train_step
pretrain.main()
"""
# The second rank's gradient is not a number while certain samples are read.
POISONED = """
import os, torch
from recipes import pretrain
from threefold.engine.engine import Engine

healthy = Engine.train_step

def train_step(self, micro_batches, rate):
    bad = any(each.info.dropout.samples.start in range(32, 56) for each in micro_batches)
    if bad and os.environ["RANK"] == "1":
        weight = dict(self.parameters())["blocks.1.mlp_norm.weight"]
        handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        result = healthy(self, micro_batches, rate)
        handle.remove()
        return result
    return healthy(self, micro_batches, rate)

Engine.train_step = train_step
pretrain.main()
"""
JUMPING = """
from recipes import pretrain
from threefold.data.dataset import TrainingData
from threefold.run_folder.history import Progress

resume = TrainingData.resume

def jump(self, progress, *layout):
    resume(self, Progress(progress.step, 56), *layout)

TrainingData.resume = jump
pretrain.main()
"""
LONG = pytest.mark.long
# Without waiting for the message of rank 0.
IMPATIENT = """
from recipes import pretrain
from threefold.pretrain import experiment

experiment.SECONDS_FOR_RANK_0_TO_SPEAK = 0
pretrain.main()
"""
OFFLINE = "tracking.mode=offline"  # W&B takes 1.5 seconds of a core per start
TIMED = (
    "step_seconds", "between_seconds", "data_seconds", "validation_seconds", "tokens_per_second",
    "tflops_per_gpu", "memory_gb",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe_file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = changed(
        small_recipe(corpus),
        name="small",
        layout__pipeline=2,
        training__steps=8,
        training__evaluate_every=4,
        checkpoint__every=4,
        tracking__mode="disabled",
    )
    file = tmp_path_factory.mktemp("recipe") / "small.toml"
    file.write_text(tomli_w.dumps(table))
    return file


@pytest.fixture(scope="module")
def finished(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the run folder and the output of an undisturbed run."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    return folder, two_ranks(recipe_file, "--run-dir", str(folder), "--set", OFFLINE)


def deepspeed(ranks: int, *arguments: object, code: int = 0) -> str:
    """Run `deepspeed` with CPU ranks; return its output."""
    command = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_gpus", str(ranks), "--master_port", str(free_port())),
        *("recipes/pretrain.py", *map(str, arguments)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    return output


def two_ranks(*arguments: object) -> str:
    """Run the command on two ranks, as `torchrun` would start it; return rank 0's output."""
    return run(2, *arguments)


def one_rank(*arguments: object, code: int = 0) -> str:
    """Run the command on one rank, where that shows as much; return its output."""
    return run(1, *arguments, "--set", "layout.pipeline=1", code=code)


def run(ranks: int, *arguments: object, code: int = 0) -> str:
    """Run the command; return rank 0's output."""
    command = ["recipes/pretrain.py", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        codes, outputs = start_ranks(ranks, command, folder=Path(folder), seconds=300)
    assert codes == [code] * ranks and "Traceback" not in outputs[0], outputs
    return outputs[0]


def rejected(*arguments: object) -> str:
    """Run the command on one rank, which must reject it; return its output."""
    return one_rank(*arguments, code=2)


def test_the_json_of_deepspeed_is_named_by_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    for words, advice in (
        (["--deepspeed"], "replace --deepspeed with --set deepspeed=FILE.json, or"),
        (["--deepspeed", "recipes/tiny.toml"], "--deepspeed with --set deepspeed=FILE.json, or"),
        (["--deepspeed", "--deepspeed_config", "ds.json"], "with --set deepspeed=ds.json, or"),
    ):
        with pytest.raises(SystemExit), mock.patch.object(sys, "argv", ["pretrain.py", *words]):
            parse_command_line("")
        assert advice in capsys.readouterr().err


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key not in TIMED} for line in lines]


def events(folder: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in RunFolder(folder).read_events()]


def test_a_run_writes_metrics_events_and_checkpoints(
    finished: tuple[Path, str], recipe_file: Path
) -> None:
    folder, output = finished
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    every = {*TIMED, "loss", "grad_norm", "learning_rate", "mfu"} - {"validation_seconds"}
    assert all(every <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "validation_seconds" in line] == [4, 8]
    between = [line["between_seconds"] for line in lines]
    assert between[0] == 0 and min(between[1:]) > 0
    assert all(
        line["step_seconds"] > line["between_seconds"] + line["data_seconds"] for line in lines
    )
    assert [line["tokens"] for line in lines] == [256 * step for step in range(1, 9)]
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 8]
    assert lines[-1]["loss"] < lines[0]["loss"]
    plan = PhasePlan(load_recipe(recipe_file))
    for step, line in enumerate(lines, 1):
        assert line["learning_rate"] == plan.at(step).learning_rate(step)
        assert line["epoch"] == pytest.approx(step * lines[0]["epoch"]) and line["epoch"] > 0
    told = [("start", 0), ("first_step", 1), ("save", 4), ("save", 8), ("end", 8)]
    assert events(folder) == told
    assert load_recipe(folder / "recipe.toml") == load_recipe(recipe_file, [OFFLINE])
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-0000004", "step-0000008"]
    assert "small is finished: 8 steps" in output
    assert "started in " in output


@pytest.mark.long
def test_the_deepspeed_launcher_starts_a_run(recipe_file: Path, tmp_path: Path) -> None:
    settings = ["layout.pipeline=1", "training.steps=1", "training.evaluate_every=0"]
    options = [word for setting in settings for word in ("--set", setting)]
    output = deepspeed(1, recipe_file, "--run-dir", tmp_path / "small", *options)
    assert "started in " in output and " s: launcher " in output
    assert "small is finished: 1 step" in output
    assert (tmp_path / "small" / "checkpoints" / "step-0000001").is_dir()


def test_weights_and_biases_runs_on_one_rank_with_the_resolved_recipe(
    finished: tuple[Path, str],
) -> None:
    home = finished[0] / "wandb"
    run_id = (home / "run_id").read_text()
    runs = list(home.glob("offline-run-*"))
    assert len(runs) == 1 and runs[0].name.endswith(run_id)
    (log,) = runs[0].glob("*.wandb")
    content = log.read_bytes()
    for expected in (b"global_sequences", b"zero1_fp32.json", b"code_version", b"validation_loss"):
        assert expected in content


def test_a_second_start_of_a_finished_run_prints_the_summary(
    finished: tuple[Path, str], recipe_file: Path
) -> None:
    folder, _ = finished
    before = (folder / "metrics.jsonl").read_bytes()
    changed_decay = ("--set", "optimizer.weight_decay=0.3")
    output = two_ranks(recipe_file, "--run-dir", folder, *changed_decay)
    assert "small is finished: 8 steps" in output
    assert "these changes have no effect: optimizer.weight_decay: 0.1 -> 0.3; to" in output
    longer = "to train longer at the learning rate of 4.00e-04, use --set training.steps=16 --set "
    assert f"{longer}optimizer.schedule.steps=8; " in output
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert events(folder)[-1] == ("end", 8)


def test_an_interrupted_run_continues_bit_for_bit(
    finished: tuple[Path, str], recipe_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    shutil.copytree(finished[0], folder)
    shutil.rmtree(folder / "checkpoints" / "step-0000008")
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 9, "lo')  # a process killed in the middle of a line
    with (folder / "events.jsonl").open("ab") as stream:
        stream.write(b'{"event": "rollb' + bytes(100))  # a power loss
    (folder / "checkpoints" / "step-0000008.incomplete").mkdir()
    output = two_ranks(recipe_file, "--run-dir", folder, "--set", OFFLINE)
    assert "resumed after step 4" in output
    assert metrics(folder) == metrics(finished[0])
    assert events(folder)[-4:] == [("resume", 4), ("first_step", 5), ("save", 8), ("end", 8)]
    assert not list((folder / "checkpoints").glob("*.incomplete"))
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 2
    assert (folder / "wandb" / "run_id").read_text() == (finished[0] / "wandb/run_id").read_text()


def test_the_same_seed_gives_the_same_metrics_and_never_starts_again(
    finished: tuple[Path, str], recipe_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    shutil.copytree(finished[0], folder)
    output = two_ranks(recipe_file, "--run-dir", folder, "--resume", "never")
    assert "the earlier run in this folder was moved to" in output
    assert metrics(folder) == metrics(finished[0])
    (aside,) = tmp_path.glob("small.*")
    assert metrics(aside) == metrics(finished[0])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "seed=5"], "was trained with seed = 1234 (here 5); use the same values"),
        (
            ["--set", "model.layers=3", "--set", "model.rope_theta=5e5"],
            "model.layers = 2 (here 3), model.rope_theta = 10000.0 (here 500000.0)",
        ),
        (["--resume", "nowhere"], "--resume nowhere: the path does not exist"),
        (["--resume", "."], "--resume .: the path has no checkpoint"),
        (
            ["--resume", "{finished}"],
            "the path is a run folder, not a checkpoint; use auto or "
            "{finished}/checkpoints/step-0000008",
        ),
        (
            ["--resume", "nowhere", "--run-dir", "{finished}/new"],
            ", and {finished}/new has no checkpoints; omit --resume",
        ),
    ],
)
def test_a_different_experiment_is_not_resumed(
    finished: tuple[Path, str], recipe_file: Path, arguments: list[str], named: str
) -> None:
    steps = ["--set", "training.steps=12"]
    arguments = [argument.format(finished=finished[0]) for argument in arguments]
    output = rejected(recipe_file, "--run-dir", finished[0], *steps, *arguments)
    assert (
        named.format(finished=finished[0]) in output
        and "Traceback" not in output
        and output.count("\n") == 1
    )


def test_resuming_an_older_checkpoint_keeps_the_later_ones_aside(
    finished: tuple[Path, str], recipe_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    shutil.copytree(finished[0], folder)
    older = ["--resume", folder / "checkpoints/step-0000004", "--set", "training.steps=6"]
    output = one_rank(recipe_file, "--run-dir", folder, *older, "--set", "checkpoint.keep=1")
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names[0].startswith("abandoned-") and names[0].endswith("-step-0000008")
    assert f"the later checkpoints of the run are kept as {names[0]}" in output
    assert names[1:] == ["step-0000006"]
    assert [line["step"] for line in metrics(folder)] == list(range(1, 7))
    (before,) = folder.glob("metrics.*.jsonl")
    assert before.read_bytes() == (finished[0] / "metrics.jsonl").read_bytes()


def test_a_run_with_only_abandoned_checkpoints_does_not_start_again(
    finished: tuple[Path, str], recipe_file: Path, tmp_path: Path
) -> None:
    """The run was rolled back to another checkpoint, and killed before it could save."""
    folder = tmp_path / "small"
    shutil.copytree(finished[0], folder)
    for path in (folder / "checkpoints").iterdir():
        path.rename(path.with_name(f"abandoned-20260101T000000-{path.name}"))
    output = rejected(recipe_file, "--run-dir", folder)
    assert "belong to abandoned branches" in output and "abandoned-2026" in output
    assert metrics(folder) == metrics(finished[0])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("weights-00001.safetensors", flip_a_bit, "has changed since the save"),
        pytest.param("moments-00000.safetensors", shorten, "bytes instead of", marks=LONG),
        pytest.param("manifest.json", Path.unlink, "is missing", marks=LONG),
    ],
)
def test_a_damaged_checkpoint_is_skipped(
    name: str,
    damage: Callable[[Path], None],
    named: str,
    finished: tuple[Path, str],
    recipe_file: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "small"
    shutil.copytree(finished[0], folder)
    damaged = folder / "checkpoints" / "step-0000008"
    damage(damaged / name)
    left = sorted(str(file) for file in damaged.rglob("*"))
    output = two_ranks(
        recipe_file, "--run-dir", folder, "--set", "training.steps=6", "--set", "checkpoint.keep=1"
    )
    assert "resumed after step 4" in output and "step-0000008 is damaged and skipped" in output
    assert named in output and str(damaged / name) in output
    assert ("skip", 4) in events(folder) and events(folder)[-1] == ("end", 6)
    assert sorted(str(file) for file in damaged.rglob("*")) == left  # neither moved nor counted
    assert (folder / "checkpoints" / "step-0000006").is_dir()
    assert metrics(folder)[:4] == metrics(finished[0])[:4]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(
    finished: tuple[Path, str], recipe_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    shutil.copytree(finished[0], folder)
    for step in (4, 8):
        flip_a_bit(folder / f"checkpoints/step-000000{step}/manifest.json")
    before = metrics(folder)
    output = rejected(recipe_file, "--run-dir", folder)
    assert "/checkpoints are damaged (step-0000008: manifest.json " in output
    assert "Traceback" not in output and metrics(folder) == before
    elsewhere = folder / "checkpoints/step-0000008"
    output = rejected(recipe_file, "--run-dir", finished[0], "--resume", elsewhere)
    assert f"--resume {elsewhere}: this checkpoint is damaged (manifest.json " in output
    assert f"use --resume auto or --resume {finished[0]}/checkpoints/step-" in output


def test_changed_keys_are_recorded(
    finished: tuple[Path, str], recipe_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    shutil.copytree(finished[0], folder)
    settings = {"training.steps": 10, "batch.global_sequences": 16}
    settings["optimizer.schedule.decay"] = "linear"
    more = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    output = one_rank(recipe_file, "--run-dir", folder, *more)
    for line in (
        "layout.pipeline: 2 -> 1",
        "training.steps: 8 -> 10",
        'decay: "cosine" -> "linear"',
    ):
        assert f"{line}\n" in output
    (jump,) = re.findall("warning: the learning rate changes from .* at step 9; .*", output)
    assert jump.endswith("the checkpoint, use optimizer.schedule.steps = 8")
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (resumed,) = (line for line in lines if line["event"] == "resume")
    assert resumed["changed"] == {
        "batch.global_sequences": [8, 16],
        "layout.pipeline": [2, 1],
        "optimizer.schedule.decay": ["cosine", "linear"],
        "tracking.mode": ["offline", "disabled"],
        "training.steps": [8, 10],
    }
    assert [line["tokens"] for line in metrics(folder)][-3:] == [2048, 2048 + 512, 2048 + 1024]


def test_checkpoints_at_an_interval_are_kept(recipe_file: Path, tmp_path: Path) -> None:
    keep = ["checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=5"]
    keep += ["checkpoint.also_at=[1, 3]", "checkpoint.keep_best=1", "training.evaluate_every=2"]
    options = [word for setting in keep for word in ("--set", setting)]
    folder = tmp_path / "x"
    one_rank(recipe_file, "--run-dir", folder, *options)
    losses = {line["step"]: line.get("validation_loss") for line in metrics(folder)}
    best = min((2, 4, 6, 8), key=losses.__getitem__)
    left = {step_of(path): path for path in published(folder / "checkpoints")}
    assert left.keys() == {1, 3, 5, 8, best}  # step 5 is no multiple of `every`
    assert {s: Manifest.read(path).validation_loss for s, path in left.items()} == {
        step: losses[step] for step in left
    }


def test_a_recipe_that_this_machine_cannot_run_is_rejected(
    recipe_file: Path, tmp_path: Path
) -> None:
    fp16 = ["--set", "deepspeed=ds_configs/zero1_fp16.json", "--run-dir", tmp_path / "x"]
    assert "fp16 needs a GPU and none was found" in rejected(recipe_file, *fp16)
    with pytest.raises(UserError, match="MASTER_ADDR is not set"), mock.patch.dict(os.environ):
        os.environ.pop("MASTER_ADDR", None)
        check_machine(LaunchEnvironment(size=2), precision="fp32", compile="auto")
    with (
        pytest.raises(UserError, match=r"TORCHINDUCTOR_CACHE_DIR = .*File exists"),
        mock.patch("threefold.runtime.processes.has_compiler", return_value=True),
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(recipe_file)),
    ):
        check_machine(LaunchEnvironment(size=1), precision="fp32", compile=True)


def test_a_run_whose_gradients_are_not_finite_stops(recipe_file: Path, tmp_path: Path) -> None:
    explode = ["--set", "optimizer.learning_rate=1e38", "--set", "optimizer.gradient_clipping=0"]
    output = one_rank(recipe_file, "--run-dir", tmp_path / "x", *explode, code=3)
    assert "skipped: step 2: the gradient norm is inf; samples 8 .. 15" in output
    assert "step 4: the gradient norm is inf, 3 steps in a row, and there is no chec" in output
    told = [("start", 0), ("first_step", 1), ("skip", 2), ("skip", 3), ("stop", 4)]
    assert events(tmp_path / "x") == told


def test_a_run_rolls_back_and_skips_the_bad_data(
    finished: tuple[Path, str], recipe_file: Path, tmp_path: Path
) -> None:
    def run(folder: str, script: str, *options: str) -> list[dict[str, Any]]:
        arguments = ["-c", script, str(recipe_file), "--run-dir", str(tmp_path / folder)]
        codes, outputs = start_ranks(2, [*arguments, *options], folder=tmp_path, seconds=300)
        assert codes == [0, 0], outputs
        return RunFolder(tmp_path / folder).read_metrics()

    # One rank's gradient is not finite while the samples 32 .. 55 of steps 5, 6 and 7 come.
    found = run("x", POISONED)
    told = [("skip", 5), ("skip", 6), ("rollback", 7), ("save", 8), ("end", 8)]
    found_events = sorted(events(tmp_path / "x"), key=itemgetter(1))  # saves end at any time
    begun = [("start", 0), ("first_step", 1), ("save", 4), ("repeat", 4)]
    assert found_events == begun + told
    shutil.copytree(finished[0], tmp_path / "y")
    shutil.rmtree(tmp_path / "y/checkpoints/step-0000008")
    expected = run("y", JUMPING)  # resumes with the samples after those
    assert [line["step"] for line in found] == list(range(1, 9))
    for ours, plain in zip(found, expected, strict=True):
        assert {k: v for k, v in ours.items() if k not in TIMED} == {
            k: v for k, v in plain.items() if k not in TIMED
        }
    assert len(list((tmp_path / "x").glob("metrics.2*.jsonl"))) == 1  # with steps 5 .. 7


def test_the_number_of_rollbacks_is_limited(
    finished: tuple[Path, str], recipe_file: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished[0], tmp_path / "x")
    shutil.rmtree(tmp_path / "x/checkpoints/step-0000008")
    arguments = ["-c", POISONED.replace("range(32, 56)", "range(32, 10**6)"), str(recipe_file)]
    options = ["--run-dir", str(tmp_path / "x"), "--set", "supervision.bad_steps=1"]
    codes, outputs = start_ranks(2, [*arguments, *options], folder=tmp_path, seconds=300)
    assert codes == [3, 3], outputs
    assert "step 5: the gradient norm is inf, after 2 rollbacks" in outputs[0]
    assert [name for name, _ in events(tmp_path / "x")].count("rollback") == 2
    codes, outputs = start_ranks(2, [*arguments, *options], folder=tmp_path, seconds=300)
    assert codes == [3, 3], outputs  # the same command resumes after the bad data, and stops
    assert "after 2 rollbacks" in outputs[0]
    assert RunFolder(tmp_path / "x").read_metrics()[-1]["tokens"] == 32 * (32 + 3 * 8)


def poisoned(recipe_file: Path, folder: Path, samples: tuple[int, ...], *settings: str) -> str:
    """Run two ranks with bad micro-batches that begin at these samples; return rank 0's output."""
    script = POISONED.replace("range(32, 56)", repr(samples))
    options = [word for setting in settings for word in ("--set", setting)]
    arguments = ["-c", script, str(recipe_file), "--run-dir", str(folder), *options]
    codes, outputs = start_ranks(2, arguments, folder=folder.parent, seconds=300)
    assert codes == [0, 0], outputs
    return outputs[0]


@pytest.mark.long
def test_rollbacks_with_a_save_in_between_do_not_stop_a_run(
    recipe_file: Path, tmp_path: Path
) -> None:
    settings = ("training.steps=12", "supervision.bad_steps=1", "supervision.rollbacks=1")
    poisoned(recipe_file, tmp_path / "x", (40, 80), *settings)
    lines = RunFolder(tmp_path / "x").read_events()
    found = [(e["step"], e["to"], e["samples"]) for e in lines if e["event"] == "rollback"]
    assert found == [(6, 4, 48), (9, 8, 88)]
    ends = [line["tokens"] // 32 for line in RunFolder(tmp_path / "x").read_metrics()]
    assert ends == [8, 16, 24, 32, 56, 64, 72, 80, 96, 104, 112, 120]


@pytest.mark.long
def test_a_bad_last_step_is_rolled_back(recipe_file: Path, tmp_path: Path) -> None:
    poisoned(recipe_file, tmp_path / "x", (56,))
    assert ("rollback", 8) in events(tmp_path / "x") and events(tmp_path / "x")[-1] == ("end", 8)
    ends = [line["tokens"] // 32 for line in RunFolder(tmp_path / "x").read_metrics()]
    assert ends == [8, 16, 24, 32, 72, 80, 88, 96]


def test_a_bad_last_step_that_cannot_be_rolled_back_is_skipped(
    recipe_file: Path, tmp_path: Path
) -> None:
    settings = ("supervision.rollbacks=0", "training.evaluate_every=0")
    output = poisoned(recipe_file, tmp_path / "x", (56,), *settings)
    assert "skipped: step 8: the gradient norm is inf; samples 56 .. 63" in output
    told = [("save", 4), ("skip", 8), ("save", 8), ("end", 8)]
    kinds = ("save", "skip", "end", "stop")
    found = [event for event in events(tmp_path / "x") if event[0] in kinds]
    assert sorted(found, key=itemgetter(1)) == told  # saves end at any time


def test_a_folder_without_flock_is_a_warning(recipe_file: Path, tmp_path: Path) -> None:
    script = (
        "import fcntl\n"
        "def refuse(*_): raise OSError(38, 'Function not implemented')\n"
        "fcntl.flock = refuse\n"
        "from recipes import pretrain\n"
        "pretrain.main()\n"
    )
    options = ["--run-dir", str(tmp_path / "x"), "--set", "layout.pipeline=1"]
    arguments = ["-c", script, str(recipe_file), *options, "--set", "training.steps=1"]
    codes, outputs = start_ranks(1, arguments, folder=tmp_path, seconds=300)
    assert codes == [0] and "is on a file system without flock" in outputs[0], outputs
    assert not (tmp_path / "x" / "lock.exclusive").exists()


@pytest.mark.parametrize(
    ("every", "stopped"),
    # Before a save; at its interval; never.
    [(100, 4), pytest.param(3, 3, marks=LONG), pytest.param(0, None, marks=LONG)],
)
def test_a_run_whose_replicas_diverge_stops(
    every: int, stopped: int | None, recipe_file: Path, tmp_path: Path
) -> None:
    settings = ("layout.pipeline=1", "layout.tensor=2", f"training.compare_replicas_every={every}")
    options = [word for setting in settings for word in ("--set", setting)]
    arguments = ["-c", FAULTY, str(recipe_file), *options, "--run-dir", str(tmp_path / "x")]
    codes, outputs = start_ranks(2, arguments, folder=tmp_path, seconds=300)
    assert codes == ([3, 3] if stopped else [0, 0]), outputs
    if stopped:
        assert (
            f"stopped: step {stopped}: blocks.1.mlp_norm.weight differs between tensor ranks: "
            "rank 0 against rank 1" in outputs[0]
        )
        told = [("start", 0), ("first_step", 1), ("stop", stopped)]  # nothing was saved
        assert events(tmp_path / "x") == told


@pytest.mark.long
def test_a_bad_recipe_is_rejected_once_under_the_launcher() -> None:
    output = deepspeed(2, "--set", "layout.pipeline=9", code=2)
    assert output.count("layout.pipeline = 9 has more stages than model.layers") == 1
    assert "Traceback" not in output


def test_a_missing_corpus_is_rejected_on_each_rank(recipe_file: Path, tmp_path: Path) -> None:
    words = ["-c", IMPATIENT, str(recipe_file), "--run-dir", str(tmp_path / "x")]
    words += ["--set", "data.validation=nowhere/x"]
    codes, outputs = start_ranks(2, words, folder=tmp_path, seconds=300)
    assert codes == [2, 2], outputs
    missing = "nowhere does not exist; use a corpus that recipes/prepare_data.py has written"
    for output, who in zip(outputs, ("pretrain.py: ", "pretrain.py: rank 1: "), strict=True):
        assert output.count("\n") == 1 and missing in output and f" {who}{recipe_file}" in output


CROWDED = """
import os
import torch
from recipes import pretrain

torch.get_num_threads = lambda: len(os.sched_getaffinity(0))
pretrain.main()
"""


def test_a_run_without_validation_reports_crowded_cores_and_repeated_data(
    corpus: Path, tmp_path: Path
) -> None:
    part = str(corpus / "validation")  # the smaller one: 4,000 tokens
    table = changed(
        small_recipe(corpus), data__train=[{"path": part}], data__validation=None,
        training__evaluate_every=0, training__steps=5,
        model__sequence_length=128, batch__micro_sequences=4,
    )  # fmt: skip
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    folder = tmp_path / "run"
    words = ["-c", CROWDED, str(tmp_path / "recipe.toml"), "--run-dir", str(folder)]
    codes, (output, *_) = start_ranks(2, words, folder=tmp_path, seconds=300)
    assert codes == [0, 0], output
    windows = (TokenFile(Path(part)).count - 1) // 128
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [8 * step / windows for step in range(1, 6)]
    assert not any(key.startswith("validation") for line in lines for key in line)
    first = next(line["step"] for line in lines if line["epoch"] > 1)
    assert output.count(f"step {first}: {part} has been read once; its second epoch begins") == 1
    assert output.count("its second epoch begins") == 1
    assert f"epoch {lines[-1]['epoch']:.2f}" in output
    assert f" tokens/s, {lines[-1]['epoch']:.2f} epochs" in output
    cores = len(os.sched_getaffinity(0))
    assert f"2 ranks on this node run {2 * cores} threads on {cores} core" in output
    assert load_recipe(folder / "recipe.toml").data.validation_sets == {}


TRUNCATED = """
from recipes import pretrain
from threefold.data.dataset import TrainingData

healthy = TrainingData.evaluation

def evaluation(self, name=""):
    with open(FILE, "r+b") as stream:
        stream.truncate(1000)
    return healthy(self, name)

TrainingData.evaluation = evaluation
pretrain.main()
"""


def test_unreadable_validation_data_stop_the_run(
    corpus: Path, recipe_file: Path, tmp_path: Path
) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    path = tmp_path / "corpus" / "validation"
    file = str(path.with_suffix(".bin"))
    script = f"FILE = {file!r}\n{TRUNCATED}"
    words = ["-c", script, str(recipe_file), "--run-dir", str(tmp_path / "run")]
    words += ["--set", "layout.pipeline=1", "--set", f"data.validation={str(path)!r}"]
    codes, outputs = start_ranks(1, words, folder=tmp_path, seconds=300)
    assert codes == [3], outputs
    assert "Traceback" not in outputs[0] and file in outputs[0]
    stop = RunFolder(tmp_path / "run").read_events()[-1]
    assert (stop["event"], stop["step"], stop["exit_code"]) == ("stop", 4, 3)


@pytest.mark.parametrize(
    ("problem", "code"), [(OSError(5, "Input/output error", "x.bin"), 1), (UserError("x.bin"), 3)]
)
def test_only_an_io_error_lets_launch_py_start_the_run_again(
    problem: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = mock.Mock()
    monkeypatch.setattr(after_step, "exit_now", ended)
    with after_step.stop_if_unreadable(mock.Mock(folder=RunFolder(tmp_path)), 7):
        raise problem
    ended.assert_called_once_with(code)
    stop = RunFolder(tmp_path).read_events()[-1]
    assert stop["exit_code"] == code and "x.bin" in stop["reason"]


def test_one_of_the_ranks_that_cannot_read_the_tokens_tells_why(
    world: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(after_step, "exit_now", mock.Mock())
    monkeypatch.setattr(after_step, "SECONDS_FOR_OTHERS", 0)
    folder = RunFolder(tmp_path)
    watch = Supervisor(folder, Breadcrumb(), hang_seconds=0, startup_seconds=0)
    for name in ("x.bin", "x.bin", "y.bin"):  # the store counts, as if on three ranks
        with after_step.stop_if_unreadable(mock.Mock(folder=folder, supervisor=watch), 7):
            raise UserError(name)
    told = capsys.readouterr().err.splitlines()
    stops = [event["reason"] for event in folder.read_events()]
    assert told == [f"stopped: {reason}" for reason in stops] and len(stops) == 2
    lost = mock.Mock(**{"return_value.add.side_effect": RuntimeError("reset")})
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lost)
    assert watch.is_first_to_report(stops[0])  # rank 0 has ended


def test_a_run_whose_corpus_is_overwritten_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_step, "exit_now", mock.Mock(side_effect=SystemExit))
    run = mock.MagicMock(folder=RunFolder(tmp_path))
    run.data.rank, run.data.check_unchanged.side_effect = 0, UserError("overwritten")
    with pytest.raises(SystemExit):
        after_step.save(run, 7, {}, ends_process=False)
    run.writer.save.assert_not_called()


def test_a_damaged_wandb_id_is_rejected_before_the_run_begins(
    recipe_file: Path, tmp_path: Path
) -> None:
    run_id = tmp_path / "run" / "wandb" / "run_id"
    run_id.parent.mkdir(parents=True)
    run_id.write_bytes(bytes(8))
    output = rejected(recipe_file, "--run-dir", tmp_path / "run", "--set", OFFLINE)
    assert f"{run_id} holds" in output
    assert not (tmp_path / "run" / "events.jsonl").exists()
