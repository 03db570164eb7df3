"""The declaration of a parameter: how its logical tensor is split, and its role in the model.

Every parameter declares its sharding once. Initialisation, gradient norm, checkpoints and proofs
read this declaration; no other code knows the layout of a parameter.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from models.parallel.collectives import TensorAxis

# The role of a parameter, on which its initial scale and its update depend.

Role = Literal["input", "hidden", "output", "vector"]

# attention.output.weight, mlp.down.bias, mlp.shared.down.weight, mlp.experts.down_5_bias
INTO_RESIDUAL_STREAM = re.compile(r"\.(attention\.output|down)\.(weight|bias)$|\.down_\d+(_bias)?$")


@dataclass(frozen=True)
class Place:
    """The place of a parameter in the model, as far as the scaling rules depend on it.

    Attributes:
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
        in_block=name.startswith(("blocks.", "predictions.")),
        writes_residual=writes_residual(name),
    )


def writes_residual(name: str) -> bool:
    """Return True for the parameters of a linear layer that writes into the residual stream."""
    return INTO_RESIDUAL_STREAM.search(name) is not None


@dataclass(frozen=True)
class MatrixPart:
    """The part of a logical matrix that a tensor rank holds.

    Attributes:
        shape: rows and columns of the logical matrix
        elements: indices of the part in the rank's flattened parameter
    """

    shape: tuple[int, int]
    elements: range
    rows: range
    columns: range


