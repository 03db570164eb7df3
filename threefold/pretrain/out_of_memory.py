"""One message when a rank runs out of memory: where, what was predicted, and what would fit."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from models.errors import UserError
from threefold.engine.engine import Engine
from threefold.plan.job import job_of
from threefold.plan.memory.peak import GIB, StageMemory, memory_of_stage
from threefold.plan.software import THREEFOLD
from threefold.pretrain.allocated import (
    Allocated,
    allocated,
    is_out_of_memory,
    record_allocations,
    save_snapshot,
)
from threefold.pretrain.alternative import Alternative, alternative
from threefold.pretrain.experiment import Experiment, machine_of
from threefold.pretrain.setup import Claim
from threefold.runtime.exits import STOPPED, leave
from threefold.runtime.processes import driver_name, on_gpu

REPORT = "out-of-memory.txt"


@dataclass
class Account:
    """The parts of a run whose memory is reported.

    Attributes:
        engine: the engine, once it is built
    """

    engine: Engine | None = None


@contextlib.contextmanager
def out_of_memory_explained(experiment: Experiment, claim: Claim) -> Iterator[Account]:
    """End this rank with one message for all ranks if memory runs out within this context.

    Args:
        experiment: the experiment of the run
        claim: the run folder and the supervision of this rank
    """
    account = Account()
    snapshot = experiment.recipe.tracking.memory_snapshot and on_gpu()
    if snapshot:
        record_allocations()
    if experiment.world.rank == 0:  # a report of an earlier start would suppress that of this one
        with contextlib.suppress(OSError):
            (claim.folder.path / REPORT).unlink(missing_ok=True)
    try:
        yield account
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        file = claim.folder.path / f"memory-rank-{experiment.world.rank:05d}.pickle"
        if snapshot:
            with contextlib.suppress(OSError, RuntimeError):
                save_snapshot(str(file))
        report(experiment, claim, account.engine, error=error)
        leave(STOPPED)


def report(
    experiment: Experiment, claim: Claim, engine: Engine | None, *, error: Exception
) -> None:
    """Print and record the message; if another rank has begun to, refer to its message.

    Args:
        experiment: the experiment of the run
        claim: the run folder and the supervision of this rank
        engine: the engine, or None if memory ran out before it was built
        error: the error of the allocator
    """
    name = claim.supervisor.names[experiment.world.rank]
    file = claim.folder.path / REPORT
    try:
        file.open("xb").close()
    except FileExistsError:
        print(f"out of memory on {name} too; see {file}", file=sys.stderr, flush=True)
        return
    except OSError:  # the message is more important than the file
        pass
    # The details take seconds, and launch.py may kill this rank before they are known.
    first = first_line(experiment, claim, error)
    print(first, file=sys.stderr, flush=True)
    append(file, f"{first}\n\n{''.join(traceback.format_exception(error))}\n")
    claim.folder.event(
        "stop", claim.supervisor.crumb.step, reason=first, exit_code=STOPPED, out_of_memory=True
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


def first_line(experiment: Experiment, claim: Claim, error: Exception) -> str:
    """Return where memory ran out, and the first line of the error."""
    topology, rank = experiment.topology, experiment.world.rank
    place = topology.coordinates(rank)
    where = ", ".join(f"{axis} {getattr(place, axis)}" for axis in topology.axes)
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        f"out of memory on {claim.supervisor.names[rank]} ({where}) in {claim.supervisor.crumb}: "
        f"{text}"
    )


def details(experiment: Experiment, engine: Engine | None) -> list[str]:
    """Return the lines about allocated and predicted memory, and about a layout that needs less."""
    recipe = experiment.recipe
    lines = [f"  allocated: {allocated_text(allocated(engine, on_gpu=on_gpu()))}"]
    stage = experiment.topology.coordinates(experiment.world.rank).pipeline
    try:
        machine = machine_of(experiment, driver_name())
        if machine is None:
            return [*lines, f"  no prediction: threefold/gpus/datasheets/ has no {driver_name()}"]
        memory = memory_of_stage(job_of(recipe, machine, THREEFOLD), stage)
        other = alternative(recipe, machine)
    except UserError as problem:  # the planner rejects what the engine accepts
        return [*lines, f"  no prediction: {problem}"]
    predicted = f"  predicted: {predicted_text(memory)} of {machine.gpu.memory_gib:.1f} GiB"
    return [*lines, predicted, f"  {alternative_text(other)}"]


def allocated_text(found: Allocated) -> str:
    """Return the allocated memory as text."""
    parts = []
    for name in ("weights", "optimizer"):
        size = getattr(found, name)
        if size is not None:
            parts.append(f"{name} {size_text(size)}")
    parts.append(f"peak {size_text(found.peak)}")
    if found.reserved is not None:
        parts.append(f"reserved by torch {size_text(found.reserved)}")
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
    )
