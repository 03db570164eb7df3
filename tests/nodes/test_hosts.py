"""Hostfiles and Slurm's list of nodes."""

from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile

from models.errors import UserError
from recipes.nodes import hosts
from recipes.nodes.hosts import read_hostfile, slurm_hosts


def test_hosts_are_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode2 slots=8\n\n  node1   slots=16  # larger\n")
    assert read_hostfile(file, processes=8) == ["node2", "node1"]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffnode1 slots=8\nnode2 slots=8\n",
        "node1 slots=8 max_slots=16\nnode2   slots=8 max-slots=8  port=22 # two\n",
        "\ufeff# the cluster\r\nnode1 slots=8\r\n\r\nroot@node2 slots=8",
    ],
)
def test_lines_are_read_as_deepspeed_reads_them(text: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text, encoding="utf-8", newline="")
    lines = text.removeprefix("\ufeff").splitlines()
    assert read_hostfile(file, processes=8) == list(_parse_hostfile(lines))


def test_a_thousand_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    names = [f"node{number}" for number in range(1024)]
    file.write_text("".join(f"{name} slots=8\n" for name in names))
    assert read_hostfile(file, processes=8) == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node1\n", "line 1: 'node1' is not a host; for example: node1 slots=8"),
        ("node1 slots=eight\n", "'node1 slots=eight' is not a host"),
        ("node1 slots=8\nnode1 slots=8\n", "line 2: node1 is listed twice"),
        ("node1 slots=4\n", "slots=4, and cluster.gpus_per_node = 8; use slots=8 or more"),
        ("# nothing\n", "lists no host"),
        ("node1 slots=8 node2 slots=8\n", "'node1 slots=8 node2 slots=8' is not a host"),
        ("node1 slots=8 slots=4\n", "is not a host"),
        ("-oX slots=8\n", "'-oX slots=8' is not a host (a name cannot begin with a hyphen); for"),
        ("root@-oX slots=8\n", "'root@-oX slots=8' is not a host (a name cannot begin with"),
        ("x" * 500 + "\x1b\n", f"line 1: '{'x' * 79} is not a host; for example"),
    ],
)
def test_wrong_lines_are_rejected(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        read_hostfile(file, processes=8)
    assert said in str(raised.value)
    assert str(file) in str(raised.value)


def test_a_missing_hostfile_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file or directory; use a file with one line"):
        read_hostfile(tmp_path / "absent", processes=8)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not a text file"):
        read_hostfile(tmp_path / "binary", processes=8)


def test_slurm_expands_its_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="this is not a Slurm job; use --hostfile FILE"):
        slurm_hosts({})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="scontrol show hostnames"):
        slurm_hosts({"SLURM_JOB_NODELIST": "node[1-2]"})
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho node1\necho node2\n")
    fake.chmod(0o755)
    assert slurm_hosts({"SLURM_JOB_NODELIST": "node[1-2]"}) == ["node1", "node2"]
    fake.write_text("#!/bin/sh\nexec /bin/sleep 60\n")  # the controller does not answer
    monkeypatch.setattr(hosts, "SECONDS_FOR_SCONTROL", 0.3)
    with pytest.raises(UserError, match="timed out after"):
        slurm_hosts({"SLURM_JOB_NODELIST": "node[1-2]"})
