"""The start of a run on all ranks, its orderly end, and its restart for a phase."""

import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from models.errors import SharedError, UserError
from models.kernels.attention import document_kernel_name
from threefold.checkpoint.resume import (
    ResumeRequest,
    Start,
    begin_branch,
    check_folder_is_shared,
    find_start,
    lock_run_folder,
)
from threefold.checkpoint.retention import check_disk
from threefold.checkpoint.snapshots.node_memory import NodeMemory
from threefold.checkpoint.snapshots.reader import find_snapshot
from threefold.checkpoint.snapshots.writer import SnapshotWriter
from threefold.checkpoint.writer import CheckpointWriter
from threefold.config.deepspeed_json import leaves
from threefold.config.loading import value_text
from threefold.config.parallel_dims import check_placement
from threefold.config.recipe import Recipe
from threefold.config.sections import REPOSITORY
from threefold.data.corpus import content_hashes
from threefold.data.dataset import Prefetcher, TrainingData
from threefold.engine.build import DTYPES
from threefold.engine.engine import Engine
from threefold.plan.report import predicted_metrics_of_run
from threefold.pretrain import experiment as experiment_module
from threefold.pretrain.evaluation import Evaluator
from threefold.pretrain.experiment import Experiment, exit_on_user_error, machine_of
from threefold.pretrain.run import Run, RunEnd, stopped_after_save
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import remove_debris
from threefold.run_folder.lock import FolderInUse
from threefold.runtime.exits import (
    FINISHED,
    INTERRUPTED,
    STOPPED,
    PortInUse,
    exit_now,
    ignore_ending_signals,
)
from threefold.runtime.launchers import free_port
from threefold.runtime.output import finish_output
from threefold.runtime.processes import (
    check_machine,
    gathered,
    on_gpu,
    start_processes,
    threads_on_first_node,
)
from threefold.supervision.hang_report import Breadcrumb
from threefold.supervision.step_watch import LossWatch, Severity
from threefold.supervision.supervisor import Supervisor
from threefold.tracking.clocks import Startup, StepClock
from threefold.tracking.messages import (
    NOT_COMPILED,
    announce,
    saves_after_the_end,
    summarize,
    tell_changes,
    tell_skipped,
    tell_unsaved_attempt,
    thread_excess,
    warn,
    warn_of_changes_after_the_end,
)
from threefold.tracking.profiler import StepProfiler, TimelineRecorder
from threefold.tracking.tracker import Meter, open_tracker
from threefold.tracking.wandb_connection import check_wandb, read_wandb_key

# Rejection by one rank, shared with all others, so that no rank waits in a collective for it.


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise on all ranks the UserError that one of them has raised; collective.

    Any other exception is a defect. The rank raises it after telling the other ranks, which then
    end with exit code 1 instead of waiting for that rank in their next collective.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    is_defect = problem is not None and not isinstance(problem, UserError)
    in_use = isinstance(problem, FolderInUse)
    of_ranks = gathered((is_defect, in_use, str(problem or "")))
    if problem and is_defect:
        raise problem
    for rank, (failed, *_) in enumerate(of_ranks):
        if failed:
            # Launchers end all ranks when the first one exits, so let the failed rank print first.
            time.sleep(experiment_module.SECONDS_FOR_RANK_0_TO_SPEAK)
            if dist.get_rank() == (1 if rank == 0 else 0):  # the lowest of the other ranks
                print(f"all ranks exit because rank {rank} failed", file=sys.stderr)
            exit_now(1)
    for _, in_use, message in of_ranks:
        if message:
            raise FolderInUse(message, alive=True) if in_use else SharedError(message)


@dataclass(frozen=True)
class RunHandle:
    """A run folder that this run has locked, and the supervision of this rank.

    Attributes:
        memory: the snapshots of this node; None if the run takes none
    """

    folder: RunFolder
    supervisor: Supervisor
    memory: NodeMemory | None


def open_data(experiment: Experiment) -> TrainingData:
    """Check this machine, and open the corpora of the recipe.

    Raises:
        UserError: the machine does not fit the recipe, or a corpus is missing or damaged.
    """
    recipe = experiment.recipe
    check_machine(
        experiment.world,
        precision=experiment.precision,
        compile=recipe.training.compile,
        deterministic=recipe.training.deterministic,
        gpu=recipe.cluster.gpu if recipe.cluster else None,
    )
    data = TrainingData(experiment.whole_recipe, experiment.dims, experiment.world.rank)
    data.open_evaluation()
    return data


