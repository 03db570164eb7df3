"""The operators of the tensor axis, on two ranks."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from models.parallel.collectives import TensorAxis, all_gather, reduce_from_tensor_axis
from models.parallel.layers import matmul as linear
from tests.ranks import join_world, run_ranks
from threefold.trace.trace import AllocationCounter

SHAPES = [(3,), (2, 3), (1, 4, 5), (2, 3, 4)]
DIMENSIONS = (0, 1, -1)


def gather_worker() -> list[str]:
    """Return the cases in which the result or its memory is wrong."""
    world = join_world()
    axis, wrong = TensorAxis(dist.group.WORLD, world.rank, world.size), []
    for shape, dimension in product(SHAPES, DIMENSIONS):
        if dimension >= len(shape):
            continue
        whole = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in (0, 1)]
        with AllocationCounter() as counter:
            found = all_gather(whole[world.rank], axis, dimension)
        if not torch.equal(found, torch.cat(whole, dim=dimension)):
            wrong.append(f"values of {shape} along {dimension}")
        before = shape[: dimension % len(shape)]
        tensors = 1 if all(size == 1 for size in before) else 2
        if counter.peak != tensors * found.nbytes:
            wrong.append(f"memory of {shape} along {dimension}: {counter.peak}")
    strided = all_gather(torch.arange(6).view(2, 3).t(), axis)
    if not torch.equal(strided, torch.arange(6).view(2, 3).t().repeat(2, 1)):
        wrong.append("values of a tensor that is not contiguous")
    return wrong


def test_parts_are_gathered_into_one_tensor() -> None:
    assert run_ranks(2, gather_worker) == [[], []]


def reduce_worker() -> tuple[bool, int, list[float]]:
    """Return whether the sum is right, the bytes that the reduction takes, and input gradients."""
    world = join_world()
    axis = TensorAxis(dist.group.WORLD, world.rank, world.size)
    x = torch.full((4, 2, 8), 1.0 + world.rank, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(6, 8))
    y = linear(x, weight, None, None)
    counter = AllocationCounter()
    counter.ignore([y])
    with counter:
        total = reduce_from_tensor_axis(y, axis)
    total.square().sum().backward()
    right = torch.equal(total.detach(), torch.full((4, 2, 6), 24.0))
    strided = reduce_from_tensor_axis(torch.ones(3, 2).t(), axis)
    right = right and torch.equal(strided, torch.full((2, 3), 2.0))
    return right, counter.peak, x.grad.unique().tolist()


def test_a_reduction_is_in_place() -> None:
    for right, allocated, gradients in run_ranks(2, reduce_worker):
        assert right and allocated == 0
        assert gradients == [pytest.approx(2 * 24 * 6)]
