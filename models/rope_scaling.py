"""Scaling of rotary positions, to continue training on longer sequences."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from models.errors import UserError

KEYS = {  # keys of each type besides `type` and `factor`
    "linear": (),
    "llama3": ("original_sequence_length", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("original_sequence_length", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary positions, to continue training on longer sequences.

    Rotary positions turn each pair of columns at a frequency of its own. Lower frequencies give new
    positions angles that the model has already seen. Leave the section out if the sequences are not
    longer than those that the model was first trained on.

    Raises:
        UserError: keys are inconsistent; the message gives a value that works.
    """

    __pydantic_config__: ClassVar[dict] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }

    type: Literal["linear", "llama3", "yarn"]
    """"linear" divides all frequencies by `factor` (arXiv 2306.15595), "llama3" only those that
    turn less than once in the original length (Llama 3.1), and "yarn" also strengthens attention
    (arXiv 2309.00071)."""
    factor: float
    """Divisor of the frequencies, such as the new length divided by the original one."""
    original_sequence_length: int | None = None
    """Sequence length that the model was first trained on (llama3, yarn)."""
    low_frequency_factor: float = 1.0
    """Frequencies with fewer turns in the original length are divided by `factor` (llama3)."""
    high_frequency_factor: float = 4.0
    """Frequencies with more turns in the original length are kept (llama3)."""
    beta_fast: float = 32.0
    """Frequencies with more turns in the original length are kept (yarn)."""
    beta_slow: float = 1.0
    """Frequencies with fewer turns in the original length are divided by `factor` (yarn)."""
    attention_factor: float | None = None
    """Factor of rotated queries and keys; by default 0.1 ln(factor) + 1 (yarn)."""
    truncate: bool = True
    """Round the bounds of the interpolated frequencies to whole pairs of columns (yarn)."""

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise UserError(f"factor = {self.factor} is below 1; use factor = 8.0")
        for field in fields(self):
            key, value = field.name, getattr(self, field.name)
            if key not in ("type", "factor", *KEYS[self.type]) and value != field.default:
                types = " and ".join(kind for kind, keys in KEYS.items() if key in keys)
                raise UserError(
                    f'{key} = {value} has no effect with type = "{self.type}", only with {types}; '
                    f"leave {key} out"
                )
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
            if not 0 < getattr(self, low) < getattr(self, high):
                raise UserError(
                    f"{low} = {getattr(self, low)} is not between 0 and {high} = "
                    f"{getattr(self, high)}; use {low} = {getattr(self, high) / 4}"
                )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise UserError(
                f"attention_factor = {self.attention_factor} is not above 0; leave it out"
            )

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries and of rotated keys (arXiv 2309.00071, equation 22)."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0