def join(
    experiment: Experiment,
    folder: RunFolder,
    data: TrainingData,
    startup: Startup,
    *,
    wait_seconds: float,
) -> RunHandle:
    """Join the process group, supervise this rank, and lock the run folder; collective.

    Args:
        wait_seconds: time to wait for the lock if its holder shows no sign of life

    Raises:
        UserError: the folder or the key of W&B is rejected, the ranks are placed wrongly, or nodes
            have different run folders, recipes or data.
    """
    recipe, world = experiment.recipe, experiment.world
    try:
        start_processes(
            world,
            deterministic=recipe.training.deterministic,
            patience_seconds=recipe.supervision.patience_seconds,
        )
    except PortInUse:
        if not folder.attempt:
            folder.check_unused()  # the other process may be a run in the same folder
            raise
        port = os.environ["MASTER_PORT"]
        print(
            f"port {port}, chosen by launch.py, is now in use by another process; launch.py "
            f"retries with another port",
            file=sys.stderr,
        )
        exit_now(1)
    startup.mark("joining")
    crumb = Breadcrumb()
    supervisor = Supervisor(
        folder,
        crumb,
        hang_seconds=recipe.supervision.hang_seconds,
        startup_seconds=recipe.supervision.startup_seconds,
    ).start()
    crumb.note("locking the run folder")
    with raise_on_all_ranks():
        if world.rank == 0:
            read_wandb_key()
    with crumb.waiting_for_disk("waiting for the run folder"):
        in_use = lock_run_folder(folder, wait_seconds=wait_seconds)
    if in_use:
        raise FolderInUse(in_use, alive=True)
    hosts = gathered(socket.gethostname())
    supervisor.name_hosts(hosts)
    check_placement(experiment.dims, hosts)
    with crumb.waiting_for_disk("comparing the run folders of the nodes"):
        check_folder_is_shared(folder.path, supervisor.names)
    crumb.note("comparing the files of the nodes")
    check_files(experiment, data, supervisor.names)
    return RunHandle(folder, supervisor, memory_of_all_nodes(recipe))


def check_files(experiment: Experiment, data: TrainingData, names: Sequence[str]) -> None:
    """Check that all ranks have read the same recipe and undamaged, equal data; collective.

    Nodes may have files of their own under the same paths. Different code causes only a warning: a
    restart must not fail because the code of some nodes has just been updated.

    Args:
        names: the ranks' names, for messages

    Raises:
        UserError: two ranks have read different files, or a rank has found a damage.
    """
    with raise_on_all_ranks():
        data.check_index()
    recipe, is_first_of_node = experiment.whole_recipe, experiment.world.local_rank == 0
    config = {f"{recipe.deepspeed}: {key}": value for key, value in leaves(experiment.config)}
    parts = {
        "recipe": dict(leaves(recipe.model_dump(mode="json"))) | config,
        # One rank of each node is enough for files that its ranks share.
        "data": content_hashes(data.phase_plan, data.fingerprint) if is_first_of_node else {},
        "code": code_of_node() if is_first_of_node else {},
    }
    digests = {
        name: hashlib.sha256(canonical(part).encode()).digest() if part else None
        for name, part in parts.items()
    }
    everyones = gathered(digests)
    for name, part in parts.items():
        of_ranks = [digests[name] for digests in everyones]
        other = next((n for n, own in enumerate(of_ranks) if own not in (None, of_ranks[0])), 0)
        if not other:
            continue
        first, second = [part], [part]
        dist.broadcast_object_list(first, src=0)
        dist.broadcast_object_list(second, src=other)
        own, others = first[0], second[0]
        key = next((key for key in own | others if own.get(key) != others.get(key)), None)
        if key is None:  # null on one of them, and left out on the other
            continue
        if name == "recipe":
            raise SharedError(
                f"{key} is {value_text(own.get(key))} on {names[0]}, but "
                f"{value_text(others.get(key))} on {names[other]}; use copies of the same recipe "
                f"and DeepSpeed JSON on all nodes"
            )
        if name == "data":
            raise SharedError(
                f"{key} has other content on {names[other]} than on {names[0]}; copy the files "
                f"from one node to all others"
            )
        if dist.get_rank() == 0:
            print(
                f"warning: {key} differs between {names[0]} and {names[other]}; use the same "
                f"commit and packages on all nodes",
                file=sys.stderr,
            )


def canonical(table: dict[str, Any]) -> str:
    """Return a text that is the same for equal tables: 5e8 equals 500000000, in any order."""

    def number(text: str) -> float:
        return int(float(text)) if float(text).is_integer() else float(text)

    return json.dumps(json.loads(json.dumps(table), parse_float=number), sort_keys=True)


