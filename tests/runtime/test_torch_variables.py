"""The environment variables of torch are set, except those that the user has set."""

import os
import subprocess
import sys
from unittest import mock

import pytest

from models.errors import UserError
from threefold.config.loading import REPOSITORY
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.runtime.environment import (
    check_workspace,
    cores_of_rank,
    set_flight_recorder,
    set_thread_count,
    set_torch_variables,
)
from threefold.runtime.processes import check_machine

INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"


def variables(deterministic: bool = False, **given: str) -> dict[str, str]:
    environment = dict(given)
    set_torch_variables(environment, deterministic=deterministic)
    return environment


def recorded(on_gpu: bool, **given: str) -> dict[str, str]:
    environment = dict(given)
    set_flight_recorder(environment, on_gpu=on_gpu)
    return environment


def test_variables_have_the_names_of_the_pinned_torch() -> None:
    assert variables() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", INDUCTOR: "1"}
    assert recorded(on_gpu=True) == {"TORCH_FR_BUFFER_SIZE": "2000"}


@pytest.mark.parametrize(
    "given",
    [
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
        {"PYTORCH_CUDA_ALLOC_CONF": ""},
    ],
)
def test_variables_set_by_the_user_are_kept(given: dict[str, str]) -> None:
    given = given | {INDUCTOR: "0"}
    assert variables(**given) == given


def test_only_gpus_record_collectives_unless_the_user_has_set_it() -> None:
    assert recorded(on_gpu=False) == {"TORCH_FR_BUFFER_SIZE": "0"}
    for given in ({"TORCH_FR_BUFFER_SIZE": "50"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}):
        for on_gpu in (False, True):
            assert recorded(on_gpu, **given) == given


def test_deterministic_runs_fix_the_workspace() -> None:
    found = variables(deterministic=True)
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in variables()
    own = variables(deterministic=True, CUBLAS_WORKSPACE_CONFIG=":16:8")
    assert own["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_workspace_that_is_not_deterministic_is_rejected() -> None:
    for environment in ({}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}):
        check_workspace(environment)
    with pytest.raises(UserError, match=r"CUBLAS_WORKSPACE_CONFIG = :0:0 .* use :4096:8"):
        check_workspace({"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    with mock.patch.dict("os.environ", CUBLAS_WORKSPACE_CONFIG=":0:0"):
        check_machine(LaunchEnvironment(), precision="fp32", compile=False)
        with pytest.raises(UserError, match="CUBLAS_WORKSPACE_CONFIG"):
            check_machine(LaunchEnvironment(), precision="fp32", compile=False, deterministic=True)


WATCHED = """
import builtins, os, sys
from unittest import mock

variables = sys.argv[1:]
original = builtins.__import__

def watching(name, *arguments, **settings):
    if name == "torch":
        print(*map(os.environ.get, variables), flush=True)
        os._exit(0)
    return original(name, *arguments, **settings)

builtins.__import__ = watching
from recipes import pretrain
settings = ["training.deterministic=true", "layout.pipeline=1"]
with mock.patch.object(sys, "argv", ["pretrain.py", *(f"--set={each}" for each in settings)]):
    pretrain.pretrain()
"""


def test_a_run_sets_the_variables_before_it_imports_torch() -> None:
    keys = ("PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS")
    unset = {key: value for key, value in os.environ.items() if key not in keys}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *keys],
        cwd=REPOSITORY,
        env=unset,
        capture_output=True,
        text=True,
    )
    cores = str(len(os.sched_getaffinity(0)))  # all of them are the only rank's
    assert done.stdout.split() == ["expandable_segments:True", ":4096:8", cores], done.stderr


def test_the_cores_are_divided_over_the_ranks_of_a_node() -> None:
    with mock.patch("os.sched_getaffinity", return_value=set(range(9))):
        for ranks, threads in ((1, "9"), (2, "4"), (9, "1"), (20, "1")):
            set_thread_count(environment := {}, LaunchEnvironment(size=ranks, local_size=ranks))
            assert environment == {"OMP_NUM_THREADS": threads}
        set_thread_count(
            environment := {"OMP_NUM_THREADS": "7"}, LaunchEnvironment(size=2, local_size=2)
        )
        assert environment["OMP_NUM_THREADS"] == "7"  # set by the user


@pytest.mark.parametrize(
    ("affinity", "slurm", "threads"),
    [
        (8, {"NTASKS": "16", "CPUS_PER_TASK": "8", "CPUS_ON_NODE": "64"}, 8),  # bound
        (64, {"NTASKS": "16", "CPUS_PER_TASK": "8", "CPUS_ON_NODE": "64"}, 8),  # not bound
        (4, {"NTASKS": "16", "CPUS_PER_TASK": "8", "CPUS_ON_NODE": "64"}, 4),  # cores of 2 threads
        (8, {"NTASKS": "16", "CPUS_ON_NODE": "64"}, 8),  # bound by --cpus-per-gpu
        (64, {"NTASKS": "16", "CPUS_ON_NODE": "64"}, 8),
        (64, {"NTASKS": "1", "CPUS_PER_TASK": "64", "CPUS_ON_NODE": "64"}, 8),  # launch.py's agent
        (32, {"NTASKS": "2", "CPUS_PER_TASK": "32", "CPUS_ON_NODE": "64"}, 4),  # torchrun's
        (64, {"NTASKS": "16", "CPUS_PER_TASK": "many"}, 8),
    ],
)
def test_the_cores_of_a_slurm_task_are_not_divided_again(
    affinity: int, slurm: dict[str, str], threads: int
) -> None:
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    with mock.patch("os.sched_getaffinity", return_value=set(range(affinity))):
        assert cores_of_rank(variables, LaunchEnvironment(size=16, local_size=8)) == threads


def test_pipelined_runs_load_kernels_early_and_use_all_queues() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "16"}
    set_torch_variables(environment, pipelined=True)
    assert environment["CUDA_MODULE_LOADING"] == "EAGER"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"  # set by the user
    assert "CUDA_MODULE_LOADING" not in variables()
    set_torch_variables(environment := {}, pipelined=True)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
