"""The command launch.py: what it rejects, and its exit codes."""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from models.errors import UserError
from tests.conftest import changed
from threefold.commands import launch
from threefold.config.layout import Cluster
from threefold.config.loading import load_recipe
from threefold.launch import hosts
from threefold.launch.attempt import check_container
from threefold.runtime.exits import REJECTED


@pytest.fixture
def options(tmp_path: Path, small: dict, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return the options for a recipe on two hosts, whose run folder does not exist."""
    recipe, hosts = tmp_path / "small.toml", tmp_path / "hosts"
    recipe.write_text(
        tomli_w.dumps(changed(small, cluster={"nodes": 2, "gpus_per_node": 1, "gpu": "cpu"}))
    )
    hosts.write_text("node1 slots=1\nnode2 slots=1\n")
    words = ["launch.py", str(recipe), "--hostfile", str(hosts), "--launcher", "local"]
    monkeypatch.setattr(sys, "argv", [*words, "--run-dir", str(tmp_path / "run")])
    return launch.parse_command_line()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.gpu=FOO"], "FOO"),
        (["cluster.gpu=V100-32GB", 'deepspeed="bf16-zero1.json"'], "bf16"),
    ],
)
def test_a_recipe_that_cannot_be_placed_is_rejected_before_the_folder_is_locked(
    overrides: list[str], said: str, options: argparse.Namespace
) -> None:
    options.set = overrides
    with pytest.raises(UserError, match=said):
        launch.prepare(options)
    assert not options.run_dir.exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"gradient_accumulation_steps": 2}, "2 is fixed, but launch.py chooses the layout anew"),
        ({"gradient_clipping": 7.0}, "gradient_clipping = 7.0 differs from the recipe"),
    ],
)
def test_a_json_that_the_ranks_would_reject_is_rejected_before_they_start(
    setting: dict[str, Any], said: str, options: argparse.Namespace, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}} | setting))
    options.set = [f'deepspeed="{file}"']
    with pytest.raises(UserError, match=said):
        launch.prepare(options)
    assert not options.run_dir.exists()


def test_a_container_that_cannot_run_is_rejected_before_the_folder_is_locked(
    options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for image, said in (
        (
            str(tmp_path / "absent.sif"),
            "absent.sif: no such image; build one as described",
        ),
        (
            str(tmp_path / "absent/x.sif"),
            "x.sif: no such image; build one as described",
        ),
        (str(options.recipe), "the program apptainer is not on PATH"),
        ("docker://threefold", "the program apptainer is not on PATH"),
    ):
        options.container = image
        with pytest.raises(UserError, match=f"^--container {image}: ") as raised:
            launch.prepare(options)
        assert said in str(raised.value)
    assert not options.run_dir.exists()
    check_container(str(tmp_path / "absent/x.sif"), shares_machine=False)  # nodes may have it


def test_a_recipe_without_a_cluster_runs_on_the_hosts_of_the_hostfile(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    table = tomllib.loads(options.recipe.read_text())
    del table["cluster"]
    options.recipe.write_text(tomli_w.dumps(table))
    monkeypatch.setattr(hosts, "machine_has_gpu", lambda environment: False)
    launcher = launch.prepare(options)
    launcher.connections.close_all(0)
    launcher.folder.release()
    described = (
        f"using nodes = 2 and gpus_per_node = 1 as in {options.hostfile}, and "
        f'gpu = "cpu" as on this machine\n'
    )
    assert capsys.readouterr().err.endswith(f"has no [cluster] section; {described}")
    assert launcher.nodes.hosts == ["node1", "node2"]
    recipe = load_recipe(options.run_dir / "launched.toml")
    assert recipe.cluster == launcher.cluster == Cluster(nodes=2, gpus_per_node=1, gpu="cpu")


def test_nodes_and_slots_that_are_not_used_are_named(
    options: argparse.Namespace, capsys: pytest.CaptureFixture
) -> None:
    options.hostfile.write_text("node1 slots=3\n")
    launcher = launch.prepare(options)
    launcher.connections.close_all(0)
    launcher.folder.release()
    said = capsys.readouterr().err
    continuing = "launch.py: continuing on 1 host (cluster.minimum_nodes = 1): 1 host is listed, "
    assert said.count("1 host is listed") == 1
    assert f"{continuing}fewer than cluster.nodes = 2" in said
    assert said.endswith("gpus_per_node = 1 leaves slots unused on node1 (slots=3)\n")


@pytest.mark.parametrize("hostfile", ["absent", None])
def test_mistakes_in_the_recipe_and_in_the_list_of_hosts_are_reported_together(
    hostfile: str | None, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    options.hostfile = hostfile and options.recipe.with_name(hostfile)
    options.set = ["training.steps=0"]
    with pytest.raises(UserError, match=r"(?s)^2 problems\n.*training.steps = 0") as raised:
        launch.prepare(options)
    assert ("absent: No such file" if hostfile else "use --hostfile FILE") in str(raised.value)
    options.set = []
    with pytest.raises(UserError, match=r"^(--hostfile|SLURM_JOB_NODELIST)"):
        launch.prepare(options)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            "node1 slots=1\nnode2 slots=1\n",
            ["2 hosts are listed, fewer than cluster.nodes = 3; add"],
        ),
        (
            "node1 slots=2\n",
            ["1 host is listed, fewer than cluster.nodes = 3", "leaves slots unused on node1"],
        ),
        ("node1 slots=1\nnode2 slots=1\nnode3 slots=1\n", []),
    ],
)
def test_a_mistake_that_the_number_of_hosts_may_explain_is_reported_with_it(
    lines: str, said: list[str], options: argparse.Namespace
) -> None:
    options.hostfile.write_text(lines)
    options.set = ["cluster.nodes=3"]
    with pytest.raises(UserError, match=r"batch.global_sequences = 8") as raised:
        launch.prepare(options)
    count, *problems = str(raised.value).split("\n  ")
    assert (count == f"{len(said) + 1} problems") == bool(said)
    assert all(text in problem for text, problem in zip(said, problems[1:], strict=True))


def test_a_recipe_that_fits_on_no_number_of_nodes_is_rejected(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.Replanner, "best", lambda *_: None)
    with pytest.raises(UserError, match="no layout is predicted to fit on 1 to 2 nodes; use more"):
        launch.prepare(options)
    assert not options.run_dir.exists()


def test_user_errors_of_a_run_end_launch_py_with_a_message(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    class Rejected:
        def request_stop(self, *_: Any) -> None: ...

        def run(self) -> int:
            raise UserError("no such GPU")

    monkeypatch.setattr(launch, "use_nonblocking_output", lambda: None)
    monkeypatch.setattr(launch, "prepare", lambda _: Rejected())
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch.resource, "setrlimit", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        launch.main()
    assert ended.value.code == REJECTED
    assert capsys.readouterr().err == "launch.py: no such GPU\n"
