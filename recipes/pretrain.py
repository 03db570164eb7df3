"""Pretrain the model of a recipe: one run, top to bottom.

deepspeed recipes/pretrain.py                                     # recipes/tiny.toml
deepspeed --num_nodes 4 recipes/pretrain.py recipes/llama/7b.toml
deepspeed recipes/pretrain.py --set training.steps=20 --run-dir runs/short
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not recipes/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from models.errors import UserError
from recipes.training.recipe.deepspeed_config import build_deepspeed_config, precision
from recipes.training.recipe.learning_rate import learning_rate
from recipes.training.recipe.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe, origin
from recipes.training.recipe.schema import Recipe
from recipes.training.recipe.topology import Topology, World, check_placement
from recipes.training.run_folder.folder import RunFolder
from recipes.training.run_folder.lock import FolderInUse
from recipes.training.run_folder.progress import Progress
from recipes.training.runtime.exits import BUSY, FINISHED, INTERRUPTED, REFUSED, STOPPED, leave
from recipes.training.runtime.garbage import (
    collect_garbage,
    hold_garbage,
    pause_collection,
    resume_collection,
)
from recipes.training.runtime.streams import outlive_output
from recipes.training.runtime.torch_variables import check_accelerator, set_torch_variables
from recipes.training.supervision.loss_watch import ROLL_BACK, UNSAFE
from recipes.training.tracking.messages import NOT_COMPILED, announce, summarize, tell_skipped
from recipes.training.tracking.startup import Startup
from recipes.training.tracking.step_clock import StepClock

if TYPE_CHECKING:
    from recipes.training.checkpoint.writer import CheckpointWriter
    from recipes.training.data.dataset import TrainingData
    from recipes.training.data.prefetcher import Feed
    from recipes.training.engine.engine import Engine
    from recipes.training.supervision.loss_watch import LossWatch
    from recipes.training.supervision.supervisor import Supervisor
    from recipes.training.tracking.timeline import TimelineRecorder
    from recipes.training.tracking.tracker import Meter, Tracker

SECONDS_FOR_RANK_0_TO_SPEAK = 5
SECONDS_TO_WAIT_FOR_FOLDER = 300  # file servers notice a dead node after 30 to 120 s
DRIFTED_SHOWN = 8  # weights in a message


def main() -> None:
    """Check everything that can be checked, then train; what is not foreseen ends this rank."""
    outlive_output()
    try:
        pretrain()
    except UserError as problem:  # found later than the checks within `refusals`
        print(f"pretrain.py: {problem}", file=sys.stderr, flush=True)
        leave(REFUSED)
    except Exception:
        traceback.print_exc()
        leave(1)  # and not by way of threads that may hang


def pretrain() -> None:
    """Run one training, from its options to its exit code."""
    startup = Startup()
    pause_collection()
    options = parse_command_line()
    with refusals(World()):
        world = World.from_environment(os.environ)
        check_accelerator(os.environ)
    with refusals(world):
        recipe = load_recipe(options.recipe, options.set)
    with refusals(world, options):
        topology = recipe.topology(world)
        config = build_deepspeed_config(recipe, topology)
        number_format = precision(config)

    # torch reads these variables when it is imported.
    set_torch_variables(
        os.environ,
        deterministic=recipe.training.deterministic,
        pipelined=topology.pipeline > 1,
    )
    # torch and DeepSpeed take seconds to import; a bad recipe has been rejected by now.
    import torch.distributed as dist

    from recipes.training.checkpoint.resume import Request, begin_branch, find_start, hold_together
    from recipes.training.checkpoint.writer import CheckpointWriter
    from recipes.training.data.dataset import TrainingData
    from recipes.training.data.prefetcher import Feed
    from recipes.training.engine.build import build_from_recipe as build_engine
    from recipes.training.runtime.processes import check_machine, hosts_of_ranks, start_processes
    from recipes.training.supervision.loss_watch import LossWatch
    from recipes.training.supervision.supervisor import Breadcrumb, Supervisor
    from recipes.training.tracking.timeline import TimelineRecorder
    from recipes.training.tracking.tracker import Meter, check_wandb, open_tracker, read_wandb_key

    resume_collection()
    startup.lap("imports")
    folder = RunFolder(options.run_dir or REPOSITORY / "runs" / recipe.name)
    with refusals(world, options):
        check_machine(
            world,
            precision=number_format,
            compile=recipe.training.compile,
            deterministic=recipe.training.deterministic,
            gpu=recipe.cluster.gpu if recipe.cluster else None,
        )
        data = TrainingData(recipe, topology, world.rank)
        startup.lap("data")
        start_processes(
            world,
            deterministic=recipe.training.deterministic,
            patience_seconds=recipe.supervision.patience_seconds,
        )
        startup.lap("joining")
        crumb = Breadcrumb()
        supervisor = Supervisor(
            folder,
            crumb,
            hang_seconds=recipe.supervision.hang_seconds,
            startup_seconds=recipe.supervision.startup_seconds,
        ).start()
        crumb.note("locking the run folder")
        with refused_together():
            if world.rank == 0:
                read_wandb_key()
        with crumb.waiting_for_disk("waiting for the run folder"):
            in_use = hold_together(folder, wait_seconds=options.wait_for_folder)
        if in_use:
            leave_busy(world, in_use)
        hosts = hosts_of_ranks()
        supervisor.name_hosts(hosts)
        check_placement(topology, hosts)
        request = Request(options.resume, options.resume_once)
        crumb.note("verifying checkpoints")
        beginning = find_start(folder, request, recipe, data.fingerprint, note=crumb.note)
    found, start = beginning.found, beginning.progress
    with refusals(world, options), refused_together():
        if world.rank == 0:
            if start.step < recipe.training.steps:
                keeps_id = beginning.request.resume != "never"
                check_wandb(recipe, folder.path, keeps_id=keeps_id)
            tell_skipped(folder, found)
            begin_branch(folder, beginning)
    if start.step >= recipe.training.steps:
        summarize(recipe, folder, world)
        leave(FINISHED)
    with refusals(world, options), refused_together():
        if world.rank == 0:
            folder.prepare(recipe, start)
    startup.lap("checkpoint search")
    if world.rank == 0:
        announce(recipe, topology, hosts, folder, found)

    crumb.note("building the engine")
    engine = build_engine(recipe, topology, config, crumb, startup.lap)
    startup.lap("DeepSpeed")
    if found.path:
        engine.load(found.reader(), weights_only=found.weights_only)
        startup.lap("loading")
    data.resume(start)
    facts = {"recipe": recipe, "topology": topology, "data": data.fingerprint}
    changed = found.changes(recipe)
    with (
        CheckpointWriter(engine.state, folder, damaged=found.skipped, **facts) as writer,
        open_tracker(recipe, folder, world.rank, start=start, changed=changed) as tracker,
        supervisor,
    ):
        if engine.on_gpu and recipe.training.compile == "auto" and not engine.compiled:
            tracker.warn(NOT_COMPILED)
        run = Run(
            recipe=recipe,
            topology=topology,
            folder=folder,
            data=data,
            feed=Feed(data.step, last_step=recipe.training.steps, pinned=engine.on_gpu),
            engine=engine,
            meter=Meter(
                recipe, world.size, precision=number_format, device_name=engine.device_name
            ),
            clock=StepClock(),
            watch=LossWatch(
                recipe.supervision,
                fp16=number_format == "fp16",
                losses=[line["loss"] for line in folder.read_metrics()] if world.rank == 0 else (),
            ),
            writer=writer,
            tracker=tracker,
            supervisor=supervisor,
            timeline=TimelineRecorder(engine, recipe, topology, folder),
            startup=startup,
        )
        if not engine.compiled:  # otherwise the first step compiles, and belongs to the start-up
            supervisor.expect_steps()
        ending = train(run, start.step)
        with crumb.waiting_for_disk("saving"):
            unsaved = writer.wait()
        if unsaved and ending.code in (FINISHED, INTERRUPTED):
            ending = Ending(STOPPED, unsaved)
        if ending.code == FINISHED:
            tracker.end()
        else:
            tracker.stop(ending.reason, ending.code)
    dist.barrier()  # launchers end all ranks when the first one fails; rank 0 may be the last
    dist.destroy_process_group()
    if ending.code == FINISHED:
        summarize(recipe, folder, world)
    leave(ending.code)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects that work together in a run."""

    recipe: Recipe
    topology: Topology
    folder: RunFolder
    data: "TrainingData"
    feed: "Feed"
    engine: "Engine"
    meter: "Meter"
    clock: StepClock
    watch: "LossWatch"
    writer: "CheckpointWriter"
    tracker: "Tracker"
    supervisor: "Supervisor"
    timeline: "TimelineRecorder"
    startup: Startup