def code_of_node() -> dict[str, str]:
    """Return the hash of each module of this project, and the versions of packages."""
    hashes = {}
    for folder in ("models", "recipes", "threefold"):
        for file in (REPOSITORY / folder).rglob("*.py"):
            with suppress(OSError):  # an editor's dangling link, or a file that git replaces
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                hashes[str(file.relative_to(REPOSITORY))] = digest
    return hashes | {f"the version of {name}": version(name) for name in ("torch", "deepspeed")}


def memory_of_all_nodes(recipe: Recipe) -> NodeMemory | None:
    """Return the snapshots of this node; None if the run takes none; collective.

    Snapshots need launch.py, and a folder for them on every node.
    """
    memory = NodeMemory.from_environment(os.environ)
    if not recipe.checkpoint.snapshot_every:
        return None
    everyones = gathered(memory is not None)
    if all(everyones):
        return memory
    if dist.get_rank() == 0:
        missing = everyones.count(False)
        reason = (
            f"{missing} ranks have no folder for them in checkpoint.snapshot_folder = "
            f'"{recipe.checkpoint.snapshot_folder}"'
            if any(everyones)
            else "the run was not started by recipes/launch.py"
        )
        print(f"warning: no snapshots are taken: {reason}", file=sys.stderr)
    return None


def find_resume_point(
    experiment: Experiment, handle: RunHandle, data: TrainingData, resume: str, resume_once: str
) -> Start:
    """Find the point at which the run starts or resumes, without changing anything; collective.

    Args:
        resume: the option `--resume`
        resume_once: the option `--resume-once`

    Raises:
        UserError: no checkpoint can be used, or it belongs to another experiment.
    """
    crumb, request = handle.supervisor.crumb, ResumeRequest(resume, resume_once)
    crumb.note("verifying checkpoints")
    find_in_memory = None
    if handle.memory:
        find_in_memory = partial(
            find_snapshot,
            handle.memory,
            recipe=experiment.whole_recipe,
            data=data.fingerprint,
            note=crumb.note,
        )
    return find_start(
        handle.folder,
        request,
        experiment.whole_recipe,
        data.fingerprint,
        find_in_memory=find_in_memory,
        note=crumb.note,
    )


def begin(
    experiment: Experiment, handle: RunHandle, data: TrainingData, start: Start, startup: Startup
) -> None:
    """Prepare the run folder and announce the run; collective.

    If every step of the run is done, print its summary and end this process.
    """
    recipe, folder, world = experiment.recipe, handle.folder, experiment.world
    is_finished = start.progress.step >= recipe.training.steps
    little_room: str | None = None
    with exit_on_user_error(world, experiment.origin), raise_on_all_ranks():
        if world.rank == 0:
            if not is_finished:
                folder.check_lease()  # the unfinished saves may belong to a later attempt
                remove_debris(folder.checkpoints)  # before the free space is measured
                little_room = check_disk(
                    folder.checkpoints, experiment.whole_recipe, step=start.progress.step
                )
                keeps_id = start.request.resume != "never"
                check_wandb(recipe, folder.path, keeps_id=keeps_id)
            tell_skipped(folder, start.found)
            begin_branch(folder, start)
    if is_finished:
        if world.rank == 0:
            warn_of_changes_after_the_end(start.found, experiment.whole_recipe)
        leave_processes(partial(summarize, experiment.whole_recipe, folder, world, start.found))
        exit_now(FINISHED)
    with exit_on_user_error(world, experiment.origin), raise_on_all_ranks():
        if world.rank == 0:
            folder.prepare(experiment.whole_recipe, start.progress)
    startup.mark("checkpoint search")
    excess = "" if on_gpu() else thread_excess(*threads_on_first_node())
    if world.rank == 0:
        hosts = list(handle.supervisor.hosts)
        imbalance = data.context_imbalance()
        announce(recipe, experiment.dims, hosts, folder, start.found, imbalance)
        for note in filter(None, (excess, *experiment.phase_plan.notes)):
            print(f"  {note}", flush=True)
        tell_unsaved_attempt(folder, start.found)
        tell_changes(folder, start.found, experiment.whole_recipe)
        for warning in (little_room, saves_after_the_end(experiment.whole_recipe)):
            if warning:
                warn(folder, start.progress.step, warning)


# The opening of a run, just before its first step, and its orderly end.


@contextmanager
def open_run(
    experiment: Experiment,
    handle: RunHandle,
    engine: Engine,
    *,
    data: TrainingData,
    start: Start,
    startup: Startup,
) -> Iterator[Run]:
    """Open the checkpoint writer, the tracker and the handling of signals; collective.

    Args:
        engine: the engine, with the weights of `start`
        data: the corpora, at the position of `start`
        start: the point at which the run starts or resumes
    """
    whole_recipe, dims, folder = experiment.whole_recipe, experiment.dims, handle.folder
    found, rank, size = start.found, experiment.world.rank, experiment.world.size
    changed, next_step = found.changes(whole_recipe), start.progress.step + 1
    last_step = experiment.phase_plan.last_step_of_engine(next_step)
    writer_of_run = CheckpointWriter(
        engine.state,
        folder,
        recipe=whole_recipe,
        dims=dims,
        data=data.fingerprint,
        step=next_step,
        damaged=found.skipped,
        parent=start.parent,
    )
    snapshots = None
    if handle.memory is not None:
        snapshots = SnapshotWriter(
            writer_of_run,
            handle.memory,
            every=experiment.recipe.checkpoint.snapshot_every,
            step=start.progress.step,
            ranks_per_node=experiment.world.local_size,
        )
    metrics = folder.read_metrics() if rank == 0 else []  # large after 100,000 steps: read once
    losses = [
        (line["step"], line["loss"]) for line in metrics if isinstance(line.get("loss"), float)
    ]
    machine = None
    if rank == 0:
        with suppress(UserError):  # `cluster.gpu` has no datasheet
            machine = machine_of(experiment, engine.device_name)
    tracker_of_run = open_tracker(
        whole_recipe,
        folder,
        rank,
        start=start.progress,
        changed=changed,
        in_memory=found.in_memory,
        metrics=metrics,
        predicted=predicted_metrics_of_run(experiment.phase_plan, machine),
    )
    del metrics  # gigabytes after a million steps
    with writer_of_run as writer, tracker_of_run as tracker, handle.supervisor as supervisor:
        writer.on_publish, writer.on_wait = tracker.saved, tracker.warn
        writer.on_pause = supervisor.crumb.wait_for_room
        writer.is_asked_to_stop = lambda: bool(supervisor.asked)
        if engine.on_gpu and whole_recipe.training.compile == "auto" and not engine.compiled:
            tracker.warn(NOT_COMPILED)
        if rank == 0 and engine.on_gpu:
            print_document_attention(experiment)
        for warning in data.tasks.warnings:
            tracker.warn(warning)
        name, precision = engine.device_name, experiment.precision
        run = Run(
            recipe=experiment.recipe,
            phase_plan=experiment.phase_plan,
            last_step_of_engine=last_step,
            dims=dims,
            folder=folder,
            data=data,
            prefetcher=Prefetcher(data.micro_batches, last_step=last_step, pinned=engine.on_gpu),
            engine=engine,
            evaluator=Evaluator(engine, data),
            meter=Meter(whole_recipe, size, precision=precision, device_name=name),
            clock=StepClock(),
            watch=LossWatch(
                experiment.recipe.supervision,
                fp16=precision == "fp16",
                losses=losses,
            ),
            writer=writer,
            snapshots=snapshots,
            tracker=tracker,
            supervisor=supervisor,
            timeline=TimelineRecorder(
                engine,
                experiment.recipe,
                dims,
                folder,
                last_step=last_step,
                show=tracker.show,
            ),
            profiler=StepProfiler(
                engine, experiment.recipe, folder, precision=precision, show=tracker.show
            ),
            startup=startup,
            find_start=partial(find_start, folder, ResumeRequest(), whole_recipe, data.fingerprint),
        )
        if not engine.compiled:  # otherwise the first step compiles, and belongs to the start-up
            supervisor.expect_steps()
        yield run


def print_document_attention(experiment: Experiment) -> None:
    """Print how attention to separate documents is computed: the two ways differ much in speed."""
    recipe, dtype = experiment.recipe, DTYPES[experiment.precision]
    if recipe.data.separate_documents and recipe.layout.context == 1:
        name = document_kernel_name(torch.device("cuda"), dtype, recipe.model.attention_head_size)
        print(f"  attention to separate documents: {name}", flush=True)


