"""The scripts in slurm/, with stubs for Slurm; tests/cluster runs them under a real Slurm."""

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import tomli_w

from tests.commands import run_here
from tests.conftest import changed, small_recipe
from threefold.config.loading import REPOSITORY
from threefold.runtime.exits import BUSY, INTERRUPTED, UNFIT

TEMPLATES = sorted((REPOSITORY / "slurm").glob("*.s[lh]*"))
OPTIONS_OF_RECIPE = "--job-name=a.b-c_1 --nodes=4 --ntasks-per-node=2 --gpus-per-node=2"


def python(script: str, *words: object, code: int = 0, job: str = "7") -> str:
    """Run a script of slurm/ in this process; return what it printed."""

    def main() -> None:
        runpy.run_path(str(REPOSITORY / script), run_name="__main__")

    with (
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.dict(os.environ, {"SLURM_JOB_ID": job}),
    ):
        done = run_here(main, *words)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Path:
    cluster = {"nodes": 4, "gpus_per_node": 2, "gpu": "H100"}
    table = changed(small_recipe(corpus), name="a.b-c_1", cluster=cluster, layout={"tensor": 2})
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    return tmp_path / "recipe.toml"


def test_options_come_from_the_recipe(recipe: Path) -> None:
    assert python("slurm/options.py", recipe, "--run-dir", "x") == OPTIONS_OF_RECIPE + "\n"
    fewer = ["--set", "cluster.nodes=2"]
    assert "--nodes=2 " in python("slurm/options.py", recipe, *fewer)


def test_an_elastic_job_requests_the_spare_nodes(recipe: Path) -> None:
    said = python("slurm/options.py", recipe, "--set", "cluster.spare_nodes=3", "--elastic")
    assert "--nodes=7 " in said and "--no-kill" in said
    assert "--no-kill" in python("slurm/options.py", recipe, "--elastic", "--forget-failures")
    said = python("slurm/options.py", recipe, "--forget-failures", code=2)
    assert "add --elastic" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "never"], "--resume never is not supported, because launch.py holds"),
        (
            ["--set", "cluster.minimum_nodes=9"],
            "cluster.minimum_nodes = 9 is more than cluster.nodes = 4; use cluster.minimum_nodes "
            "= 4 or less",
        ),
        (["--set", "cluster.gpu=V100-32GB", "--set", 'deepspeed="bf16-zero1.json"'], "bf16"),
        (["--set", 'deepspeed="{fixed}"'], "1 is fixed, but launch.py chooses the layout anew"),
        (["--wait-for-folder", "soon"], "argument --wait-for-folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_elastic_job_that_launch_py_would_reject_is_not_submitted(
    words: list[str], message: str, recipe: Path, tmp_path: Path
) -> None:
    fixed = tmp_path / "ds.json"
    fixed.write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 1})
    )
    words = [word.format(fixed=fixed) for word in words]
    said = python("slurm/options.py", recipe, "--elastic", *words, code=2)
    assert message in said and "--no-kill" not in said
    if "never" in words:
        python("slurm/options.py", recipe, *words)


def test_a_recipe_that_does_not_fit_its_cluster_is_rejected(recipe: Path) -> None:
    crossing = ["--set", "layout.tensor=4", "--set", "model.kv_heads=4"]
    said = python("slurm/options.py", recipe, *crossing, code=2)
    assert "layout.tensor = 4 does not divide the 2 ranks of a node" in said
    assert "use layout.tensor = 2" in said
    assert "has no [cluster] section" in python("slurm/options.py", "recipes/tiny.toml", code=2)


def test_a_job_is_requeued_until_it_fails_twice_at_the_same_step(
    recipe: Path, tmp_path: Path
) -> None:
    run = ("--run-dir", tmp_path / "run", "--resume", "auto", "--forget-failures")
    failed = ("slurm/attempts.py", "3", recipe, *run)
    assert "exit code 3; the requeued job resumes after step 0" in python(*failed)
    (tmp_path / "run" / "checkpoints" / "step-0000010").mkdir(parents=True)
    assert "exit code 3; the requeued job resumes after step 10" in python(*failed)
    assert "exit code 3; the requeued job resumes after step 10" in python(
        *failed, job="8"
    )  # another job
    assert "failed twice without a checkpoint after step 10 (exit code 3)" in python(
        *failed, code=1
    )
    lines = (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["job"] for line in lines] == ["7", "7", "8", "7"]
    assert "was rejected" in python("slurm/attempts.py", "2", recipe, code=1)
    with mock.patch.dict(os.environ, {"REQUEUE": "no"}):
        assert "3; a rerun resumes after step 10" in python(*failed, job="9")


