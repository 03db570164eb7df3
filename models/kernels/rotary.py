"""Frequencies of rotary positions (arXiv 2104.09864), scaled for long sequences if asked for.

All arithmetic is in fp32 and in the order of transformers' `modeling_rope_utils`. At position
100,000, fp32 rounds an angle by up to 0.004 radians. A different order of operations would
therefore give an imported model slightly different angles than in its training.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import RopeScaling


@dataclass(frozen=True)
class Frequencies:
    """Rotation frequency of each pair of rotated columns of a head.

    Attributes:
        columns: rotated columns of a head, d
        theta: base of the frequencies
        scaling: None: the frequency of pair i is theta^(-2i/d)
    """

    columns: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the frequencies in radians per position: fp32 [d/2]."""
        columns = torch.arange(0, self.columns, 2, device=device).float()
        base, scaling = self.theta ** (columns / self.columns), self.scaling
        if scaling is None:
            return 1.0 / base
        if scaling.type == "linear":
            return 1.0 / base / scaling.factor
        if scaling.type == "llama3":
            return _llama3(1.0 / base, scaling)
        return _yarn(base, self.theta, scaling)

    @property
    def amplitude(self) -> float:
        """The factor by which rotated queries and keys are each multiplied."""
        return self.scaling.amplitude if self.scaling else 1.0


def _llama3(usual: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between.

    As in transformers' `_compute_llama3_parameters`; published with Llama 3.1.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    length = scaling.original_sequence_length
    assert length is not None  # `RopeScaling` requires it
    wavelength = 2 * math.pi / usual
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * usual / scaling.factor + smooth * usual
    scaled = torch.where(wavelength > length / low, usual / scaling.factor, between)
    return torch.where(wavelength < length / high, usual, scaled)


def _yarn(base: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend in between.

    The "NTK-by-parts" interpolation of arXiv 2309.00071, section 3.2. The bounds of the blend are
    indices of pairs, as in transformers' `_compute_yarn_parameters`.
    """
    count, length = base.shape[0], scaling.original_sequence_length
    assert length is not None  # `RopeScaling` requires it

    def pair_of(turns: float) -> float:
        return count * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # transformers limits the last pair by the number of columns, twice that of the pairs.
    first, last = max(first, 0), min(last, 2 * count - 1)
    width = last - first or 0.001
    pairs = torch.arange(count, dtype=torch.float32, device=base.device)
    kept = 1 - ((pairs - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * base) * (1 - kept) + 1.0 / base * kept