def close_run(run: Run, ending: RunEnd) -> RunEnd:
    """Wait for the last save, and record the end of the run; collective.

    Returns:
        The end of the run: `ending`, unless a failed save changes it.
    """
    run.supervisor.crumb.note("gathering weights")
    run.engine.finish_communication()
    with run.supervisor.crumb.waiting_for_disk("saving"):
        unsaved = run.writer.wait()
    ends_well = ending.code in (FINISHED, INTERRUPTED) or ending.restarts_for_phase
    if unsaved and (ends_well or unsaved in ending.reason):
        reason = unsaved if ends_well else ending.reason
        ending = RunEnd(STOPPED, f"{reason}; {run.writer.remedy()}")
    if ending.restarts_for_phase:
        # The signal may have come during the save, and the new processes would not know of it.
        request = run.supervisor.agree(Severity.GOOD, run.engine.device).stop
        ending = stopped_after_save(ending.step, request) if request else ending
    if ending.restarts_for_phase:
        run.tracker.replace_ranks(ending.step, run.phase_plan.at(ending.step + 1).phase)
    elif ending.code == FINISHED:
        run.tracker.end()
    else:
        run.tracker.stop(ending.reason, ending.code)
    return ending


def leave_processes(finish: Callable[[], None] | None = None) -> None:
    """Leave the process group; collective.

    finish: called first; the other ranks wait for that of rank 0
    """
    # Launchers end all ranks when the first one exits with an error, or some time after its exit,
    # and rank 0 may finish last, because it waits for W&B or reads a long metrics.jsonl. Ctrl-C
    # ends the wait for W&B, but it reaches the other ranks, too.
    ignore_ending_signals()
    try:
        if finish is not None:
            finish()
    finally:
        dist.barrier()
    dist.destroy_process_group()


# Start of a phase that needs another engine: every rank replaces itself with a new process. A phase
# may change the sequence length, the size of micro-batches or the layout, on which the process
# groups, the kernels and the engine depend. The run saves a checkpoint, and each rank calls
# `execve` with its own command. The process keeps its PID, so its launcher notices nothing. The new
# program resumes from the checkpoint as after any other interruption. No memory, group or compiled
# kernel of the earlier engine is left.
#
# - The ranks meet at another port, which rank 0 chooses. The store at the earlier port may still
#   hold the keys of the earlier process group (torchrun's store lives as long as torchrun).
# - All descriptors are closed by `execve`, except for the standard streams and the lock of the run
#   folder, which therefore stays locked.
# - `--resume` is dropped, so that the default `auto` applies. An explicit `--resume` would begin
#   another branch.


AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun
SECONDS_FOR_READER = 30.0  # maximum wait until the reader of the output has taken all of it


def replace_process(folder: RunFolder, environment: Mapping[str, str]) -> NoReturn:
    """Replace this rank with a new process that resumes the run; collective.

    Args:
        folder: the run folder, whose lock the new process takes over
        environment: the environment variables that the launcher has given to this process
    """
    started = time.monotonic()
    variables = dict(environment)
    if dist.get_world_size() > 1:
        port = [free_port() if dist.get_rank() == 0 else 0]
        dist.broadcast_object_list(port)
        variables["MASTER_PORT"] = str(port[0])
    if AGENT_STORE in variables:
        variables[AGENT_STORE] = "False"  # rank 0 holds the store at the new port
    dist.barrier()
    dist.destroy_process_group()
    lock = folder.lock_descriptor
    command = command_of(sys.argv[1:], started, lock)
    finish_output(SECONDS_FOR_READER)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2:
            _set_inheritable(descriptor, inheritable=descriptor == lock)
    os.execve(command[0], command, variables)


def command_of(arguments: Sequence[str], started: float, lock: int | None) -> list[str]:
    """Return the command that resumes the run of this process.

    Args:
        arguments: the options of this process
        started: time.monotonic() at the beginning of the replacement, in seconds
        lock: the descriptor of the run folder's lock; None if this process does not hold it
    """
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("--resume", "--resume-once", "--continued-at", "--lock"):
            next(words, None)
        elif not word.startswith(("--resume=", "--resume-once=", "--continued-at=", "--lock=")):
            kept.append(word)
    holds = [] if lock is None else [f"--lock={lock}"]
    script = str(REPOSITORY / "recipes" / "pretrain.py")
    return [sys.executable, script, *kept, f"--continued-at={started!r}", *holds]


def _set_inheritable(descriptor: int, *, inheritable: bool) -> None:
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
        without = flags & ~fcntl.FD_CLOEXEC
        fcntl.fcntl(descriptor, fcntl.F_SETFD, without if inheritable else flags | fcntl.FD_CLOEXEC)
    except OSError:  # the descriptor of the listing itself, which is closed
        return
