"""Garbage collection between steps only, not during imports or within a step.

Within a step, Python would start a collection at a different point on each rank, and every rank
would wait for each of these collections.
"""

import gc


def pause_collection() -> None:
    """Turn the collector off during imports.

    Imports create hundreds of thousands of objects to scan, but hardly any garbage.
    """
    gc.disable()


def resume_collection() -> None:
    """Turn the collector on again, and exempt all existing objects from it."""
    gc.freeze()
    gc.enable()


def hold_garbage() -> None:
    """Exempt all existing objects from collection, and collect only on request."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_garbage() -> None:
    """Collect garbage among the objects created since `hold_garbage`, in a few milliseconds."""
    gc.collect()
