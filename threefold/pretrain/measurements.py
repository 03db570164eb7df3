"""Measurements that some steps add to their metrics: validation, tasks, and speed of the ranks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from models.errors import UserError
from threefold.pretrain.run import Run, is_due, stopped_without_save
from threefold.runtime.exits import STOPPED, leave
from threefold.supervision.stragglers import describe, relative_times, slow_groups


def evaluate(run: Run, step: int) -> dict[str, Any]:
    """Validate and score the tasks, each only if it is due; collective.

    Returns:
        The metrics of the evaluations that were due, with the duration of each in seconds.
    """
    metrics: dict[str, Any] = {}
    run.data.evaluate_after(step)
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
    run.data.evaluate_after(step)
    with stop_if_unreadable(run, step):
        return run.evaluator.validate()


def compare_speed(run: Run, step: int) -> dict[str, Any]:
    """Warn about slow ranks, and report those that stay slow to launch.py; collective.

    Returns:
        The slowest rank and its time relative to its peers, for the metrics; nothing if no rank has
        peers.
    """
    relative = relative_times(run.engine.stopwatch.take_of_all_ranks(), run.topology)
    if not relative:
        return {}
    limits, hosts = run.recipe.supervision, run.supervisor.hosts
    slow = slow_groups(relative, run.topology, limits.slow_rank)
    for group in slow:
        run.tracker.warn(f"slow: {describe(group, relative, hosts)}")
    for group in run.slow_streaks.update(slow, limits.slow_comparisons):
        nodes = list(dict.fromkeys(hosts[rank] for rank in group))
        run.tracker.slow(step, list(group), nodes, relative[group[0]])
    slowest = max(relative, key=relative.__getitem__)
    return {"slowest_rank": slowest, "slowest_ratio": relative[slowest]}


@contextmanager
def stop_if_unreadable(run: Run, step: int) -> Iterator[None]:
    """End this rank if its tokens cannot be read; launchers then end the others."""
    try:
        yield
    except (UserError, OSError) as problem:
        reason = stopped_without_save(step, str(problem))
        run.folder.event("stop", step, reason=reason, exit_code=STOPPED)
        print(f"stopped: {reason}", file=sys.stderr)
        leave(STOPPED)
