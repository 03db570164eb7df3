"""Folders of snapshots in the memory of a node."""

import hashlib
import shutil
from pathlib import Path

import pytest

from threefold.checkpoint.snapshots import node_memory
from threefold.checkpoint.snapshots.names import SnapshotName
from threefold.checkpoint.snapshots.node_memory import NodeMemory

GB = 10**9


@pytest.fixture
def memory(tmp_path: Path) -> NodeMemory:
    return NodeMemory(tmp_path)


def test_names_are_read_back_and_ordered() -> None:
    names = [SnapshotName(9, 5, "ff"), SnapshotName(10, 0, "00"), SnapshotName(10, 1, "00")]
    assert [SnapshotName.parse(str(name)) for name in names] == names == sorted(names)
    assert SnapshotName.parse("step-0000100-9f3a22c1.incomplete") is None
    assert SnapshotName.parse("servers.json") is None


def test_a_published_snapshot_replaces_the_earlier_one(memory: NodeMemory) -> None:
    for step in (5, 10):
        workspace = memory.workspace(step, "ab")
        memory.create(workspace)
        memory.create(workspace)  # another rank of the node
        (workspace / "weights-00000.safetensors").write_bytes(b"x")
        assert SnapshotName.parse(workspace.name) is None
        memory.publish(workspace, str(SnapshotName(step, 1, "ab")), '{"step": 1}')
    assert len(list(memory.folder.iterdir())) == 2
    memory.clean(keep=str(SnapshotName(10, 1, "ab")))
    (left,) = memory.folder.iterdir()
    assert left.name == "step-0000010-1-ab"
    digest = (left / "manifest.sha256").read_text().strip()
    assert digest == hashlib.sha256((left / "manifest.json").read_bytes()).hexdigest()


def test_a_failed_snapshot_leaves_the_earlier_one(memory: NodeMemory) -> None:
    memory.create(memory.workspace(5, "ab"))
    memory.publish(memory.workspace(5, "ab"), "step-0000005-1-ab", "{}")
    memory.create(memory.workspace(10, "ab"))
    memory.clean(keep="", incomplete_only=True)
    assert [entry.name for entry in memory.folder.iterdir()] == ["step-0000005-1-ab"]


@pytest.mark.parametrize(
    ("in_folder", "available", "size", "words"),
    [
        (10, 100, 9, ""),
        (10, 100, 11, "has 10.000 GB of memory free, and a snapshot needs 11.000 GB"),
        (100, 20, 14, ""),
        (100, 20, 16, "the node has 15.000 GB of memory free"),
        (100, 4, 1, "the node has 0.000 GB"),
    ],
)
def test_a_lack_of_memory_is_noticed_before_the_write(
    in_folder: int,
    available: int,
    size: int,
    words: str,
    memory: NodeMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = shutil._ntuple_diskusage(0, 0, in_folder * GB)  # type: ignore[attr-defined]
    monkeypatch.setattr(node_memory.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(node_memory, "memory_of_node", lambda: (100 * GB, available * GB))
    problem = memory.lack_of_room(size * GB)
    assert words in problem and bool(words) == bool(problem)


def test_the_memory_of_this_node_is_known() -> None:
    total, available = node_memory.memory_of_node()
    assert 10**8 < available <= total


def test_limits_of_cgroups_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has 4 GB, of which 3 are used, a half of it for cached files; its step has none."""
    own, root = tmp_path / "own", tmp_path / "cgroup"
    step = root / "slurm" / "job" / "step"
    step.mkdir(parents=True)
    own.write_text("1:cpu:/elsewhere\n0::/slurm/job/step\n")
    for folder, limit in ((step, "max"), (step.parent, str(4 * GB))):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{3 * GB}\n")
        (folder / "memory.stat").write_text(
            f"anon {GB}\nshmem {GB}\nactive_file {GB}\ninactive_file {GB // 2}\n"
        )
    limits = list(node_memory.cgroup_limits(own, root))
    assert limits == [(4 * GB, 5 * GB // 2)]
    assert list(node_memory.cgroup_limits(tmp_path / "absent", root)) == []
    monkeypatch.setattr(node_memory, "cgroup_limits", lambda *_: [(10**7, 10**6)])
    assert node_memory.memory_of_node() == (10**7, 10**6)


def test_unknown_servers_are_none(memory: NodeMemory) -> None:
    assert memory.servers() == []
    (memory.folder / "servers.json").write_text('[{"node": "node1"}]')
    assert memory.servers() == []
    assert NodeMemory(memory.folder / "absent").lack_of_room(1)
    assert NodeMemory.from_environment({}) is None
