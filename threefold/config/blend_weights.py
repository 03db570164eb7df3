"""The weights of a blend of corpora as whole numbers of samples."""

import math
from collections.abc import Sequence
from fractions import Fraction

from models.errors import UserError

PERIOD = 2**16  # samples, at most, after which the order of the sources repeats itself
LARGEST_ROUNDING = Fraction(1, 10)  # of a source's share, relative
# A source with this many samples per period or more loses less than LARGEST_ROUNDING of its share
# when it is rounded down.
SAMPLES_TO_ROUND = math.ceil(1 / LARGEST_ROUNDING)


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the samples of each source in a period.

    The shares are exact if a period of at most PERIOD samples can represent them. Otherwise they
    are rounded down to a multiple of 1 / PERIOD, and the largest source takes the rest. The order
    of a run's samples follows from these numbers, so a change here would change what resumed runs
    read.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    period = math.lcm(*((weight / total).denominator for weight in exact))
    if period <= PERIOD:
        return tuple(int(weight / total * period) for weight in exact)
    whole = [max(1, int(weight / total * PERIOD)) for weight in exact]
    whole[whole.index(max(whole))] += PERIOD - sum(whole)
    return tuple(whole)


def check_weights(weights: Sequence[float]) -> None:
    """Reject weights that are too small to be represented.

    Raises:
        UserError: names the key, the share that the weight would become, and a weight that works.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total, shares = sum(exact), whole_shares(weights)
    for number, weight in enumerate(exact):
        found = Fraction(shares[number], sum(shares))
        if weight == max(exact) or abs(found * total / weight - 1) <= LARGEST_ROUNDING:
            continue
        least = SAMPLES_TO_ROUND * (total - weight) / (PERIOD - SAMPLES_TO_ROUND)
        raise UserError(
            f"data.train.{number}.weight = {weights[number]:g} is {float(weight / total):.3g} of "
            f"all samples, and would become {float(found):.3g}, because the order of the corpora "
            f"repeats after {PERIOD} samples; use weight = {_round_up(float(least)):g} or more, or "
            f"leave the corpus out"
        )


def _round_up(number: float) -> float:
    """Round up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit
