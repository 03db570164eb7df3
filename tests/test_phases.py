"""A run in three phases: killed, handed from layout to layout, and branched."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from models.errors import UserError
from tests.conftest import changed, in_turn, small_recipe
from tests.ranks import program_on_ranks, run_ranks, start_ranks
from threefold.checkpoint.compatibility import check_same_run
from threefold.checkpoint.format import Manifest
from threefold.checkpoint.resume import ResumePoint, _at
from threefold.checkpoint.state import CheckpointReader
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import REPOSITORY, load_recipe, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.data.corpus import fingerprint
from threefold.data.dataset import TrainingData
from threefold.engine.build import build_from_recipe
from threefold.prepare_data.sample_lookup import sample_lines
from threefold.pretrain.setup import command_of
from threefold.report.run_record import marks_of, read_run
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import History, LeftPart, Progress
from threefold.runtime.launchers import free_port
from threefold.runtime.processes import start_processes

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "validation_loss")
SECONDS = 600
STEPS = 15
KILLED = """
import os, signal
from recipes import pretrain

os.execve = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
pretrain.main()
"""


@pytest.fixture(scope="module")
def table(corpus: Path) -> dict[str, Any]:
    """A growing batch of a mixture; then longer sequences and a larger batch; then the decay."""
    train, extra = str(corpus / "train"), str(corpus / "extra")
    for suffix in (".bin", ".idx"):
        shutil.copyfile(corpus / f"validation{suffix}", f"{extra}{suffix}")
    table = changed(
        small_recipe(corpus),
        name="staged",
        training={"steps": STEPS, "evaluate_every": 5, "evaluation_batches": 1},
        checkpoint__every=2,
        checkpoint__keep=20,
        batch__ramp={"start_sequences": 4, "increment": 4, "samples": 8},
        optimizer__schedule={"warmup_steps": 2, "decay": "constant"},
        data__train=[{"path": train, "weight": 0.7}, {"path": extra, "weight": 0.3}],
    )
    long = {
        "name": "long",
        "start_step": 6,
        "model": {"sequence_length": 64, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "batch": {"global_sequences": 16},
        "data": {"train": [{"path": extra, "weight": 0.5}, {"path": train, "weight": 0.5}]},
    }
    decay = {
        "name": "decay",
        "start_tokens": (2 * 4 + 3 * 8) * 32 + 5 * 16 * 64,
        "data": {"train": [{"path": train}]},
        "optimizer": {
            "schedule": {
                "warmup_steps": 0,
                "decay": "wsd",
                "decay_steps": 5,
                "decay_shape": "sqrt",
            }
        },
    }
    return table | {"phase": [long, decay]}


@pytest.fixture(scope="module")
def recipe_file(table: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "staged.toml"
    file.write_text(tomli_w.dumps(table))
    return file


@pytest.fixture(scope="module")
def undisturbed(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an undisturbed run of one process."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    run_forked(folder, recipe_file)
    return folder


def run_forked(folder: Path, *words: object) -> None:
    """Run one rank, forked from a process that has imported torch, until it has finished."""
    folder.mkdir(exist_ok=True)
    command = ["recipes/pretrain.py", *map(str, words), "--run-dir", str(folder)]
    codes, outputs = start_ranks(1, command, folder=folder, seconds=SECONDS)
    assert codes == [0], outputs


def wait_for_step(folder: Path, step: int, rank: BaseProcess) -> bool:
    """Wait until a step is done; return False if the run ends before."""
    for _ in range(100 * SECONDS):
        if any(line["step"] >= step for line in RunFolder(folder).read_metrics()):
            return True
        if not rank.is_alive():
            return False
        time.sleep(0.01)
    raise TimeoutError(f"step {step} of {folder}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = RunFolder(folder).read_metrics()
    return [{key: line[key] for key in EXACT if key in line} for line in lines]


def largest_difference(folder: Path, expected: Path) -> float:
    """Return the largest relative difference of any metric."""
    found, reference = metrics(folder), metrics(expected)
    assert [line["step"] for line in found] == [line["step"] for line in reference]
    return max(
        abs(line[key] - other[key]) / abs(other[key] or 1)
        for line, other in zip(found, reference, strict=True)
        for key in other
    )


def names(folder: Path) -> list[str]:
    return [event["event"] for event in RunFolder(folder).read_events()]


def test_a_run_passes_through_its_phases(undisturbed: Path, table: dict[str, Any]) -> None:
    lines, plan = metrics(undisturbed), PhasePlan(parse_recipe(table, "test"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in lines] == [
        plan.tokens_before(step + 1) for step in range(1, STEPS + 1)
    ]
    rates = [line["learning_rate"] for line in lines]
    assert len(set(rates[1:10])) == 1 and rates[10] < rates[9] and rates[-1] == 0
    events = RunFolder(undisturbed).read_events()
    phases = [(e["step"], e["phase"]) for e in events if e["event"] == "phase"]
    assert phases == [(6, "long"), (11, "decay")]
    # Only the longer sequences need another engine. The process is the same one.
    assert [e["step"] for e in events if e["event"] == "boundary"] == [5]
    assert [e["step"] for e in events if e["event"] in ("start", "resume")] == [0, 5]
    manifest = Manifest.read(undisturbed / "checkpoints" / f"step-{STEPS:07d}")
    assert (manifest.tokens, manifest.samples) == (lines[-1]["tokens"], 32 + 10 * 16)
    assert manifest.read_parts == [[0, 32], [1, 32 + 5 * 16]]
    assert load_recipe(undisturbed / "recipe.toml").phase == plan.recipe.phase


def replay(file: Path, checkpoint: Path, steps: range) -> list[tuple[float, float]]:
    """Train steps after a checkpoint with the plain recipe of their phase: loss and norm of each.

    The learning rate is constant here.
    """
    world = LaunchEnvironment()
    start_processes(world)
    whole = load_recipe(file)
    recipe = PhasePlan(whole).at(steps[0]).recipe
    dims = recipe.parallel_dims(world)
    engine = build_from_recipe(recipe, dims, build_deepspeed_config(recipe, dims))
    manifest = Manifest.read(checkpoint)
    engine.load(CheckpointReader(checkpoint, manifest))
    data = TrainingData(whole, dims, 0)
    data.resume(manifest.progress, dims)
    rate = recipe.optimizer.learning_rate
    results = [engine.train_step(data.micro_batches(step), rate) for step in steps]
    return [(result.loss, result.grad_norm) for result in results]


def test_the_steps_of_a_phase_follow_its_recipe(undisturbed: Path, recipe_file: Path) -> None:
    """The engine of the phase has its length and positions, and the moments of the run so far."""
    checkpoint = undisturbed / "checkpoints" / "step-0000005"
    (found,) = run_ranks(1, replay, recipe_file, checkpoint, range(6, 9))
    assert found == [(line["loss"], line["grad_norm"]) for line in metrics(undisturbed)[5:8]]


def test_a_killed_run_is_equal_bit_for_bit(
    undisturbed: Path, recipe_file: Path, tmp_path: Path
) -> None:
    """The process is killed in place of being replaced; a long test kills it at random."""
    folder = tmp_path / "killed"
    folder.mkdir()
    words = ["-c", KILLED, str(recipe_file), "--run-dir", str(folder)]
    codes, outputs = start_ranks(1, words, folder=folder, seconds=SECONDS)
    assert codes == [-signal.SIGKILL] and metrics(folder)[-1]["step"] == 5, outputs
    run_forked(folder, recipe_file)
    assert metrics(folder) == metrics(undisturbed)


@pytest.mark.long
def test_a_new_engine_changes_no_number(table: dict[str, Any], tmp_path: Path) -> None:
    """A phase with recomputation needs a new engine, but computes the same."""
    phase = {"name": "recompute", "start_step": 4, "layout": {"recompute": "full"}}
    for name, phases in (("one", []), ("two", [phase])):
        file = tmp_path / f"{name}.toml"
        short = changed(table, training__steps=6, phase=phases)
        file.write_text(tomli_w.dumps(short))
        run_forked(tmp_path / name, file)
    assert "boundary" in names(tmp_path / "two")
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")


LAYOUTS: Sequence[tuple[int, Sequence[str]]] = (
    (1, ()),
    (2, ("layout.pipeline=2", "batch.micro_sequences=1")),
    (2, ("layout.tensor=2", "layout.sequence_parallel=true")),
    (2, ("deepspeed=ds_configs/zero3_fp32.json",)),
    (4, ("layout.pipeline=2", "layout.tensor=2", "layout.schedule=zb-h1")),
)


@pytest.mark.long
def test_a_run_handed_through_layouts_is_equal(
    undisturbed: Path, recipe_file: Path, tmp_path: Path
) -> None:
    """Each layout is killed at a random instant; pipeline stages pass a boundary in theirs."""
    folder, logs, chance = tmp_path / "handed", tmp_path / "logs", random.Random(2)
    logs.mkdir()
    for (count, settings), step in zip(LAYOUTS, (3, 7, 9, 12, STEPS), strict=True):
        command = ["recipes/pretrain.py", str(recipe_file), "--run-dir", str(folder)]
        command += [word for setting in settings for word in ("--set", setting)]
        if step == STEPS:
            codes, outputs = start_ranks(count, command, folder=logs, seconds=SECONDS)
            assert codes == [0] * count, outputs
            continue
        with program_on_ranks(count, command, folder=logs) as ranks:
            if wait_for_step(folder, step, ranks.processes[0]):
                time.sleep(chance.uniform(0, 0.3))
    assert largest_difference(folder, undisturbed) < 1e-6


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("torchrun", marks=in_turn(0, pytest.mark.long)),
        pytest.param("deepspeed", marks=in_turn(1, pytest.mark.long)),
    ],
)
def test_launchers_pass_through_a_boundary(
    undisturbed: Path, recipe_file: Path, tmp_path: Path, launcher: str
) -> None:
    """torchrun's store still holds the keys of the first process group."""
    port = str(free_port())
    words = {
        # Without a folder of its own, torchrun leaves one in the temporary folder.
        "torchrun": ["--nproc_per_node=2", "--master_port", port, "--log-dir", str(tmp_path)],
        "deepspeed": ["--num_gpus", "2", "--master_port", port],
    }[launcher]
    command = [str(Path(sys.executable).with_name(launcher)), *words, "recipes/pretrain.py"]
    command += [str(recipe_file), "--run-dir", str(tmp_path / "run")]
    command += ["--set", "layout.pipeline=2", "--resume", "never"]
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | variables, capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "boundary" in names(tmp_path / "run")
    assert largest_difference(tmp_path / "run", undisturbed) < 1e-6


