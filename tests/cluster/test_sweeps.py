"""Sweeps over several simulated hosts: through deepspeed, and in a Slurm allocation."""

import csv
import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.cluster.cluster import Cluster, missing
from tests.conftest import changed, in_turn, small_recipe
from tests.sweep.sweeps import copy_of_code
from threefold.config.loading import REPOSITORY
from threefold.gpus.datasheet import load_gpu, read_gpu

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=f"no cluster here: {missing()}"),
]
CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
RESOURCES = "--time=10 --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=2"
SECONDS_OF_A_SWEEP = 300
SECONDS_FOR_RANKS_TO_END = 45  # their watch waits 30 seconds for the scheduler's heartbeat


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, slurm=True) as cluster:
        yield cluster


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    machine = {"nodes": 2, "gpus_per_node": 1, "gpu": "cpu"}
    path = tmp_path / "small.toml"
    table = changed(small_recipe(Path("absent")), model__layers=4, cluster=machine)
    path.write_text(tomli_w.dumps(table))
    return path


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def results(folder: Path) -> dict[str, dict[str, Any]]:
    files = (folder / "results").glob("*.json")
    return {file.stem: json.loads(file.read_text())["result"] for file in files}


def wait_for_results(folder: Path, count: int) -> None:
    deadline = time.monotonic() + SECONDS_OF_A_SWEEP
    while len(results(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for_end_of_ranks(cluster: Cluster) -> None:
    """Wait until no rank, and no ssh that started one, is left on any host."""
    deadline = time.monotonic() + SECONDS_FOR_RANKS_TO_END
    while cluster.processes("--rank-of"):
        assert time.monotonic() < deadline, cluster.processes("--rank-of")
        time.sleep(0.5)


def test_deepspeed_measures_on_several_hosts(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    hosts, folder = tmp_path / "hosts", tmp_path / "sweep"
    hosts.write_text("".join(f"{host} slots=1\n" for host in cluster.hosts[:2]))
    command = f"python recipes/sweep.py {recipe} --hostfile {hosts} --sweep-dir {folder} --top 3"
    process = subprocess.Popen(
        cluster.command(f"exec {command}"), env=cluster.environment | CPU, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_results(folder, 1)
    assert len(cluster.processes("--rank-of")) >= 2
    cluster.run("pkill -9 -f -- recipes/sweep.py.*--hostfile")
    process.communicate(timeout=30)
    wait_for_end_of_ranks(cluster)
    done = cluster.run(command, env=CPU, timeout=SECONDS_OF_A_SWEEP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["outcome"] for row in rows(folder)] == ["ok"] * 3
    assert {(row["gpus"], row["gpus_per_node"]) for row in rows(folder)} == {("2", "1")}
    wait_for_end_of_ranks(cluster)


@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("srun", marks=in_turn(0))])
def test_links_between_hosts_are_measured(cluster: Cluster, tmp_path: Path, launcher: str) -> None:
    copy = copy_of_code(tmp_path / "copy")  # whose datasheets the command may write
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{host} slots=2\n" for host in cluster.hosts[:2]))
    python, program = REPOSITORY / ".venv/bin/python", copy / "recipes/sweep.py"
    command = f"{python} {program} links two-hosts --nodes 2 --gpus-per-node 2 --json"
    if launcher == "deepspeed":
        command += f" --hostfile {hosts}"
    else:
        command = f"salloc --quiet --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 {command}"
    done = cluster.run(f"cd {copy} && {command}", env=CPU, timeout=SECONDS_OF_A_SWEEP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (copy / "runs" / "links").exists()
    wait_for_end_of_ranks(cluster)
    table = json.loads(done.stdout.splitlines()[-1])
    assert {link["ranks"] for link in table["links"] if link["across_nodes"]} == {2, 4}
    assert len(table["links"]) == 12 and table["matmul"]["slowest"]["host"] in cluster.hosts
    gpu, cpu = read_gpu(Path(table["file"])), load_gpu("cpu")
    assert gpu.name == "two-hosts" and gpu.network_contention == cpu.network_contention
    assert gpu.network_efficiency not in (cpu.network_efficiency, 0.0)


def test_a_job_continues_after_the_death_of_a_node(
    cluster: Cluster, recipe: Path, tmp_path: Path
) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "job.log"
    options = f"--sweep-dir {folder} --top 4 --steps 20"
    submitted = cluster.run(
        f"sbatch {RESOURCES} --output={log} slurm/sweep.slurm {recipe} {options}", env=CPU
    )
    assert submitted.returncode == 0, submitted.stderr
    number = re.search(r"\d+", submitted.stdout)[0]
    wait_for_results(folder, 2)
    before = results(folder)
    shown = cluster.run(f"scontrol show job {number}").stdout
    victim = re.search(r"BatchHost=(node\d)", shown)[1]
    cluster.kill_host(victim)
    try:
        deadline = time.monotonic() + SECONDS_OF_A_SWEEP
        while "JobState=COMPLETED" not in (
            shown := cluster.run(f"scontrol show job {number}").stdout
        ):
            assert "JobState=FAILED" not in shown, log.read_text()
            assert time.monotonic() < deadline, (shown, log.read_text())
            time.sleep(1)
        assert "Restarts=1" in shown
        assert [row["outcome"] for row in rows(folder)] == ["ok"] * 4, log.read_text()
        assert before.items() <= results(folder).items()  # nothing was measured again
        assert not (folder / "claims").exists()
    finally:
        cluster.restart_host(victim)
        cluster.run(f"scontrol update nodename={victim} state=resume")


def test_an_array_measures_several_sizes(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    words = shlex.join([str(recipe), "--sweep-dir", str(folder), "--top", "2", "--steps", "2"])
    submitted = cluster.run(
        f"sbatch --wait {RESOURCES} --array=1,2 --output={tmp_path}/%a.log slurm/sweep.slurm "
        f"{words}",
        env=CPU,
        timeout=SECONDS_OF_A_SWEEP,
    )
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert submitted.returncode == 0, submitted.stderr + logs
    assert sorted(row["gpus"] for row in rows(folder)) == ["1", "1", "2", "2"], logs
    assert {row["outcome"] for row in rows(folder)} == {"ok"}, logs
