"""The role of a parameter, on which its initial scale and its update depend."""

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["input", "hidden", "output", "vector"]

# attention.output.weight, mlp.down.bias, mlp.shared.down.weight, mlp.experts.down_5
INTO_RESIDUAL_STREAM = re.compile(r"\.(attention\.output|down)\.(weight|bias)$|\.down_\d+$")


@dataclass(frozen=True)
class Place:
    """The place of a parameter in the model, as far as the scaling rules depend on it.

    Attributes:
        role: role that the parameter declares (`models.sharding.Sharding`)
        in_block: True for parameters of the layers, False for embeddings, final norm and head
        writes_residual: True for matrices whose output is added to the residual stream, and for
            their biases
    """

    role: Role
    in_block: bool
    writes_residual: bool = False

    @property
    def is_router(self) -> bool:
        """True for the router of a mixture of experts, the only output matrix in a layer."""
        return self.role == "output" and self.in_block


def place_of(name: str, role: Role) -> Place:
    """Return the place of a parameter, given its logical name and the role that it declares."""
    return Place(
        role,
        in_block=name.startswith("blocks."),
        writes_residual=writes_residual(name),
    )


def writes_residual(name: str) -> bool:
    """Return True for the parameters of a linear layer that writes into the residual stream."""
    return INTO_RESIDUAL_STREAM.search(name) is not None
