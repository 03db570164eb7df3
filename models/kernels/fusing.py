"""Whether the work between matrix products runs as it is written or compiled into few kernels.

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


@cache
def compiled(function: Function) -> Function:
    """The function as kernels of its own, made at the first call (`torch.compile`).

    In this process: torch's compiling ones would outlive a rank that is killed. Detached, inputs
    whose gradients are wanted are no case of their own.
    """
    run = torch.compile(function, dynamic=False, options={"compile_threads": 1})

    def detached(*inputs: Any) -> Any:
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
