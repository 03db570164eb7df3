"""Passes of a pipeline: one micro-batch through one chunk of a stage. Standard library only."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kind of a pass; an undivided backward pass computes the weight gradients, too."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


class Pass(NamedTuple):
    """One micro-batch through one chunk of a stage."""

    kind: Kind
    stage: int
    chunk: int
    micro_batch: int


Order = Sequence[Pass]  # all passes of a stage in a step
FORWARD, BACKWARD, WEIGHT = Kind


def group_ends(order: Iterable[Pass], every: int = 0) -> dict[Pass, bool]:
    """Return the passes after which gradients of a chunk are reduced over the data ranks.

    Each ends a group of micro-batches. The gradients of a group are complete after its last
    backward pass or, if backward passes are split and the gradients deferred, after its last weight
    pass.

    Args:
        order: the passes of a stage
        every: number of micro-batches in a group; 0: all of the step

    Returns:
        By pass: True if it is the last of its kind through its chunk in the step.
    """
    passes: dict[tuple[Kind, int], list[Pass]] = {}
    for work in order:
        if work.kind != FORWARD:
            passes.setdefault((work.kind, work.chunk), []).append(work)
    return {
        work: number == len(of_chunk)
        for of_chunk in passes.values()
        for number, work in enumerate(of_chunk, start=1)
        if number == len(of_chunk) or (every and number % every == 0)
    }


def most_in_flight(order: Iterable[Pass]) -> int:
    """Return the maximum number of micro-batches whose activations a stage holds at the same time.

    A chunk holds them until the last of its backward passes, that of the weights included.
    """
    order = list(order)
    ending = WEIGHT if any(work.kind == WEIGHT for work in order) else BACKWARD
    held = most = 0
    for work in order:
        held += (work.kind == FORWARD) - (work.kind == ending)
        most = max(most, held)
    return most
