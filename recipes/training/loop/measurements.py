"""Measurements that some steps add to their metrics: validation loss, and speed of the ranks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from models.errors import UserError
from recipes.training.loop.run import Run, stopped_without_save
from recipes.training.runtime.exits import STOPPED, leave
from recipes.training.supervision.stragglers import describe, relative_times, slow_groups


def validate(run: Run, step: int) -> float:
    """Return the validation loss, in nats per token; collective."""
    run.supervisor.crumb.note("validating")
    with stop_if_unreadable(run, step):
        return run.engine.evaluate(run.data.evaluation(step))


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
