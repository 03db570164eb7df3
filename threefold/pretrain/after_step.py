"""Evaluations, comparisons of replicas, saves and rollbacks after the update of a step.

All ranks make the same decisions, because they first agree on the worst severity of the step, on
requests to stop and on saves in flight.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from models.errors import UserError
from threefold.pretrain.run import (
    Run,
    RunEnd,
    StepOutcome,
    is_due,
    stopped_after_save,
    stopped_without_save,
)
from threefold.run_folder.json_lines import mean_validation_loss, validation_losses
from threefold.runtime.exits import FINISHED, STOPPED, exit_now
from threefold.supervision.step_watch import (
    BadStep,
    Severity,
    describe,
    relative_times,
    slow_groups,
)
from threefold.tracking.messages import tell_skipped

# Rollback of a run to its last checkpoint, and continuation with the data after the bad step.


def roll_back(run: Run, step: int, reason: str) -> StepOutcome:
    """Roll back to the last checkpoint, and continue with the data that follows a step; collective.

    Returns:
        The step to continue after, with an ending if the ranks have to start again for an earlier
        phase; or `step` and an ending, if the run cannot roll back.
    """
    limit = run.recipe.supervision.rollbacks
    if not limit:
        return _stop(step, stopped_without_save(step, f"{reason}, supervision.rollbacks = 0"))
    with run.supervisor.crumb.waiting_for_disk("rolling back"):
        unsaved = run.writer.wait()
        if unsaved and run.recipe.checkpoint.on_failure == "stop":
            return _stop(step, unsaved)
        if unsaved:
            run.tracker.warn(unsaved)
        try:
            start = run.find_start()
        except UserError as problem:
            return _stop(step, f"step {step}: {reason}, and {problem}")
    found = start.found
    if not found.path or found.weights_only:
        return _stop(step, f"step {step}: {reason}, and there is no checkpoint yet")
    if start.rollbacks >= limit:
        why = f"after {limit} rollbacks without a checkpoint in between"
        return _stop(step, stopped_without_save(step, f"{reason}, {why}"))
    run.prefetcher.reset()
    target = run.data.progress_after(step).moved_to(found.progress.step, run.phase_plan)
    is_same_engine = run.phase_plan.last_step_of_engine(target.step + 1) == run.last_step_of_engine
    if run.supervisor.rank == 0:
        tell_skipped(run.folder, found)
    run.writer.damaged = found.skipped
    parts = run.data.fingerprint.get("parts", ())
    with run.supervisor.crumb.waiting_for_disk("rolling back"):
        if is_same_engine:
            run.engine.load(found.reader())
        run.tracker.roll_back(step, target, reason, parts=parts)
    if not is_same_engine:  # the ranks start again with the engine of the earlier phase
        return StepOutcome(target.step, RunEnd(FINISHED, step=target.step))
    run.data.resume(target)
    if run.snapshots:
        run.snapshots.last = target.step
    run.watch.rolled_back(target.step)
    run.clock.restart()
    return StepOutcome(target.step, None)


def _stop(step: int, reason: str) -> StepOutcome:
    return StepOutcome(step, RunEnd(STOPPED, reason))


# Measurements that some steps add to their metrics: validation, tasks, and speed of the ranks.


def evaluate(run: Run, step: int) -> dict[str, Any]:
    """Validate and score the tasks, each only if it is due; collective.

    Returns:
        The metrics of the evaluations that were due, with the duration of each in seconds.
    """
    metrics: dict[str, Any] = {}
    run.data.use_phase_of(step)
    if run.data.validation and is_due(step, run.recipe.training.evaluate_every, run.last_step):
        with run.clock.left_out() as spent:
            metrics |= validate(run, step)
        metrics["validation_seconds"] = spent[0]
    if is_due(step, run.recipe.evaluate_tasks_every, run.last_step):
        run.supervisor.crumb.note("evaluating tasks")
        with run.clock.left_out() as spent:
            metrics |= run.evaluator.score_tasks()
        metrics["task_seconds"] = spent[0]
    return metrics


def validate(run: Run, step: int) -> dict[str, Any]:
    """Return the metrics of all validation sets; collective."""
    run.supervisor.crumb.note("validating")
    run.data.use_phase_of(step)
    with stop_if_unreadable(run, step):
        return run.evaluator.validate()


def compare_speed(run: Run, step: int) -> dict[str, Any]:
    """Warn about slow ranks, and report those that stay slow to launch.py; collective.

    Returns:
        The slowest rank and its time relative to its peers, for the metrics; nothing if no rank has
        peers.
    """
    relative = relative_times(run.engine.stopwatch.take_of_all_ranks(), run.dims)
    if not relative:
        return {}
    limits, hosts = run.recipe.supervision, run.supervisor.hosts
    slow = slow_groups(relative, run.dims, limits.slow_rank)
    for group in slow:
        run.tracker.warn(f"slow: {describe(group, relative, hosts)}")
    for group in run.straggler_history.update(slow, limits.slow_comparisons):
        nodes = list(dict.fromkeys(hosts[rank] for rank in group))
        run.tracker.slow(step, list(group), nodes, relative[group[0]])
    slowest = max(relative, key=relative.__getitem__)
    return {"slowest_rank": slowest, "slowest_ratio": relative[slowest]}


SECONDS_FOR_OTHERS = 2.0  # for ranks with the same problem to find it, before launchers end them


@contextmanager
def stop_if_unreadable(run: Run, step: int) -> Iterator[None]:
    """End this rank if its tokens cannot be read; launchers then end the others.

    If several ranks have the same reason, one reports it while the others wait. After an I/O
    error, which may be temporary, launch.py starts the run again.
    """
    from threefold.supervision.supervisor import within  # here because it imports torch

    try:
        yield
    except (UserError, OSError) as problem:
        code = STOPPED if isinstance(problem, UserError) else 1
        reason = stopped_without_save(step, str(problem))
        if run.supervisor.is_first_to_report(reason):
            print(f"stopped: {reason}", file=sys.stderr)
            # The file server that cannot read the tokens may have the run folder, too.
            event = partial(run.folder.event, "stop", step, reason=reason, exit_code=code)
            within(SECONDS_FOR_OTHERS / 2, event, doing="recording the reason of the stop")
        time.sleep(SECONDS_FOR_OTHERS)
        exit_now(code)


def after_step(run: Run, step: int, metrics: dict[str, Any]) -> StepOutcome:
    """Handle bad numbers, compare replicas, save and stop, each only if it is due; collective."""
    bad = run.watch.judge(step, metrics["loss"], metrics["grad_norm"])
    own_severity = bad.severity if bad else Severity.GOOD
    stop_request, severity, saving = run.supervisor.agree(
        own_severity, run.engine.device, saving=run.writer.busy
    )
    snapshots = run.snapshots
    snapshot_due = snapshots is not None and snapshots.is_due(step) and not saving

    # 1. Bad numbers: report a step that the optimizer has skipped, or roll back.
    if bad or severity >= Severity.UNSAFE:
        outcome = handle_bad_step(run, step, metrics, bad=bad, severity=severity)
        if outcome:
            return outcome
    # 2. Replicas: the ranks that hold the same weights compare them, always before a save.
    ending = find_diverged_replicas(run, step, saves=snapshot_due or bool(stop_request))
    # 3. Save: begin to write a checkpoint, or a snapshot in memory, in the background.
    if not ending and run.is_save_due(step):
        ending = save(run, step, metrics, ends_process=bool(stop_request))
    elif not ending and not stop_request and snapshots and snapshot_due:
        run.supervisor.crumb.note("taking a snapshot")
        if problem := snapshots.take(run.data.progress_after(step)):  # of an earlier one
            run.tracker.warn(problem)
    # 4. Stop: after a signal or the death of a launcher, save and end.
    if not ending and stop_request:
        ending = stop(run, step, stop_request, metrics)
    # 5. Phases: leave this engine if the next step belongs to a phase that needs another one.
    if not ending and step == run.last_step_of_engine < run.last_step:
        ending = RunEnd(FINISHED, step=step)
    return StepOutcome(step, ending)


def handle_bad_step(
    run: Run, step: int, metrics: dict[str, Any], *, bad: BadStep | None, severity: Severity
) -> StepOutcome | None:
    """Skip a step with bad numbers, or roll back; collective.

    Args:
        bad: the judgement of this rank, if the step is bad on this rank
        severity: the worst severity of all ranks

    Returns:
        None if the weights after the step may be saved.
    """
    reason = bad.reason if bad else "another rank has a bad step"
    is_last = step == run.last_step_of_engine
    if severity == Severity.ROLL_BACK:
        return roll_back(run, step, reason)
    if severity == Severity.UNSAFE and is_last:
        outcome = roll_back(run, step, reason)
        if not outcome.ending or outcome.ending.restarts_for_phase:
            return outcome
        ending = skip_last_step(run, step, metrics, reason)
        return StepOutcome(step, ending) if ending else None
    if bad:
        run.tracker.skip(step, reason, run.data.samples(step))
    return StepOutcome(step, None) if severity == Severity.UNSAFE else None


def skip_last_step(run: Run, step: int, metrics: dict[str, Any], reason: str) -> RunEnd | None:
    """Skip the last step, which is bad, if the weights are sound.

    After any other bad step, the loss of the next step shows whether the weights are sound. After
    the last step of the run or of an engine, no step follows before the weights are saved, so the
    validation loss is used instead.

    Returns:
        None if the weights may be saved; otherwise the end of the run.
    """
    run.tracker.skip(step, reason, run.data.samples(step))
    losses = validation_losses(metrics) or validation_losses(validate(run, step))
    broken = [loss for loss in losses.values() if not math.isfinite(loss)]
    if losses and not broken:
        return None
    if losses:
        finding = f"the validation loss is {broken[0]}"
    else:
        finding = "there is no validation set (data.validation) to check the weights with"
    return RunEnd(STOPPED, stopped_without_save(step, f"{reason}, and {finding}"))


def find_diverged_replicas(run: Run, step: int, *, saves: bool) -> RunEnd | None:
    """Compare the replicas of the weights, if that or a save is due; collective.

    Args:
        saves: a snapshot is due, or the run saves because it was asked to stop
    """
    every, last = run.recipe.training.compare_replicas_every, run.last_step
    save_due = saves or run.is_save_due(step)
    if not every or not (save_due or is_due(step, every, last)):
        return None
    run.supervisor.crumb.note("comparing replicas")
    diverged = run.engine.diverged_replicas()
    if not diverged:
        return None
    return RunEnd(STOPPED, stopped_without_save(step, "; ".join(diverged)))


def save(run: Run, step: int, metrics: dict[str, Any], *, ends_process: bool) -> RunEnd | None:
    """Begin to save. If that fails, return the end of the run or only warn; collective.

    `checkpoint.on_failure` decides between the two. A failure in the background is noticed at the
    next save, or at the end of the run.

    Args:
        ends_process: True if a rank was asked to stop, so that no step follows
    """
    ends_process = ends_process or step == run.last_step_of_engine
    with run.supervisor.crumb.waiting_for_disk("saving"):
        if run.data.rank == 0:
            with stop_if_unreadable(run, step):
                run.data.check_unchanged()
        progress, loss = run.data.progress_after(step), mean_validation_loss(metrics)
        problem = run.writer.save(progress, loss, ends_process=ends_process)
    if run.snapshots:
        run.snapshots.last = step
    if problem and run.recipe.checkpoint.on_failure == "continue":
        run.tracker.warn(problem)
        return None
    return RunEnd(STOPPED, problem) if problem else None


def stop(run: Run, step: int, request: str, metrics: dict[str, Any]) -> RunEnd | None:
    """End the run because a rank was asked to stop; first save, unless already saved."""
    if step == run.last_step:
        return None
    ending = None if run.is_save_due(step) else save(run, step, metrics, ends_process=True)
    return ending or stopped_after_save(step, request)
