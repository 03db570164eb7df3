"""Scripts that the Slurm templates call; tests/cluster runs the templates themselves."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from recipes.training.recipe.schema import REPOSITORY
from recipes.training.runtime.exits import BUSY, INTERRUPTED
from tests.conftest import changed, small_recipe

TEMPLATES = sorted((REPOSITORY / "slurm").glob("*.s[lh]*"))


def python(*words: object, code: int = 0, job: str = "7") -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=REPOSITORY,
        env={"SLURM_JOB_ID": job},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Path:
    cluster = {"nodes": 4, "gpus_per_node": 2, "gpu": "H100"}
    table = changed(small_recipe(corpus), name="a.b-c_1", cluster=cluster, layout={"tensor": 2})
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    return tmp_path / "recipe.toml"


def test_options_are_those_of_the_recipe(recipe: Path) -> None:
    expected = "--job-name=a.b-c_1 --nodes=4 --ntasks-per-node=2 --gpus-per-node=2\n"
    assert python("slurm/options.py", recipe, "--run-dir", "x") == expected
    fewer = ["--set", "cluster.nodes=2"]
    assert "--nodes=2 " in python("slurm/options.py", recipe, *fewer)


def test_a_recipe_that_does_not_fit_its_cluster_has_no_options(recipe: Path) -> None:
    crossing = ["--set", "layout.tensor=4", "--set", "model.kv_heads=4"]
    said = python("slurm/options.py", recipe, *crossing, code=1)
    assert "layout.tensor = 4 does not divide the 2 ranks of a node" in said
    assert "use layout.tensor = 2" in said
    assert "has no [cluster]" in python("slurm/options.py", "recipes/tiny.toml", code=1)


def test_a_job_starts_again_until_it_fails_twice_at_the_same_step(
    recipe: Path, tmp_path: Path
) -> None:
    failed = ["slurm/attempts.py", "3", recipe, "--run-dir", tmp_path / "run", "--resume", "auto"]
    assert "starts again after step 0" in python(*failed)
    (tmp_path / "run" / "checkpoints" / "step-0000010").mkdir(parents=True)
    assert "starts again after step 10" in python(*failed)
    assert "starts again after step 10" in python(*failed, job="8")  # another job
    assert "failed twice without a checkpoint after step 10 (exit code 3)" in python(
        *failed, code=1
    )
    lines = (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["job"] for line in lines] == ["7", "7", "8", "7"]
    assert "was refused" in python("slurm/attempts.py", "2", recipe, code=1)


def test_a_job_whose_failures_cannot_be_counted_does_not_start_again(
    recipe: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "slurm/attempts.py", "3", recipe, "--run-dir", tmp_path / "run"]
    for _ in range(2):
        done = subprocess.run(  # no file may grow, as on a full disk
            ["bash", "-c", 'ulimit -f 0; exec "$0" "$@"', *map(str, words)],
            cwd=REPOSITORY,
            env={"SLURM_JOB_ID": "7"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "(File too large), so failures cannot be counted; make room" in done.stderr
    attempts = tmp_path / "run" / "attempts.jsonl"
    attempts.unlink()
    attempts.mkdir()
    assert "failures cannot be counted; make room" in python(*words[1:], code=1)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_has_no_personal_path(template: Path) -> None:
    text = template.read_text()
    assert "set -euo pipefail" in text and ("EDIT" in text) == (template.suffix == ".slurm")
    assert re.findall(r"(?<![\w.$}*\"])/(?:home|scratch|work|data|mnt)/", text) == []
    assert subprocess.run(["bash", "-n", template], capture_output=True).stderr == b""


@pytest.fixture
def start_job(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run pretrain.slurm with an scontrol that prints some hosts and an srun that ends at once."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "master $MASTER_ADDR"\n')
    # Line by line until the reader stops; a single large write would fit into the pipe.
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\nwhile read -r host; do echo "$host"; done <"{tmp_path}/hosts"\n'
    )
    for stub in ("srun", "scontrol"):
        (tmp_path / stub).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0001-1024]", "SLURM_CPUS_PER_TASK": "8"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}

    def start(hosts: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "hosts").write_text(hosts)
        return subprocess.run(
            ["bash", REPOSITORY / "slurm" / "pretrain.slurm", "recipe.toml"],
            env=job | environment,
            capture_output=True,
            text=True,
        )

    return start


def test_a_job_of_1024_nodes_starts(
    start_job: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    names = [f"a-cluster-with-long-host-names-{number:04}" for number in range(1, 1025)]
    for _ in range(100):
        done = start_job("\n".join(names) + "\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"master {names[0]}\n", "")


def test_a_job_without_hosts_says_so(
    start_job: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = start_job("")
    assert done.returncode != 0 and "scontrol show hostnames printed no host" in done.stderr


def shell_lines() -> list[str]:
    """Return the lines of all shell scripts and of the Makefile, without comments."""
    scripts = [REPOSITORY / "Makefile", REPOSITORY / ".ci" / "run", *TEMPLATES]
    scripts += (REPOSITORY / "tests").rglob("*.sh")
    lines = [line for script in scripts for line in script.read_text().splitlines()]
    return [line for line in lines if not line.lstrip().startswith("#")]


def test_no_pipe_ends_in_a_command_that_stops_reading() -> None:
    """With pipefail, the SIGPIPE of the writer would end the script if the output is long."""
    assert len(shell_lines()) > 200
    stops_reading = re.compile(r"\|\s*(head|sed|awk|read|grep\s+(-\w*[qm]|--quiet|--max-count))\b")
    assert [line for line in shell_lines() if stops_reading.search(line)] == []


def test_templates_know_the_exit_codes() -> None:
    assert f'[ "$code" -eq {INTERRUPTED} ]' in (REPOSITORY / "slurm/pretrain.slurm").read_text()


def test_a_folder_that_is_still_locked_starts_the_job_again_once(
    recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "attempts.jsonl").write_bytes(b'{"job": "7", "st' + bytes(50))  # torn
    words = ["slurm/attempts.py", BUSY, recipe, "--run-dir", tmp_path / "run"]
    words += ["--resume-once", "job-7", "--wait-for-folder", "60"]
    assert "exit code 6; starts again" in python(*words)
    assert "failed twice" in python(*words, code=1)


def test_every_start_of_a_job_requests_the_same() -> None:
    """pretrain.py knows whether the request was carried out; the template does not."""
    template = (REPOSITORY / "slurm/pretrain.slurm").read_text()
    assert "--resume auto" not in template and '--resume-once "${RESUME_ONCE:-job-' in template
    chain = (REPOSITORY / "slurm/chain.sh").read_text()
    assert "--resume auto" not in chain and "RESUME_ONCE=$RESUME_ONCE" in chain
