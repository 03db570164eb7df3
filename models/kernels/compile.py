"""Element-wise operations between matmuls: run eagerly, or compiled into few kernels.

Only pure functions are compiled, most of them in this folder, forward and backward ones separately.
Matmuls, collectives and deferred weight gradients run the same either way, in every layout, and
autograd keeps the same tensors. All layers share a function, so it is compiled once per shape.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

Function = Callable[..., Any]


def as_written(function: Function) -> Function:
    """Return the function itself, whose operations torch runs one by one."""
    return function


def native_on_cpu(function: Function) -> Function:
    """Mark a function as faster in eager mode on a CPU, where torch has vectorised kernels."""
    vars(function)["native_on_cpu"] = True
    return function


def compiled(function: Function) -> Function:
    """Return the function compiled into kernels, once for each shape."""
    return _compiled(function, dynamic=False)


def for_any_rows(fuse: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Return the setting `fuse` for functions whose number of rows differs between calls."""
    return partial(_compiled, dynamic=True) if fuse is compiled else fuse


MAX_COMPILED_SHAPES = 64  # of a function's inputs; torch would run a ninth one as written


@cache
def _compiled(function: Function, *, dynamic: bool) -> Function:
    """Return the function compiled into kernels at its first call (`torch.compile`).

    It is compiled in this process: torch's compile workers would outlive a rank that is killed.
    Inputs are detached; otherwise inputs that require gradients would be compiled separately.
    """
    run = torch.compile(function, dynamic=dynamic, options={"compile_threads": 1})
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, MAX_COMPILED_SHAPES)

    def detached(*inputs: Any) -> Any:
        if getattr(function, "native_on_cpu", False) and inputs[0].device.type == "cpu":
            return function(*inputs)
        return run(*(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs))

    return detached


class Fusing(nn.Module):
    """A module with element-wise operations between matmuls.

    fuse: `as_written` or `compiled`, applied to each function that the module runs
    """

    fuse: Callable[[Function], Function] = staticmethod(as_written)


def are_compiled(module: nn.Module) -> bool:
    """Return True if all submodules run compiled kernels."""
    return all(layer.fuse is compiled for layer in module.modules() if isinstance(layer, Fusing))


def compile_kernels(module: nn.Module) -> None:
    """Let all submodules run compiled kernels."""
    for layer in module.modules():
        if isinstance(layer, Fusing):
            layer.fuse = compiled
