"""One message when a rank runs out of memory: where, what was predicted, and what would fit."""

import contextlib
import resource
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from models.errors import UserError
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.config.sections import FIRST_PHASE
from threefold.engine.engine import Engine
from threefold.plan.job import Job, Machine, job_of
from threefold.plan.memory.peak import (
    GIB,
    StageMemory,
    fullest_stage,
    limit_after_shortage,
    memory_of_stage,
)
from threefold.plan.recipe_edits import (
    options_of,
    phase_prefix,
    problem_in_run,
    replaced_settings,
)
from threefold.plan.search import search
from threefold.plan.software import THREEFOLD
from threefold.plan.time.step import step_time
from threefold.pretrain.experiment import Experiment, machine_of
from threefold.pretrain.setup import RunHandle
from threefold.runtime.exits import STOPPED, exit_now
from threefold.runtime.processes import driver_name, on_gpu

# Detection of out-of-memory errors, and the memory that a rank has allocated.

OUT_OF_MEMORY_TEXTS = (  # of plain RuntimeErrors
    "can't allocate memory",  # the CPU's allocator (c10/core/impl/alloc_cpu.cpp)
    "CUDA error: out of memory",  # outside of torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
HISTORY_ENTRIES = 100_000  # allocations and frees that a snapshot shows


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of an allocator, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(text in message for text in OUT_OF_MEMORY_TEXTS)


@dataclass(frozen=True)
class Allocated:
    """Bytes that a rank has allocated; None for parts that do not exist yet.

    Attributes:
        weights: weights in the precision of the forward pass
        optimizer: fp32 weights, moments and average of this rank's share
        peak: peak of all allocations: on a GPU by torch's allocator, else of the whole process
        reserved: memory that torch's allocator holds; None on a CPU
    """

    weights: int | None
    optimizer: int | None
    peak: int
    reserved: int | None


def allocated(engine: Engine | None, *, on_gpu: bool) -> Allocated:
    """Return the memory that this rank has allocated.

    Args:
        engine: the engine, or None if memory ran out before it was built
        on_gpu: True if the run uses GPUs
    """
    weights = optimizer = None
    if engine is not None:
        weights = _bytes([parameter.detach() for _, parameter in engine.parameters()])
        # The two moments, and the average if there is one, have the same size.
        optimizer = (3 + engine.state.has_average) * _bytes(engine.state.weights)
    if on_gpu:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        reserved = None
    return Allocated(weights, optimizer, peak, reserved)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# The nearest layout that needs less memory than the one that ran out of it.

MAX_CANDIDATES = 500  # the fastest layouts that are compared


@dataclass(frozen=True)
class Alternative:
    """A layout that is predicted to need less memory.

    Attributes:
        options: the values of --set that select it
        memory: predicted memory of its fullest stage
        slowdown: predicted duration of a step, relative to that of the layout that failed
        replaced: the settings of the recipe's DeepSpeed JSON of which this layout's JSON has other
            values
    """

    options: list[str]
    memory: StageMemory
    slowdown: float
    replaced: Sequence[str] = ()


def alternative(whole: Recipe, machine: Machine, phase: str = FIRST_PHASE) -> Alternative | None:
    """Return the most similar layout of a phase that needs less memory and keeps the run valid.

    Args:
        whole: the recipe with all phases
        phase: the phase that ran out of memory

    Returns:
        The same layout with more recomputation if that saves enough memory. Otherwise the layout
        with the fewest changed settings, the fastest on a tie. None if no layout saves enough.
    """
    recipe = PhasePlan(whole).recipe_of(phase)
    job = job_of(recipe, machine, THREEFOLD)
    own = fullest_stage(job)
    limit = limit_after_shortage(own)
    headroom = max(0.0, 1 - limit / (machine.gpu.memory_gib * GIB))
    # `search` drops a layout with more recomputation if the same layout fits with less, so every
    # plan may change the parallel sizes. Changing only the recomputation is the smallest change.
    for recompute in ("selective", "full"):
        changed = replace(job, layout=replace(job.layout, recompute=recompute))
        memory = fullest_stage(changed)
        if recompute != job.layout.recompute and memory.total <= limit:
            options = [f"{phase_prefix(phase)}layout.recompute={recompute}"]
            return Alternative(options, memory, _slowdown(job, changed))
    problem_of = problem_in_run(whole, machine, THREEFOLD, phase)
    candidates = search(job, MAX_CANDIDATES, headroom=headroom, problem_of=problem_of).plans
    if not candidates:
        return None
    best = min(candidates, key=lambda plan: (len(options_of(recipe, plan, phase)), plan.time.total))
    return Alternative(
        options_of(recipe, best, phase),
        best.memory,
        _slowdown(job, best.job),
        replaced_settings(recipe, best),
    )


def _slowdown(own: Job, other: Job) -> float:
    return step_time(other).total / step_time(own).total


REPORT = "out-of-memory.txt"


@dataclass
class Account:
    """The parts of a run whose memory is reported."""

    engine: Engine | None = None


@contextlib.contextmanager
def out_of_memory_explained(experiment: Experiment, handle: RunHandle) -> Iterator[Account]:
    """End this rank with one message for all ranks if memory runs out within this context."""
    account = Account()
    snapshot = experiment.recipe.tracking.memory_snapshot and on_gpu()
    if snapshot:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
    if experiment.world.rank == 0:  # a report of an earlier start would suppress that of this one
        with contextlib.suppress(OSError):
            (handle.folder.path / REPORT).unlink(missing_ok=True)
    try:
        yield account
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        file = handle.folder.path / f"memory-rank-{experiment.world.rank:05d}.pickle"
        if snapshot:
            with contextlib.suppress(OSError, RuntimeError):
                # https://pytorch.org/memory_viz shows the recorded allocations.
                torch.cuda.memory._dump_snapshot(str(file))
        report(experiment, handle, account.engine, error=error)
        exit_now(STOPPED)


def report(
    experiment: Experiment, handle: RunHandle, engine: Engine | None, *, error: Exception
) -> None:
    """Print and record the message; if another rank has begun to, refer to its message.

    Args:
        engine: the engine, or None if memory ran out before it was built
    """
    name = handle.supervisor.names[experiment.world.rank]
    file = handle.folder.path / REPORT
    try:
        file.open("xb").close()
    except FileExistsError:
        print(f"out of memory on {name} too; see {file}", file=sys.stderr, flush=True)
        return
    except OSError:  # the message is more important than the file
        pass
    # The details take seconds, and launch.py may kill this rank before they are known.
    first = first_line(experiment, handle, error)
    print(first, file=sys.stderr, flush=True)
    append(file, f"{first}\n\n{''.join(traceback.format_exception(error))}\n")
    handle.folder.event(
        "stop", handle.supervisor.crumb.step, reason=first, exit_code=STOPPED, out_of_memory=True
    )
    try:
        lines = details(experiment, engine)
    except Exception:  # a defect of the prediction must not hide the lack of memory
        lines = [f"  no prediction: {traceback.format_exc()}"]
    text = "\n".join(lines)
    print(text, file=sys.stderr, flush=True)
    append(file, f"{text}\n")


def append(file: Path, text: str) -> None:
    """Append to the report; the messages of the run are more important than a full disk."""
    with contextlib.suppress(OSError), file.open("a", encoding="utf-8") as stream:
        stream.write(text)


def first_line(experiment: Experiment, handle: RunHandle, error: Exception) -> str:
    """Return where memory ran out, and the first line of the error."""
    dims, rank = experiment.dims, experiment.world.rank
    place = dims.coordinates(rank)
    where = ", ".join(f"{axis} {getattr(place, axis)}" for axis in dims.shown_sizes)
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        f"out of memory on {handle.supervisor.names[rank]} ({where}) in {handle.supervisor.crumb}: "
        f"{text}"
    )


