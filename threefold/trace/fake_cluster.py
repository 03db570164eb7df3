"""Simulation of one rank of a cluster in this process.

Tensors are fake (shapes without memory), collectives do nothing, and values that would be read from
a tensor or come from another rank are constants. This file has all replacements of library
functions, which last only for the duration of a trace.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from models import cost, initialization
from models.experts import routing
from models.experts.overlap import Turns
from models.kernels import attention, compile, norms
from models.kernels.attention import cumulative_lengths
from models.parallel.micro_batch_info import positions_in, token_positions
from models.transformer import rotary_table
from threefold.engine import muon_exchange
from threefold.pipeline.stage import replaced
from threefold.trace.fake_shards import shards_of_all_ranks


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
    tables = (rotary_table, positions_in, token_positions, cumulative_lengths)
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
    more logits at a time. A sent tensor is freed once its transfer is complete, and not only when
    the send is waited for, as with gloo.

    compiled: element-wise operations allocate only their results
    """
    fuse = one_kernel if compiled else compile.as_written
    with (
        replaced(attention, "MAX_KEPT_LENGTH", 0),
        replaced(norms, "sums_in_16_bits", lambda x: False),
        entries_replaced(cost.MAX_LOGITS, {"cpu": cost.MAX_LOGITS["cuda"]}),
        replaced(compile.Fusing, "fuse", staticmethod(fuse)),
        replaced(dist.Work, "is_completed", lambda self: True),
    ):
        yield


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
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        shapes = (each.to("meta") if isinstance(each, torch.Tensor) else each for each in inputs)
        return tree_map_only(
            torch.Tensor, partial(made_like, device=tensors[0].device), function(*shapes)
        )

    return run


def made_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a new tensor of the same shape, type and memory order."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def equal_counts(counts: Sequence[torch.Tensor], total: int) -> list[list[list[int]]]:
    """Return counts as if the tokens were equally distributed among the experts."""
    ranks, experts = counts[0].shape
    each, more = divmod(total, ranks * experts)
    numbers = [each + (expert < more) for expert in range(ranks * experts)]
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
