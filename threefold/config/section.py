"""The base class of a recipe's sections, and the types of their numbers.

The sections are frozen pydantic classes. The docstrings of their fields are the text of
docs/recipe-reference.md.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_COUNT = 10**9
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Probability = Annotated[float, Field(ge=0, lt=1)]
# 1 equals True in Python, so a number has to become something else before it is compared.
Switch = Annotated[
    Literal[True, False, "auto"],
    BeforeValidator(lambda value: value if isinstance(value, bool) else str(value)),
]


class Section(BaseModel):
    """Base class of all sections: rejects unknown keys, converts nothing and is frozen."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
