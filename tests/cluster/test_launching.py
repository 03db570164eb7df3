"""The documented ways to start a run, on simulated hosts and a Slurm on this machine."""

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.cluster.cluster import NETWORK, Cluster, missing
from tests.conftest import changed, small_recipe
from threefold.config.loading import REPOSITORY
from threefold.run_folder.folder import RunFolder

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(missing()), reason=f"no cluster here: {missing()}"),
]
CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
CANARY = "5ec7e7" + "c0ffee" * 5 + "cafe"  # looks like a key of W&B, but is not one
TIMED = (
    "step_seconds", "between_seconds", "data_seconds", "validation_seconds", "tokens_per_second",
    "tflops_per_gpu", "memory_gb",
)  # fmt: skip
SECONDS_OF_A_JOB = 180
TWO_NODES = {  # of one rank
    "layout__tensor": 1,
    "layout__pipeline": 2,
    "cluster": {"nodes": 2, "gpus_per_node": 1, "gpu": "H100"},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4, slurm=True) as cluster:
        yield cluster


def write_recipe(corpus: Path, file: Path, **changes: Any) -> Path:
    """Write a recipe for four nodes of two ranks: tensor = 2 within a node, one stage per node."""
    settings = {
        "name": "small",
        "model__layers": 4,
        "layout__tensor": 2,
        "layout__pipeline": 4,
        "training__steps": 8,
        "training__evaluate_every": 0,
        "checkpoint__every": 100,
        "cluster": {"nodes": 4, "gpus_per_node": 2, "gpu": "H100"},
    }
    file.write_text(tomli_w.dumps(changed(small_recipe(corpus), **settings | changes)))
    return file


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without times."""
    lines = RunFolder(folder).read_metrics()
    return [{k: v for k, v in line.items() if k not in TIMED} for line in lines]


def events(folder: Path) -> list[str]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


class Job:
    """A job of Slurm."""

    def __init__(self, cluster: Cluster, command: str, environment: dict[str, str] | None = None):
        done = cluster.run(command, env=CPU | (environment or {}))
        assert done.returncode == 0, done.stderr
        self.cluster, self.number = cluster, re.search(r"\d+", done.stdout)[0]

    def facts(self) -> dict[str, str]:
        """Return the properties that Slurm reports."""
        shown = self.cluster.run(f"scontrol show job {self.number}").stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait(self, *states: str) -> dict[str, str]:
        """Wait until the job stays in one of the given states, and return its properties."""
        deadline, seen = time.monotonic() + SECONDS_OF_A_JOB, 0
        while seen < 3:
            facts = self.facts()
            seen = seen + 1 if facts["JobState"] in states else 0
            assert time.monotonic() < deadline, (facts, self.words(facts))
            time.sleep(0.5)
        return facts

    def words(self, facts: dict[str, str] | None = None) -> str:
        """Return the output of the job."""
        return Path((facts or self.facts())["StdOut"]).read_text(errors="replace")


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path, corpus: Path):
    """Write a recipe and submit it as the README says."""

    def submit(*more: str, environment: dict[str, str] | None = None, **changes: Any) -> Job:
        recipe = write_recipe(corpus, tmp_path / "recipe.toml", **changes)
        arguments = shlex.join([str(recipe), "--run-dir", str(tmp_path / "run"), *more])
        return Job(
            cluster,
            f"sbatch --time=10 --output={tmp_path}/job.log $(python slurm/options.py {recipe}) "
            f"slurm/pretrain.slurm {arguments}",
            environment or {},
        )

    return submit


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + SECONDS_OF_A_JOB
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def alone(cluster: Cluster, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of the same training by one process."""
    folder = tmp_path_factory.mktemp("alone")
    one = {"nodes": 1, "gpus_per_node": 1, "gpu": "H100"}
    layout = {"layout__tensor": 1, "layout__pipeline": 1}
    recipe = write_recipe(corpus, folder / "recipe.toml", cluster=one, **layout)
    done = cluster.run(f"python recipes/pretrain.py {recipe} --run-dir {folder}/run", env=CPU)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_deepspeed_on_four_hosts_trains_as_one_process_does(
    cluster: Cluster, corpus: Path, alone: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(corpus, tmp_path / "recipe.toml")
    (tmp_path / "hosts").write_text("".join(f"{host} slots=2\n" for host in cluster.hosts))
    command = "deepspeed --hostfile {} --num_nodes 4 recipes/pretrain.py {} --run-dir {}"
    command += " --set cluster.gpu=cpu"  # DS_ACCELERATOR does not reach the hosts
    done = cluster.run(command.format(tmp_path / "hosts", recipe, tmp_path / "run"), env=CPU)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node3: rank 4 .. 5: pipeline 2, data 0, tensor 0 .. 1" in done.stdout
    for ours, one in zip(metrics(tmp_path / "run"), metrics(alone), strict=True):
        assert ours["loss"] == pytest.approx(one["loss"], rel=1e-6)
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    command = command.format(tmp_path / "hosts", recipe, tmp_path / "other")
    done = cluster.run(command, env=CPU)
    assert done.returncode == 2 and not (tmp_path / "other").exists()
    assert "are 8 ranks, and 4 were started" in done.stderr


def test_launch_py_finds_hosts_that_only_ssh_knows(
    cluster: Cluster, corpus: Path, alone: Path, tmp_path: Path
) -> None:
    """A login name, an alias of ssh's configuration, and lines as deepspeed accepts them."""
    with (cluster.folder / "ssh_config").open("a") as stream:
        stream.write(f"Host gateway\n  HostName {NETWORK}.2\n")
    (tmp_path / "hosts").write_text(
        "root@node1 slots=2 max_slots=4\ngateway slots=2\n", encoding="utf-8-sig"
    )
    recipe = write_recipe(
        corpus,
        tmp_path / "recipe.toml",
        layout__pipeline=2,
        checkpoint={"every": 100, "snapshot_every": 2},
        cluster={"nodes": 2, "gpus_per_node": 2, "gpu": "cpu"},
    )
    done = cluster.run(
        f"python recipes/launch.py --hostfile {tmp_path}/hosts {recipe} --run-dir {tmp_path}/run",
        env=CPU,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 1 on root@node1, gateway: " in done.stderr
    assert "2 nodes, 4 ranks: node1, node2" in done.stdout
    assert "snapshot" not in done.stdout + done.stderr  # no warning about them
    for ours, one in zip(metrics(tmp_path / "run"), metrics(alone), strict=True):
        assert ours["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_a_job_trains_as_one_process_does(submit, alone: Path, tmp_path: Path) -> None:
    job = submit()
    facts = job.wait("COMPLETED", "FAILED")
    assert facts["JobState"] == "COMPLETED", job.words(facts)
    assert facts["NumNodes"] == "4" and facts["NumTasks"] == "8" and facts["JobName"] == "small"
    assert "node2: rank 2 .. 3: pipeline 1, data 0, tensor 0 .. 1" in job.words(facts)
    for ours, one in zip(metrics(tmp_path / "run"), metrics(alone), strict=True):
        assert ours["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_a_job_is_saved_before_its_time_limit_and_resumes(submit, tmp_path: Path) -> None:
    job = submit(training__steps=24, **TWO_NODES)
    wait_for_step(tmp_path / "run", 6)
    assert job.cluster.run(f"scancel --batch --signal=USR1 {job.number}").returncode == 0
    facts = job.wait("COMPLETED", "FAILED")
    assert facts["JobState"] == "COMPLETED" and facts["Restarts"] == "1", job.words(facts)
    told = [event for event in events(tmp_path / "run") if event != "first_step"]
    assert told == ["start", "save", "stop", "resume", "save", "end"]
    disturbed = metrics(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    submit(training__steps=24, **TWO_NODES).wait("COMPLETED")
    assert disturbed == metrics(tmp_path / "run") and len(disturbed) == 24


def test_a_job_resumes_without_a_dead_host(submit, cluster: Cluster, tmp_path: Path) -> None:
    job = submit(training__steps=50, checkpoint__every=5, **TWO_NODES)
    wait_for_step(tmp_path / "run", 12)
    victim = re.search(r"node\d|node\[\d", job.facts()["NodeList"])[0].replace("[", "")
    cluster.kill_host(victim)
    try:
        facts = job.wait("COMPLETED", "FAILED")
        assert facts["JobState"] == "COMPLETED", job.words(facts)
        assert victim not in facts["NodeList"] and len(metrics(tmp_path / "run")) == 50
        assert "resume" in events(tmp_path / "run")
    finally:
        cluster.restart_host(victim)
        cluster.run(f"scontrol update nodename={victim} state=resume")


def test_a_job_that_always_fails_stops(submit, tmp_path: Path) -> None:
    broken = ["--set", "optimizer.learning_rate=1e38", "--set", "optimizer.gradient_clipping=0"]
    job = submit(*broken, **TWO_NODES)
    facts = job.wait("FAILED", "COMPLETED")
    assert facts["JobState"] == "FAILED" and facts["ExitCode"] == "3:0", job.words(facts)
    assert facts["Restarts"] == "1"
    assert "failed twice without a checkpoint after step 0 (exit code 3)" in job.words(facts)


def test_a_rejected_recipe_is_not_requeued(submit, tmp_path: Path) -> None:
    job = submit("--set", "layout.pipeline=3", **TWO_NODES)
    facts = job.wait("FAILED", "COMPLETED")
    assert facts["ExitCode"] == "2:0" and facts["Restarts"] == "0"
    assert "ranks, not 2;" in job.words(facts)


def test_a_job_gets_its_variables_although_the_cluster_exports_none(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(corpus, tmp_path / "recipe.toml", **TWO_NODES)
    words = f"{recipe} --run-dir {tmp_path}/run"
    variables = {"SBATCH_EXPORT": "NONE", "SBATCH_OUTPUT": f"{tmp_path}/job.log"}
    job = Job(cluster, f"slurm/submit.sh --elastic {words}", variables)
    facts = job.wait("COMPLETED", "FAILED")
    assert facts["JobState"] == "COMPLETED", job.words(facts)
    assert "attempt" in events(tmp_path / "run")  # of launch.py, which ELASTIC starts


def test_a_corpus_that_one_host_lacks_is_reported_with_the_host(
    submit, cluster: Cluster, corpus: Path
) -> None:
    """The other rank waits for this one, until srun kills it."""
    has_corpus = cluster.hosts[0]
    done = cluster.run(f"cp -r {corpus} /dev/shm/of-one-host", host=has_corpus)
    assert done.returncode == 0, done.stderr
    job = submit("--set", "data.validation=/dev/shm/of-one-host/validation", **TWO_NODES)
    facts = job.wait("FAILED", "COMPLETED")
    assert facts["ExitCode"] == "2:0" and facts["Restarts"] == "0", job.words(facts)
    assert re.search(r"rank 1 \(node\d\): .*of-one-host", job.words(facts)), job.words(facts)
    assert "had exit code 2; others were killed" in job.words(facts)


def test_jobs_follow_each_other(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    recipe = write_recipe(corpus, tmp_path / "recipe.toml", **TWO_NODES)
    done = cluster.run(f"slurm/submit.sh --jobs 2 {recipe} --run-dir {tmp_path}/run", env=CPU)
    numbers = re.findall(r"Submitted batch job (\d+)", done.stdout)
    assert len(numbers) == 2, done.stderr
    jobs = [Job(cluster, f"echo {number}") for number in numbers]
    facts = [job.wait("COMPLETED", "FAILED") for job in jobs]
    words = [job.words(fact) for job, fact in zip(jobs, facts, strict=True)]
    for fact in facts:
        Path(fact["StdOut"]).unlink()
    assert [fact["JobState"] for fact in facts] == ["COMPLETED", "COMPLETED"], words
    assert all("small is finished: 8 steps" in text for text in words)
    assert events(tmp_path / "run").count("start") == 1


def test_a_corpus_is_an_array_of_shards(cluster: Cluster, tmp_path: Path) -> None:
    source = tmp_path / "a source.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(500)))
    made = cluster.run(
        f"python recipes/prepare_data.py --source {shlex.quote(str(source))} --vocab-size 300 "
        f"--output {tmp_path}/plain"
    )
    assert made.returncode == 0, made.stderr
    options = ["--source", str(source), "--tokenizer", f"{tmp_path}/plain/tokenizer"]
    words = shlex.join([*options, "--output", str(tmp_path / "joined")])
    sbatch = f"sbatch --parsable --output={tmp_path}/%A-%a.log --cpus-per-task=2"
    shards = Job(cluster, f"{sbatch} --array=0-2 slurm/prepare_data.slurm {words}")
    after = f"--dependency=afterok:{shards.number} --kill-on-invalid-dep=yes"
    Job(cluster, f"{sbatch} {after} slurm/prepare_data.slurm {words}").wait("COMPLETED")
    for name in ("train.bin", "train.idx", "validation.bin", "validation.idx"):
        plain, joined = tmp_path / "plain" / name, tmp_path / "joined" / name
        assert joined.read_bytes() == plain.read_bytes()


def test_templates_are_accepted_at_eight_gpus_a_node(corpus: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        corpus, tmp_path / "recipe.toml", cluster={"nodes": 4, "gpus_per_node": 8, "gpu": "H100"}
    )
    with Cluster(4, slurm=True, gpus=8) as cluster:
        for template in sorted((REPOSITORY / "slurm").glob("*.slurm")):
            options = f"$(python slurm/options.py {recipe})" if "pretrain" in template.name else ""
            done = cluster.run(f"sbatch --test-only {options} {template} {recipe}")
            assert done.returncode == 0, done.stderr
    for script in (REPOSITORY / "slurm").glob("*.s[lh]*"):
        assert subprocess.run(["bash", "-n", script], capture_output=True).stderr == b"", script


def test_a_key_appears_nowhere(submit, cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    """A canary in place of a key must not appear in logs, arguments, run folders or checkpoints."""
    (tmp_path / "key").write_text(CANARY)
    (tmp_path / "key").chmod(0o600)
    offline = {"WANDB_BASE_URL": "http://127.0.0.1:9"}  # no server listens there
    secrets = [{"WANDB_API_KEY": CANARY}, {"WANDB_API_KEY_FILE": str(tmp_path / "key")}]
    (tmp_path / "hosts").write_text("".join(f"{host} slots=1\n" for host in cluster.hosts[:2]))
    settings = TWO_NODES | {"training__steps": 60, "tracking__mode": "auto"}
    job = submit(environment=secrets[0] | offline, **settings)
    wait_for_step(tmp_path / "run", 3)
    assert CANARY not in arguments_of_all(cluster)
    facts = job.wait("COMPLETED", "FAILED")
    assert facts["JobState"] == "COMPLETED", job.words(facts)
    command = ["deepspeed", "--hostfile", str(tmp_path / "hosts"), "--num_nodes", "2"]
    command += ["recipes/pretrain.py", str(tmp_path / "recipe.toml")]
    command += ["--set", "cluster.gpu=cpu"]  # DS_ACCELERATOR does not reach the hosts
    command += ["--set", "tracking.mode=offline"]  # W&B would look for its server for a minute
    with (tmp_path / "deepspeed.log").open("w") as log:
        process = subprocess.Popen(
            cluster.command(shlex.join([*command, "--run-dir", str(tmp_path / "run2")])),
            env=cluster.environment | CPU | secrets[1] | offline,
            stdout=log,
            stderr=log,
        )
    wait_for_step(tmp_path / "run2", 3)
    assert CANARY not in arguments_of_all(cluster)
    assert process.wait(timeout=SECONDS_OF_A_JOB) == 0
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "key"]
    assert len(files) > 20 and any("wandb" in file.parts for file in files)
    assert [file for file in files if CANARY.encode() in file.read_bytes()] == []
    (tmp_path / "key").chmod(0o640)
    recipe = [
        "python",
        "recipes/pretrain.py",
        str(tmp_path / "recipe.toml"),
        "--set",
        "cluster.nodes=1",
    ]
    recipe += ["--set", "cluster.gpus_per_node=1", "--set", "layout={}"]
    done = cluster.run(shlex.join(recipe), env=CPU | secrets[1])
    assert done.returncode == 2 and "can be read by others; use chmod 600" in done.stderr


def arguments_of_all(cluster: Cluster) -> str:
    """Return the command lines of all processes on all hosts."""
    return cluster.run("cat /proc/[0-9]*/cmdline").stdout
