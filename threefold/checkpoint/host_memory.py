"""Page-locked host memory of exactly the requested size.

torch's allocator of pinned memory rounds every block up to a power of two and keeps it: the staged
copies of a checkpoint would take up to twice the host memory that they need. Here whole pages of
ordinary memory are registered with CUDA instead, and copies into them are just as fast.
"""

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all CUDA contexts


def host_copy(tensor: Tensor) -> Tensor:
    """Allocate host memory for a copy of a tensor, page-locked when the tensor is on a GPU.

    The memory is written once, so that the system allocates all pages now and not during the first
    save.
    """
    if tensor.is_cuda:
        return page_locked(tensor.shape, tensor.dtype, torch.cuda.cudart())
    return torch.empty(tensor.shape, dtype=tensor.dtype).zero_()


def page_locked(shape: torch.Size, dtype: torch.dtype, runtime: Any) -> Tensor:
    """Allocate a tensor of zeros whose memory is registered with CUDA for as long as it exists.

    The tensor shares no page with other memory, because CUDA cannot register a page twice.

    Args:
        runtime: `torch.cuda.cudart()`, or a substitute with the same two functions

    Raises:
        RuntimeError: CUDA cannot lock the memory.
    """
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).zero_().view(shape)
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), size, PORTABLE))
    if code:
        raise RuntimeError(
            f"CUDA cannot lock {size / 1e9:.2f} GB of host memory for the copy of a checkpoint "
            f"(cudaHostRegister returned {code}); give the job more host memory"
        )
    release = weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())
    # At exit the system unlocks the memory by itself, while the call could hang with the device.
    release.atexit = False
    return buffer
