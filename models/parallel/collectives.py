"""Process groups, the tensor axis and the conjugate operators that cross it.

Where the forward pass communicates the backward pass does the conjugate, so autograd gives every
rank the gradient of the logical model (Megatron-LM's f and g, arXiv 1909.08053; with sequence
parallelism g-bar, arXiv 2205.05198). s sequence, b micro-batch, h hidden, t tensor ranks.

| operator                | forward                | backward       |
|-------------------------|------------------------|----------------|
| copy_to_tensor_axis     | identity               | all-reduce     |
| reduce_from_tensor_axis | all-reduce             | identity       |
| scatter_to_tensor_axis  | this rank's part       | all-gather     |
| gather_from_tensor_axis | all-gather             | this rank's part |
| reduce_scatter_sequence | reduce-scatter         | all-gather     |
| gather_sequence         | all-gather             | reduce-scatter |

The last one is also part of the column-parallel matmul (`layers.py`), which keeps a part of its
input instead of the whole.
"""

import copy
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Process groups: all groups of an axis at once, with the NCCL settings that fit their traffic.
# `torch.distributed.new_group` is called by all ranks once per group, and with NCCL each call
# splits the communicator of the whole world: thousands of calls take minutes on 1,000 ranks.
# `split_group` creates all groups of a partition with one split.
#
# In each call of the functions below, every rank creates exactly one group, with itself as the only
# member if no list holds it. The reason is that torch derives the name of a group from its ranks
# and from the number of groups that the rank has created before, and all members must agree on it.


@dataclass(frozen=True)
class NcclSettings:
    """Settings of a group's NCCL communicator; other backends have none.

    high_priority: run on a high-priority stream, for collectives that the next operation needs
    max_ctas: thread blocks that one operation occupies at most, for operations that run in parallel
        with computation; None: NCCL's choice
    """

    high_priority: bool = False
    max_ctas: int | None = None


def create_groups(
    partition: Sequence[Collection[int]], settings: NcclSettings | None = None
) -> dist.ProcessGroup | None:
    """Create the groups of disjoint lists of global ranks; collective over the world.

    Returns:
        This rank's group, or None if no list holds this rank.
    """
    device = _world().bound_device_id
    if device is None:
        return _create_among_members(partition)
    lists = [sorted(ranks) for ranks in partition]
    members = {rank for ranks in lists for rank in ranks}
    alone = [[rank] for rank in range(dist.get_world_size()) if rank not in members]
    settings = settings or NcclSettings()
    options: Any = copy.deepcopy(_world()._get_backend(device).options)  # ProcessGroupNCCL.Options
    options.is_high_priority_stream = settings.high_priority
    if settings.max_ctas is not None:
        options.config.max_ctas = settings.max_ctas
    group = dist.split_group(split_ranks=lists + alone, pg_options=options)
    return group if dist.get_rank() in members else None


CONNECTS_ON_DEMAND = "TORCH_GLOO_LAZY_INIT"  # torch reads it whenever a gloo group is created


def create_host_groups(
    partition: Sequence[Collection[int]], timeout: timedelta, *, on_demand: bool = False
) -> dist.ProcessGroup | None:
    """Create groups as `create_groups` does, but with gloo, which communicates through host memory.

    on_demand: connect two ranks when both first use their connection, until which `isend` may
        block. Otherwise every rank of a group connects to all others here. In a group of 8,192,
        rank 0 of the world would send 4 TB of addresses for that.

    Only the members call `new_group`. If a device is bound to the world and all ranks called it, it
    would hang: torch lets ranks outside the group split the world's NCCL communicator, and the
    members of a gloo group do not join that split.
    """
    value_of_user = os.environ.get(CONNECTS_ON_DEMAND)
    if on_demand:
        os.environ[CONNECTS_ON_DEMAND] = "1"
    try:
        return _create_among_members(partition, backend="gloo", timeout=timeout)
    finally:
        if value_of_user is not None:
            os.environ[CONNECTS_ON_DEMAND] = value_of_user
        elif on_demand:
            del os.environ[CONNECTS_ON_DEMAND]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialized"
    return world


