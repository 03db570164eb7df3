"""Hostfiles and Slurm's list of nodes."""

import re
from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile

from models.errors import UserError
from threefold.config.layout import Cluster
from threefold.config.loading import DEFAULT_RECIPE, load_recipe
from threefold.launch import hosts
from threefold.launch.hosts import (
    check_cluster,
    cluster_of_hosts,
    read_hostfile,
    read_slots,
    slurm_hosts,
    unused,
)
from threefold.launch.replanning import Replanner


def test_hosts_are_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode2 slots=8\n\n  node1   slots=16  # larger\n")
    assert read_hostfile(file, processes=8) == ["node2", "node1"]
    assert read_slots(file) == {"node2": 8, "node1": 16}


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
        ("# nothing\n", "lists no host"),
        ("node1 slots=0\n", "line 1: node1 has slots=0; use slots=1 or more"),
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


def test_a_host_needs_a_slot_for_each_rank(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1 slots=8\nnode2 slots=4\n")
    message = r"slots=4 for node2, and cluster.gpus_per_node = 8; use slots=8 or more, or --set"
    with pytest.raises(UserError, match=message):
        read_hostfile(file, processes=8)


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
    fake.write_text("#!/bin/sh\n")
    with pytest.raises(UserError, match=r"it printed no host\); use --launcher local"):
        slurm_hosts({"SLURM_JOB_NODELIST": "node[1-2]"}, remedy="use --launcher local")
    fake.write_text("#!/bin/sh\nexec /bin/sleep 60\n")  # the controller does not answer
    monkeypatch.setattr(hosts, "SECONDS_FOR_SCONTROL", 0.3)
    with pytest.raises(UserError, match="timed out after"):
        slurm_hosts({"SLURM_JOB_NODELIST": "node[1-2]"})


H100 = "NVIDIA H100 80GB HBM3"
HOSTS = {"node1": 2, "node2": 4, "node3": 2}


def has_gpus(monkeypatch: pytest.MonkeyPatch, model: str | None) -> None:
    """Let this machine have two GPUs of a model, or none."""
    names = [model] * 2 if model else []
    monkeypatch.setattr(hosts, "device_names_of_machine", lambda: names)
    monkeypatch.setattr(hosts, "machine_has_gpu", lambda environment: bool(names))


@pytest.mark.parametrize(
    ("model", "shares_machine", "gpu"), [(H100, False, "H100"), (None, True, "cpu")]
)
def test_a_hostfile_describes_a_cluster(
    model: str | None, shares_machine: bool, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpus(monkeypatch, model)
    layout = load_recipe(DEFAULT_RECIPE).layout
    keys = cluster_of_hosts(HOSTS, layout, "mine.toml", shares_machine=shares_machine)
    recipe = load_recipe(DEFAULT_RECIPE, [f"cluster.{key}" for key in keys])
    assert recipe.cluster == Cluster(nodes=3, gpus_per_node=2, gpu=gpu)


@pytest.mark.parametrize(
    ("model", "slots", "cluster", "examples"),
    [
        (None, HOSTS, {"nodes": 3, "gpus_per_node": 2, "gpu": "cpu"}, set()),
        ("GeForce 256", HOSTS, {"nodes": 3, "gpus_per_node": 2, "gpu": "H100"}, {"gpu"}),
        (H100, {}, {"nodes": 2, "gpus_per_node": 2, "gpu": "H100"}, {"nodes"}),
        ("GeForce 256", {}, {"nodes": 2, "gpus_per_node": 2, "gpu": "H100"}, {"nodes", "gpu"}),
        (None, {}, {"nodes": 2, "gpus_per_node": 2, "gpu": "cpu"}, {"nodes", "gpus_per_node"}),
        (
            None,
            {"node1": None},
            {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"},
            {"gpus_per_node"},
        ),
    ],
)
def test_a_section_that_a_user_can_append_is_proposed_if_the_gpu_is_uncertain(
    model: str | None, slots: hosts.Slots, cluster: dict, examples: set[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    has_gpus(monkeypatch, model)
    layout = load_recipe(DEFAULT_RECIPE).layout
    with pytest.raises(UserError, match=r"mine.toml has no \[cluster\] section, which") as raised:
        cluster_of_hosts(slots, layout, "mine.toml", shares_machine=False)
    _, _, section = str(raised.value).partition("the lines with a comment:\n")
    marked = re.findall(r"^(\w+) = \S+  # for example", section, re.MULTILINE)
    assert set(marked) == examples  # the other values are those of the hosts or of this machine
    mine = tmp_path / "mine.toml"
    mine.write_text(DEFAULT_RECIPE.read_text() + section)
    assert load_recipe(mine).cluster == Cluster(**cluster)
    assert Replanner(mine).best(cluster["nodes"], cluster["nodes"])


def test_a_cluster_is_checked_on_the_hosts() -> None:
    cluster = Cluster(nodes=3, gpus_per_node=2, gpu="cpu", minimum_nodes=2)
    check_cluster(cluster, HOSTS)
    check_cluster(cluster, {})  # unknown
    check_cluster(cluster, dict.fromkeys(("node1", "node2")))
    with pytest.raises(UserError, match=r"slots=1 for node1, and cluster.gpus_per_node = 2; use"):
        check_cluster(cluster, {"node1": 1, "node2": 2})
    with pytest.raises(UserError, match=r"1 host is listed, and cluster.minimum_nodes = 2; list"):
        check_cluster(cluster, {"node1": 2})
    wrong = Cluster(nodes=3, gpus_per_node=2, gpu="cpu", minimum_nodes=4)
    with pytest.raises(UserError, match=r"use cluster.minimum_nodes = 3 or less"):
        check_cluster(wrong, {})


def test_unused_nodes_and_slots_are_named() -> None:
    cluster = Cluster(nodes=2, gpus_per_node=2, gpu="cpu")
    assert unused(cluster, dict.fromkeys(("node1", "node2", "spare"))) == []
    assert unused(cluster, {"node1": 2, "node2": 2}) == []
    few, large = unused(cluster, {"node1": 3})
    assert few.startswith("1 host is listed, fewer than cluster.nodes = 2; add hosts to the list")
    assert few.endswith("or use --set cluster.nodes=1")
    assert large == "cluster.gpus_per_node = 2 leaves slots unused on node1 (slots=3)"
    (large,) = unused(cluster, HOSTS | {"node1": 8})
    assert large.endswith("leaves slots unused on node1 (slots=8) and 1 more")
