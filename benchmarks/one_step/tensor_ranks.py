"""Speed-up of two tensor ranks on two cores relative to one process on one core."""

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.one_step import contestants
from benchmarks.one_step.rows import OUR_ENTRY, TOLERANCE, Setting
from benchmarks.one_step.shapes import Shape
from benchmarks.taking_turns import (
    Player,
    check_first_losses,
    median_seconds,
    players,
    ratio,
    take_turns,
)

ONE = "one_process"
SPLIT, SEQUENCE = ("layout.tensor=2",), ("layout.tensor=2", "layout.sequence_parallel=true")
WAITING = replace(OUR_ENTRY, overlaps=False)
TWO_RANKS = {
    "plain": (OUR_ENTRY, SPLIT),
    "plain_without_overlap": (WAITING, SPLIT),
    "sequence_parallel": (OUR_ENTRY, SEQUENCE),
    "sequence_parallel_without_overlap": (WAITING, SEQUENCE),
}


def compare(setting: Setting, shape: Shape, precision: str) -> dict[str, Any]:
    """Return the speed-up of two ranks, with and without sequence parallelism and overlap.

    Raises:
        AssertionError: the contestants have not computed the same loss.
    """
    play = partial(Player, contestants.play)
    starts = {ONE: partial(play, OUR_ENTRY, shape, precision, {}, cores=setting.cores)}
    for name, (entry, layout) in TWO_RANKS.items():
        more = {"more": layout}
        starts[name] = partial(play, entry, shape, precision, more, cores=setting.cores, ranks=2)
    with players(starts) as playing:
        turns = take_turns(playing, warm_up=setting.warm_up, rounds=setting.rounds)
    check_first_losses(turns, TOLERANCE[precision])
    timed = {name: each[setting.warm_up :] for name, each in turns.items()}
    return {
        "shape": shape.name,
        "speed_up": {name: ratio(timed[ONE], timed[name]) for name in TWO_RANKS},
        "seconds": {name: median_seconds(each) for name, each in timed.items()},
    }