@dataclass(frozen=True)
class Ending:
    """How training ended: an exit code, and why unless every step is done."""

    code: int
    reason: str = ""


def train(run: Run, step: int) -> Ending:
    """All steps after this one, or as many as can be."""
    while step < run.recipe.training.steps:
        collect_garbage()
        step += 1
        metrics = train_step(run, step)
        if run.startup.running:
            startup = run.startup.stop("first step")
            run.tracker.started(step, startup, compiled=run.engine.compiled)
            hold_garbage()  # now, since a first step imports and compiles
            run.supervisor.expect_steps()
        with run.supervisor.crumb.waiting_for_disk("writing metrics"):
            run.tracker.step(metrics)
        run.timeline.write_after(step)
        bad = run.watch.judge(metrics["loss"], metrics["grad_norm"])
        asked, severity = run.supervisor.agree(bad.severity if bad else 0, run.engine.device)
        reason = bad.reason if bad else "another rank has a bad step"
        is_last = step == run.recipe.training.steps
        if severity == ROLL_BACK or (severity == UNSAFE and is_last):
            step, ending = roll_back(run, step, reason)
            if ending and severity == UNSAFE:
                ending = finish_bad_last_step(run, metrics, reason) or finish(run, step, asked)
        else:
            if bad:
                run.tracker.skip(step, reason, run.data.samples(step))
            ending = None if severity == UNSAFE else finish(run, step, asked)
        if ending:
            return ending
    return Ending(FINISHED)


