"""Measurement of trials in the workers of a sweep: step times and peak memory."""

import contextlib
import ctypes
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from threefold.config.deepspeed_json import precision, read_deepspeed_json
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.data.dataset import TrainingData
from threefold.engine.build import release
from threefold.engine.engine import Engine
from threefold.gpus.datasheet import check_device
from threefold.prove.training import shared_groups, start
from threefold.runtime.processes import check_machine, gathered, on_gpu, start_processes
from threefold.sweep.breakdown import split_of_rank
from threefold.sweep.links.timing import measure_links
from threefold.sweep.ranks.protocol import (
    START,
    RankWatch,
    WorkerFiles,
    read_message,
    write_message,
)
from threefold.sweep.trial import PartSeconds, Result, split_of_slowest
from threefold.sweep.width_transfer.measure import measure_training

GIB = 2**30
POLL_SECONDS = 0.05
SECONDS_BETWEEN_TRIALS = timedelta(days=1)  # RankWatch ends abandoned ranks much earlier


def serve(
    files: WorkerFiles, world: LaunchEnvironment, watch: RankWatch, *, deterministic: bool
) -> None:
    """Measure trials until this process is ended.

    Args:
        watch: ends this process after a trial's time limit
    """
    gc.freeze()  # the collector is faster if it skips the objects that imports have created
    start_processes(world, deterministic=deterministic)
    control = dist.new_group(backend="gloo", timeout=SECONDS_BETWEEN_TRIALS)
    dist.barrier(group=control)
    memory = Memory()
    if world.rank == 0:
        write_result(files, START, Result(outcome="ok"))
    with shared_groups() as forget_asked:
        for number in range(START + 1, 10**9):
            request = next_request(files, world, control, number)
            watch.begin(number, request["seconds"])
            forget_asked()
            if "links" in request:
                result = measure_links(request["links"], world, control)
            elif "kind" in request:
                recipe = checked_recipe(request, world)
                result = measure_training(request["kind"], recipe, world)
            else:
                result = measure(request, world, control, memory)
            watch.end()
            if world.rank == 0:
                write_result(files, number, result)


def next_request(
    files: WorkerFiles, world: LaunchEnvironment, control: dist.ProcessGroup, number: int
) -> dict[str, Any]:
    """Return the next request on all ranks; only rank 0 reads files."""
    box: list[dict[str, Any] | None] = [None]
    while world.rank == 0 and (box := [read_message(files.request, number)]) == [None]:
        time.sleep(POLL_SECONDS)
    dist.broadcast_object_list(box, src=0, group=control)
    assert box[0] is not None
    return box[0]


def write_result(files: WorkerFiles, number: int, result: Result) -> None:
    """Write a result for the scheduler."""
    write_message(files.result, {"number": number, "result": result.as_json()})


def checked_recipe(request: dict[str, Any], world: LaunchEnvironment) -> Recipe:
    """Return the recipe of a request.

    Raises:
        UserError: this machine cannot run the recipe.
    """
    recipe = parse_recipe(request["recipe"], request["recipe"]["name"])
    assert recipe.cluster is not None
    check_machine(
        world,
        precision=precision(read_deepspeed_json(recipe.deepspeed)),
        compile=recipe.training.compile,
        deterministic=recipe.training.deterministic,
        gpu=recipe.cluster.gpu,
    )
    check_device(recipe.cluster.gpu, get_accelerator().device_name())
    return recipe


def measure(
    request: dict[str, Any], world: LaunchEnvironment, control: dist.ProcessGroup, memory: "Memory"
) -> Result:
    """Build the engine of a recipe, run its steps, and return their times; collective.

    Args:
        request: the table of the recipe, and the numbers of warm-up and measured steps
    """
    recipe = checked_recipe(request, world)
    memory.begin()
    engine, data = start(recipe, world)
    seconds = run_steps(engine, data, control, request["warm_up"] + request["steps"])
    of_rank = RankMeasurement(seconds, memory.peak_gib(), memory.allocated_gib())
    if request["split"]:
        of_rank.parts = run_split_steps(engine, data, control)
    device = engine.device_name
    release(engine)
    of_ranks = gathered(of_rank, control)
    del engine
    gc.collect()  # an engine has reference cycles
    return result_of(of_ranks, request["warm_up"], device)


