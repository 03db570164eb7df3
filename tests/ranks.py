"""Run a function or a program on several ranks, for tests that need more than one process."""

import contextlib
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator

from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.sections import REPOSITORY
from threefold.prove.ranks import PRELOADED_MODULES
from threefold.runtime.processes import start_processes
from threefold.runtime.ranks import (
    CPU_VARIABLES,
    ForkedRanks,
    log_file,
    send,
    start_interpreters,
)

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
    "transformers.models.llama.modeling_llama",
    "torch.distributed.checkpoint",
    "threefold.commands.convert",
    "threefold.commands.sweep",
    "threefold.convert.to_hugging_face",
    "threefold.convert.from_hugging_face",
    "threefold.trace.trace",
]
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
        RankFailed: a rank raised, was killed, or reached the time limit.
    """
    with (
        tempfile.TemporaryDirectory() as name,
        _forked(world_size, _call, function, arguments, folder=Path(name)) as ranks,
    ):
        return ranks.gather(seconds)


def start_ranks(
    world_size: int, arguments: list[str], *, folder: Path, seconds: float, forked: bool = True
) -> tuple[list[int], list[str]]:
    """Run `python ARGUMENTS` on every rank of a new world; return exit codes and outputs.

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
    deadline = time.monotonic() + seconds
    if forked:
        with program_on_ranks(world_size, arguments, folder=folder) as ranks:
            for process in ranks.processes:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in ranks.processes]
    else:
        interpreters = start_interpreters(
            world_size, arguments, logs=folder, variables=CPU_VARIABLES
        )
        interpreters.wait(seconds)
        codes = [process.returncode for process in interpreters.running.values()]
        interpreters.stop()
    outputs = [log_file(folder, rank).read_text(errors="replace") for rank in range(world_size)]
    if None in codes:
        raise subprocess.TimeoutExpired(arguments, seconds, "\n".join(outputs))
    return codes, outputs


def program_on_ranks(
    world_size: int, arguments: list[str], *, folder: Path
) -> AbstractContextManager[ForkedRanks]:
    """Run `python ARGUMENTS` on forked ranks, as `start_ranks`; they are killed at the end."""
    return _forked(world_size, _run_program, arguments, folder=folder)


@contextlib.contextmanager
def _forked(
    world_size: int, function: Callable[..., None], *arguments: Any, folder: Path
) -> Iterator[ForkedRanks]:
    """Fork ranks from a server that has imported torch and DeepSpeed, and count their seconds."""
    with ForkedRanks(
        world_size, function, folder, *arguments, logs=folder, preload=FORK_SERVER_MODULES
    ) as ranks:
        yield ranks
    for file in folder.glob("seconds*"):
        core_seconds.append(float(file.read_text()))


@contextlib.contextmanager
def _in_checkout(folder: Path) -> Iterator[None]:
    """Run a rank in the checkout, with its temporary files in `folder`, and note its seconds."""
    # The end of a rank skips the removal of temporary files, such as those of W&B's import.
    tempfile.tempdir = tempfile.mkdtemp(dir=folder)
    os.chdir(REPOSITORY)
    try:
        yield
    finally:
        seconds = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        (folder / f"seconds{os.environ['RANK']}").write_text(str(seconds))


def _call(
    pipe: Connection, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Call the function that `run_ranks` was given, and send its result."""
    with _in_checkout(folder):
        result = function(*arguments)
    send(pipe, result)


def _run_program(pipe: Connection, folder: Path, arguments: Sequence[str]) -> None:
    """Run the program that `start_ranks` was given, as `__main__`."""
    file, *rest = arguments
    with _in_checkout(folder):
        if file == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [file, *rest]
            runpy.run_path(file, run_name="__main__")


def join_world() -> LaunchEnvironment:
    """Join the world of this rank, with one thread, and return it."""
    world = LaunchEnvironment.from_environment(os.environ)
    torch.set_num_threads(1)
    start_processes(world)
    return world
