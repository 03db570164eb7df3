"""Work between matrix products: run as it is written, or compiled into few kernels.

Compiled are the pure functions of this folder, forward and backward ones apart, and nothing around
them: matrix products, collectives and deferred weight gradients run the same either way, in every
layout, and autograd keeps the same tensors. All layers share a function, so each is compiled once
per shape.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

Function = Callable[..., Any]


def as_written(function: Function) -> Function:
    """The function itself: torch runs its operations one by one."""
    return function


def native_on_cpu(function: Function) -> Function:
    """Mark a function that a CPU runs faster as written: torch has vectorised kernels for it."""
    function.native_on_cpu = True
    return function


@cache
def compiled(function: Function) -> Function:
    """Return the function as kernels of its own, made at the first call (`torch.compile`).

    It is compiled in this process: torch's compiling ones would outlive a rank that is killed.
    Inputs are detached, so that those whose gradients are wanted are no case of their own.
    """
    run = torch.compile(function, dynamic=False, options={"compile_threads": 1})

    def detached(*inputs: Any) -> Any:
        if getattr(function, "native_on_cpu", False) and inputs[0].device.type == "cpu":
            return function(*inputs)
        return run(*(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs))

    return detached


class Fusing(nn.Module):
    """A module with work between matrix products.

    fuse: `as_written` or `compiled`
    """

    fuse: Callable[[Function], Function] = staticmethod(as_written)


def are_compiled(module: nn.Module) -> bool:
    """Whether all of a module run compiled kernels."""
    return all(each.fuse is compiled for each in module.modules() if isinstance(each, Fusing))


def compile_kernels(module: nn.Module) -> None:
    """Let all of a module run compiled kernels."""
    for each in module.modules():
        if isinstance(each, Fusing):
            each.fuse = compiled
