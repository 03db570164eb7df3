"""The opening of a run, just before its first step, and its orderly end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from models.errors import UserError
from models.kernels.attention import document_kernel_name
from threefold.checkpoint.resume import Request, Start, find_start
from threefold.checkpoint.snapshots.writer import SnapshotWriter
from threefold.checkpoint.writer import CheckpointWriter
from threefold.data.dataset import Prefetcher, TrainingData
from threefold.engine.build import DTYPES
from threefold.engine.engine import Engine
from threefold.plan.predicted_metrics import predicted_metrics_of_run
from threefold.pretrain.evaluation import Evaluator
from threefold.pretrain.experiment import Experiment, machine_of
from threefold.pretrain.run import Ending, Run
from threefold.pretrain.setup import Claim
from threefold.runtime.exits import FINISHED, INTERRUPTED, STOPPED
from threefold.supervision.loss_watch import LossWatch
from threefold.tracking.clocks import Startup, StepClock
from threefold.tracking.messages import NOT_COMPILED
from threefold.tracking.metrics import Meter
from threefold.tracking.profiler import StepProfiler
from threefold.tracking.timeline import TimelineRecorder
from threefold.tracking.tracker import open_tracker


@contextmanager
def open_run(
    experiment: Experiment,
    claim: Claim,
    engine: Engine,
    *,
    data: TrainingData,
    start: Start,
    startup: Startup,
) -> Iterator[Run]:
    """Open the checkpoint writer, the tracker and the handling of signals; collective.

    Args:
        experiment: the experiment of the run
        claim: the run folder and the supervision of this rank
        engine: the engine, with the weights of `start`
        data: the corpora, at the position of `start`
        start: the point at which the run starts or resumes
        startup: the stopwatch of the start-up
    """
    recipe, topology, folder = experiment.whole_recipe, experiment.topology, claim.folder
    found, rank, size = start.found, experiment.world.rank, experiment.world.size
    changed, next_step = found.changes(recipe), start.progress.step + 1
    last_step = experiment.plan.last_step_of_engine(next_step)
    writer_of_run = CheckpointWriter(
        engine.state,
        folder,
        recipe=recipe,
        topology=topology,
        data=data.fingerprint,
        step=next_step,
        damaged=found.skipped,
        parent=start.parent,
    )
    snapshots = open_snapshots(experiment, claim, writer_of_run, start.progress.step)
    metrics = folder.read_metrics() if rank == 0 else []  # large after 100,000 steps: read once
    machine = None
    if rank == 0:
        with suppress(UserError):  # `cluster.gpu` has no datasheet
            machine = machine_of(experiment, engine.device_name)
    tracker_of_run = open_tracker(
        recipe,
        folder,
        rank,
        start=start.progress,
        changed=changed,
        in_memory=found.in_memory,
        metrics=metrics,
        predicted=predicted_metrics_of_run(experiment.plan, machine),
    )
    with writer_of_run as writer, tracker_of_run as tracker, claim.supervisor as supervisor:
        writer.on_publish, writer.on_wait = tracker.saved, tracker.warn
        writer.on_pause = supervisor.crumb.wait_for_room
        writer.is_asked_to_stop = lambda: bool(supervisor.asked)
        if engine.on_gpu and recipe.training.compile == "auto" and not engine.compiled:
            tracker.warn(NOT_COMPILED)
        if rank == 0 and engine.on_gpu:
            print_document_attention(experiment)
        for warning in data.tasks.warnings:
            tracker.warn(warning)
        name, precision = engine.device_name, experiment.precision
        run = Run(
            recipe=experiment.recipe,
            plan=experiment.plan,
            last_step_of_engine=last_step,
            topology=topology,
            folder=folder,
            data=data,
            prefetcher=Prefetcher(data.step, last_step=last_step, pinned=engine.on_gpu),
            engine=engine,
            evaluator=Evaluator(engine, data),
            meter=Meter(recipe, size, precision=precision, device_name=name),
            clock=StepClock(),
            watch=watch_losses(experiment, metrics),
            writer=writer,
            snapshots=snapshots,
            tracker=tracker,
            supervisor=supervisor,
            timeline=TimelineRecorder(
                engine,
                experiment.recipe,
                topology,
                folder,
                last_step=last_step,
                show=tracker.show,
            ),
            profiler=StepProfiler(
                engine, experiment.recipe, folder, precision=precision, show=tracker.show
            ),
            startup=startup,
            find_start=partial(find_start, folder, Request(), recipe, data.fingerprint),
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


def open_snapshots(
    experiment: Experiment, claim: Claim, writer: CheckpointWriter, step: int
) -> SnapshotWriter | None:
    """Return the writer of snapshots, or None if the run takes none; collective.

    Args:
        experiment: the experiment of the run
        claim: the snapshots of this node
        writer: the writer of the run's checkpoints
        step: the last completed step
    """
    if claim.memory is None:
        return None
    every, size = experiment.recipe.checkpoint.snapshot_every, experiment.world.local_size
    return SnapshotWriter(writer, claim.memory, every=every, step=step, ranks_per_node=size)


def watch_losses(experiment: Experiment, metrics: Sequence[dict[str, Any]]) -> LossWatch:
    """Return the loss watch, which knows the losses in the lines of metrics.jsonl."""
    return LossWatch(
        experiment.recipe.supervision,
        fp16=experiment.precision == "fp16",
        losses=[line["loss"] for line in metrics if isinstance(line.get("loss"), float)],
    )


def close_run(run: Run, ending: Ending) -> Ending:
    """Wait for the last save, and record the end of the run; collective.

    Returns:
        The end of the run: `ending`, unless a failed save changes it.
    """
    run.supervisor.crumb.note("gathering weights")
    run.engine.finish_communication()
    with run.supervisor.crumb.waiting_for_disk("saving"):
        unsaved = run.writer.wait()
    ends_well = ending.code in (FINISHED, INTERRUPTED) or ending.is_boundary
    if unsaved and (ends_well or unsaved in ending.reason):
        reason = unsaved if ends_well else ending.reason
        ending = Ending(STOPPED, f"{reason}; {run.writer.remedy()}")
    if ending.is_boundary:
        run.tracker.replace_ranks(ending.step, run.plan.at(ending.step + 1).stage)
    elif ending.code == FINISHED:
        run.tracker.end()
    else:
        run.tracker.stop(ending.reason, ending.code)
    return ending


def leave_processes() -> None:
    """Leave the process group; collective."""
    # Launchers end all ranks when the first one exits with an error, and rank 0 may finish last.
    dist.barrier()
    dist.destroy_process_group()