def test_the_ledger_names_documents_and_phase(
    undisturbed: Path, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = parse_recipe(table, "test")
    heads = [next(sample_lines(recipe, undisturbed, step, text=False)) for step in (5, 6, 11)]
    assert heads == [
        'step 5 (phase "first") reads samples 24 .. 31, windows of 32 + 1 tokens',
        'step 6 (phase "long") reads samples 32 .. 47, windows of 64 + 1 tokens',
        'step 11 (phase "decay") reads samples 112 .. 127, windows of 64 + 1 tokens',
    ]
    lines = list(sample_lines(recipe, undisturbed, 6, text=False))
    assert len(lines) == 17
    corpora = [line.split(": ")[1].split(" window")[0].rpartition("/")[2] for line in lines[1:]]
    assert sorted(set(corpora)) == ["extra", "train"] and corpora.count("extra") == 8
    assert all("document " in line for line in lines[1:])


def test_a_branch_records_its_parent(
    undisturbed: Path, table: dict[str, Any], tmp_path: Path
) -> None:
    """A run branches after step 8 into a recipe with another last phase."""
    decay = changed(table["phase"][1], start_tokens=None, start_step=9, data=None)
    other = table | {"name": "other", "phase": [table["phase"][0], decay]}
    other["training"] = other["training"] | {"steps": 13}
    file, folder = tmp_path / "other.toml", tmp_path / "other"
    file.write_text(tomli_w.dumps(other))
    checkpoint = undisturbed / "checkpoints" / "step-0000008"
    run_forked(folder, file, "--resume", checkpoint)
    assert metrics(folder)[:8] == metrics(undisturbed)[:8]
    parent = {
        "checkpoint": str(checkpoint),
        "run": str(undisturbed),
        "name": "staged",
        "step": 8,
    }
    (branch,) = (e for e in RunFolder(folder).read_events() if e["event"] == "branch")
    assert branch["parent"] == parent
    assert Manifest.read(folder / "checkpoints" / "step-0000013").parent == parent


def test_the_records_of_earlier_versions_are_read(undisturbed: Path, tmp_path: Path) -> None:
    """Earlier versions called a phase a stage, in manifests, events and recorded recipes."""
    for name in ("recipe.toml", "events.jsonl", "metrics.jsonl"):
        text = (undisturbed / name).read_text()
        (tmp_path / name).write_text(re.sub(r"\bphase\b", "stage", text))
    now, before = read_run(undisturbed, "run"), read_run(tmp_path, "run")
    assert before.recipe == now.recipe and now.recipe and len(now.recipe.phase) == 2
    assert marks_of(before.events) == marks_of(now.events)
    assert {"phase", "boundary"} <= {event["event"] for event in before.events}
    file = undisturbed / "checkpoints" / f"step-{STEPS:07d}" / "manifest.json"
    text = re.sub(r"\bphase\b", "stage", file.read_text())
    assert Manifest.parse(text.encode(), file) == Manifest.read(file.parent)


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (8, {"start_step": 5}, 'another phase "long": first_step = 6 (here 5)'),
        (8, {"model": {"sequence_length": 128}}, "sequence_length = 64 (here 128)"),
        (8, {"data": {}}, "another phase"),
        (8, {"start_step": 9}, 'with phase "long" from step 6 on, which this recipe lacks'),
        (4, {"start_step": 4}, 'without phase "long", which begins with step 4'),
        (4, {"start_step": 5, "model": {"sequence_length": 128}}, ""),
        (8, {"name": "longer"}, ""),
        (8, {"batch": {}}, ""),
    ],
)
def test_only_later_phases_may_differ(
    undisturbed: Path, table: dict[str, Any], step: int, changes: dict[str, Any], message: str
) -> None:
    checkpoint = undisturbed / "checkpoints" / f"step-{step:07d}"
    long = changed(table["phase"][0], **changes)
    recipe = parse_recipe(table | {"phase": [long]}, "test")
    manifest = Manifest.read(checkpoint)
    with pytest.raises(UserError) if message else contextlib.nullcontext() as raised:
        check_same_run(checkpoint, manifest, recipe, fingerprint(recipe))
    assert not message or message in str(raised.value)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_step": 5}, ""),
        ({"name": "longer"}, ""),
        ({"model": {"sequence_length": 128}}, "sequence_length = 64 (here 128)"),
        ({"data": {}}, "rolled back, so that the phase cannot change: "),
        ({"start_step": 5, "data": {}}, "phase cannot change"),
        (None, "this recipe lacks the phase"),
    ],
)
@pytest.mark.parametrize("saved", [False, True], ids=["in an event", "in a checkpoint"])
def test_a_phase_from_which_a_run_has_rolled_back_keeps_its_data(
    table: dict[str, Any], changes: dict[str, Any] | None, message: str, saved: bool
) -> None:
    before = parse_recipe(table, "test")
    first, *later = table["phase"]
    phases = [] if changes is None else [changed(first, **changes), *later]
    recipe = parse_recipe(table | {"phase": phases}, "test")
    rolled_back = Progress(4, 60, (LeftPart(0, 40), LeftPart(1, 60)))
    manifest = SimpleNamespace(
        step=4, progress=rolled_back if saved else Progress(4, 32), data=fingerprint(before),
        recipe=before.model_dump(mode="json"), has_moments=True, parent=None,
    )  # fmt: skip
    history = History()
    if not saved:
        history.rolled_back[4] = 60
        history.left_parts[4, 60] = rolled_back.left_parts
        history.data_parts[4, 60] = fingerprint(before)["parts"]
    found = ResumePoint(SimpleNamespace(manifest=manifest))  # type: ignore[arg-type]
    with pytest.raises(UserError) if message else contextlib.nullcontext() as raised:
        check_same_run(Path("step-4"), manifest, recipe, fingerprint(recipe))  # type: ignore[arg-type]
        _at(found, history, fingerprint(recipe), saved=4)
    assert not message or message in str(raised.value)  # type: ignore[union-attr]


def test_the_command_of_the_next_process_resumes() -> None:
    words = ["r.toml", "--resume", "never", "--resume-once=a", "--set", "seed=1", "--lock=7"]
    command = command_of([*words, "--continued-at=1.5"], 2.5, 9)
    assert command[2:] == ["r.toml", "--set", "seed=1", "--continued-at=2.5", "--lock=9"]
    assert json.dumps(command)  # strings only: execve accepts nothing else
