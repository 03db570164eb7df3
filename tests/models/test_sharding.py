from dataclasses import replace

import pytest
import torch

from models.parallel.collectives import TensorAxis
from models.sharding import Sharding

SHARDINGS = {
    "replicated": Sharding((5, 3), role="hidden"),
    "rows": Sharding((8, 3), 0, (8,), role="hidden"),
    "columns": Sharding((3, 8), 1, (8,), role="hidden"),
    "q|k|v": Sharding((16, 3), 0, (8, 4, 4), role="hidden"),
    "gate|up bias": Sharding((16,), 0, (8, 8)),
    "vocabulary": Sharding((10, 3), 0, (10,), padded_size=16, role="input"),
    "a rank of padding only": Sharding((3, 2), 0, (3,), padded_size=16, role="input"),
}


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS.keys())
def test_parts_join_to_the_logical_tensor(sharding: Sharding, tensor_size: int) -> None:
    logical = torch.arange(1.0, 1 + torch.Size(sharding.shape).numel()).view(sharding.shape)
    parts = [
        sharding.local_part(logical, TensorAxis(rank=rank, size=tensor_size))
        for rank in range(tensor_size)
    ]
    assert {tuple(part.shape) for part in parts} == {
        sharding.local_shape(TensorAxis(size=tensor_size))
    }
    assert torch.equal(sharding.logical_tensor(parts), logical)
    if sharding.dimension is not None:  # nothing twice, padding zero
        assert sum(part.sum() for part in parts) == logical.sum()


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS.keys())
def test_any_elements_of_a_part_are_read_from_the_rows_they_need(
    sharding: Sharding, tensor_size: int
) -> None:
    logical = torch.arange(1.0, 1 + torch.Size(sharding.shape).numel()).view(sharding.shape)
    read: list[int] = []

    def rows(start: int, stop: int) -> torch.Tensor:
        read.append(stop - start)
        return logical[start:stop]

    for rank in range(tensor_size):
        part = sharding.local_part(logical, TensorAxis(rank=rank, size=tensor_size))
        width = part[0].numel()
        for start in range(part.numel()):
            for stop in range(start + 1, part.numel() + 1):
                read.clear()
                elements = sharding.local_elements(
                    rows, range(start, stop), tensor=TensorAxis(rank=rank, size=tensor_size)
                )
                assert torch.equal(elements, part.flatten()[start:stop])
                assert sum(read) <= (stop - 1) // width - start // width + 1


def test_blocks_are_split_one_by_one() -> None:
    logical = torch.arange(16.0).view(16, 1)
    part = SHARDINGS["q|k|v"].local_part(logical.expand(16, 3), TensorAxis(rank=1, size=2))
    assert part[:, 0].tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


def test_a_tensor_names_the_rows_of_its_matrices() -> None:
    assert SHARDINGS["q|k|v"].matrices == [range(8), range(8, 12), range(12, 16)]
    assert SHARDINGS["columns"].matrices == [range(3)]
    whole = replace(SHARDINGS["q|k|v"], dimension=None)
    assert whole.matrices == SHARDINGS["q|k|v"].matrices


def test_a_matrix_must_have_a_role() -> None:
    with pytest.raises(AssertionError, match="a matrix without a role"):
        Sharding((4, 4))
