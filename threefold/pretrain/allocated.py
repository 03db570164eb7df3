"""Detection of out-of-memory errors, and the memory that a rank has allocated."""

import resource
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.engine.engine import Engine

OUT_OF_MEMORY_TEXTS = (  # of plain RuntimeErrors
    "can't allocate memory",  # the CPU's allocator (c10/core/impl/alloc_cpu.cpp)
    "CUDA error: out of memory",  # outside of torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
HISTORY_ENTRIES = 100_000  # allocations and frees that a snapshot shows


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an error of an allocator, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(text in message for text in OUT_OF_MEMORY_TEXTS)


@dataclass(frozen=True)
class Allocated:
    """Bytes that a rank has allocated; None for parts that do not exist yet.

    Attributes:
        weights: weights in the precision of the forward pass
        optimizer: fp32 weights and moments of this rank's share
        peak: peak of all allocations: on a GPU by torch's allocator, else of the whole process
        reserved: memory that torch's allocator holds; None on a CPU
    """

    weights: int | None
    optimizer: int | None
    peak: int
    reserved: int | None


def allocated(engine: Engine | None, *, on_gpu: bool) -> Allocated:
    """Return the memory that this rank has allocated.

    Args:
        engine: the engine, or None if memory ran out before it was built
        on_gpu: True if the run uses GPUs
    """
    weights = optimizer = None
    if engine is not None:
        weights = _bytes([parameter.detach() for _, parameter in engine.parameters()])
        optimizer = 3 * _bytes(engine.state.weights)  # the two moments have the same size
    if on_gpu:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        reserved = None
    return Allocated(weights, optimizer, peak, reserved)


def record_allocations() -> None:
    """Begin to record allocations on this rank's GPU, for a snapshot."""
    torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)


def save_snapshot(file: str) -> None:
    """Save the recorded allocations; https://pytorch.org/memory_viz shows them."""
    torch.cuda.memory._dump_snapshot(file)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