@dataclass(frozen=True)
class Sharding:
    """The layout of a logical (unsharded, unpadded) tensor over the tensor ranks, and its role.

    shape: shape of the logical tensor
    dimension: the split dimension; None: every rank holds the whole tensor
    blocks: parts of that dimension that are split separately, such as q|k|v or gate|up; of a tensor
        that is not split, parts of its rows
    padded_size: size of that dimension with appended zero rows (vocabulary); None: no padding
    of_expert: the tensor belongs to one expert. With a split dimension, all tensor ranks hold parts
        of it; otherwise only the tensor rank that has this expert holds it, as a whole
    role: what the tensor maps (arXiv 2203.03466, table 8): "hidden" matrices map activations whose
        size grows with the width to such activations; "input" matrices (embeddings) and "output"
        matrices (head, router) have one side that does not grow; "vector": norms and biases
    """

    shape: tuple[int, ...]
    dimension: int | None = None
    blocks: tuple[int, ...] = ()
    padded_size: int | None = None
    of_expert: bool = False
    role: Role = "vector"

    def __post_init__(self) -> None:
        assert (self.role == "vector") == (len(self.shape) == 1), "a matrix without a role"
        if self.dimension is not None:
            assert sum(self.blocks) == self.shape[self.dimension]
            assert self.padded_size is None or len(self.blocks) == 1
        elif self.blocks:
            assert sum(self.blocks) == self.shape[0]

    @property
    def replicated(self) -> bool:
        """True if every tensor rank holds the whole tensor."""
        return self.dimension is None and not self.of_expert

    @property
    def matrices(self) -> list[range]:
        """The rows of each matrix in a logical tensor, such as those of q, k and v."""
        if self.dimension == 1 or not self.blocks:
            return [range(self.shape[0])]
        ends = itertools.accumulate(self.blocks)
        return [range(end - block, end) for end, block in zip(ends, self.blocks, strict=True)]

    def matrix_parts(self, tensor: TensorAxis) -> list[MatrixPart]:
        """Return a rank's part of each of `matrices`."""
        all_rows, all_columns = map(range, self.shape)
        if self.dimension == 1:
            (columns,) = itertools.starmap(range, self._ranges(tensor))
            elements = range(len(all_rows) * len(columns))
            return [MatrixPart((len(all_rows), len(all_columns)), elements, all_rows, columns)]
        held = [(rows.start, rows.stop) for rows in self.matrices]
        if self.dimension == 0:
            held = self._ranges(tensor)
        parts, first = [], 0  # element of the rank's parameter
        for matrix, (start, stop) in zip(self.matrices, held, strict=True):
            elements = range(first, first + (stop - start) * len(all_columns))
            rows = range(start - matrix.start, stop - matrix.start)
            shape = len(matrix), len(all_columns)
            parts.append(MatrixPart(shape, elements, rows, all_columns))
            first = elements.stop
        return parts

    def local_shape(self, tensor: TensorAxis) -> tuple[int, ...]:
        """Return the shape of the part that each tensor rank holds."""
        if self.dimension is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dimension] = sum(
            stop - start for start, stop in self._ranges(tensor, padded=True)
        )
        return tuple(shape)

    def local_part(self, logical: Tensor, tensor: TensorAxis) -> Tensor:
        """Return this rank's part of the logical tensor; padding is zero."""
        assert tuple(logical.shape) == self.shape
        if self.dimension is None:
            return logical
        part = logical.new_zeros(self.local_shape(tensor))
        offset = 0
        for start, stop in self._ranges(tensor):
            part.narrow(self.dimension, offset, stop - start).copy_(
                logical.narrow(self.dimension, start, stop - start)
            )
            offset += stop - start
        return part

    def local_elements(
        self,
        logical_rows: Callable[[int, int], Tensor],
        elements: range,
        *,
        tensor: TensorAxis,
    ) -> Tensor:
        """Return consecutive elements of a rank's flattened part, reading only the rows needed.

        Args:
            logical_rows: function of (start, stop) that returns these rows of the logical tensor
            elements: indices into the flattened part
            tensor: the tensor axis from the perspective of the rank
        """
        local_shape = self.local_shape(tensor)
        width = math.prod(local_shape[1:])  # elements of a row of this rank's part
        rows = range(elements.start // width, -(-elements.stop // width))
        pieces, row = [], 0  # of the rank's part; the next range's first row
        for start, stop in self._ranges(tensor) if self.dimension == 0 else [(0, self.shape[0])]:
            first, last = max(rows.start, row), min(rows.stop, row + stop - start)
            if first < last:
                piece = logical_rows(start + first - row, start + last - row)
                pieces.append(self._own_columns(piece, tensor))
            row += stop - start
        padding = rows.stop - max(rows.start, row)
        if padding > 0:
            pieces.append(torch.zeros(padding, *local_shape[1:]))
        flat = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).flatten()
        return flat[elements.start - rows.start * width :][: len(elements)]

    def _own_columns(self, rows: Tensor, tensor: TensorAxis) -> Tensor:
        """Return the columns that a rank holds of rows of the logical tensor."""
        if self.dimension in (None, 0):
            return rows
        ranges = self._ranges(tensor)
        return torch.cat([rows.narrow(self.dimension, a, b - a) for a, b in ranges], self.dimension)

    def logical_tensor(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of all ranks, in rank order, and drop padding."""
        if self.dimension is None:
            return parts[0]
        logical = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            offset = 0
            for start, stop in self._ranges(TensorAxis(rank=rank, size=len(parts))):
                logical.narrow(self.dimension, start, stop - start).copy_(
                    part.narrow(self.dimension, offset, stop - start)
                )
                offset += stop - start
        return logical

    def _ranges(self, tensor: TensorAxis, padded: bool = False) -> list[tuple[int, int]]:
        """Return for each block the [start, stop) of the split dimension that a rank holds."""
        ranges, block_start = [], 0
        for block in self.blocks:
            size = self.padded_size or block
            assert size % tensor.size == 0, (self, tensor.size)
            share = size // tensor.size
            start = block_start + tensor.rank * share
            stop = start + share
            if not padded:
                end = block_start + block
                start, stop = min(start, end), min(stop, end)
            ranges.append((start, stop))
            block_start += block
        return ranges


def declared_parameter(sharding: Sharding, tensor: TensorAxis) -> nn.Parameter:
    """Return an uninitialised parameter with this rank's shape, declared as `sharding`.

    DeepSpeed's gradient norm reads the attribute `model_parallel`: a parameter without it counts on
    tensor rank 0 only.
    """
    parameter = nn.Parameter(torch.empty(sharding.local_shape(tensor)))
    declare(parameter, sharding)
    vars(parameter)["model_parallel"] = not sharding.replicated
    return parameter


def declare(parameter: nn.Parameter, sharding: Sharding) -> None:
    """Store the declaration of a parameter with the parameter; `sharding_of` reads it."""
    vars(parameter)["sharding"] = sharding


def sharding_of(parameter: nn.Parameter) -> Sharding:
    """Return the declaration of a parameter that `declared_parameter` created."""
    return vars(parameter)["sharding"]
