"""Garbage is collected between the steps, on all ranks at once.

Within a step Python would begin it at a different place on each rank, which the others wait for.
"""

import gc


def hold_garbage() -> None:
    """Keep all that there is for good, and collect nothing without being asked."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_garbage() -> None:
    """Collect what has come since, in a millisecond or two: the rest is not looked at."""
    gc.collect()
