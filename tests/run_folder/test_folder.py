import errno
import fcntl
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from models.errors import UserError
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress
from threefold.run_folder.json_lines import LineFile
from threefold.run_folder.lock import FolderLock

HOLD = (
    "import sys, time, pathlib; sys.path[0] = '.'\n"
    "from threefold.run_folder.folder import RunFolder\n"
    "RunFolder(pathlib.Path(sys.argv[1])).hold()"
)


def test_a_dead_process_releases_the_folder_and_a_live_one_keeps_it(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], cwd=REPOSITORY)
    holder.wait(timeout=30)  # it has locked the folder and ended
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    second = subprocess.run(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert second.returncode != 0
    assert "is in use by process" in second.stderr and "--run-dir" in second.stderr


def test_metrics_of_repeated_steps_are_dropped(tmp_path: Path, small) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    for step in range(1, 6):
        folder.metric({"step": step, "loss": 0.1 + 0.2})
    folder.prepare(parse_recipe(small, "test"), Progress(3, 24))
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    assert folder.read_metrics()[0]["loss"] == 0.1 + 0.2  # every digit


def test_whole_metrics_are_not_written_again(tmp_path: Path, small: dict) -> None:
    """After a million steps, every start would take half a minute longer."""
    folder, recipe = RunFolder(tmp_path), parse_recipe(small, "test")
    folder.prepare(recipe, Progress())
    for step in (1, 2):
        folder.metric({"step": step, "loss": 1.0})
    written = folder.metrics.stat().st_ino
    folder.prepare(recipe, Progress(2, 16))
    assert folder.metrics.stat().st_ino == written
    with folder.metrics.open("a") as stream:
        stream.write('{"step": 3')
    folder.prepare(recipe, Progress(2, 16))
    assert folder.metrics.stat().st_ino != written
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]


def test_only_the_lost_metrics_are_parsed(tmp_path: Path, small: dict) -> None:
    """A million lines take a quarter of a minute."""
    folder, recipe = RunFolder(tmp_path), parse_recipe(small, "test")
    folder.prepare(recipe, Progress())
    for step in range(1, 10):
        folder.metric({"step": step, "step_seconds": 0.5})
    with mock.patch.object(LineFile, "_parse", autospec=True, side_effect=LineFile._parse) as parse:
        folder.prepare(recipe, Progress(7, 56))
    assert parse.call_count == 3  # steps 9, 8 and 7
    assert [line["step"] for line in folder.read_metrics()] == list(range(1, 8))
    (repeat,) = folder.read_events()
    assert (repeat["event"], repeat["steps"], repeat["seconds"]) == ("repeat", 2, 1.0)


def test_a_fresh_start_moves_the_old_run_aside(tmp_path: Path, small) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    folder.metric({"step": 1})
    folder.event("start", 0)
    folder.move_aside()
    folder.prepare(parse_recipe(small, "test"), Progress())
    assert folder.read_metrics() == [] and not folder.events.exists()
    (aside,) = tmp_path.glob("run.*")
    assert RunFolder(aside).read_metrics() == [{"step": 1}]
    with pytest.raises(UserError, match="is in use"):
        RunFolder(tmp_path / "run").hold()


def test_moving_a_run_aside_keeps_the_link_to_its_folder(tmp_path: Path, small) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "large disk")
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    folder.metric({"step": 1})
    folder.move_aside()
    folder.prepare(parse_recipe(small, "small"), Progress())
    assert (tmp_path / "run").is_symlink() and (tmp_path / "run" / "recipe.toml").is_file()
    (aside,) = tmp_path.glob("large disk.*")
    assert (aside / "metrics.jsonl").is_file()


def test_metrics_that_a_rollback_discarded_are_copied_by_the_next_start(
    tmp_path: Path, small
) -> None:
    """The run was killed after the rollback was recorded and before its metrics were copied."""
    folder, recipe = RunFolder(tmp_path / "run"), parse_recipe(small, "test")
    folder.hold()
    for step in range(1, 8):
        folder.metric({"step": step, "tokens": 8 * 32 * step})
    folder.prepare(recipe, Progress(6, 48))  # step 7 will be repeated with the same samples
    assert not list(folder.path.glob("metrics.*.jsonl"))
    folder.prepare(recipe, Progress(4, 48))  # steps 5 and 6 will read other samples
    (copy,) = folder.path.glob("metrics.*.jsonl")
    assert [line["step"] for line in LineFile(copy, keys={"step": (int,)}).read()] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3, 4]


def test_runs_moved_aside_in_the_same_second_are_all_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    for step in (1, 2, 3):
        folder.metric({"step": step})
        folder.move_aside()
    kept = [RunFolder(path).read_metrics()[0]["step"] for path in tmp_path.glob("run.*")]
    assert sorted(kept) == [1, 2, 3]


