"""The lease of a run folder: only the current attempt writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from models.errors import UserError
from threefold.config.loading import REPOSITORY
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.lock import LOST, FolderInUse, Lease, grant

WRITE = """
import sys
from pathlib import Path
from threefold.run_folder.folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), sys.argv[2])
folder.hold()
folder.metric({"step": 1})
folder.event("save", 1)
folder.durable_event("save", 2)
input()
getattr(folder, sys.argv[3])(*eval(sys.argv[4]))
"""


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("metric", '({"step": 2},)'),
        ("event", '("save", 3)'),
        ("durable_event", '("save", 3)'),
        ("check_lease", "()"),  # before a checkpoint is published
    ],
)
def test_an_earlier_attempt_can_no_longer_write(
    method: str, arguments: str, tmp_path: Path
) -> None:
    grant(tmp_path, "run.1")
    earlier = subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path), "run.1", method, arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = RunFolder(tmp_path, "run.2")
    while len(folder.read_events()) < 2:
        assert earlier.poll() is None, earlier.stderr and earlier.stderr.read()
    grant(tmp_path, "run.2")
    _, said = earlier.communicate("\n", timeout=60)
    assert earlier.returncode == LOST
    assert "no longer belongs to attempt run.1" in said
    assert [line["step"] for line in folder.read_metrics()] == [1]
    assert [event["step"] for event in folder.read_events()] == [1, 2]


def test_only_the_current_attempt_gets_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FolderInUse, match="belongs to another attempt"):
        RunFolder(tmp_path, "run.1").hold()
    grant(tmp_path, "run.2")
    with pytest.raises(FolderInUse, match="belongs to another attempt"):
        RunFolder(tmp_path, "run.1").hold()
    RunFolder(tmp_path, "run.2").hold()
    assert Lease(tmp_path, "run.2").is_current()


def test_a_leased_folder_is_not_moved(tmp_path: Path) -> None:
    grant(tmp_path, "run.1")
    folder = RunFolder(tmp_path, "run.1")
    folder.hold()
    folder.metric({"step": 1})
    with pytest.raises(UserError, match="--resume never"):
        folder.move_aside()
    assert folder.read_metrics()


def test_a_run_that_locks_the_folder_itself_revokes_the_lease(tmp_path: Path) -> None:
    grant(tmp_path, "run.1")
    folder = RunFolder(tmp_path)
    folder.hold()
    assert not Lease(tmp_path, "run.1").is_current()
    folder.release()


def test_a_checkpoint_is_published_only_with_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer checks the lease between the manifest and the rename."""
    from threefold.checkpoint import writer

    order: list[str] = []
    folder = RunFolder(tmp_path, "run.1")
    monkeypatch.setattr(folder, "check_lease", lambda: order.append("lease"))
    monkeypatch.setattr(folder, "flush", lambda: None)
    monkeypatch.setattr(writer, "publish", lambda *_: order.append("publish"))
    monkeypatch.setattr(writer, "retain", lambda *_, **__: None)

    class Manifest:
        step = 1

        def missing(self, _: Path) -> str:
            return ""

        def write(self, _: Path) -> None:
            order.append("manifest")

    class Writer:
        phase_plan = None
        damaged = ()
        on_publish = staticmethod(lambda *_: order.append("told"))

    Writer.folder = folder  # type: ignore[attr-defined]
    assert writer.CheckpointWriter._publish(Writer(), tmp_path, Manifest()) is None  # type: ignore[arg-type]
    assert order[:3] == ["manifest", "lease", "publish"] and order[-1] == "told"
