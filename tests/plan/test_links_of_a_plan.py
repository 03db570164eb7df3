"""plan.py with links that differ from the GPU's datasheet."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import run_here
from threefold.commands import plan
from threefold.config.layout import Cluster
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.gpus.datasheet import load_gpu
from threefold.plan import catalogue
from threefold.plan.job import LinkOverrides, Machine, job_of, links_text
from threefold.plan.pictures import plan_on_nodes
from threefold.plan.time.block import all_reduce_seconds, transfer_seconds
from threefold.plan.time.step import step_time

LLAMA_7B = "recipes/llama/7b.toml"
CLUSTER = Cluster(nodes=2, gpus_per_node=4, gpu="H100")
BATCH = "batch.global_sequences=16"  # a small one, so that the network matters
KEYS = ["cluster.nodes=2", "cluster.gpus_per_node=4", BATCH]
SIZE = ["--nodes", "2", "--gpus-per-node", "4", "--set", BATCH]
OPTIONS = [*SIZE, "--node-link", "200", "--network", "2", "--network-latency", "80"]


def run_plan(*options: str) -> subprocess.CompletedProcess[str]:
    return run_here(plan.main, LLAMA_7B, *options)


def run_family(*options: str) -> subprocess.CompletedProcess[str]:
    return run_here(plan.main, "largest", LLAMA_7B, *options)


def test_links_replace_those_of_the_datasheet() -> None:
    links = LinkOverrides(
        node_link_gigabytes_per_second=200.0,
        network_gigabytes_per_second=10.0,
        network_latency_seconds=1e-3,
    )
    machine, usual = Machine.of_cluster(CLUSTER, links), Machine.of_cluster(CLUSTER)
    gpu = load_gpu("H100")
    assert transfer_seconds(machine, 0.0, stride=8) == 1e-3
    bytes_per_second = 10e9 * gpu.network_efficiency
    assert transfer_seconds(machine, 1e9, stride=8) - 1e-3 == pytest.approx(1e9 / bytes_per_second)
    inside = transfer_seconds(machine, 1e9, stride=1) - gpu.node_link_latency_seconds
    assert inside == pytest.approx(1e9 / (200e9 * gpu.node_link_efficiency))
    small = {"ranks": 8, "stride": 1}
    assert all_reduce_seconds(machine, 1.0, **small) > all_reduce_seconds(usual, 1.0, **small)
    assert Machine.of_cluster(CLUSTER, LinkOverrides()) == usual
    assert "latency" not in links_text(usual) and "1000 microseconds" in links_text(machine)


def test_a_plan_uses_the_links_and_shows_them() -> None:
    done, usual = run_plan(*OPTIONS, "--json"), run_plan(*SIZE, "--json")
    table, before = json.loads(done.stdout), json.loads(usual.stdout)
    assert table["links"] == {
        "node_link_gigabytes_per_second": 200.0,
        "network_gigabytes_per_second": 2.0,
        "network_latency_seconds": pytest.approx(80e-6),
    }
    assert before["links"]["network_gigabytes_per_second"] == 50.0
    recipe = load_recipe(REPOSITORY / LLAMA_7B, KEYS)
    job = job_of(recipe, Machine.of_cluster(CLUSTER, LinkOverrides(**table["links"])))
    assert table["own"]["step_seconds"]["total"] == pytest.approx(step_time(job).total)
    assert table["best"][0]["step_seconds"]["total"] > before["best"][0]["step_seconds"]["total"]
    heading = run_plan(*OPTIONS, "--top", "0").stdout.splitlines()[1]
    assert heading.endswith(
        "links per GPU: 200 GB/s within a node, 2 GB/s between nodes, network latency 80 "
        "microseconds"
    )


def test_a_family_uses_the_links_and_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "recipes_in_repository", lambda: [])
    family_of_one = [*SIZE, "--days", "1000"]
    options = [*family_of_one, "--network", "1"]
    slow = json.loads(run_family(*options, "--json").stdout)
    usual = json.loads(run_family(*family_of_one, "--json").stdout)
    assert slow["links"]["network_gigabytes_per_second"] == 1.0
    seconds = [table["models"][0]["best"]["step_seconds"]["total"] for table in (slow, usual)]
    assert seconds[0] > 1.05 * seconds[1]
    assert "450 GB/s within a node, 1 GB/s between nodes\n" in run_family(*options).stdout


def test_a_heat_map_uses_the_links_and_the_headroom(tmp_path: Path) -> None:
    recipe = load_recipe(REPOSITORY / LLAMA_7B, KEYS)
    machine = Machine.of_cluster(CLUSTER)
    slow = replace(machine, network_gigabytes_per_second=1.0)
    times = []
    for each in (machine, slow):
        fastest = plan_on_nodes(recipe, replace(job_of(recipe, machine), machine=each), 2)
        assert fastest
        times.append(fastest.time.total)
    assert times[1] > times[0]
    roomy = plan_on_nodes(recipe, job_of(recipe, machine), 2, headroom=0.7)
    assert (
        roomy and roomy.memory.total <= 0.3 * machine.gpu.memory_gib * 2**30 < fastest.memory.total
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--node-link", "0"], "invalid rate 0: expected a number from 0.001 to"),
        (["--network", "fast"], "invalid rate fast: expected a number from 0.001 to"),
        (["--network", "nan"], "invalid rate nan: expected a number from 0.001 to"),
        (["--network", "inf"], "invalid rate inf: expected a number from 0.001 to"),
        (["--network-latency", "-1"], "invalid latency -1: expected microseconds, for example 30"),
        (["--node-link", "1e-12"], "invalid rate 1e-12: expected a number from 0.001 to"),
    ],
)
def test_invalid_options_are_rejected(options: list[str], message: str) -> None:
    done = run_plan(*options)
    assert done.returncode == 2 and message in done.stderr
