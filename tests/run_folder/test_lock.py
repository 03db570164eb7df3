"""Locks of run folders: without flock, with dead holders and with live holders."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from models.errors import UserError
from tests.ranks import start_ranks
from threefold.checkpoint import resume
from threefold.checkpoint.resume import lock_run_folder
from threefold.config.loading import REPOSITORY
from threefold.run_folder import lock as lock_module
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.lock import FolderInUse, FolderLock
from threefold.runtime.exits import BUSY

HOLDER = """
import pathlib, sys, time
sys.path[0] = "."
from threefold.run_folder import lock
lock.BEAT_SECONDS = 0.05
if sys.argv[2] == "no flock":
    import fcntl
    def refuse(*_):
        raise OSError(38, "Function not implemented")
    fcntl.flock = refuse
if sys.argv[2] == "local flock":
    import fcntl
    fcntl.flock = lambda *_: None
if sys.argv[3] == "elsewhere":
    lock.machine_id = lambda: "another machine"
from threefold.run_folder.folder import RunFolder
RunFolder(pathlib.Path(sys.argv[1])).hold()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holders():
    """Start processes that hold a folder, and kill them after the test."""
    started = []

    def hold(folder: Path, flock: str = "flock", where: str = "here") -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDER, str(folder), flock, where]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()


def without_flock(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_flock_a_file_is_the_lock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    without_flock(number, monkeypatch)
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    assert "file system without flock" in capsys.readouterr().err
    with pytest.raises(FolderInUse, match=rf"is in use by process {os.getpid()} on ") as found:
        second.acquire()
    assert found.value.alive
    first.release()
    second.acquire()
    second.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]


def test_other_errors_of_flock_are_user_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_flock(errno.EIO, monkeypatch)
    with pytest.raises(UserError, match="Input/output error"):
        RunFolder(tmp_path).hold()


def test_the_lock_of_a_process_killed_on_this_node_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders
) -> None:
    holder = holders(tmp_path, "no flock")
    without_flock(errno.ENOSYS, monkeypatch)
    lock = FolderLock(tmp_path)
    with pytest.raises(FolderInUse):
        lock.acquire()
    holder.kill()
    holder.wait()
    lock.acquire()
    assert json.loads(lock.exclusive.read_text())["process"] == os.getpid()
    lock.release()


def test_the_lock_of_a_dead_node_is_taken_over_once_it_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders
) -> None:
    holder = holders(tmp_path, "no flock", "elsewhere")
    without_flock(errno.ENOSYS, monkeypatch)
    lock = FolderLock(tmp_path)
    alive = False
    while not alive:  # wait for a heartbeat
        with pytest.raises(FolderInUse) as found:
            lock.acquire()
        alive = found.value.alive
    holder.kill()
    holder.wait()
    with pytest.raises(FolderInUse):  # it is not known yet if the holder is alive
        lock.acquire()
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 0.0)
    lock.acquire()
    lock.release()


def test_a_run_ends_if_its_lock_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders
) -> None:
    holder = holders(tmp_path, "no flock", "elsewhere")
    holder.send_signal(signal.SIGSTOP)
    without_flock(errno.ENOSYS, monkeypatch)
    monkeypatch.setattr(lock_module, "STALE_SECONDS", 0.0)
    lock = FolderLock(tmp_path)
    lock.acquire()
    holder.send_signal(signal.SIGCONT)
    assert holder.wait(timeout=60) == lock_module.LOST
    assert json.loads(lock.exclusive.read_text())["token"] == lock.record["token"]
    lock.release()


def test_a_run_ends_if_flock_lets_a_run_on_another_node_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders
) -> None:
    holder = holders(tmp_path, "local flock", "elsewhere")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    lock = FolderLock(tmp_path)
    lock.acquire()
    assert holder.wait(timeout=60) == lock_module.LOST
    assert json.loads(lock.shared.read_text())["token"] == lock.record["token"]
    lock.release()


def test_a_run_waits_for_the_lock_of_a_dead_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holders, world: None, capsys
) -> None:
    holder = holders(tmp_path, "flock", "elsewhere")
    holder.send_signal(signal.SIGSTOP)  # the holder shows no sign of life and keeps the lock
    tries = []

    def sleep(seconds: float) -> None:
        tries.append(seconds)
        if len(tries) == 3:  # the file server has noticed the death of the node
            holder.kill()
            holder.wait()

    monkeypatch.setattr(resume.time, "sleep", sleep)
    assert lock_run_folder(RunFolder(tmp_path), wait_seconds=300) == ""
    assert len(tries) == 3
    assert "waiting up to 300 s" in capsys.readouterr().err


