"""A run of launch.py loses hosts and gets them back, over ssh and in a Slurm job."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.cluster.cluster import Cluster, missing
from tests.cluster.test_launching import CPU, Job, metrics, wait_for_step
from tests.conftest import changed, small_recipe
from tests.fault_injection import node_loss
from threefold.run_folder.folder import RunFolder

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=f"no cluster here: {missing()}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4, slurm=True) as cluster:
        yield cluster


def attempts(folder: Path) -> list[dict[str, Any]]:
    """Return the events of launch.py's starts."""
    return [event for event in RunFolder(folder).read_events() if event["event"] == "attempt"]


@pytest.mark.parametrize(
    "kinds",
    [
        ("kill", "pair"),
        pytest.param(("kill", "cut", "stop", "pair"), marks=pytest.mark.exhaustive),
    ],
    ids="-".join,
)
def test_a_run_survives_lost_hosts(
    kinds: tuple[str, ...], cluster: Cluster, tmp_path: Path
) -> None:
    recipe = node_loss.write_recipe(tmp_path, steps=len(kinds) * node_loss.STEPS_PER_FAULT)
    run = node_loss.start(cluster, tmp_path, recipe)
    injected = node_loss.disturb(run, kinds=kinds, chance=random.Random(3))
    assert [fault.left for fault in injected] == [3, 2] * (len(kinds) // 2)
    sources = [fault.source for fault in injected]
    assert "memory" in sources and sources[-1] == "disk", sources
    wrong = node_loss.judge(run, node_loss.reference(cluster, tmp_path, recipe))
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def submit_elastic(cluster: Cluster, corpus: Path, tmp_path: Path) -> Callable[[int], Job]:
    """Submit a recipe of some steps for two nodes and a spare one; its run folder is `run`."""

    def submit(steps: int) -> Job:
        settings = {
            "name": "elastic",
            "training": {"steps": steps, "evaluate_every": 0},
            "checkpoint": {"every": 5},
            "supervision": {"node_seconds": 3},
            "cluster": {"nodes": 2, "gpus_per_node": 1, "gpu": "H100", "spare_nodes": 1},
        }
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(tomli_w.dumps(changed(small_recipe(corpus), **settings)))
        command = f"SBATCH_TIMELIMIT=10 SBATCH_OUTPUT={tmp_path}/job.log slurm/submit.sh --elastic"
        return Job(cluster, f"{command} {recipe} --run-dir {tmp_path}/run", CPU)

    return submit


def test_an_elastic_job_continues_without_a_dead_host(
    cluster: Cluster, submit_elastic: Callable[[int], Job], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = submit_elastic(120)
    wait_for_step(folder, 12)
    assert job.facts()["NumNodes"].startswith("3")
    first = attempts(folder)[0]
    assert len(first["nodes"]) == 2 and list(first["unused"].values()) == ["spare"]
    victim = first["nodes"][1]  # the batch script runs on the first one
    cluster.kill_host(victim)
    try:
        facts = job.wait("COMPLETED", "FAILED")
        assert facts["JobState"] == "COMPLETED" and facts["Restarts"] == "0", job.words(facts)
        _, second = attempts(folder)
        assert set(second["nodes"]) == {first["nodes"][0], *first["unused"]}
        assert re.match(rf"{victim}: ", second["reason"])
        assert [line["step"] for line in metrics(folder)] == list(range(1, 121))
    finally:
        cluster.restart_host(victim)
        cluster.run(f"scontrol update nodename={victim} state=resume")


def test_an_elastic_job_whose_first_host_dies_is_requeued(
    cluster: Cluster, submit_elastic: Callable[[int], Job], tmp_path: Path
) -> None:
    """Slurm removes the host, and with it the batch script, and would leave the job as it is."""
    folder = tmp_path / "run"
    job = submit_elastic(60)
    wait_for_step(folder, 12)
    victim = job.facts()["BatchHost"]
    cluster.kill_host(victim)
    try:
        facts = job.wait("COMPLETED", "FAILED")
        assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.words(facts)
        assert victim not in attempts(folder)[-1]["nodes"]
        assert [line["step"] for line in metrics(folder)] == list(range(1, 61))
    finally:
        cluster.restart_host(victim)
        cluster.run(f"scontrol update nodename={victim} state=resume")
