"""Run a function or a program on several ranks, for tests that need more than one process."""

import importlib
import multiprocessing
import os
import pickle
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator

from threefold.config.parallel_dims import LaunchEnvironment
from threefold.prove.ranks import (
    PRELOADED_MODULES,
    RANK_ENVIRONMENT,
    environment,
    free_port,
    rank_variables,
)
from threefold.runtime.processes import start_processes

# The fork server imports these modules before it forks ranks, because most test files import
# pytest, and some matplotlib, transformers or what a run of pretrain.py imports.
FORK_SERVER_MODULES = [
    *PRELOADED_MODULES,
    "recipes.pretrain",
    "threefold.pretrain.setup",
    "threefold.pretrain.preflight.run",
    "pytest",
    "matplotlib.pyplot",
    "transformers.models.auto.modeling_auto",
    "tests.frozen_imports",
]
REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 420
core_seconds: list[float] = []  # of each rank that has ended


def fp16_on_cpu() -> AbstractContextManager[Any]:
    """Let DeepSpeed train in fp16 on any CPU: it rejects CPUs that compute fp16 only slowly."""
    return mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda _: True)


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS
) -> list[Any]:
    """Call a module's function on every rank of a new world; return the results by rank.

    The function finds RANK and WORLD_SIZE in the environment, as a launcher would set them.

    Args:
        world_size: number of ranks
        function: a function of a module
        arguments: its arguments, which have to be picklable, as its result
        seconds: time limit, after which the ranks are killed

    Raises:
        AssertionError: a rank raised, was killed, or reached the time limit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call = (function.__module__, function.__name__, arguments)
        (folder / "call").write_bytes(pickle.dumps(call))
        codes = _fork(world_size, _call, folder, seconds)
        assert not any(code != 0 for code in codes), "\n".join(
            f"rank {rank} of {world_size}, "
            + ("killed at the time limit" if code is None else f"exit code {code}")
            + f":\n{_log(folder, rank).read_text(errors='replace')[-4000:]}"
            for rank, code in enumerate(codes)
        )
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def start_ranks(
    world_size: int, arguments: list[str], *, folder: Path, seconds: float, forked: bool = True
) -> tuple[list[int], list[str]]:
    """Run `python ARGUMENTS` on every rank of a new world; return exit codes and outputs.

    Outputs go to files, because a full pipe would stop a rank.

    Args:
        world_size: number of ranks
        arguments: a file or `-c CODE`, and the arguments of the program
        folder: of the outputs
        seconds: time limit, after which the ranks are killed
        forked: fork processes that have imported torch and DeepSpeed. False starts interpreters,
            for code that must run before torch is imported.

    Raises:
        subprocess.TimeoutExpired: a rank has reached the time limit.
    """
    if forked:
        (folder / "call").write_bytes(pickle.dumps(arguments))
        codes = _fork(world_size, _run_program, folder, seconds)
    else:
        codes = _start_interpreters(world_size, arguments, folder, seconds)
    outputs = [_log(folder, rank).read_text(errors="replace") for rank in range(world_size)]
    if None in codes:
        raise subprocess.TimeoutExpired(arguments, seconds, "\n".join(outputs))
    return codes, outputs


def _start_interpreters(
    world_size: int, arguments: list[str], folder: Path, seconds: float
) -> list[int | None]:
    """Start an interpreter per rank; return the exit codes, None where the time was over."""
    port, deadline = free_port(), time.monotonic() + seconds
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=os.environ | rank_environment(rank, world_size, port),
            stdout=_log(folder, rank).open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(world_size)
    ]
    codes: list[int | None] = []
    for process in processes:
        try:
            codes.append(process.wait(timeout=max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in processes:
        process.kill()
    return codes


def _fork(
    world_size: int, target: Callable[[Path], None], folder: Path, seconds: float
) -> list[int | None]:
    """Run a function on forked ranks; return the exit codes, None where the time was over.

    The server that the ranks are forked from has imported torch and DeepSpeed, which saves
    seconds per world.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(FORK_SERVER_MODULES)
    port, deadline = free_port(), time.monotonic() + seconds
    with environment(RANK_ENVIRONMENT):  # of the server, which starts with the first rank
        processes = [
            server.Process(
                target=_rank,
                args=(target, folder, os.environ | rank_environment(rank, world_size, port)),
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for file in folder.glob("seconds*"):
            core_seconds.append(float(file.read_text()))
        for process in processes:
            process.kill()
            process.join()


def _rank(target: Callable[[Path], None], folder: Path, variables: dict[str, str]) -> None:
    """Run one forked rank."""
    log = os.open(_log(folder, int(variables["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(variables)
    # os._exit below skips the removal of temporary files, such as those of W&B's import.
    tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    os.chdir(REPOSITORY)
    target(folder)
    sys.stdout.flush()
    seconds = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    (folder / f"seconds{variables['RANK']}").write_text(str(seconds))
    os._exit(0)  # the teardown of torch's threads sometimes aborts, and is not under test


def _call(folder: Path) -> None:
    """Call the function that `run_ranks` was given, and write its result."""
    module, name, arguments = pickle.loads((folder / "call").read_bytes())
    result = getattr(importlib.import_module(module), name)(*arguments)
    (folder / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))


def _run_program(folder: Path) -> None:
    """Run the program that `start_ranks` was given, as `__main__`."""
    file, *rest = pickle.loads((folder / "call").read_bytes())
    if file == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [file, *rest]
        runpy.run_path(file, run_name="__main__")


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher sets for a CPU rank, and limits to one core."""
    return rank_variables(rank, world_size, port) | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def join_world() -> LaunchEnvironment:
    """Join the world of this rank, with one thread, and return it."""
    world = LaunchEnvironment.from_environment(os.environ)
    torch.set_num_threads(1)
    start_processes(world)
    return world
