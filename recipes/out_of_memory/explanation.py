"""One message when a rank runs out of memory: where, what was predicted, and what would fit."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from models.errors import UserError
from recipes.gpus.datasheet import Gpu, gpus
from recipes.out_of_memory.allocated import (
    Allocated,
    allocated,
    is_out_of_memory,
    record_allocations,
    save_snapshot,
)
from recipes.out_of_memory.alternative import Alternative, alternative, predicted
from recipes.planning.inputs.job import Machine, job_of
from recipes.planning.inputs.software import THREEFOLD
from recipes.planning.memory.peak import GIB, StageMemory
from recipes.training.engine.engine import Engine
from recipes.training.loop.experiment import Experiment
from recipes.training.loop.start import Claim
from recipes.training.runtime.exits import STOPPED, leave
from recipes.training.runtime.processes import on_gpu

SECONDS_OF_ONE_SHORTAGE = 60  # several ranks run out of memory at about the same time
REPORT = "out-of-memory.txt"


@dataclass
class Account:
    """What is needed to explain a lack of memory.

    engine: the engine, once it is built
    """

    engine: Engine | None = None


@contextlib.contextmanager
def explained(experiment: Experiment, claim: Claim) -> Iterator[Account]:
    """End this rank with one message for all ranks if memory runs out within this context.

    Args:
        experiment: the experiment of the run
        claim: the run folder and the supervision of this rank
    """
    account = Account()
    snapshot = experiment.recipe.tracking.memory_snapshot and on_gpu()
    if snapshot:
        record_allocations()
    try:
        yield account
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        rank = experiment.world.rank
        text = describe(experiment, claim, account.engine, error)
        if snapshot:
            file = claim.folder.path / f"memory-rank-{rank:05d}.pickle"
            with contextlib.suppress(OSError, RuntimeError):
                save_snapshot(str(file))
                text += f"\n  allocations: {file}"
        tell(claim, rank, text)
        leave(STOPPED)


def tell(claim: Claim, rank: int, text: str) -> None:
    """Print the message, and record it; another rank that is short of memory too prints a line."""
    name = claim.supervisor.names[rank]
    file = claim.folder.path / REPORT
    with contextlib.suppress(OSError):
        if time.time() - file.stat().st_mtime > SECONDS_OF_ONE_SHORTAGE:
            file.unlink()
    try:
        with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "w") as stream:
            stream.write(f"{text}\n")
    except FileExistsError:
        print(f"out of memory on {name} too; see {file}", file=sys.stderr, flush=True)
        return
    except OSError:
        pass  # the message is more important than the file
    print(text, file=sys.stderr, flush=True)
    claim.folder.event(
        "stop", claim.supervisor.crumb.step, reason=text.partition("\n")[0], exit_code=STOPPED
    )


def describe(
    experiment: Experiment, claim: Claim, engine: Engine | None, error: BaseException
) -> str:
    """Return the message about a lack of memory on this rank."""
    recipe, world, topology = experiment.recipe, experiment.world, experiment.topology
    place = topology.coordinates(world.rank)
    where = ", ".join(f"{axis} {getattr(place, axis)}" for axis in topology.axes)
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    lines = [
        f"out of memory on {claim.supervisor.names[world.rank]} ({where}) in "
        f"{claim.supervisor.crumb}: {first_line}"
    ]
    found = allocated(engine, on_gpu=on_gpu())
    lines.append(f"  allocated: {allocated_text(found)}")
    machine = machine_of(experiment)
    if machine is None:
        lines.append(f"  no prediction: recipes/gpus/datasheets/ has no {driver_name()}")
        return "\n".join(lines)
    try:
        memory = predicted(job_of(recipe, machine, THREEFOLD), place.pipeline)
        other = alternative(recipe, machine)
    except UserError as problem:  # the planner rejects what the engine accepts
        lines.append(f"  no prediction: {problem}")
        return "\n".join(lines)
    lines.append(f"  predicted: {predicted_text(memory)} of {machine.gpu.memory_gib:.1f} GiB")
    lines.append(f"  {alternative_text(other)}")
    return "\n".join(lines)


def machine_of(experiment: Experiment) -> Machine | None:
    """Return the machine of a run for the planner; None if its GPU has no datasheet."""
    cluster, name = experiment.recipe.cluster, driver_name()
    found: list[Gpu] = [
        gpu
        for gpu in gpus()
        if (gpu.name == cluster.gpu if cluster else any(n in name for n in gpu.device_names))
        or (name == "cpu" and not cluster and gpu.name == "cpu")
    ]
    if not found:
        return None
    world = experiment.world
    return Machine.of(found[0], gpus=world.size, gpus_per_node=world.local_size)


def driver_name() -> str:
    """Return the driver's name of this rank's GPU; "cpu" on a CPU."""
    return torch.cuda.get_device_name() if on_gpu() else "cpu"


def allocated_text(found: Allocated) -> str:
    """Return the allocated memory as text."""
    parts = []
    for name in ("weights", "optimizer"):
        size = getattr(found, name)
        if size is not None:
            parts.append(f"{name} {size_text(size)}")
    parts.append(f"in total at most {size_text(found.peak)}")
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
