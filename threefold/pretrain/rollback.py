"""Rollback of a run to its last checkpoint, and continuation with the data after the bad step."""

from models.errors import UserError
from threefold.pretrain.run import Ending, Run, StepOutcome, stopped_without_save
from threefold.runtime.exits import FINISHED, STOPPED
from threefold.tracking.messages import tell_skipped


def roll_back(run: Run, step: int, reason: str) -> StepOutcome:
    """Roll back to the last checkpoint, and continue with the data that follows a step; collective.

    Args:
        run: the objects of the run
        step: the bad step
        reason: the problem with the step

    Returns:
        The step to continue after, with an ending if the ranks have to start again for an earlier
        stage; or `step` and an ending, if the run cannot roll back.
    """
    limit = run.recipe.supervision.rollbacks
    if not limit:
        return _stop(step, stopped_without_save(step, f"{reason}, supervision.rollbacks = 0"))
    with run.supervisor.crumb.waiting_for_disk("rolling back"):
        unsaved = run.writer.wait()
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
    run.prefetcher.forget()
    target = run.data.progress_after(step).moved_to(found.progress.step, run.plan)
    is_same_engine = run.plan.last_step_of_engine(target.step + 1) == run.last_step_of_engine
    if run.supervisor.rank == 0:
        tell_skipped(run.folder, found)
    run.writer.damaged = found.skipped
    parts = run.data.fingerprint.get("parts", ())
    if not is_same_engine:  # the ranks start again with the engine of the earlier stage
        run.tracker.roll_back(step, target, reason, parts=parts)
        return StepOutcome(target.step, Ending(FINISHED, step=target.step))
    with run.supervisor.crumb.waiting_for_disk("rolling back"):
        run.engine.load(found.reader())
    run.data.resume(target)
    if run.snapshots:
        run.snapshots.last = target.step
    run.watch.rolled_back()
    run.clock.restart()
    run.tracker.roll_back(step, target, reason, parts=parts)
    return StepOutcome(target.step, None)


def _stop(step: int, reason: str) -> StepOutcome:
    return StepOutcome(step, Ending(STOPPED, reason))
