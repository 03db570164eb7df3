"""Sweeps with real ranks: measured values, shared processes, faults, and kills."""

import gc
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w
import torch
import torch.distributed as dist

from models.errors import UserError
from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from tests.sweep.sweeps import Sweep
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.sweep.choice import TrialRequest, choose
from threefold.sweep.folder import SweepFolder
from threefold.sweep.links.timing import measure_links
from threefold.sweep.ranks import worker
from threefold.sweep.ranks.controller import SlurmLauncher, rank_settings
from threefold.sweep.ranks.protocol import START, WorkerFiles, read_message
from threefold.sweep.ranks.rank import outcome_of
from threefold.sweep.trial import Trial, WorkerKind

OUTCOMES = {  # fault -> outcome
    "out_of_memory": "out_of_memory",
    "crash": "crashed",
    "hang": "hung",
    "error": "crashed",
}
MAX_OVERHEAD_SECONDS = 3.0
SECONDS_OF_A_SWEEP = 2400


def write_recipe(file: Path, **changes: Any) -> Path:
    file.write_text(tomli_w.dumps(changed(small_recipe(Path("absent")), **changes)))
    return file


def results(sweep: Sweep) -> dict[str, dict[str, Any]]:
    files = (sweep.folder / "results").glob("*.json")
    return {file.stem: json.loads(file.read_text())["result"] for file in files}


