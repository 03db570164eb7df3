"""The parts of a measured step, and their comparison with the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from threefold.plan.time.step import StepTime

SPLIT_STEPS = 3  # instrumented steps of a trial, after the measured ones
PARTS = (
    "compute", "tensor", "context", "expert", "pipeline", "bubble", "data", "optimizer", "other",
)  # fmt: skip
PLANNED_PARTS = (
    "compute", "tensor", "context", "expert", "pipeline", "bubble", "data", "optimizer",
    "waiting",
)  # fmt: skip

PartSeconds = Mapping[str, float]  # part -> seconds


@dataclass(frozen=True, kw_only=True)
class Split:
    """The split of a step on one rank. The parts, in seconds, add up to the measured step.

    Attributes:
        compute: forward, backward and weight-gradient passes without their collectives
        tensor: collectives of the tensor group in the passes
        context: communication of the context group in the passes
        expert: exchange of tokens between expert ranks in the passes
        pipeline: starting sends and receives, and gathering messages that arrive in parts
        bubble: waiting for messages and collectives of other stages
        data: collectives over the data ranks
        optimizer: gradient norm, clipping, update, and the sum of tied gradients over the stages
        other: the rest, such as copying the samples to the device
        rank: the slowest rank, to which the parts belong
        instrumented_seconds: sum of the parts before the normalisation
    """

    compute: float
    tensor: float
    context: float = 0.0  # missing in the results of older sweeps, like the next one
    expert: float = 0.0
    pipeline: float
    bubble: float
    data: float
    optimizer: float
    other: float
    rank: int
    instrumented_seconds: float

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part."""
        return {part: getattr(self, part) for part in PARTS}


def split_of_slowest(of_ranks: Sequence[PartSeconds], step_seconds: float) -> Split:
    """Return the split of the rank that is busy for the longest time.

    Args:
        of_ranks: parts of an instrumented step on each rank, by rank
        step_seconds: measured duration of a step, to which the parts are normalised
    """
    totals = [sum(parts.values()) for parts in of_ranks]
    busy = [total - parts["bubble"] for total, parts in zip(totals, of_ranks, strict=True)]
    rank = busy.index(max(busy))
    scale = step_seconds / totals[rank]
    parts = {part: of_ranks[rank][part] * scale for part in PARTS}
    return Split(**parts, rank=rank, instrumented_seconds=totals[rank])


def planned_parts(time: StepTime) -> dict[str, float]:
    """Return the predicted seconds of each part."""
    return {part: getattr(time, part) for part in PLANNED_PARTS}
