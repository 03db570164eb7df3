"""Speed-up of two tensor, context or expert ranks on two cores over one process on one core."""

from collections.abc import Mapping
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
from threefold.config.layout import CONTEXT_ATTENTIONS

ONE = "one_process"
WAITING = replace(OUR_ENTRY, overlaps=False)
Layouts = Mapping[str, tuple[str, ...]]  # name -> settings of the recipe
TENSOR: Layouts = {
    "plain": ("layout.tensor=2",),
    "sequence_parallel": ("layout.tensor=2", "layout.sequence_parallel=true"),
}
CONTEXT: Layouts = {
    kind: ("layout.context=2", f"layout.context_attention={kind}") for kind in CONTEXT_ATTENTIONS
}
EXPERT: Layouts = {
    "experts": ("layout.expert=2",),
    "experts_on_every_rank": ("layout.expert=1",),  # two data ranks
    "experts_of_tensor_ranks": ("layout.tensor=2", "layout.sequence_parallel=true"),
}
WITHOUT_OVERLAP = ("ulysses", *EXPERT)  # layouts in which nothing is overlapped


def compare(setting: Setting, shape: Shape, precision: str, layouts: Layouts) -> dict[str, Any]:
    """Return the speed-up of two ranks in each layout, with and without overlap.

    Raises:
        AssertionError: the contestants have not computed the same loss.
    """
    play = partial(Player, contestants.play)
    starts = {ONE: partial(play, OUR_ENTRY, shape, precision, {}, cores=setting.cores)}
    for layout, settings in layouts.items():
        entries = {layout: OUR_ENTRY, f"{layout}_without_overlap": WAITING}
        if layout in WITHOUT_OVERLAP:
            entries = {layout: OUR_ENTRY}
        for name, entry in entries.items():
            more = {"more": settings}
            starts[name] = partial(
                play, entry, shape, precision, more, cores=setting.cores, ranks=2
            )
    with players(starts) as playing:
        turns = take_turns(playing, warm_up=setting.warm_up, rounds=setting.rounds)
    check_first_losses(turns, TOLERANCE[precision])
    timed = {name: each[setting.warm_up :] for name, each in turns.items()}
    return {
        "shape": shape.name,
        "speed_up": {name: ratio(timed[ONE], timed[name]) for name in starts if name != ONE},
        "seconds": {name: median_seconds(each) for name, each in timed.items()},
    }