def finish_bad_last_step(run: Run, metrics: dict[str, Any], reason: str) -> Ending | None:
    """Leave out a last step that is bad, if the weights before it are sound.

    After any other bad step, the loss of the next step shows whether the weights are sound. After
    the last step there is no next one, so the validation loss is used instead.

    Returns:
        None if the run may be saved as it is; otherwise how it ends.
    """
    step = run.recipe.training.steps
    run.tracker.skip(step, reason, run.data.samples(step))
    loss = metrics.get("validation_loss")
    if loss is None:
        loss = validate(run, step)
    if math.isfinite(loss):
        return None
    return Ending(STOPPED, without_save(step, f"{reason}, and the validation loss is {loss}"))


def finish(run: Run, step: int, asked: str) -> Ending | None:
    """Compare replicas and save if they are due; return the ending, if the run ends here.

    Args:
        run: the objects of the run
        step: the step that is done
        asked: reason to stop, or an empty string
    """
    ending = find_drift(run, step) or save_if_due(run, step)
    if ending or not asked or step == run.recipe.training.steps:
        return ending
    saved = due(step, run.recipe.checkpoint.every, run.recipe.training.steps)
    ending = None if saved else save(run, step)
    return ending or Ending(INTERRUPTED, f"step {step}: {asked}; the same command goes on")


def train_step(run: Run, step: int) -> dict[str, Any]:
    """Run one step, and a validation if one is due; return the metrics of the step."""
    run.clock.begin()
    crumb, recipe = run.supervisor.crumb, run.recipe
    crumb.step = step
    rate = learning_rate(step, recipe.optimizer, recipe.training.steps)
    with unreadable_data(run, step), crumb.waiting_for_disk("waiting for data"):
        micro_batches, waited = run.feed.take(step)
    with run.timeline.recorded(step):
        result = run.engine.train_step(micro_batches, rate)
    seconds = run.clock.end()
    metrics = run.meter.line(
        run.data.progress_after(step),
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=rate,
        seconds=seconds.total,
    )
    metrics |= {"between_seconds": seconds.between, "data_seconds": waited}
    if due(step, recipe.training.evaluate_every, recipe.training.steps):
        with run.clock.left_out() as spent:
            metrics["validation_loss"] = validate(run, step)
        metrics["validation_seconds"] = spent[0]
    every = recipe.supervision.compare_speed_every
    if every and step % every == 0:
        metrics |= compare_speed(run)
    return metrics


