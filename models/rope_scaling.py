"""Scaling of rotary positions, to continue training on longer sequences."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from models.errors import STRICT_SECTION, UserError

MAX_SIZE = 2**24  # far beyond any model, so that a typing error is reported instead of a hang
SCALING_KEYS = {  # keys of each type besides `type` and `factor`
    "linear": (),
    "llama3": ("original_sequence_length", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("original_sequence_length", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary positions, to continue training on longer sequences.

    Rotary positions rotate each pair of columns of a head at its own frequency. Lower frequencies
    keep the angles of new positions within the range seen in training. Weights that were trained
    with scaling need the same section at every sequence length. Other models need it only for
    sequences longer than those of their training.

    Raises:
        UserError: keys are inconsistent; the message gives a value that works.
    """

    __pydantic_config__: ClassVar[dict] = STRICT_SECTION

    type: Literal["linear", "llama3", "yarn"]
    """"linear" divides all frequencies by `factor` (arXiv 2306.15595). "llama3" (Llama 3.1) and
    "yarn" (arXiv 2309.00071) divide the low ones, keep the high ones and interpolate between them;
    "yarn" also multiplies rotated queries and keys by `attention_factor`."""
    factor: float
    """Divisor of the frequencies, such as the new length divided by the original one."""
    original_sequence_length: int | None = None
    """Sequence length that the model was first trained on; required for llama3 and yarn."""
    low_frequency_factor: float = 1.0
    """Frequencies that make fewer than this number of turns within `original_sequence_length` are
    divided by `factor` (llama3)."""
    high_frequency_factor: float = 4.0
    """Frequencies that make more than this number of turns within `original_sequence_length` are
    kept (llama3)."""
    beta_fast: float = 32.0
    """Frequencies that make more than this number of turns within `original_sequence_length` are
    kept (yarn)."""
    beta_slow: float = 1.0
    """Frequencies that make fewer than this number of turns within `original_sequence_length` are
    divided by `factor` (yarn)."""
    attention_factor: float | None = None
    """Factor by which rotated queries and keys are multiplied; by default 0.1 ln(factor) + 1
    (yarn)."""
    truncate: bool = True
    """Round the bounds of the interpolated frequencies to whole pairs of columns (yarn)."""

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise UserError(f"factor = {self.factor} is below 1; use factor = 8.0")
        for field in fields(self):
            key, value = field.name, getattr(self, field.name)
            if key not in ("type", "factor", *SCALING_KEYS[self.type]) and value != field.default:
                types = " and ".join(kind for kind, keys in SCALING_KEYS.items() if key in keys)
                raise UserError(
                    f'{key} = {value} has no effect with type = "{self.type}", only with {types}; '
                    f"leave {key} out"
                )
        self._check_limit()
        original = self.original_sequence_length
        if original is None and self.type != "linear":
            raise UserError(
                f'original_sequence_length is missing, and type = "{self.type}" requires it; use '
                f"the length that the model was first trained on, such as "
                f"original_sequence_length = 8192"
            )
        if original is not None and original < 1:
            raise UserError(
                f"original_sequence_length = {original} is below 1; use "
                f"original_sequence_length = 8192"
            )
        for low, high in (
            ("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast"),
        ):  # fmt: skip
            if not getattr(self, high) > 0:
                default = type(self).__dataclass_fields__[high].default
                raise UserError(
                    f"{high} = {getattr(self, high)} is not above 0; use {high} = {default}"
                )
            if not 0 < getattr(self, low) < getattr(self, high):
                raise UserError(
                    f"{low} = {getattr(self, low)} is not between 0 and {high} = "
                    f"{getattr(self, high)}; use {low} = {getattr(self, high) / 4}"
                )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise UserError(
                f"attention_factor = {self.attention_factor} is not above 0; leave it out"
            )

    def _check_limit(self) -> None:
        examples = {"factor": 8.0, "original_sequence_length": 8192}
        for field in fields(self):
            key, value = field.name, getattr(self, field.name)
            if not isinstance(value, int | float) or value <= MAX_SIZE:
                continue
            works = examples.get(key, field.default)
            advice = f"leave {key} out" if works is None else f"use {key} = {works}"
            raise UserError(f"{key} = {value} is above {MAX_SIZE}; {advice}")

    @property
    def amplitude(self) -> float:
        """The factor by which rotated queries and keys are each multiplied (arXiv 2309.00071)."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0
