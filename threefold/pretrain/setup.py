"""The start of a run on all ranks: supervision, the run folder's lock, and the resume point."""

import os
import sys
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from threefold.checkpoint.resume import (
    Request,
    Start,
    begin_branch,
    find_start,
    hold_together,
)
from threefold.checkpoint.retention import check_disk
from threefold.checkpoint.snapshots.node_memory import NodeMemory
from threefold.checkpoint.snapshots.reader import find_snapshot
from threefold.config.parallel_dims import check_placement
from threefold.config.recipe import Recipe
from threefold.data.dataset import TrainingData
from threefold.pretrain.experiment import Experiment
from threefold.pretrain.joint_rejection import rejected_together
from threefold.pretrain.rejection import rejections
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import remove_debris
from threefold.run_folder.lock import FolderInUse
from threefold.runtime.exits import FINISHED, PortInUse, leave
from threefold.runtime.processes import (
    check_machine,
    hosts_of_ranks,
    on_gpu,
    start_processes,
    threads_on_first_node,
)
from threefold.supervision.hang_report import Breadcrumb
from threefold.supervision.supervisor import Supervisor
from threefold.tracking.clocks import Startup
from threefold.tracking.messages import (
    announce,
    saves_after_the_end,
    summarize,
    tell_changes,
    tell_skipped,
    tell_unsaved_attempt,
    thread_excess,
    warn,
)
from threefold.tracking.wandb_connection import check_wandb, read_wandb_key


@dataclass(frozen=True)
class Claim:
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
    data = TrainingData(experiment.whole_recipe, experiment.topology, experiment.world.rank)
    data.open_evaluation()
    return data


def join(
    experiment: Experiment, folder: RunFolder, startup: Startup, *, wait_seconds: float
) -> Claim:
    """Join the process group, supervise this rank, and lock the run folder; collective.

    Args:
        experiment: the experiment of the run
        folder: the run folder
        startup: the stopwatch of the start-up
        wait_seconds: time to wait for the lock if its holder shows no sign of life

    Raises:
        UserError: the folder or the key of W&B is rejected, or the ranks are placed wrongly.
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
            raise
        port = os.environ["MASTER_PORT"]
        print(
            f"port {port}, chosen by launch.py, is now in use by another process; launch.py "
            f"retries with another port",
            file=sys.stderr,
        )
        leave(1)
    startup.lap("joining")
    crumb = Breadcrumb()
    supervisor = Supervisor(
        folder,
        crumb,
        hang_seconds=recipe.supervision.hang_seconds,
        startup_seconds=recipe.supervision.startup_seconds,
    ).start()
    crumb.note("locking the run folder")
    with rejected_together():
        if world.rank == 0:
            read_wandb_key()
    with crumb.waiting_for_disk("waiting for the run folder"):
        in_use = hold_together(folder, wait_seconds=wait_seconds)
    if in_use:
        raise FolderInUse(in_use, alive=True)
    hosts = hosts_of_ranks()
    supervisor.name_hosts(hosts)
    check_placement(experiment.topology, hosts)
    return Claim(folder, supervisor, memory_of_all_nodes(recipe))


def memory_of_all_nodes(recipe: Recipe) -> NodeMemory | None:
    """Return the snapshots of this node; None if the run takes none; collective.

    Snapshots need launch.py, and a folder for them on every node.
    """
    memory = NodeMemory.from_environment(os.environ)
    if not recipe.checkpoint.snapshot_every:
        return None
    everyones: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everyones, memory is not None)
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
    experiment: Experiment, claim: Claim, data: TrainingData, resume: str, resume_once: str
) -> Start:
    """Find the point at which the run starts or resumes, without changing anything; collective.

    Args:
        experiment: the experiment of the run
        claim: the run folder and the supervision of this rank
        data: the corpora of the run
        resume: the option `--resume`
        resume_once: the option `--resume-once`

    Raises:
        UserError: no checkpoint can be used, or it belongs to another experiment.
    """
    crumb, request = claim.supervisor.crumb, Request(resume, resume_once)
    crumb.note("verifying checkpoints")
    find_in_memory = None
    if claim.memory:
        find_in_memory = partial(
            find_snapshot,
            claim.memory,
            recipe=experiment.whole_recipe,
            data=data.fingerprint,
            note=crumb.note,
        )
    return find_start(
        claim.folder,
        request,
        experiment.whole_recipe,
        data.fingerprint,
        find_in_memory=find_in_memory,
        note=crumb.note,
    )


def begin(
    experiment: Experiment, claim: Claim, data: TrainingData, start: Start, startup: Startup
) -> None:
    """Prepare the run folder and announce the run; collective.

    If every step of the run is done, print its summary and end this process.
    """
    recipe, folder, world = experiment.recipe, claim.folder, experiment.world
    is_finished = start.progress.step >= recipe.training.steps
    little_room: str | None = None
    with rejections(world, experiment.origin), rejected_together():
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
        summarize(experiment.whole_recipe, folder, world, start.found)
        leave(FINISHED)
    with rejections(world, experiment.origin), rejected_together():
        if world.rank == 0:
            folder.prepare(experiment.whole_recipe, start.progress)
    startup.lap("checkpoint search")
    excess = "" if on_gpu() else thread_excess(*threads_on_first_node())
    if world.rank == 0:
        hosts = list(claim.supervisor.hosts)
        imbalance = data.context_imbalance()
        announce(recipe, experiment.topology, hosts, folder, start.found, imbalance)
        if excess:
            print(f"  {excess}", flush=True)
        tell_unsaved_attempt(folder, start.found)
        tell_changes(folder, start.found, experiment.whole_recipe)
        for warning in (little_room, saves_after_the_end(experiment.whole_recipe)):
            if warning:
                warn(folder, start.progress.step, warning)