def options_of(settings: list[str], **options: Any) -> list[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    return words + [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


@pytest.mark.long
def test_real_ranks_measure_layouts(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "small.toml", model__sequence_length=128)
    sweep = Sweep(tmp_path, recipe, fake=False)
    settings = [
        "batch.micro_sequences=4,1",
        "layout.pipeline=1,2",
        "deepspeed=ds_configs/zero1_fp32.json,ds_configs/zero3_fp32.json",
    ]
    trials = sweep.trials(settings=settings, steps=3, warm_up=1)
    assert len(trials) == 6
    sweep.inject({trials[-1].key: "out_of_memory"})
    done = sweep.run(*options_of(settings, steps=3, warm_up=1))
    assert done.returncode == 0, done.stdout
    assert not sweep.processes()
    rows = {row["trial"]: row for row in sweep.rows()}
    outcomes = [row["outcome"] for row in rows.values()]
    assert sorted(outcomes) == [*["ok"] * 5, "out_of_memory", "rejected", "rejected"]
    for trial in trials[:-1]:
        result, row = results(sweep)[trial.key], rows[trial.key]
        assert len(result["step_seconds"]) == 3 and result["warm_up_seconds"] > 0
        median = sorted(result["step_seconds"])[1]
        assert float(row["step_time_s"]) == pytest.approx(median, rel=1e-4)
        assert 0.2 < float(row["mem_gb"]) < 2.0
        assert float(row["tokens_s_gpu"]) == pytest.approx(8 * 128 / median / 2, rel=1e-3)
    assert "can't allocate memory" in rows[trials[-1].key]["reason"]
    assert "Traceback" in results(sweep)[trials[-1].key]["log"]
    assert sorted(sweep.finished()) == sorted(trial.key for trial in trials[:-1])


def test_a_cpu_is_not_measured_as_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank checks its own device, because another node may choose a different one."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    cluster = {"nodes": 1, "gpus_per_node": 1, "gpu": "H100"}
    recipe = load_recipe(write_recipe(tmp_path / "small.toml", cluster=cluster))
    request, world = {"recipe": recipe.model_dump(mode="json")}, LaunchEnvironment()
    with pytest.raises(UserError, match="is a GPU, and the ranks run on CPUs"):
        worker.checked_recipe(request, world)
    with pytest.raises(UserError, match="is a GPU, and the ranks run on CPUs"):
        measure_links({"gpu": "H100", "precision": "bf16"}, world, mock.Mock())


def live_bytes(folder: str, stages: list[int]) -> list[int]:
    """Measure a trial of each ZeRO stage in this process; return the bytes of tensors after each.

    Storages whose memory was returned count as empty.
    """
    world = join_world()
    control = dist.new_group(backend="gloo")
    found = []
    sweep = SweepFolder(Path(folder) / "sweep", {})
    for stage in stages:
        recipe = write_recipe(
            Path(folder) / "small.toml",
            deepspeed=f"ds_configs/zero{stage}_fp32.json",
            cluster={"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"},
        )
        (trial,) = choose(TrialRequest(recipes=[recipe], layouts="own", warm_up=1, steps=1)).trials
        request = trial.request(sweep.corpus)
        assert worker.measure(request, world, control, worker.Memory()).outcome == "ok"
        gc.collect()
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        storages = {id(each.untyped_storage()): each.untyped_storage() for each in tensors}
        found.append(sum(storage.nbytes() for storage in storages.values()))
    sweep.close()
    return found


def test_the_engine_of_a_trial_is_freed(tmp_path: Path) -> None:
    (sizes,) = run_ranks(1, live_bytes, str(tmp_path), [1, 1, 3, 3, 1])
    assert max(sizes) - sizes[0] < 10_000, sizes  # the model alone has 500 kB of state


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    """The warm-up counts apart, and the memory is that of the fullest rank."""
    ranks = [
        worker.RankMeasurement([8.0, 1.0, 4.0, 2.0], peak_gib=3.0, allocated_gib=None),
        worker.RankMeasurement([9.0, 2.0, 3.0, 5.0], peak_gib=2.0, allocated_gib=1.5),
    ]
    result = worker.result_of(ranks, warm_up=2, device="a GPU")
    assert (result.step_seconds, result.warm_up_seconds) == ([4.0, 5.0], 11.0)
    assert (result.memory_gib, result.allocated_gib) == (3.0, 1.5)


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [
        (UserError("2 heads cannot be divided by tensor = 4"), "rejected"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA"), "out_of_memory"),
        (RuntimeError("Failed to CUDA calloc 1024 bytes"), "out_of_memory"),
        (RuntimeError("an illegal memory access"), "crashed"),
        (ValueError("out of memory"), "crashed"),
    ],
)
def test_the_outcome_of_an_exception(problem: Exception, outcome: str) -> None:
    assert outcome_of(problem) == outcome


@pytest.mark.exhaustive
def test_a_trial_measures_the_same_in_shared_processes(tmp_path: Path) -> None:
    """Memory must not contain that of earlier trials, nor may they slow later ones down."""
    recipe = write_recipe(
        tmp_path / "small.toml",
        model__sequence_length=512,
        model__hidden_size=256,
        model__vocab_size=8000,
        batch={"global_sequences": 16, "micro_sequences": 1},
    )
    few = {"steps": 1, "warm_up": 1, "gpus_per_node": 1}
    shared = Sweep(tmp_path, recipe, fake=False)
    shared.run(*options_of(["batch.micro_sequences=16,1"], **few))
    together = {row["mbs"]: row for row in shared.rows()}
    gib = {}
    for size in ("16", "1"):
        (tmp_path / size).mkdir()
        alone = Sweep(tmp_path / size, recipe, "--layouts", "own", fake=False)
        alone.run(*options_of([f"batch.micro_sequences={size}"], **few))
        (row,) = alone.rows()
        gib[size] = float(row["mem_gb"])
        # malloc keeps 0.04 GiB more in some runs than in others
        assert float(together[size]["mem_gb"]) == pytest.approx(gib[size], abs=0.15)
    assert gib["16"] > gib["1"] + 0.5


def check_killed(
    folder: Path, recipe: Path, trials: list[Trial], options: list[str], *, kills: int, faults: int
) -> None:
    """Kill a sweep with faults several times, and compare it with an undisturbed one.

    Args:
        folder: for the two sweeps
        recipe: the recipe to measure
        trials: the trials that the options choose
        options: of the command
        kills: number of kills
        faults: number of injected faults
    """
    step = len(trials) // faults
    faults_of_trials = {trials[step * n].key: list(OUTCOMES)[n] for n in range(faults)}
    randomly = random.Random(kills)
    sweeps = []
    for name, count in (("disturbed", kills), ("undisturbed", 0)):
        (folder / name).mkdir()
        sweep = Sweep(folder / name, recipe, *options, fake=False)
        sweep.inject(faults_of_trials)
        for number in range(count):
            process = sweep.start()
            # At random instants of a trial, at least one of which has been measured.
            deadline = time.monotonic() + SECONDS_OF_A_SWEEP
            while len(results(sweep)) < min(1 + number, len(trials) - 1):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(randomly.uniform(0.0, 5.0))
            sweep.kill(process)
        done = sweep.run(seconds=SECONDS_OF_A_SWEEP)
        assert done.returncode == 1, done.stdout
        assert not sweep.processes()
        sweeps.append(sweep)
    disturbed, undisturbed = sweeps
    assert disturbed.untimed_rows() == undisturbed.untimed_rows()
    rows = {row["trial"]: row for row in disturbed.rows()}
    assert rows.keys() == {trial.key for trial in trials}
    for key, fault in faults_of_trials.items():
        assert rows[key]["outcome"] == OUTCOMES[fault], rows[key]
    measured = [key for key, row in rows.items() if row["outcome"] == "ok"]
    assert len(measured) == len(trials) - faults
    assert set(disturbed.finished()) == set(measured)
    assert len(disturbed.finished()) <= len(measured) + kills
    print(done.stdout[-1500:])


@pytest.mark.exhaustive
def test_a_killed_sweep_of_real_ranks_continues(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "small.toml")
    options = ["--top", "8", "--steps", "2", "--warm-up", "1", "--seconds-per-trial", "8"]
    trials = Sweep(tmp_path, recipe).trials(top=8, steps=2, warm_up=1)
    check_killed(tmp_path, recipe, trials, options, kills=3, faults=2)


@pytest.mark.exhaustive
def test_a_sweep_of_tiny_survives_ten_kills(tmp_path: Path) -> None:
    """More than 40 layouts, ten kills and injected faults; see also test_sweep.py."""
    options = ["--layouts", "all", "--steps", "2", "--warm-up", "1", "--seconds-per-trial", "60"]
    request = {"layouts": "all", "steps": 2, "warm_up": 1}
    trials = Sweep(tmp_path, DEFAULT_RECIPE).trials(**request)
    assert len(trials) > 40
    check_killed(tmp_path, DEFAULT_RECIPE, trials, options, kills=10, faults=4)


@pytest.mark.exhaustive
def test_a_trial_costs_little_beyond_its_steps(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, DEFAULT_RECIPE, "--layouts", "all", "--steps", "2", fake=False)
    done = sweep.run(seconds=SECONDS_OF_A_SWEEP)
    overhead = float(re.search(r"([\d.]+) s of overhead per trial", done.stdout)[1])
    assert overhead < MAX_OVERHEAD_SECONDS, done.stdout


TWO_NODES = WorkerKind(nodes=2, gpus_per_node=1, gpu="cpu", deterministic=False, pipelined=False)


@pytest.fixture
def files(tmp_path: Path) -> WorkerFiles:
    files = WorkerFiles(tmp_path / "workers")
    files.create(rank_settings(TWO_NODES), TWO_NODES.size)
    files.heartbeat.touch()
    return files


def test_srun_passes_on_the_address_although_the_job_exports_nothing(
    files: WorkerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun obeys SLURM_EXPORT_ENV=NONE unless it gets the option."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$MASTER_ADDR $*"\n')
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node7\n")
    for stub in ("srun", "scontrol"):
        (tmp_path / stub).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[7-8]")
    processes = SlurmLauncher(Path("sweep.py")).start(files, TWO_NODES)
    processes.wait(30)
    words = files.launcher_log.read_text().split()
    assert words[0] == "node7" and "--export=ALL" in words[: words.index(sys.executable)]


def test_a_rank_without_an_address_fails_at_once(files: WorkerFiles) -> None:
    variables = {name: text for name, text in os.environ.items() if name != "MASTER_ADDR"}
    command = [sys.executable, REPOSITORY / "recipes" / "sweep.py", "--rank-of", files.folder]
    with subprocess.Popen(command, env=variables | {"RANK": "1", "WORLD_SIZE": "2"}) as rank:
        deadline = time.monotonic() + 60
        while read_message(files.failed, START) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        rank.kill()
    message = read_message(files.failure(1), START)
    assert message and message["outcome"] == "rejected"
    assert message["reason"].startswith("MASTER_ADDR is not set")