def _create_among_members(
    partition: Sequence[Collection[int]],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup | None:
    """Create this rank's group with one call per rank, in which only its members communicate."""
    rank = dist.get_rank()
    own = next((sorted(ranks) for ranks in partition if rank in ranks), None)
    group = dist.new_group(
        own or [rank], timeout=timeout, backend=backend, use_local_synchronization=True
    )
    return group if own else None


def matches_by_order() -> bool:
    """Return True if the backend matches sends to receives by posting order, as NCCL does.

    gloo matches them by tag and connects all ranks before the first message; torch's fake backend
    sends nothing.
    """
    return dist.get_backend() not in ("gloo", "fake")


# Older versions of torch have these functions under the longer names only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Operator = Callable[..., Tensor]  # of a tensor, an axis and what else it needs


@dataclass(frozen=True)
class TensorAxis:
    """The tensor axis from the perspective of one rank.

    sequence_parallel: between the layers' matmuls, activations are split along the sequence,
        [s/t, b, h], instead of being repeated on every rank
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False


def conjugate(x: Tensor, forward: Operator, backward: Operator, *where: Any) -> Tensor:
    """Return forward(x, *where), whose backward pass is backward(gradient, *where)."""
    return _Conjugate.apply(x, forward, backward, where)


def copy_to_tensor_axis(x: Tensor, axis: TensorAxis) -> Tensor:
    """Forward: identity; backward: all-reduce. Enters a region in which each rank does a part."""
    if axis.size == 1:
        return x
    return conjugate(x, lambda x, axis: x.view_as(x), sum_of_copies, axis)


def reduce_from_tensor_axis(x: Tensor, axis: TensorAxis) -> Tensor:
    """Forward: all-reduce; backward: identity. Leaves a region in which each rank computed a part.

    The sum is written into x: no other operation may need x, not even in the backward pass.
    """
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def scatter_to_tensor_axis(x: Tensor, axis: TensorAxis, dimension: int = 0) -> Tensor:
    """Forward: this rank's part of a replicated tensor; backward: all-gather."""
    return x if axis.size == 1 else conjugate(x, _part, all_gather, axis, dimension)


def gather_from_tensor_axis(x: Tensor, axis: TensorAxis, dimension: int = -1) -> Tensor:
    """Forward: all-gather; backward: this rank's part. Every rank repeats the work that follows."""
    return x if axis.size == 1 else conjugate(x, all_gather, _part, axis, dimension)


def reduce_scatter_sequence(x: Tensor, axis: TensorAxis) -> Tensor:
    """Forward: reduce-scatter, [s, b, h] to [s/t, b, h]; backward: all-gather."""
    return x if axis.size == 1 else conjugate(x, reduce_scatter, all_gather, axis)


def gather_sequence(x: Tensor, axis: TensorAxis) -> Tensor:
    """Forward: all-gather, [s/t, b, h] to [s, b, h]; backward: reduce-scatter, in fp32."""
    return x if axis.size == 1 else conjugate(x, all_gather, _part_of_sum, axis)


def enter_tensor_region(x: Tensor, axis: TensorAxis) -> Tensor:
    """Apply gather_sequence or copy_to_tensor_axis before each rank computes a part."""
    return gather_sequence(x, axis) if axis.sequence_parallel else copy_to_tensor_axis(x, axis)


def leave_tensor_region(x: Tensor, axis: TensorAxis) -> Tensor:
    """Apply reduce_scatter_sequence or reduce_from_tensor_axis after a row-parallel matmul."""
    if axis.sequence_parallel:
        return reduce_scatter_sequence(x, axis)
    return reduce_from_tensor_axis(x, axis)


def all_gather(x: Tensor, axis: TensorAxis, dimension: int = 0) -> Tensor:
    """Return the ranks' parts, concatenated along a dimension; not differentiable.

    The parts arrive in one tensor, in the order of the ranks. For any dimension but the first, this
    tensor is copied once, unless all earlier dimensions have one element.
    """
    whole = begin_all_gather(x, axis)()  # [t * n, ...]
    dimension %= x.dim()
    if dimension == 0:
        return whole
    parts = whole.view(axis.size, *x.shape)
    return parts.movedim(0, dimension).flatten(dimension, dimension + 1)


def reduce_scatter(x: Tensor, axis: TensorAxis) -> Tensor:
    """Return this rank's part, along dimension 0, of the ranks' sum; not differentiable."""
    part = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    reduce_scatter_single(part, x.contiguous(), group=axis.group)
    return part


def begin_all_gather(x: Tensor, axis: TensorAxis) -> Callable[[], Tensor]:
    """Begin an all-gather along dimension 0; return a function that waits for the result."""
    whole = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    running = all_gather_single(whole, x.contiguous(), group=axis.group, async_op=True)

    def all_gathered() -> Tensor:
        wait_for(running)
        return whole

    return all_gathered


def begin_sum_of_copies(grad: Tensor, axis: TensorAxis) -> Callable[[], Tensor]:
    """Begin to sum the ranks' gradients of a replicated input; return a function that waits for it.

    It is an all-reduce, or under sequence parallelism a reduce-scatter, [s, b, h] to [s/t, b, h].
    The caller must not use the gradient afterwards, because the sum may be written into it.
    """
    if axis.size == 1:
        return lambda: grad
    grad = grad.contiguous()
    if axis.sequence_parallel:
        part = grad.new_empty((grad.shape[0] // axis.size, *grad.shape[1:]))
        running = reduce_scatter_single(part, grad, group=axis.group, async_op=True)

        def reduce_scattered() -> Tensor:
            wait_for(running)
            return part

        return reduce_scattered
    running = dist.all_reduce(grad, group=axis.group, async_op=True)

    def all_reduced() -> Tensor:
        wait_for(running)
        return grad

    return all_reduced


def wait_for(running: dist.Work) -> None:
    """Wait for a collective; a hang report shows the name of the caller."""
    running.wait()


def _part(x: Tensor, axis: TensorAxis, dimension: int) -> Tensor:
    return x.chunk(axis.size, dim=dimension)[axis.rank].contiguous()


def sum_of_copies(grad: Tensor, axis: TensorAxis) -> Tensor:
    """Return the sum of the ranks' gradients of a replicated tensor."""
    # Copy, because other operations may also hold `grad`. All-reduce in fp32, because every
    # addition in 16 bits would round the sum.
    dtype = torch.promote_types(grad.dtype, torch.float32)
    total = grad.to(dtype, memory_format=torch.contiguous_format, copy=True)
    dist.all_reduce(total, group=axis.group)
    return total.to(grad.dtype)


def _part_of_sum(grad: Tensor, axis: TensorAxis) -> Tensor:
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return reduce_scatter(wide, axis).to(grad.dtype)


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward, where):
        ctx.conjugate, ctx.where = backward, where
        return forward(x, *where)

    @staticmethod
    def backward(ctx, grad):
        return ctx.conjugate(grad, *ctx.where), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        if x.is_contiguous():
            ctx.mark_dirty(x)
        else:
            x = x.contiguous()
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None
