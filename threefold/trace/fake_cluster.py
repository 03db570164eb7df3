"""Simulation of one rank of a cluster in this process, with the shards of the other ranks.

Tensors are fake (shapes without memory), collectives do nothing, and values that would be read from
a tensor or come from another rank are constants. This file has all replacements of library
functions, which last only for the duration of a trace.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.utils import groups
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from models import attention as model_attention
from models import cost, initialization
from models.attention import rotary_table, rotary_table_of_windows
from models.experts import routing
from models.experts.overlap import Turns
from models.kernels import attention, attention_parts, compile, matmul, norms
from models.kernels.attention import cumulative_lengths
from models.kernels.attention_parts import CPU_FLASH
from models.parallel import cross_entropy
from models.parallel.micro_batch_info import positions_in, token_positions
from models.sharding import Sharding, sharding_of
from threefold.checkpoint.state import Fragment, PartitionedState, TrainingState
from threefold.engine import muon_exchange
from threefold.engine.muon_exchange import Shard
from threefold.pipeline.stage import replaced

# The shards that the other ranks of a simulated cluster hold of the optimizer's state.


def shards_of_all_ranks(
    own: list[Shard], state: TrainingState, group: dist.ProcessGroup
) -> list[list[Shard]]:
    """Return the shards of each rank of a group; replaces `gather_shards`.

    ZeRO-1 and 2 divide each flat tensor equally, ZeRO-3 each parameter. In the group, the tensor
    ranks of a data rank are neighbours. Other ranks have parameters of the same sizes. Where they
    have other experts, the names are changed.
    """
    tensor_size = _tensor_size(state)
    replicas = dist.get_world_size(group) // tensor_size
    ranks: list[list[Shard]] = []
    for replica in range(replicas):
        for tensor_rank in range(tensor_size):
            ranks.append(
                [
                    Shard(
                        _renamed(fragment, sharding, f"{holder}, {tensor_rank}"),
                        sharding,
                        tensor_rank,
                    )
                    for fragment, sharding, holder in _fragments(state, replica, replicas)
                    if sharding.role == "hidden"
                ]
            )
    return ranks


def _tensor_size(state: TrainingState) -> int:
    """Return the number of tensor ranks; ZeRO-3 has no pipeline, so they are the model's ranks."""
    if isinstance(state, PartitionedState):
        return dist.get_world_size(state.optimizer.model_parallel_group)
    return state.optimizer.mpu.get_slice_parallel_world_size()


def _renamed(fragment: Fragment, sharding: Sharding, holder: str) -> Fragment:
    """Return a fragment of an expert with a name of its own on each rank that holds others."""
    if not sharding.of_expert or sharding.dimension is not None:
        return fragment
    return replace(fragment, name=f"{fragment.name} of {holder}")


