"""A worker of a sweep: waits for trials, measures them, and ends with its scheduler."""

import os
import time
import traceback
from pathlib import Path
from typing import NoReturn

from models.errors import UserError
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.runtime.environment import check_address, set_torch_variables
from threefold.runtime.ranks import log_file
from threefold.sweep.ranks.protocol import (
    START,
    RankWatch,
    WorkerFiles,
    read_message,
    write_message,
)
from threefold.sweep.trial import Outcome

MAX_REASON_CHARACTERS = 300
MAX_TRACEBACK_LINES = 20
OUT_OF_MEMORY_TEXTS = (  # in errors of CUDA, torch on the CPU, cuBLAS and NCCL
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",
)


def run_rank(folder: Path) -> NoReturn:
    """Run a rank until the workers are stopped."""
    files = WorkerFiles(folder)
    settings = read_settings(files)
    os.environ.update(settings["environment"])
    set_torch_variables(
        os.environ, deterministic=settings["deterministic"], pipelined=settings["pipelined"]
    )
    world = LaunchEnvironment.from_environment(os.environ)
    output = os.open(log_file(folder, world.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    watch = RankWatch(files)
    watch.start()
    try:
        check_address(os.environ, world)  # the group would wait for minutes
        from threefold.sweep.ranks.worker import serve  # torch reads its variables only once

        serve(files, world, watch, deterministic=settings["deterministic"])
    except BaseException as problem:  # any exception is the outcome of the trial
        report_failure(files, world.rank, watch.number, problem)
    # Do not exit: to the other ranks, the end of this process would look like a second failure.
    while True:
        time.sleep(1)


def read_settings(files: WorkerFiles) -> dict:
    """Return the settings of the workers, or end this process if they were stopped."""
    settings = read_message(files.settings, START)
    if settings is None:
        raise SystemExit(f"{files.folder} is not the folder of running workers")
    return settings


def report_failure(files: WorkerFiles, rank: int, number: int, problem: BaseException) -> None:
    """Report an exception to the scheduler."""
    log = "".join(traceback.format_exception(problem)).splitlines()[-MAX_TRACEBACK_LINES:]
    traceback.print_exception(problem)
    text = " ".join(str(problem).split())[:MAX_REASON_CHARACTERS]
    reason = text if isinstance(problem, UserError) else f"{type(problem).__name__}: {text}"
    message = {
        "number": number,
        "rank": rank,
        "outcome": outcome_of(problem),
        "reason": reason,
        "log": "\n".join(log),
        "time": time.time(),
    }
    write_message(files.failure(rank), message)
    write_message(files.failed, {"number": number})


def outcome_of(problem: BaseException) -> Outcome:
    """Return the outcome of a trial that ended with an exception."""
    if isinstance(problem, UserError):
        return "rejected"
    text = str(problem)
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(problem, RuntimeError) and any(marker in text for marker in OUT_OF_MEMORY_TEXTS):
        return "out_of_memory"
    return "crashed"