def validate(run: Run, step: int) -> float:
    """Return the validation loss; collective."""
    run.supervisor.crumb.note("validating")
    with unreadable_data(run, step):
        return run.engine.evaluate(run.data.evaluation())


@contextmanager
def unreadable_data(run: Run, step: int) -> Iterator[None]:
    """End this rank when its tokens cannot be read; launchers then end the others."""
    try:
        yield
    except (UserError, OSError) as problem:
        reason = without_save(step, str(problem))
        run.folder.event("stop", step, reason=reason, exit_code=STOPPED)
        print(f"stopped: {reason}", file=sys.stderr)
        leave(STOPPED)


def compare_speed(run: Run) -> dict[str, Any]:
    """Name slow ranks; for the metrics, the slowest and its time over that of its peers."""
    from recipes.training.supervision.stragglers import find_slow, gather, ratios

    relative = ratios(gather(run.engine.stopwatch.take()), run.topology)
    if not relative:  # nobody has peers
        return {}
    limit = run.recipe.supervision.slow_rank
    for sentence in find_slow(relative, run.topology, run.supervisor.hosts, limit):
        run.tracker.warn(f"slow: {sentence}")
    slowest = max(relative, key=relative.__getitem__)
    return {"slowest_rank": slowest, "slowest_ratio": relative[slowest]}


def save_if_due(run: Run, step: int) -> Ending | None:
    """Begin to save, where a save is due; how the run ends because an earlier one failed."""
    if not due(step, run.recipe.checkpoint.every, run.recipe.training.steps):
        return None
    return save(run, step)


def save(run: Run, step: int) -> Ending | None:
    """Begin to save; how the run ends because an earlier save failed."""
    with run.supervisor.crumb.waiting_for_disk("saving"):
        problem = run.writer.save(run.data.progress_after(step))
    if problem and run.recipe.checkpoint.on_failure == "continue":
        run.tracker.warn(problem)
        return None
    return Ending(STOPPED, problem) if problem else None


def roll_back(run: Run, step: int, reason: str) -> tuple[int, Ending | None]:
    """Roll back to the last checkpoint, and continue with the data that follows this step.

    Returns:
        The last step that the run has now done, and the ending if it cannot roll back.
    """
    import torch.distributed as dist

    from recipes.training.checkpoint.resume import Request, find_start

    most = run.recipe.supervision.rollbacks
    if not most:
        return step, Ending(STOPPED, without_save(step, f"{reason}, supervision.rollbacks = 0"))
    with run.supervisor.crumb.waiting_for_disk("rolling back"):
        unsaved = run.writer.wait()
        if unsaved:
            run.tracker.warn(unsaved)
        try:
            back = find_start(run.folder, Request(), run.recipe, run.data.fingerprint)
        except UserError as problem:
            return step, Ending(STOPPED, f"step {step}: {reason}, and {problem}")
    found = back.found
    if not found.path or found.weights_only:
        return step, Ending(STOPPED, f"step {step}: {reason}, and there is no checkpoint yet")
    if back.rollbacks >= most:
        why = f"after {most} rollbacks without a checkpoint in between"
        return step, Ending(STOPPED, without_save(step, f"{reason}, {why}"))
    run.feed.forget()
    to = Progress(found.progress.step, run.data.progress_after(step).samples)
    if dist.get_rank() == 0:
        tell_skipped(run.folder, found)
    run.writer.damaged = found.skipped
    with run.supervisor.crumb.waiting_for_disk("rolling back"):
        run.engine.load(found.reader())
    run.data.resume(to)
    run.watch.rolled_back()
    run.clock.restart()
    run.tracker.roll_back(step, to, reason)
    return to.step, None


