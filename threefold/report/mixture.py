"""The samples that a run has read from each source of its mixture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from threefold.config.sections import whole_shares
from threefold.data.sample_order import one_period


@dataclass(frozen=True)
class SourceShare:
    """A source of the mixture.

    Attributes:
        path: path of the corpus, as in the recipe
        wanted: share that its weight asks for
        samples: samples of this source that the kept steps have read
        share: `samples` as a share of all samples that the kept steps have read; 0 if none
    """

    path: str
    wanted: float
    samples: int
    share: float


def shares_read(
    sources: Mapping[str, float], ends: Sequence[tuple[int, int]], jumps: Mapping[int, int],
    *, batch: int,
) -> list[SourceShare]:  # fmt: skip
    """Return the share of each source in the samples that the kept steps have read.

    Args:
        sources: weights of the mixture, by path
        ends: (step, number of samples read when it ended) of each kept step, in increasing order
        jumps: step -> the next sample that is read, for steps after which the run skipped samples
        batch: samples per step, used for steps whose predecessor is not in `ends`
    """
    weights = list(sources.values())
    shares = whole_shares(weights)
    read = sum((_samples_until(stop, shares) - _samples_until(start, shares)
                for start, stop in _ranges(ends, jumps, batch)),
               start=np.zeros(len(shares), np.int64))  # fmt: skip
    total = max(1, int(read.sum()))
    return [
        SourceShare(path, weight / sum(weights), int(samples), int(samples) / total)
        for (path, weight), samples in zip(sources.items(), read, strict=True)
    ]


def _ranges(
    ends: Sequence[tuple[int, int]], jumps: Mapping[int, int], batch: int
) -> list[tuple[int, int]]:
    """Return the ranges of samples that some steps have read; adjacent ranges are joined."""
    ranges: list[tuple[int, int]] = []
    known = {0: 0}
    for step, end in ends:
        start = jumps.get(step - 1, known.get(step - 1, end - batch))
        known = {step: end}
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges


def _samples_until(stop: int, shares: tuple[int, ...]) -> np.ndarray:
    """Return how many of the samples 0 .. stop - 1 each source gives; int64 [sources]."""
    order, _ = one_period(shares)
    periods, rest = divmod(stop, len(order))
    begun = np.bincount(order[:rest], minlength=len(shares))
    return periods * np.array(shares, np.int64) + begun
