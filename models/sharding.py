"""The declaration: how a parameter's logical tensor lies over the tensor axis.

Every parameter declares it once, and whoever must know the logical tensor (initialisation, gradient
norm, checkpoints, the proofs) reads it here; nothing else in the code knows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sharding:
    """How a logical (unsharded, unpadded) tensor is laid out over the tensor ranks.

    shape: of the logical tensor
    dimension: the one that is split; None when every rank holds the whole tensor
    blocks: parts of that dimension that are split one by one, such as q|k|v or gate|up
    padded_size: of that dimension once zero rows are appended (vocabulary); None: no padding
    """

    shape: tuple[int, ...]
    dimension: int | None = None
    blocks: tuple[int, ...] = ()
    padded_size: int | None = None

    def __post_init__(self) -> None:
        if self.dimension is not None:
            assert sum(self.blocks) == self.shape[self.dimension]
            assert self.padded_size is None or len(self.blocks) == 1

    def local_shape(self, tensor_size: int) -> tuple[int, ...]:
        """The shape that one of `tensor_size` ranks holds."""
        if self.dimension is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dimension] = sum(
            stop - start for start, stop in self._ranges(0, tensor_size, padded=True)
        )
        return tuple(shape)

    def local_part(self, logical: Tensor, tensor_rank: int, tensor_size: int) -> Tensor:
        """Cut this rank's part out of the logical tensor; padding is zero."""
        assert tuple(logical.shape) == self.shape
        if self.dimension is None:
            return logical
        part = logical.new_zeros(self.local_shape(tensor_size))
        offset = 0
        for start, stop in self._ranges(tensor_rank, tensor_size):
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
        tensor_rank: int,
        tensor_size: int,
    ) -> Tensor:
        """Some consecutive elements of a rank's flattened part, reading no more rows than needed.

        logical_rows: (start, stop) to these rows (of dimension 0) of the logical tensor
        """
        local_shape = self.local_shape(tensor_size)
        width = math.prod(local_shape[1:])  # of a row of this rank's part
        rows = range(elements.start // width, -(-elements.stop // width))
        pieces, row = [], 0  # of the rank's part; the next range's first row
        for start, stop in self._row_ranges(tensor_rank, tensor_size):
            first, last = max(rows.start, row), min(rows.stop, row + stop - start)
            if first < last:
                piece = logical_rows(start + first - row, start + last - row)
                pieces.append(self._own_columns(piece, tensor_rank, tensor_size))
            row += stop - start
        padding = rows.stop - max(rows.start, row)
        if padding > 0:
            pieces.append(torch.zeros(padding, *local_shape[1:]))
        flat = torch.cat(pieces).flatten()
        return flat[elements.start - rows.start * width :][: len(elements)]

    def _row_ranges(self, tensor_rank: int, tensor_size: int) -> list[tuple[int, int]]:
        """The [start, stop) rows of the logical tensor that a rank's part takes, in its order."""
        return (
            self._ranges(tensor_rank, tensor_size) if self.dimension == 0 else [(0, self.shape[0])]
        )

    def _own_columns(self, rows: Tensor, tensor_rank: int, tensor_size: int) -> Tensor:
        """Of some rows of the logical tensor, what a rank holds."""
        if self.dimension in (None, 0):
            return rows
        ranges = self._ranges(tensor_rank, tensor_size)
        return torch.cat([rows.narrow(self.dimension, a, b - a) for a, b in ranges], self.dimension)

    def logical_tensor(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the ranks' parts, in rank order, together again; padding is dropped."""
        if self.dimension is None:
            return parts[0]
        logical = parts[0].new_empty(self.shape)
        for tensor_rank, part in enumerate(parts):
            offset = 0
            for start, stop in self._ranges(tensor_rank, len(parts)):
                logical.narrow(self.dimension, start, stop - start).copy_(
                    part.narrow(self.dimension, offset, stop - start)
                )
                offset += stop - start
        return logical

    def _ranges(
        self, tensor_rank: int, tensor_size: int, padded: bool = False
    ) -> list[tuple[int, int]]:
        """Per block, the [start, stop) of the logical dimension that a rank holds."""
        ranges, block_start = [], 0
        for block in self.blocks:
            size = self.padded_size or block
            assert size % tensor_size == 0, (self, tensor_size)
            share = size // tensor_size
            start = block_start + tensor_rank * share
            stop = start + share
            if not padded:
                end = block_start + block
                start, stop = min(start, end), min(stop, end)
            ranges.append((start, stop))
            block_start += block
        return ranges


def declared_parameter(sharding: Sharding, tensor_size: int) -> nn.Parameter:
    """Return an uninitialised parameter with this rank's shape, declared as `sharding`.

    DeepSpeed's gradient norm reads the attribute `model_parallel`: a parameter without it counts on
    tensor rank 0 only.
    """
    parameter = nn.Parameter(torch.empty(sharding.local_shape(tensor_size)))
    declare(parameter, sharding)
    vars(parameter)["model_parallel"] = sharding.dimension is not None
    return parameter


def declare(parameter: nn.Parameter, sharding: Sharding) -> None:
    """Store the declaration of a parameter with the parameter; `sharding_of` reads it."""
    vars(parameter)["sharding"] = sharding


def sharding_of(parameter: nn.Parameter) -> Sharding:
    """Return the declaration of a parameter that `declared_parameter` created."""
    return vars(parameter)["sharding"]
