"""Pretrain the model of a recipe: one run, top to bottom.

deepspeed recipes/pretrain.py                                     # recipes/tiny.toml
deepspeed --num_nodes 4 recipes/pretrain.py recipes/llama/7b.toml
deepspeed recipes/pretrain.py --set training.steps=20 --run-dir runs/short

A recipe is a complete experiment. For another model size, copy a recipe and edit it; this file
stays the same. Rerun the same command to resume an interrupted run.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

import os
import signal
import traceback
from functools import partial
from typing import Any

from models.errors import UserError
from threefold.config.sections import REPOSITORY
from threefold.pretrain.after_step import after_step, compare_speed, evaluate, stop_if_unreadable
from threefold.pretrain.experiment import exit_on_user_error, parse_command_line, read_experiment
from threefold.pretrain.run import Run, RunEnd
from threefold.run_folder.folder import RunFolder
from threefold.runtime.environment import set_thread_count, set_torch_variables
from threefold.runtime.exits import (
    FINISHED,
    REJECTED,
    collect_garbage,
    exit_now,
    hold_garbage,
    pause_collection,
    raise_at_interrupt,
    resume_collection,
)
from threefold.runtime.output import label_lines, use_nonblocking_output
from threefold.tracking.clocks import Startup
from threefold.tracking.messages import summarize


def main(started: float | None = None) -> None:
    """Pretrain, and end this rank with a message or a traceback if that fails.

    Args:
        started: time.monotonic() at which a standby process of launch.py became this rank; None in
            a newly started process
    """
    use_nonblocking_output()
    try:
        pretrain(started)
    except UserError as problem:  # raised by the summary; the steps print their own messages
        print(f"pretrain.py: {problem}", file=sys.stderr, flush=True)
        exit_now(REJECTED)
    except KeyboardInterrupt:  # before the run handles signals, and therefore before its first step
        print("pretrain.py: interrupted before the first step", file=sys.stderr, flush=True)
        exit_now(128 + signal.SIGINT)
    except Exception:
        traceback.print_exc()
        exit_now(1)  # an ordinary exit would wait for threads, which may hang


def pretrain(started: float | None = None) -> None:
    """Train once, from the command-line options to the exit code."""
    pause_collection()
    environment, options = dict(os.environ), parse_command_line(__doc__)
    startup = Startup(started if options.continued_at is None else options.continued_at)

    # 1. Experiment: read and check the recipe before importing torch, which takes seconds.
    experiment = read_experiment(options.recipe, options.set)
    world, recipe = experiment.world, experiment.recipe
    label_lines(world.rank)
    set_thread_count(os.environ, world)
    set_torch_variables(
        os.environ,
        deterministic=recipe.training.deterministic,
        pipelined=experiment.phase_plan.has_pipeline,
    )
    from threefold.engine.axes import build_axes
    from threefold.engine.build import build_engine, build_model, build_optimizer
    from threefold.pretrain.out_of_memory import out_of_memory_explained
    from threefold.pretrain.preflight.run import check_nodes
    from threefold.pretrain.setup import (
        begin,
        close_run,
        find_resume_point,
        join,
        leave_processes,
        open_data,
        open_run,
        replace_process,
    )

    resume_collection()
    raise_at_interrupt()
    startup.mark("imports")

    path = options.run_dir or REPOSITORY / "runs" / recipe.name
    folder = RunFolder(path, options.lease, options.lock)
    with exit_on_user_error(world, experiment.origin):
        # 2. Data: open the corpora first, so that a missing file ends every rank immediately.
        data = open_data(experiment)
        startup.mark("data")

        # 3. Processes: join the other ranks, start this rank's supervisor, and lock the run folder.
        # If a rank hangs, the supervisors name it and end all ranks with exit code 4.
        handle = join(experiment, folder, data, startup, wait_seconds=options.wait_for_folder)

        # 4. Start: find the newest undamaged checkpoint, and prepare the run folder.
        start = find_resume_point(experiment, handle, data, options.resume, options.resume_once)
        experiment = experiment.at(start.progress.step + 1)  # in the phase of the next step
        data.resume(start.progress, experiment.dims)
    begin(experiment, handle, data, start, startup)

    with (
        exit_on_user_error(world, experiment.origin),
        out_of_memory_explained(experiment, handle) as account,
    ):
        # 5. Model: check the nodes, build the model, its optimizer and DeepSpeed's engine, and load
        # the checkpoint. If memory runs out from here on, a message names a layout that needs less.
        recipe, dims, config = experiment.recipe, experiment.dims, experiment.config
        crumb = handle.supervisor.crumb  # tells the supervisor what this rank is doing
        crumb.note("building the engine")
        axes = build_axes(recipe, dims)
        step = start.progress.step
        check_nodes(experiment, handle=handle, axes=axes, step=step, startup=startup)
        model = build_model(recipe, axes, config=config)
        startup.mark("model")
        optimizer = build_optimizer(model, recipe, config=config)
        engine = account.engine = build_engine(
            recipe, axes, config=config, model=model, optimizer=optimizer, crumb=crumb
        )
        startup.mark("DeepSpeed")
        if start.found.path:
            engine.load(start.found.reader(), weights_only=start.found.weights_only)
            startup.mark("loading")

        # 6. Train: run the steps, and record how the run ends.
        with open_run(experiment, handle, engine, data=data, start=start, startup=startup) as run:
            ending = close_run(run, train(run, start.progress.step))
    if ending.restarts_for_phase:  # the next phase needs another engine
        replace_process(folder, environment)
    finish = partial(summarize, experiment.whole_recipe, folder, world)
    leave_processes(finish if ending.code == FINISHED else None)
    exit_now(ending.code)


def train(run: Run, step: int) -> RunEnd:
    """Run the steps after `step` until the last one, or until there is a reason to stop.

    After each step, `after_step` handles a loss that spikes or is not finite, compares the weights
    of data-parallel replicas if that is due, saves a checkpoint every `checkpoint.every` steps and
    after the last one, and stops the run after a signal or a fault. If it has to roll back, it
    loads an earlier checkpoint and returns the step of that checkpoint.
    """
    ending = None
    while step < run.last_step and not ending:
        step += 1
        collect_garbage(step)
        if run.phase_plan.begins_phase(step):
            run.tracker.begin_phase(run.phase_plan.at(step - 1), run.phase_plan.at(step))
        metrics = train_step(run, step)
        if run.startup.running:
            end_startup(run, step)
        with run.supervisor.crumb.waiting_for_disk("writing metrics"):
            run.tracker.step(metrics)
            run.tracker.tell_repetition(run.data.repeated(step))
            run.profiler.write_after(step)
        run.timeline.write_after(step)
        step, ending = after_step(run, step, metrics)
    return ending or RunEnd(FINISHED)


def train_step(run: Run, step: int) -> dict[str, Any]:
    """Run one step: micro-batches in, forward and backward passes, update, metrics out.

    Then validate, score the tasks, and compare the ranks' speed, each only if it is due.
    """
    run.clock.begin()
    crumb, recipe = run.supervisor.crumb, run.recipe
    crumb.step = step
    rate = run.phase_plan.at(step).learning_rate(step)
    with stop_if_unreadable(run, step), crumb.waiting_for_disk("waiting for data"):
        micro_batches, data_seconds = run.prefetcher.next(step)
    with run.timeline.recorded(step), run.profiler.recorded(step):
        result = run.engine.train_step(micro_batches, rate)
    seconds = run.clock.end()
    metrics = run.meter.line(
        run.data.progress_after(step),
        loss=result.loss,
        grad_norm=result.grad_norm,
        learning_rate=rate,
        seconds=seconds.total,
        experts=result.experts,
        prediction_losses=result.prediction_losses,
        largest_logit=result.largest_logit,
    )
    metrics |= {"between_seconds": seconds.between, "data_seconds": data_seconds}
    metrics["epoch"] = run.data.epoch(step)
    metrics |= evaluate(run, step)
    if result.experts and "validation_seconds" in metrics:
        metrics["expert_counts"] = result.experts.counts
    every = recipe.supervision.compare_speed_every
    if every and step % every == 0:
        metrics |= compare_speed(run, step)
    return metrics


def end_startup(run: Run, step: int) -> None:
    """End start-up. It includes the first step, which still imports modules and compiles."""
    run.tracker.started(step, run.startup.stop("first step"), compiled=run.engine.compiled)
    hold_garbage()
    run.supervisor.expect_steps()


if __name__ == "__main__":
    main()
