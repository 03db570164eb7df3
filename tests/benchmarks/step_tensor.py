"""Two tensor ranks on two cores beside one process on one."""

from functools import partial
from typing import Any

from tests.benchmarks import step_contestants
from tests.benchmarks.step_rows import OUR_ENTRY, TOLERANCE, Setting
from tests.benchmarks.step_shapes import Shape
from tests.benchmarks.taking_turns import (
    Player,
    check_first_losses,
    median_seconds,
    players,
    ratio,
    take_turns,
)

ONE, PLAIN, SEQUENCE = "one_process", "plain", "sequence_parallel"
LAYOUTS = {  # of two ranks
    PLAIN: ("layout.tensor=2",),
    SEQUENCE: ("layout.tensor=2", "layout.sequence_parallel=true"),
}


def compare(setting: Setting, shape: Shape, precision: str) -> dict[str, Any]:
    """How much faster two ranks are, without and with sequence parallelism.

    Raises:
        AssertionError: they have not computed the same.
    """
    play = partial(Player, step_contestants.play, OUR_ENTRY, shape, precision)
    starts = {ONE: partial(play, {}, cores=setting.cores)}
    for name, layout in LAYOUTS.items():
        starts[name] = partial(play, {"more": layout}, cores=setting.cores, ranks=2)
    with players(starts) as playing:
        turns = take_turns(playing, warm_up=setting.warm_up, rounds=setting.rounds)
    check_first_losses(turns, TOLERANCE[precision])
    timed = {name: each[setting.warm_up :] for name, each in turns.items()}
    return {
        "shape": shape.name,
        "speed_up": {name: ratio(timed[ONE], timed[name]) for name in LAYOUTS},
        "seconds": {name: median_seconds(each) for name, each in timed.items()},
    }
