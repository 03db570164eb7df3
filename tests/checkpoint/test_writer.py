"""Failed saves: a disk that is full before or during a save, and disks that are not shared."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import tomli_w

from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks, start_ranks
from tests.test_pretrain import IMPATIENT, events, metrics
from threefold.checkpoint import retention
from threefold.checkpoint import writer as writer_module
from threefold.checkpoint.format import FileRecord, find_damages
from threefold.checkpoint.retention import RESERVED_BYTES_AT_THE_END, checkpoint_bytes
from threefold.checkpoint.writer import CheckpointWriter, Counters, Written, united
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.prove.training import start, train_step
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress, checkpoint_name, published, step_of
from threefold.run_folder.json_lines import LineFile

# pretrain.py on a disk that is full when step 4 is saved. A file system with a quota still reports
# free space.
FILLING = """
import os, sys
from pathlib import Path
from recipes import pretrain
from threefold.checkpoint.writer import CheckpointWriter

disk, quota = Path(sys.argv.pop(1)), sys.argv.pop(1) == "quota"
look = CheckpointWriter._lack_of_room

def fill_and_look(self):
    with (disk / "ballast").open("ab", buffering=0) as ballast:
        try:
            while ballast.write(bytes(4096)):
                pass
        except OSError:
            pass
    return (None, False) if quota else look(self)

CheckpointWriter._lack_of_room = fill_and_look
pretrain.main()
"""
DISK_BYTES = 72 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system for the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def recipe_file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = changed(
        small_recipe(corpus),
        layout__pipeline=2,
        training__steps=8,
        training__evaluate_every=0,
        checkpoint__every=2,
        checkpoint__keep=1,
    )
    file = tmp_path_factory.mktemp("recipe") / "small.toml"
    file.write_text(tomli_w.dumps(table))
    return file


@pytest.fixture(scope="module")
def undisturbed(recipe_file: Path) -> Path:
    """Return the folder of a run on a large disk."""
    folder = recipe_file.parent / "undisturbed"
    run(recipe_file, folder, start=["recipes/pretrain.py"])
    return folder


def run(recipe: Path, folder: Path, *settings: str, code: int = 0, start: list[str]) -> str:
    """Run the command on two ranks; return their output."""
    options = [word for setting in settings for word in ("--set", setting)]
    arguments = [*start, str(recipe), "--run-dir", str(folder), *options]
    codes, outputs = start_ranks(2, arguments, folder=recipe.parent, seconds=300)
    assert codes == [code, code], outputs
    assert "Traceback" not in "".join(outputs), outputs
    return "".join(outputs)


def steps_of(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, and check that all are undamaged."""
    found = published(folder / "checkpoints")
    assert not [damage for path in found for damage in find_damages(path)]
    return [step_of(path) for path in found]


@pytest.mark.parametrize(
    ("kind", "on_failure"),
    [("quota", "continue"), pytest.param("room is looked at", "stop", marks=pytest.mark.long)],
)
def test_a_full_disk_destroys_no_checkpoint(
    kind: str, on_failure: str, disk: Path, recipe_file: Path, undisturbed: Path
) -> None:
    folder, healthy = disk / "run", ["recipes/pretrain.py"]
    filling = ["-c", FILLING, str(disk), kind]
    run(recipe_file, folder, "training.steps=3", start=healthy)
    assert steps_of(folder) == [3]
    settings = [f"checkpoint.on_failure={on_failure}", "checkpoint.room_seconds=0"]
    output = run(recipe_file, folder, *settings, code=3, start=filling)
    reason = "No space left on device" if kind == "quota" else "MB free, but a checkpoint needs"
    assert "step 4 is not saved: " in output and reason in output
    assert ("step 8 is not saved: " in output) == (on_failure == "continue")
    assert steps_of(folder) == [3] and not list((folder / "checkpoints").glob("*.incomplete"))
    expected = metrics(undisturbed)
    assert metrics(folder) == expected[: len(metrics(folder))]

    output = run(recipe_file, folder, code=2, start=["-c", IMPATIENT])
    assert "MB free, but a checkpoint needs " in output and "steps" not in output

    (disk / "ballast").unlink()
    output = run(recipe_file, folder, start=healthy)
    assert "resumed after step 3" in output and steps_of(folder) == [8]
    assert metrics(folder) == expected
    assert events(folder)[-1] == ("end", 8)