def due(step: int, every: int, last: int) -> bool:
    """Whether something is done after this step: every so many steps (0: never), and the last."""
    return every > 0 and (step % every == 0 or step == last)


def find_drift(run: Run, step: int) -> Ending | None:
    """Which weights have drifted apart on ranks that share them; also looked at before a save."""
    every, last = run.recipe.training.compare_replicas_every, run.recipe.training.steps
    if not every or not (due(step, every, last) or due(step, run.recipe.checkpoint.every, last)):
        return None
    run.supervisor.crumb.note("comparing copies")
    drifted = run.engine.differing_copies()
    if not drifted:
        return None
    more = len(drifted) - DRIFTED_SHOWN
    shown = "; ".join(drifted[:DRIFTED_SHOWN]) + (f" (and {more} more)" if more > 0 else "")
    return Ending(STOPPED, without_save(step, shown))


def without_save(step: int, reason: str) -> str:
    """Why the run stops before it saves this step."""
    return f"step {step}: {reason}; the newest checkpoint is before that"


@contextmanager
def refusals(world: World, options: argparse.Namespace | None = None) -> Iterator[None]:
    """Turn a UserError into one message and an exit code: 6 if the folder is in use, else 2.

    The message names the recipe file if `options` are given. Launchers end all ranks when the first
    one exits, so the others let rank 0 speak; they speak up themselves if they are still there
    after that.
    """
    try:
        yield
    except UserError as problem:
        about = f"{origin(options.recipe, options.set)}: " if options else ""
        if world.rank != 0:
            time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
            about = f"rank {world.rank}: {about}"
        print(f"pretrain.py: {about}{problem}", file=sys.stderr, flush=True)
        leave(BUSY if isinstance(problem, FolderInUse) else REFUSED)


@contextmanager
def refused_together() -> Iterator[None]:
    """Let all ranks raise the UserError that one of them has raised; collective.

    Any other exception is a defect. Its rank raises it once the others know, so that none of them
    waits for that rank in its next collective; they end with exit code 1.
    """
    import torch.distributed as dist

    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    is_defect = problem is not None and not isinstance(problem, UserError)
    in_use = isinstance(problem, FolderInUse)
    everyones: list[tuple[bool, bool, str]] = [(False, False, "")] * dist.get_world_size()
    dist.all_gather_object(everyones, (is_defect, in_use, str(problem or "")))
    if is_defect:
        raise problem
    for rank, (failed, *_) in enumerate(everyones):
        if failed:
            time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)  # launchers end all ranks after the first one
            print(f"this rank exits because rank {rank} failed", file=sys.stderr)
            leave(1)
    for _, in_use, message in everyones:
        if message:
            raise FolderInUse(message, alive=True) if in_use else UserError(message)


def leave_busy(world: World, reason: str) -> NoReturn:
    """End this rank because another process holds the run folder."""
    if world.rank != 0:
        time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
    else:
        print(f"pretrain.py: {reason}", file=sys.stderr, flush=True)
    leave(BUSY)


def parse_command_line() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipe", nargs="?", type=Path, default=DEFAULT_RECIPE, help="default: recipes/tiny.toml"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change a key for this run; the value in TOML, a bare word is a string; repeatable",
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|CHECKPOINT",
        help="auto: from the newest checkpoint of the run folder, if there is one",
    )
    parser.add_argument(
        "--resume-once",
        default="",
        metavar="NAME",
        help="carry out --resume only once; later starts with this NAME use --resume auto",
    )
    parser.add_argument(
        "--wait-for-folder",
        type=float,
        default=SECONDS_TO_WAIT_FOR_FOLDER,
        metavar="SECONDS",
        help="how long to wait for the lock of a run that shows no sign of life, for example "
        "because its node has died; default: %(default)s",
    )
    parser.add_argument("--run-dir", type=Path, help="default: runs/NAME of the recipe")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser.parse_args()


if __name__ == "__main__":
    main()