def test_waiting_for_a_lock_has_a_limit(tmp_path: Path, holders, world: None) -> None:
    holder = holders(tmp_path, "flock", "elsewhere")
    holder.send_signal(signal.SIGSTOP)
    assert "is in use by process" in lock_run_folder(RunFolder(tmp_path), wait_seconds=0.01)


def test_a_run_does_not_wait_for_a_live_run(tmp_path: Path, holders, world: None) -> None:
    holders(tmp_path / "here")
    started = time.monotonic()
    assert "is in use by" in lock_run_folder(RunFolder(tmp_path / "here"), wait_seconds=10_000)
    holders(tmp_path / "elsewhere", "flock", "elsewhere")
    assert "is in use by" in lock_run_folder(RunFolder(tmp_path / "elsewhere"), wait_seconds=10_000)
    assert time.monotonic() - started < 5_000


# Without waiting for the message of rank 0.
IMPATIENT = """
from threefold.pretrain import experiment
experiment.SECONDS_FOR_RANK_0_TO_SPEAK = 0
"""


def test_a_folder_in_use_has_its_own_exit_code(
    small: dict[str, Any], tmp_path: Path, holders
) -> None:
    holders(tmp_path / "run")
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small))
    script = f"{IMPATIENT}\nfrom recipes import pretrain\npretrain.main()"
    command = ["-c", script, str(tmp_path / "small.toml"), "--run-dir", str(tmp_path / "run")]
    codes, outputs = start_ranks(2, command, folder=tmp_path, seconds=300)
    assert codes == [BUSY, BUSY] and "Traceback" not in outputs[0]
    assert "is in use by process" in outputs[0] and "--run-dir" in outputs[0]


def test_a_folder_moved_during_locking_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run renames the folder and locks a new one between our `open` and `flock`."""
    holder, lock, flock = RunFolder(tmp_path / "run"), FolderLock(tmp_path / "run"), fcntl.flock
    holder.hold()
    holder.metric({"step": 1})

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        holder.move_aside()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FolderInUse, match="is being moved by another run") as found:
        lock.acquire()
    assert not found.value.alive  # the caller will therefore retry
    with pytest.raises(FolderInUse, match="is in use by process"):
        lock.acquire()
    holder.release()
    lock.folder.mkdir()  # `holder` has removed the folder that it created
    lock.acquire()
    lock.release()


def test_a_folder_without_flock_is_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat of the first lock stops before the second lock exists."""
    without_flock(errno.ENOSYS, monkeypatch)
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    folder.metric({"step": 1})
    first, create, released = folder._lock, FolderLock._create_exclusive, []

    def watched(lock: FolderLock) -> None:
        released.append(first._released.is_set())
        create(lock)

    monkeypatch.setattr(FolderLock, "_create_exclusive", watched)
    folder.move_aside()
    assert released == [True]
    assert folder._lock._holds(folder._lock.exclusive)
    (aside,) = tmp_path.glob("run.*")
    RunFolder(aside).hold()  # the moved folder is not in use


def test_the_lock_of_another_run_in_a_moved_folder_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_flock(errno.ENOSYS, monkeypatch)
    lock, other = FolderLock(tmp_path), tmp_path / "other"
    lock.acquire()
    other.mkdir()
    (other / "lock.exclusive").write_text('{"token": "another"}')
    lock.release(moved_to=other)
    assert (other / "lock.exclusive").exists()


LATE = """
import sys
from recipes import pretrain
from threefold.run_folder.lock import FolderInUse
from threefold.run_folder.folder import RunFolder

def move_aside(self):
    raise FolderInUse("the new folder is in use", alive=True)

RunFolder.move_aside = move_aside
pretrain.main()
"""


def test_a_folder_taken_by_another_run_during_the_move_is_busy(
    small: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small))
    command = ["-c", IMPATIENT + LATE, str(tmp_path / "small.toml"), "--resume", "never"]
    command += ["--run-dir", str(tmp_path / "run")]
    codes, outputs = start_ranks(2, command, folder=tmp_path, seconds=300)
    assert codes == [BUSY, BUSY] and "Traceback" not in outputs[0] + outputs[1]
    assert "the new folder is in use" in outputs[0]
