"""When garbage is collected: neither during imports nor within a step.

Within a step Python would begin it at a different place on each rank, which the others wait for.
"""

import gc


def pause_collection() -> None:
    """Collect nothing: imports leave little, and hundreds of thousands of objects to look at."""
    gc.disable()


def resume_collection() -> None:
    """Collect again, all but what there is, which stays for good."""
    gc.freeze()
    gc.enable()


def hold_garbage() -> None:
    """Keep all that there is for good, and collect nothing without being asked."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_garbage() -> None:
    """Collect what has come since, in a few milliseconds: the rest is not looked at."""
    gc.collect()