def test_waiting_lines_of_discarded_steps_are_copied_and_dropped(
    tmp_path: Path, small, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    folder.metric({"step": 1})
    write = LineFile._write

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(LineFile, "_write", full)
    for step in (2, 3):
        folder.metric({"step": step})
    (missing,) = folder.missing_lines()
    assert f"{folder.metrics} lacks the metrics of 2 steps, from step 2 on" in missing
    assert missing.endswith("resuming the run repeats every step")  # it has no checkpoint
    (folder.checkpoints / "step-0000001").mkdir(parents=True)
    assert folder.missing_lines()[0].endswith("every step since its newest checkpoint")
    monkeypatch.setattr(LineFile, "_write", write)
    folder.prepare(parse_recipe(small, "test"), Progress(2, 16), branching=True)
    folder.metric({"step": 3})
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    (copy,) = folder.path.glob("metrics.*.jsonl")
    assert [line["step"] for line in LineFile(copy, keys={"step": (int,)}).read()] == [1, 2, 3]


@pytest.mark.parametrize("hidden", ["boot_id", "pid"])
def test_a_folder_can_be_locked_without_access_to_proc(
    hidden: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, *_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        if hidden == "boot_id":
            patch.setattr(Path, "read_text", refuse)
        else:
            patch.setattr(os, "readlink", refuse)
        folder, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
        folder.hold()
        with pytest.raises(UserError, match="is in use by process"):
            second.hold()
    folder.release()
    second.hold()


def test_a_folder_of_checkpoints_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.checkpoints.symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match=r"checkpoints is a link to .*unmounted, which does not ex"):
        folder.hold()
    folder.checkpoints.unlink()
    folder.checkpoints.touch()
    with pytest.raises(UserError, match="checkpoints is not a folder; rename it"):
        folder.hold()


def test_a_run_does_not_create_the_target_of_a_link_to_an_unmounted_disk(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    said = f"{tmp_path}/link is a link to {tmp_path}/unmounted, which does not exist; mount the"
    for folder in (RunFolder(tmp_path / "link" / "x"), RunFolder(tmp_path / "link")):
        for hold in (folder.hold, folder.check_unused):
            with pytest.raises(UserError, match=re.escape(said)):
                hold()
    assert not (tmp_path / "unmounted").exists()
    (tmp_path / "unmounted").mkdir()
    folder.hold()
    folder.release()


@pytest.mark.parametrize(
    ("names", "is_accepted"),
    [
        (["manifest.json", "train.bin"], False),
        (["tiny.toml", "llama/7b.toml"], False),
        (["job.log", "lock", "notes.md"], False),
        (["step-0000200/manifest.json"], False),  # the folder of checkpoints
        ([], True),
        (["lock", "lock.exclusive", "attempts.jsonl", "hang-at-start/1", "wandb/id"], True),
        (["slurm-tiny-1.log", "nohup.out", "output.txt", "logs/1-rank0.log"], True),
        ([".nfs1", ".gitkeep", "lost+found"], True),
        (["lock", "recipe.toml.incomplete"], True),
        (["lease", "launched.toml", "notes.md"], True),
        (["events.jsonl", "notes.md"], True),
        (["checkpoints/step-0000200/manifest.json"], True),
    ],
)
def test_only_a_run_or_an_empty_folder_becomes_a_run_folder(
    names: Sequence[str], is_accepted: bool, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    before = sorted(tmp_path.rglob("*"))
    folder = RunFolder(tmp_path)
    if is_accepted:
        folder.hold()
        folder.release()
        return
    for hold in (folder.hold, folder.check_unused):
        with pytest.raises(UserError, match=r"is not a run folder: it contains .* use --run-dir"):
            hold()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("has_flock", [True, False])
@pytest.mark.parametrize(
    ("before", "written", "left"),
    [(False, (), False), (True, (), True), (False, ("recipe.toml",), True)],
)
def test_a_rejected_run_leaves_no_folder_that_it_created(
    has_flock: bool,
    before: bool,
    written: Sequence[str],
    left: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_flock:
        refused = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=refused))
    folder = RunFolder(tmp_path / "run")
    if before:
        folder.path.mkdir()
    folder.hold()
    for name in written:
        (folder.path / name).touch()
    folder.release()
    assert folder.path.exists() == left
    folder.hold()
    folder.release()


def test_a_folder_on_a_full_disk_is_rejected_and_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullFile(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(FolderLock, "_open", lambda lock: lock.shared.touch() or FullFile())
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(FolderLock, "_is_current", lambda *_: True)
    with pytest.raises(UserError, match=r"No space left on device\); free disk space"):
        folder.hold()
    assert not folder.path.exists()


def test_a_message_names_the_file_and_a_remedy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.path / "lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"lock cannot be written \(Is a directory\); make it wr"):
        folder.hold()
