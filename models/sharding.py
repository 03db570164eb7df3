"""The declaration: how a parameter's logical tensor lies over the tensor axis.

Every parameter declares it once, and whoever must know the logical tensor (initialisation, gradient
norm, the proofs) reads it here; nothing else in the code knows.
"""

from collections.abc import Sequence
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
    """An uninitialised parameter with this rank's shape and its declaration as `.sharding`.

    `.model_parallel` is what DeepSpeed's gradient norm asks for: parameters without it count on
    tensor rank 0 only.
    """
    parameter = nn.Parameter(torch.empty(sharding.local_shape(tensor_size)))
    parameter.sharding = sharding
    parameter.model_parallel = sharding.dimension is not None
    return parameter