def details(experiment: Experiment, engine: Engine | None) -> list[str]:
    """Return the lines about allocated and predicted memory, and about a layout that needs less."""
    recipe = experiment.recipe
    lines = [f"  allocated: {allocated_text(allocated(engine, on_gpu=on_gpu()))}"]
    stage = experiment.dims.coordinates(experiment.world.rank).pipeline
    try:
        machine = machine_of(experiment, driver_name())
        if machine is None:
            return [*lines, f"  no prediction: threefold/gpus/datasheets/ has no {driver_name()}"]
        memory = memory_of_stage(job_of(recipe, machine, THREEFOLD), stage)
        other = alternative(experiment.whole_recipe, machine, experiment.phase)
    except UserError as problem:  # the planner rejects what the engine accepts
        return [*lines, f"  no prediction: {problem}"]
    predicted = f"  predicted: {predicted_text(memory)} of {machine.gpu.memory_gib:.1f} GiB"
    return [*lines, predicted, f"  {alternative_text(other)}"]


def allocated_text(allocated: Allocated) -> str:
    """Return the allocated memory as text."""
    parts = []
    for name in ("weights", "optimizer"):
        size = getattr(allocated, name)
        if size is not None:
            parts.append(f"{name} {size_text(size)}")
    parts.append(f"peak {size_text(allocated.peak)}")
    if allocated.reserved is not None:
        parts.append(f"reserved by torch {size_text(allocated.reserved)}")
    return ", ".join(parts)


def predicted_text(memory: StageMemory) -> str:
    """Return the predicted memory of each part as text."""
    parts = [
        f"{field.name} {size_text(getattr(memory, field.name))}"
        for field in fields(memory)
        if getattr(memory, field.name)
    ]
    return f"{', '.join(parts)}; in total {size_text(memory.total)}"


def size_text(size: float) -> str:
    """Return a size for a message: "6.28 GiB" or "92 MiB"."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def alternative_text(other: Alternative | None) -> str:
    """Return the layout to use instead as text."""
    if other is None:
        return (
            "no layout on these GPUs is predicted to need less memory; use more nodes, a GPU with "
            "more memory, or a smaller model.sequence_length"
        )
    options = " ".join(f"--set {option}" for option in other.options)
    return (
        f"to use less memory, rerun with {options} (predicted: {size_text(other.memory.total)}, "
        f"steps take {other.slowdown:.2f} times as long)"
        + (f"; its DeepSpeed JSON changes {', '.join(other.replaced)}" if other.replaced else "")
    )