def test_the_user_is_told_how_to_leave_a_broken_node_out(recipe: Path, tmp_path: Path) -> None:
    failed = ("slurm/attempts.py", UNFIT, recipe, "--run-dir", tmp_path / "run")
    assert "the requeued job resumes" in python(*failed)
    assert "#SBATCH --exclude=NODE" in python(*failed, code=1)


def test_a_job_whose_failures_cannot_be_counted_is_not_requeued(
    recipe: Path, tmp_path: Path
) -> None:
    words = ("slurm/attempts.py", "3", recipe, "--run-dir", tmp_path / "run")
    for _ in range(2):
        done = subprocess.run(  # no file may grow, as on a full disk
            ["bash", "-c", 'ulimit -f 0; exec "$0" "$@"', sys.executable, *map(str, words)],
            cwd=REPOSITORY,
            env={"SLURM_JOB_ID": "7"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "(File too large), so failures cannot be counted; free disk space" in done.stderr
    attempts = tmp_path / "run" / "attempts.jsonl"
    attempts.unlink()
    attempts.mkdir()
    assert "failures cannot be counted; free disk space" in python(*words, code=1)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_has_no_personal_path(template: Path) -> None:
    text = template.read_text()
    assert "set -euo pipefail" in text and ("EDIT" in text) == (template.suffix == ".slurm")
    assert re.findall(r"(?<![\w.$}*\"])/(?:home|scratch|work|data|mnt)/", text) == []
    assert subprocess.run(["bash", "-n", template], capture_output=True).stderr == b""


def make_root(folder: Path) -> None:
    """Let a folder look like the root of the repository to the scripts."""
    (folder / "recipes").mkdir()
    (folder / "recipes" / "pretrain.py").touch()


@pytest.fixture
def start_job(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run pretrain.slurm with an scontrol that prints some hosts and an srun that ends at once."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "master $MASTER_ADDR"\n')
    # Line by line until the reader stops; a single large write would fit into the pipe.
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\nwhile read -r host; do echo "$host"; done <"{tmp_path}/hosts"\n'
    )
    (tmp_path / "squeue").write_text("#!/bin/sh\necho UNLIMITED\n")
    make_root(tmp_path)
    for stub in ("srun", "scontrol", "squeue"):
        (tmp_path / stub).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0001-1024]", "SLURM_CPUS_PER_TASK": "8"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}

    def start(hosts: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "hosts").write_text(hosts)
        return subprocess.run(
            ["bash", REPOSITORY / "slurm" / "pretrain.slurm", "recipe.toml"],
            env=job | environment | variables,
            capture_output=True,
            text=True,
        )

    return start


def test_a_job_of_1024_nodes_starts(
    start_job: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    names = [f"a-cluster-with-long-host-names-{number:04}" for number in range(1, 1025)]
    for _ in range(5):
        done = start_job("\n".join(names) + "\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"master {names[0]}\n", "")


def test_a_requeued_job_uses_another_port(
    start_job: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The first port may be in use. Jobs with similar numbers have their own ports, too."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$MASTER_PORT"\n')
    ports = {
        int(start_job("node1\n", SLURM_JOB_ID=job, SLURM_RESTART_COUNT=count).stdout)
        for job in ("9999", "10000", "10001")
        for count in ("0", "1", "2")
    }
    assert len(ports) == 9 and min(ports) >= 20000 and max(ports) < 30000
    assert start_job("node1\n", SLURM_JOB_ID="12345").stdout == "22345\n"


@pytest.mark.parametrize(("first", "code"), [("2 node3", 2), ("6 node3", 6), (None, 137)])
def test_the_job_ends_with_the_code_of_the_first_rank_that_failed(
    first: str | None,
    code: int,
    start_job: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """srun kills the other ranks after a while, and then returns the code of the kill."""
    record = f'echo "{first}" >"$THREEFOLD_FIRST_FAILURE"\n' if first else ""
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{record}exit 137\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$1 $2"\nexit 1\n')
    python.chmod(0o755)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "first-failure-7").write_text("4 node1\n")  # of the job's earlier start
    done = start_job("node1\n")
    assert (done.returncode, done.stdout) == (code, f"slurm/attempts.py {code}\n"), done.stderr
    if first:
        assert f"that ended by itself, on node3, had exit code {code}; others" in done.stderr
    assert list((tmp_path / ".cache").iterdir()) == []


@pytest.mark.parametrize(
    ("left", "seconds"),
    [
        ("5:00", 300),
        ("0:59", 59),
        ("5:01", None),
        ("1:00:00", None),
        ("1-00:00:08", None),
        ("UNLIMITED", None),
        ("INVALID", None),
    ],
)
def test_a_time_limit_below_the_notice_of_the_signal_is_reported(
    left: str,
    seconds: int | None,
    start_job: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho {left}\n")
    done = start_job("node1\n")
    assert done.returncode == 0
    if seconds is None:
        assert done.stderr == ""
    else:
        assert f"warning: {seconds} s are left until the time limit, and --signal" in done.stderr
        assert "raise #SBATCH --time at the top of slurm/pretrain.slurm" in done.stderr
        assert "above the 300 s of --signal\n" in done.stderr


@pytest.mark.parametrize(
    ("left", "signalled", "code", "requeued"),
    [
        ("1:00:00", True, 138, False),  # before the first step, the signal ends a rank
        ("1:00:00", True, 5, True),
        ("1:00:00", True, 1, True),
        ("1:00:00", False, 138, True),
        ("1:00:00", False, 5, False),
        ("4:00", True, 5, False),  # of launch.py, also before the first step
        ("4:00", False, 1, True),
    ],
)
def test_a_job_that_cannot_save_before_its_limit_is_not_requeued(
    left: str,
    signalled: bool,
    code: int,
    requeued: bool,
    start_job: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho {left}\n")
    wait = "while kill -USR1 $PPID; do sleep 0.2; done" if signalled else ""
    (tmp_path / "srun").write_text(f"#!/bin/sh\ntrap 'exit {code}' USR1\n{wait}\nexit {code}\n")
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = requeue ] && echo "$2" >"{tmp_path}/requeued"\necho node1\n'
    )
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    done = start_job("node1\n")
    assert done.returncode == code and (tmp_path / "requeued").exists() == requeued, done.stderr
    told = "the time limit leaves no time to do and save a step" in done.stderr
    assert told == (signalled and (code == 138 or left == "4:00"))


@pytest.mark.parametrize("code", [5, 1])
def test_a_cluster_that_does_not_allow_requeueing_is_reported(
    code: int, start_job: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The job keeps its exit code."""
    wait = "while kill -USR1 $PPID; do sleep 0.2; done" if code == 5 else ""
    (tmp_path / "srun").write_text(f"#!/bin/sh\ntrap 'exit {code}' USR1\n{wait}\nexit {code}\n")
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho node1\n[ "$1" != requeue ]\n')
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    done = start_job("node1\n")
    assert done.returncode == code
    assert "cannot be requeued (message above); submit it again" in done.stderr
    assert "slurm/submit.sh --jobs 5" in done.stderr


def test_a_job_without_hosts_is_reported(
    start_job: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = start_job("")
    assert done.returncode != 0 and "scontrol show hostnames printed no host" in done.stderr


@pytest.mark.parametrize(
    ("array", "variables", "shard"),
    [
        ((0, 15, 16, 3), {}, "3/16"),
        ((3, 7, 2, 7), {"SHARDS": "16"}, "7/16"),  # some of the shards again
        ((3, 7, 2, 7), {}, ""),
        ((1, 16, 16, 7), {}, ""),
    ],
)
def test_a_task_of_an_array_prepares_its_shard(
    array: tuple[int, ...], variables: dict[str, str], shard: str, tmp_path: Path
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*"\n')
    python.chmod(0o755)
    make_root(tmp_path)
    names = ("TASK_MIN", "TASK_MAX", "TASK_COUNT", "TASK_ID")
    of_array = {f"SLURM_ARRAY_{name}": str(n) for name, n in zip(names, array, strict=True)}
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "8"}
    done = subprocess.run(
        ["bash", REPOSITORY / "slurm" / "prepare_data.slurm", "--source", "x"],
        env=os.environ | job | of_array | variables, capture_output=True, text=True,
    )  # fmt: skip
    if shard:
        assert f"--processes 8 --shard {shard} --source x" in done.stdout, done.stderr
    else:
        assert done.returncode == 2 and "or set SHARDS to the number of all" in done.stderr


def test_a_job_without_gpus_requests_none_and_uses_its_cores(
    recipe: Path, start_job: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    said = python("slurm/options.py", recipe, "--set", "cluster.gpu=cpu")
    assert "--ntasks-per-node=2" in said and "gpus" not in said
    (tmp_path / "srun").write_text('#!/bin/sh\necho "threads ${OMP_NUM_THREADS:-unset}"\n')
    assert start_job("node1\n").stdout == "threads unset\n"
    assert start_job("node1\n", SLURM_GPUS_ON_NODE="8").stdout == "threads 1\n"


def shell_lines() -> list[str]:
    """Return the lines of all shell scripts and of the Makefile, without comments."""
    scripts = [REPOSITORY / "Makefile", REPOSITORY / ".ci" / "run", *TEMPLATES]
    scripts += (REPOSITORY / "tests").rglob("*.sh")
    lines = [line for script in scripts for line in script.read_text().splitlines()]
    return [line for line in lines if not line.lstrip().startswith("#")]


def test_no_pipe_ends_in_a_command_that_stops_reading() -> None:
    """With pipefail, the SIGPIPE of the writer would end the script if the output is long."""
    assert len(shell_lines()) > 200
    stops_reading = re.compile(
        r"\|\s*(head|sed(?! --unbuffered)|awk|read|grep\s+(-\w*[qm]|--quiet|--max-count))\b"
    )
    assert [line for line in shell_lines() if stops_reading.search(line)] == []


def test_templates_know_the_exit_codes() -> None:
    assert f'[ "$code" -eq {INTERRUPTED} ]' in (REPOSITORY / "slurm/pretrain.slurm").read_text()


def test_a_job_whose_folder_is_locked_is_requeued_once(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "attempts.jsonl").write_bytes(b'{"job": "7", "st' + bytes(50))  # torn
    failed = (BUSY, recipe, "--run-dir", tmp_path / "run")
    words = ("slurm/attempts.py", *failed, "--resume-once", "job-7", "--wait-for-folder", "60")
    assert "exit code 6; the requeued job" in python(*words)
    assert "failed twice" in python(*words, code=1)


def test_every_start_of_a_job_passes_the_same_request() -> None:
    """pretrain.py knows whether the request has been carried out; the scripts do not."""
    template = (REPOSITORY / "slurm/pretrain.slurm").read_text()
    assert "--resume auto" not in template and '--resume-once "${RESUME_ONCE:-job-' in template
    submit = (REPOSITORY / "slurm/submit.sh").read_text()
    assert "--resume auto" not in submit and "export RESUME_ONCE REQUEUE=no" in submit


Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """Run submit.sh with an sbatch that records its arguments and environment."""
    stub = tmp_path / "bin" / "sbatch"
    stub.parent.mkdir()
    record = (
        f'echo "$* REQUEUE=${{REQUEUE-}} RESUME_ONCE=${{RESUME_ONCE-}}" >>"{tmp_path}/submitted"'
    )
    stub.write_text(f'#!/bin/sh\n{record}\necho "Submitted batch job 7"\n')
    stub.chmod(0o755)

    def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "submitted").unlink(missing_ok=True)
        return subprocess.run(
            [REPOSITORY / "slurm" / "submit.sh", *map(str, words)],
            cwd=tmp_path,
            env={"PATH": f"{stub.parent}:{os.environ['PATH']}"} | environment,
            capture_output=True,
            text=True,
        )

    return run


def submitted(tmp_path: Path) -> list[str]:
    """Return a line for each call of sbatch."""
    file = tmp_path / "submitted"
    return file.read_text().splitlines() if file.exists() else []


def test_one_command_submits_a_recipe(submit: Submit, recipe: Path, tmp_path: Path) -> None:
    steps = "training.steps=10"
    done = submit(recipe, "--set", steps, "--run-dir", "a b")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Submitted batch job 7\n"
    call = f"{OPTIONS_OF_RECIPE} --export=ALL slurm/pretrain.slurm {recipe} --set {steps}"
    call += " --run-dir a b"
    assert submitted(tmp_path) == [f"{call} REQUEUE= RESUME_ONCE="]
    fewer = submit("--jobs", "1", recipe, "--set", "cluster.nodes=2")
    assert fewer.returncode == 0
    (line,) = submitted(tmp_path)
    assert "--nodes=2 " in line and "singleton" not in line
    none = submit(recipe, "--resume", "runs/none")  # it may exist when the job starts
    assert none.returncode == 0 and len(submitted(tmp_path)) == 1
    assert none.stderr.startswith("warning: --resume runs/none: the path is not a checkpoint")


@pytest.mark.parametrize(
    ("setting", "exported"),
    [("NONE", "ALL"), ("NIL", "ALL"), ("A=1", "ALL,A=1"), ("ALL,A=1", "ALL,A=1")],
)
def test_the_variables_of_a_job_arrive(
    setting: str, exported: str, submit: Submit, recipe: Path, tmp_path: Path
) -> None:
    """SBATCH_EXPORT=NONE is the default of some clusters."""
    for words in ([], ["--jobs", "2"]):
        done = submit(*words, recipe, SBATCH_EXPORT=setting)
        assert done.returncode == 0, done.stderr
        assert all(f" --export={exported} " in line for line in submitted(tmp_path))


@pytest.mark.parametrize("name", ["pretrain", "sweep", "prepare_data"])
def test_a_script_that_is_submitted_from_another_folder_says_so(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", REPOSITORY / "slurm" / f"{name}.slurm", "recipe.toml"],
        env=os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    said = f"{name}.slurm: {tmp_path} is not the root of the repository; submit this script from"
    assert done.returncode == 2 and done.stderr.startswith(said)


@pytest.mark.parametrize("name", ["pretrain", "sweep", "prepare_data"])
def test_srun_passes_on_the_variables_of_a_script(name: str, tmp_path: Path) -> None:
    """Slurm sets SLURM_EXPORT_ENV in a job that was submitted with SBATCH_EXPORT=NONE."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "export ${SLURM_EXPORT_ENV-unset}"\n')
    (tmp_path / "srun").write_text(python.read_text())
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1\n")
    for stub in (python, tmp_path / "srun", tmp_path / "scontrol"):
        stub.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_CPUS_PER_TASK": "8"}
    job |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_EXPORT_ENV": "NONE"}
    make_root(tmp_path)
    done = subprocess.run(
        ["bash", REPOSITORY / "slurm" / f"{name}.slurm", "recipe.toml"],
        env=job | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "export unset\n", done.stderr


@pytest.mark.parametrize(
    ("words", "advice"),
    [([], "Use auto, never or a checkpoint such as"), (["--elastic"], "Use auto or a checkpoint")],
)
def test_the_advice_about_a_missing_checkpoint_is_accepted(
    words: list[str], advice: str, submit: Submit, recipe: Path
) -> None:
    """launch.py does not support --resume never."""
    done = submit(*words, recipe, "--resume", "latest")
    assert done.returncode == 0 and advice in done.stderr


def test_one_command_submits_jobs_that_follow_each_other(
    submit: Submit, recipe: Path, tmp_path: Path
) -> None:
    names = set()
    for words in (["--jobs", 3], ["--jobs=3"]):
        done = submit(*words, recipe, "--resume", "never")
        assert done.returncode == 0 and done.stdout.count("Submitted") == 3, done.stderr
        assert done.stderr == ""
        lines = submitted(tmp_path)
        options = f"{OPTIONS_OF_RECIPE} --export=ALL --no-requeue --dependency=singleton"
        call = f"{options} slurm/pretrain.slurm {recipe} --resume never REQUEUE=no RESUME_ONCE="
        assert len(lines) == 3 and len(set(lines)) == 1 and lines[0].startswith(f"{call}chain-")
        names.add(lines[0])
    assert len(names) == 2  # a request of its own for each chain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a recipe, for example recipes/llama/7b.toml"),
        (["--set", "seed=1"], "expected a recipe instead of --set"),
        (["--jobs"], "invalid --jobs (no value): expected 1 to 999, for example --jobs 5"),
        (["--jobs", "0", "recipes/llama/7b.toml"], "invalid --jobs 0: expected 1 to 999"),
        (["--jobs", "5x", "recipes/llama/7b.toml"], "invalid --jobs 5x"),
        (["--jobs", "recipes/llama/7b.toml"], "invalid --jobs recipes/llama/7b.toml"),
        (["--jobs=", "recipes/llama/7b.toml"], "invalid --jobs (no value)"),
        (["--jobs", "5"], "expected a recipe"),
        (["recipes/llama/7b.toml", "--jobs", "5"], "--jobs comes after the recipe"),
        (["recipes/no-such.toml"], "no such recipe"),
        (["recipes/tiny.toml"], "has no [cluster] section"),
        (["recipes/llama/7b.toml", "--set", "layout.tensor=3"], "layout.tensor = 3"),
        (["recipes/llama/7b.toml", "--step", "5"], "unrecognized arguments: --step 5"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_reported_before_anything_is_submitted(
    words: list[str], message: str, submit: Submit, tmp_path: Path
) -> None:
    done = submit(*words)
    assert done.returncode != 0 and submitted(tmp_path) == []
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--jobs=4", "recipes/llama/7b.toml", "-h"]])
def test_help_submits_nothing(words: list[str], submit: Submit, tmp_path: Path) -> None:
    done = submit(*words)
    assert done.returncode == 0 and submitted(tmp_path) == []
    assert done.stdout.startswith("usage: slurm/submit.sh ")


def test_a_missing_slurm_or_container_is_reported(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "bin" / "sbatch").unlink()
    plain = {"PATH": "/usr/bin:/bin"}
    if not any(Path(folder, "sbatch").exists() for folder in plain["PATH"].split(":")):
        done = submit("recipes/llama/7b.toml", **plain)
        assert done.returncode == 2 and "sbatch is not on PATH" in done.stderr
    done = submit("recipes/llama/7b.toml", CONTAINER="image.sif", **plain)
    assert done.returncode == 2 and "apptainer is not on PATH" in done.stderr


def test_a_container_runs_the_options_and_the_job(
    submit: Submit, recipe: Path, tmp_path: Path, start_job: Submit
) -> None:
    image, apptainer = tmp_path / "image.sif", tmp_path / "bin" / "apptainer"
    apptainer.write_text(
        f'#!/bin/sh\nshift 2; [ "$1" = python ] && shift; exec {sys.executable} "$@"'
    )
    apptainer.chmod(0o755)
    done = submit(recipe, CONTAINER=str(image))
    assert done.returncode == 2 and f"CONTAINER={image} does not exist" in done.stderr
    image.touch()
    done = submit(recipe, CONTAINER=str(image))
    assert done.returncode == 0, done.stderr
    assert submitted(tmp_path)[0].startswith(OPTIONS_OF_RECIPE)
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$*"\n')
    started = start_job("node1\n", CONTAINER=str(image)).stdout
    assert (
        f"apptainer exec --nv {image} python recipes/pretrain.py --resume-once job-7 recipe.toml"
        in started
    )


@pytest.mark.parametrize("container", [{}, {"CONTAINER": "image.sif"}])
def test_launch_py_of_an_elastic_job_runs_outside_of_the_container(
    container: dict[str, str], tmp_path: Path, start_job: Submit
) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "python $*"\n')
    python.chmod(0o755)
    started = start_job("node1\n", ELASTIC="yes", **container).stdout
    option = " --container image.sif" if container else ""
    assert f"python recipes/launch.py --resume-once job-7 recipe.toml{option}\n" in started