@dataclass
class RankMeasurement:
    """The measured values of a rank.

    Attributes:
        allocated_gib: peak memory of torch's allocator; None on a CPU
        parts: parts of a step; None without --split
    """

    seconds: list[float]
    peak_gib: float
    allocated_gib: float | None
    parts: PartSeconds | None = None


def result_of(of_ranks: Sequence[RankMeasurement], warm_up: int, device: str) -> Result:
    """Return the result of a trial from the measured values of all ranks.

    Ranks end a step at slightly different times, so each step takes the time of the slowest rank.
    """
    slowest = [max(of_step) for of_step in zip(*(rank.seconds for rank in of_ranks), strict=True)]
    allocated = [rank.allocated_gib for rank in of_ranks if rank.allocated_gib is not None]
    parts = [rank.parts for rank in of_ranks if rank.parts is not None]
    return Result(
        outcome="ok",
        step_seconds=slowest[warm_up:],
        warm_up_seconds=sum(slowest[:warm_up]),
        memory_gib=max(rank.peak_gib for rank in of_ranks),
        allocated_gib=max(allocated, default=None),
        device=device,
        split=split_of_slowest(parts, median(slowest[warm_up:])) if parts else None,
    )


def run_steps(
    engine: Engine, data: TrainingData, control: dist.ProcessGroup, steps: int
) -> list[float]:
    """Return the duration of each step on this rank; collective.

    A step lasts from the end of the previous step to its own end, and the device is synchronized at
    both ends. The micro-batches are read in advance, as the prefetcher does in a run.
    """
    batches = [list(data.micro_batches(step)) for step in range(1, steps + 1)]
    durations = []
    dist.barrier(group=control)
    with without_collections():
        before = time.perf_counter()
        for step, batch in enumerate(batches, start=1):
            in_run = min(step, engine.recipe.training.steps)
            engine.train_step(batch, data.phase_plan.at(in_run).learning_rate(in_run))
            if engine.on_gpu:  # weights are still gathered on other streams
                torch.cuda.current_stream(engine.device).synchronize()
            now = time.perf_counter()
            durations.append(now - before)
            before = now
    return durations


def run_split_steps(
    engine: Engine, data: TrainingData, control: dist.ProcessGroup
) -> dict[str, float]:
    """Return the seconds of each part of a step on this rank; collective."""
    batch = list(data.micro_batches(1))
    rate = data.phase_plan.at(1).learning_rate(1)
    dist.barrier(group=control)
    with without_collections():
        return split_of_rank(engine, batch, rate)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect garbage now and disable collection during the steps, as in a run."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Memory:
    """Peak memory of this process in a trial.

    On a GPU, it is all used memory of the device, including that of CUDA and NCCL. On a CPU, it is
    the resident memory minus the memory that earlier trials in this process did not release.
    """

    def __init__(self) -> None:
        self._first_bytes = self._before_bytes = 0.0 if on_gpu() else resident_bytes("VmRSS")

    def begin(self) -> None:
        """Return memory of earlier trials to the system, and reset the peaks."""
        if on_gpu():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak (proc(5))
        self._before_bytes = resident_bytes("VmRSS")

    def peak_gib(self) -> float:
        """Return the peak since `begin`."""
        if on_gpu():
            free, total = torch.cuda.mem_get_info()
            return (total - free) / GIB
        left_over = self._before_bytes - self._first_bytes
        return (resident_bytes("VmHWM") - left_over) / GIB

    def allocated_gib(self) -> float | None:
        """Return the peak of torch's allocator since `begin`; None on a CPU."""
        return torch.cuda.max_memory_allocated() / GIB if on_gpu() else None


def resident_bytes(key: str) -> float:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(key))
