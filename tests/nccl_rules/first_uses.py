"""Report every operation that a device runs for the first time while a receive is outstanding."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.nccl_rules.device import Device


def launches_kernel(function: Any) -> bool:
    """Return whether an operator computes; views, allocations and messages do not."""
    allocates = "empty" in function._schema.name or function is torch.ops.aten.detach.default
    return function.namespace == "aten" and not function.is_view and not allocates


class FirstUses(TorchDispatchMode):
    """Treat an operation's first call with new shapes or types as a device-wide synchronization.

    That call may load a module, compile or autotune a kernel, build a cuDNN plan, or free memory of
    the allocator to make room; all of them wait for every stream of the device.

    sizes: False distinguishes only dimensions and types, and leaves out empty tensors, for which no
        kernel runs. It is meant for models with experts, whose number of rows differs between
        micro-batches, and for documents of different lengths, since no warm-up can run all shapes.
    """

    def __init__(self, device: Device, *, sizes: bool = True):
        super().__init__()
        self.device, self.sizes, self.known = device, sizes, set()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, arguments: tuple = (), keywords: Any = None
    ) -> Any:
        """Check an operation, then run it."""
        if launches_kernel(function):
            tensors = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
            if not self.sizes and any(x.numel() == 0 for x in tensors):
                return function(*arguments, **(keywords or {}))
            kinds = [(tuple(x.shape) if self.sizes else x.dim(), x.dtype) for x in tensors]
            use = (function, *(kinds if self.sizes else dict.fromkeys(kinds)))
            if use not in self.known:
                self.known.add(use)
                self.device.synchronize_all(f"the first use of {function} with {use[1:]}")
        return function(*arguments, **(keywords or {}))