def test_the_files_and_the_problem_of_all_ranks_are_united() -> None:
    a, b = FileRecord(bytes=4, sha256="a"), FileRecord(bytes=8, sha256="b")
    failed = Written({"weights-1": b}, {"w/bias": "weights-1"}, "weights-1: No space left")
    found = united({1: failed, 0: Written({"weights-0": a}, {"w": "weights-0"})})
    assert list(found.files.items()) == [("weights-0", a), ("weights-1", b)]
    assert found.tensors == {"w": "weights-0", "w/bias": "weights-1"}
    assert found.problem == "rank 1: weights-1: No space left"
    assert united({0: Written({"weights-0": a})}).problem is None


def test_lines_that_a_full_disk_does_not_take_come_later(disk: Path) -> None:
    lines, ballast = LineFile(disk / "lines", keys={"step": (int,)}), disk / "ballast"
    lines.append({"step": 1})
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free))
    long = "x" * 10_000
    lines.append({"step": 2, "text": long})
    assert (disk / "lines").read_text() == '{"step": 1}\n'
    lines.append({"step": 3})
    ballast.unlink()
    lines.append({"step": 4})
    steps = [json.loads(line)["step"] for line in (disk / "lines").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]


def test_storage_that_is_not_shared_yields_no_checkpoint(corpus: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(changed(small_recipe(corpus), layout__pipeline=2), "small")
    problems = run_ranks(2, save_into_folders_of_their_own, recipe, tmp_path)
    assert problems[0] == problems[1]
    assert (
        "was written and is now missing or incomplete; use a --run-dir on storage that"
        in problems[0]
    )
    assert not published(tmp_path / "0" / "checkpoints")


@pytest.mark.parametrize(
    ("problems", "seconds", "says"),
    [
        (["no room", "no room", None], 60, None),
        (["No space left on device", None], 60, None),
        (["Disk quota exceeded", None], 60, None),
        (["no room"] * 100, 0.3, "step 2 is not saved: no room"),
        (["Input/output error", None], 60, "step 2 is not saved: rank 0: Input/output error"),
    ],
    ids=["no room", "full", "quota", "no longer", "another reason"],
)
def test_the_last_save_waits_for_room(
    problems: list[str | None], seconds: float, says: str | None, corpus: Path, tmp_path: Path
) -> None:
    recipe = parse_recipe(changed(small_recipe(corpus), training__steps=2), "small")
    found, told, steps = run_ranks(1, save_on_a_full_disk, recipe, problems, seconds, tmp_path)[0]
    assert found == says
    waits = 0 if says and "Input/output" in says else 1
    assert len(told) == waits and steps == ([] if says else [2])
    assert all("saved as soon as there is space" in text and problems[0] in text for text in told)


def save_on_a_full_disk(
    recipe: Recipe, problems: list[str | None], seconds: float, folder: Path
) -> tuple[str | None, list[str], list[int]]:
    """Save the last step while the disk or the system reports problems, one for each try."""
    problems, told = list(problems), list[str]()
    engine, data = start(recipe, join_world())
    train_step(engine, data, 1)
    train_step(engine, data, 2)
    facts = {
        "recipe": recipe,
        "dims": recipe.parallel_dims(LaunchEnvironment()),
        "data": data.fingerprint,
    }
    own = RunFolder(folder / "run")
    own.path.mkdir()
    writer_module.SECONDS_BETWEEN_TRIES = 0.02
    writer = CheckpointWriter(engine.state, own, **facts)
    settings = recipe.checkpoint.model_copy(update={"room_seconds": seconds})
    writer.recipe = recipe.model_copy(update={"checkpoint": settings})
    write = writer.write_files
    if problems[0] == "no room":
        writer._lack_of_room = lambda: (problems[0], problems.pop(0) is not None)
    else:
        writer.write_files = lambda workspace: write(workspace, problems.pop(0))
    writer.on_wait = told.append
    with writer:
        problem = writer.save(data.progress_after(2)) or writer.wait()
    return problem, told, [step_of(path) for path in published(own.checkpoints)]


@pytest.fixture
def lone_writer(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CheckpointWriter]:
    """Yield a writer without an engine, on a disk that is full until its debris is deleted."""
    writer = CheckpointWriter.__new__(CheckpointWriter)
    writer.folder, writer.rank = RunFolder(tmp_path), 0
    writer.recipe = parse_recipe(changed(small_recipe(corpus), checkpoint__room_seconds=1), "small")
    writer.is_asked_to_stop, writer.reserve = lambda: False, 0
    monkeypatch.setattr(writer, "_from_rank_0", lambda value: value, raising=False)
    monkeypatch.setattr(writer_module, "SECONDS_BETWEEN_TRIES", 0.01)
    yield writer


def test_unfinished_saves_are_deleted_before_the_disk_counts_as_full(
    lone_writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    debris = lone_writer.folder.checkpoints / "step-0000002.0a1b.incomplete"
    debris.mkdir(parents=True)
    monkeypatch.setattr(
        writer_module, "lack_of_room", lambda *_, **__: "no room" if debris.exists() else None
    )
    assert lone_writer._lack_of_room() == (None, False) and not debris.exists()


def test_a_save_at_the_end_of_a_process_needs_a_smaller_reserve(
    lone_writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = checkpoint_bytes(lone_writer.recipe)
    free = size + RESERVED_BYTES_AT_THE_END
    monkeypatch.setattr(retention.shutil, "disk_usage", lambda _: mock.Mock(free=free))
    lone_writer._thread = lone_writer._broken = None
    lone_writer._told, lone_writer._begin = True, mock.Mock()  # type: ignore[method-assign]
    problem = lone_writer.save(Progress(13))
    assert problem and "67.2 MB are reserved" in problem and not lone_writer._begin.called
    assert lone_writer.save(Progress(13), ends_process=True) is None and lone_writer._begin.called
    free -= 1
    problem = lone_writer.save(Progress(13), ends_process=True)
    assert problem and "1.1 MB are reserved" in problem
    rerun = (
        f"free space until a start has the {retention.room_of_a_start(lone_writer.recipe)} that it "
        f"needs, then rerun the same command to"
    )
    assert lone_writer.remedy() == f"no checkpoint exists; {rerun} start again"
    for step in (9, 10, 11, 15):  # 11 is damaged, 15 belongs to an abandoned branch
        (lone_writer.folder.checkpoints / checkpoint_name(step)).mkdir(parents=True)
    lone_writer.damaged = [lone_writer.folder.checkpoints / checkpoint_name(11)]
    assert lone_writer.remedy() == f"the newest checkpoint is step 10; {rerun} resume from it"
    lone_writer._problem = "step 13 is not saved: weights-0: Input/output error"
    assert lone_writer.remedy().endswith("step 10; rerun the same command to resume from it")


def test_the_last_save_waits_only_for_space_and_until_a_request_to_stop(
    lone_writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters, requests, told = Counters(0, None), [False, False, True], list[str]()
    pauses: list[bool] = []
    lone_writer.on_wait, lone_writer.on_pause = told.append, pauses.append
    lone_writer.folder.checkpoints.write_text("not a folder")
    problem = lone_writer._write_patiently(Progress(20), None, counters)
    assert problem and "step 20 is not saved" in problem and "File exists" in problem
    assert not told and not pauses
    lone_writer.folder.checkpoints.unlink()
    monkeypatch.setattr(writer_module, "lack_of_room", lambda *_, **__: "no room")
    lone_writer.is_asked_to_stop = lambda: requests.pop(0)
    problem = lone_writer._write_patiently(Progress(20), None, counters)
    assert problem == "step 20 is not saved: no room" and not requests and len(told) == 1
    assert "(waiting up to 1 s): no room" in told[0]
    assert pauses == [True, False] * 2  # so that supervision does not take the waits for a hang


def save_into_folders_of_their_own(recipe: Recipe, folder: Path) -> str | None:
    """Train one step on each rank, then save into a folder that only this rank sees."""
    world = join_world()
    engine, data = start(recipe, world)
    train_step(engine, data, 1)
    own = RunFolder(folder / str(world.rank))
    own.path.mkdir(parents=True)
    facts = {"recipe": recipe, "dims": recipe.parallel_dims(world), "data": data.fingerprint}
    writer = CheckpointWriter(engine.state, own, **facts)
    return writer.save(data.progress_after(1)) or writer.wait()