def _fragments(
    state: TrainingState, replica: int, replicas: int
) -> Iterator[tuple[Fragment, Sharding, str]]:
    """Yield the fragments of a replica with their declarations, and which experts it has."""
    optimizer: Any = state.optimizer
    names = {parameter: name for name, parameter in state.parameters.items()}
    if isinstance(state, PartitionedState):
        for name, parameter in state.parameters.items():
            flat, offset, share = optimizer.grad_position[optimizer.get_param_id(parameter)]
            size = vars(parameter)["ds_numel"]
            elements = range(min(replica * share, size), min((replica + 1) * share, size))
            if elements:
                yield Fragment(name, elements, flat, offset), sharding_of(parameter), ""
        return
    groups = getattr(optimizer, "bf16_groups", None) or optimizer.round_robin_bit16_groups
    for number, (parameters, flat) in enumerate(zip(groups, state.weights, strict=True)):
        owners = dist.get_world_size(optimizer.real_dp_process_group[number])
        with_same = max(1, replicas // owners)  # neighbours with other experts
        start = replica // with_same * flat.numel()
        first = 0
        for parameter in parameters:
            low = max(first, start)
            high = min(first + parameter.numel(), start + flat.numel())
            if low < high:
                elements = range(low - first, high - first)
                fragment = Fragment(names[parameter], elements, number, low - start)
                yield fragment, sharding_of(parameter), f"{replica % with_same}"
            first += parameter.numel()


@contextlib.contextmanager
def one_rank_of(world_size: int, rank: int) -> Iterator[None]:
    """Initialize torch.distributed and DeepSpeed as on this rank, and restore them afterwards."""
    assert not dist.is_initialized()
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    remembered = {name: value for name, value in vars(groups).items() if name.isupper()}
    deepspeed.ops.__compatible_ops__ = {}  # as `start_processes` does
    with empty_tables(), entries_replaced(os.environ, environment), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        deepspeed.init_distributed(dist_backend="fake", verbose=False)
        try:
            yield
        finally:
            dist.destroy_process_group()
            deepspeed.comm.comm.cdb = None
            vars(groups).update(remembered)


@contextlib.contextmanager
def empty_tables() -> Iterator[None]:
    """Empty the caches of tensors that layers share, before and after the context.

    A cached table would be missing from the trace, and a fake one would break later passes.
    """
    tables = (
        rotary_table,
        rotary_table_of_windows,
        positions_in,
        token_positions,
        cumulative_lengths,
    )
    for table in tables:
        table.cache_clear()
    try:
        yield
    finally:
        for table in tables:
            table.cache_clear()


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Create tensors without memory, and answer DeepSpeed's questions about their values."""
    accelerator = type(get_accelerator())
    with (
        replaced(nn.Module, "_apply", apply_in_place),
        replaced(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", accept),
        replaced(accelerator, "is_fp16_supported", lambda self: True),
        replaced(routing, "on_host", equal_counts),
        replaced(Turns, "take", one_after_the_other),  # fake tensors exist in this thread only
        replaced(muon_exchange, "gather_shards", shards_of_all_ranks),
        replaced(initialization, "CHUNK_ELEMENTS", sys.maxsize),
        replaced(initialization, "run_in_threads", in_this_thread),
        replaced(functional, "linear", functional.linear),  # which ZeRO-3 replaces
        FakeTensorMode(allow_non_fake_inputs=True),
        Scalars(),
    ):
        yield


@contextlib.contextmanager
def kernels_of_a_gpu(compiled: bool) -> Iterator[None]:
    """Let autograd keep the tensors that it keeps on a GPU, which differ from those on a CPU.

    On a GPU attention is fused at any length, LayerNorm needs no fp32 copies, and the loss computes
    more logits at a time and reads them fewer times. In 16 bits one kernel computes windows and
    sinks of all sequences, and matmuls add weight gradients to fp32 sums. A sent tensor is freed
    once its transfer is complete, and not only when the send is waited for, as with gloo.
    """
    fuse = one_kernel if compiled else compile.as_written
    with (
        replaced(attention, "MAX_KEPT_LENGTH", 0),
        replaced(model_attention, "varlen_kernel", varlen_in_16_bits),
        replaced(attention_parts, "limited_kernel", lambda q, limits: CPU_FLASH),
        replaced(attention, "padded_attention", _EfficientAttention.apply),
        replaced(norms, "sums_in_16_bits", lambda x: False),
        replaced(cross_entropy, "sums_in_tiles", lambda logits: True),
        replaced(matmul, "is_on_gpu", lambda x: True),
        replaced(matmul, "multiply_into", add_nothing),
        entries_replaced(cost.MAX_LOGITS, {"cpu": cost.MAX_LOGITS["cuda"]}),
        replaced(compile.Fusing, "fuse", staticmethod(fuse)),
        replaced(dist.Work, "is_completed", lambda self: True),
    ):
        yield


class _EfficientAttention(torch.autograd.Function):
    """The memory of torch's memory-efficient attention, which a GPU uses for unequal head sizes."""

    @staticmethod
    def forward(ctx, q, k, v):
        b, a, s, _ = q.shape
        out = v.new_empty((s, b, a, v.shape[-1])).permute(1, 2, 0, 3)
        ctx.save_for_backward(q, k, v, out, q.new_empty((b, a, s), dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def varlen_in_16_bits(
    device: torch.device, dtype: torch.dtype, head_size: int
) -> Callable[..., Any] | None:
    """Return torch's attention over documents, which runs on fake tensors of any device."""
    return varlen_attn if dtype in (torch.bfloat16, torch.float16) else None


def add_nothing(
    total: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, replace: bool
) -> None:
    """Allocate nothing, as a matmul that adds to a sum does; a CPU has no such matmul."""


@contextlib.contextmanager
def entries_replaced(table: MutableMapping[str, Any], entries: Mapping[str, Any]) -> Iterator[None]:
    """Replace entries of a table for the duration of the context."""
    original = dict(table)
    table.update(entries)
    try:
        yield
    finally:
        table.clear()
        table.update(original)


def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as if compiled: it allocates only its results."""

    def run(*inputs: Any) -> Any:
        tensors = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
        made = partial(torch.empty_strided, device=tensors[0].device)
        shapes = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            if isinstance(x, torch.Tensor)
            else x
            for x in inputs
        )
        return tree_map_only(
            torch.Tensor, lambda t: made(t.shape, t.stride(), dtype=t.dtype), function(*shapes)
        )

    return run


def equal_counts(counts: Sequence[torch.Tensor], total: int) -> list[list[list[int]]]:
    """Return counts as if the tokens were equally distributed among the experts."""
    ranks, experts = counts[0].shape
    rows, more = divmod(total, ranks * experts)
    numbers = [rows + (expert < more) for expert in range(ranks * experts)]
    table = [numbers[rank * experts : (rank + 1) * experts] for rank in range(ranks)]
    return [table] * len(counts)


def one_after_the_other(turns: Turns, helper: Callable[[], None], main: Callable[[], None]) -> None:
    """Run the helper, then the main function, in this thread; replaces `Turns.take`."""
    helper()
    main()


def in_this_thread(functions: Sequence[Callable[[], None]]) -> None:
    """Run functions in this thread, where fake tensors exist; replaces `run_in_threads`."""
    for function in functions:
        function()


def accept(ints: object) -> None:
    """Accept numbers that DeepSpeed would compare with those of other ranks."""


def apply_in_place(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Run nn.Module._apply in place; it would swap fake tensors, which their hooks do not allow."""
    for child in module.children():
        child._apply(function)
    for parameter in module._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                parameter.data = function(parameter)
    for name, tensor in module._buffers.items():
        if tensor is not None:
            module._buffers[name] = function(tensor)
    return module


class Scalars(TorchDispatchMode):
    """Values of fake tensors: 1 for floats (a finite loss and norm), 0 for others (no overflow).

    Constants of the program, which torch knows, keep their values.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Answer `.item()` and run all other operations."""
        if function is torch.ops.aten._local_scalar_dense.default:
            (tensor,) = args
            if getattr(tensor, "constant", None) is not None:
                return tensor.constant.item()
            return 1.0 if tensor.dtype.is_floating_point else 0
        return function(*args, **(kwargs or {}))
