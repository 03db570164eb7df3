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


def last_passes(order: Sequence[Pass]) -> list[Pass]:
    """Return the last pass of each kind through each chunk of a stage, in the order of the passes.

    All gradients of a chunk are complete after the last of its passes. If backward passes are
    split, the gradients that are not deferred are already complete after the last backward pass.
    """
    last = {(work.kind, work.chunk): work for work in order}
    return [work for work in order if work == last[work.kind, work.chunk]]


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
