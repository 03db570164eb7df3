"""Measurements that some steps add to their metrics: validation loss, and speed of the ranks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from models.errors import UserError
from recipes.training.loop.run import Run, stopped_without_save
from recipes.training.runtime.exits import STOPPED, leave
from recipes.training.supervision.stragglers import describe_slow_ranks, relative_times


def validate(run: Run, step: int) -> float:
    """Return the validation loss, in nats per token; collective."""
    run.supervisor.crumb.note("validating")
    with stop_if_unreadable(run, step):
        return run.engine.evaluate(run.data.evaluation())


def compare_speed(run: Run) -> dict[str, Any]:
    """Warn about slow ranks; collective.

    Returns:
        The slowest rank and its time relative to its peers, for the metrics; nothing if no rank has
        peers.
    """
    relative = relative_times(run.engine.stopwatch.take_of_all_ranks(), run.topology)
    if not relative:
        return {}
    limit = run.recipe.supervision.slow_rank
    for sentence in describe_slow_ranks(relative, run.topology, run.supervisor.hosts, limit):
        run.tracker.warn(f"slow: {sentence}")
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
