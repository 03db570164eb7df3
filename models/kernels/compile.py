"""Element-wise operations between matmuls: run eagerly, or compiled into few kernels.

Only pure functions are compiled, most of them in this folder, forward and backward ones separately.
Matmuls, collectives and deferred weight gradients run the same either way, in every layout, and
autograd keeps the same tensors. All layers share a function, so it is compiled once per shape.
"""

from collections.abc import Callable, Sequence
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
    return _compiled(function, any_rows=False)


def for_any_rows(fuse: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Return the setting `fuse` for functions whose number of rows differs between calls.

    The rows are the first dimension of all tensors that the function receives.
    """
    return partial(_compiled, any_rows=True) if fuse is compiled else fuse


MAX_COMPILED_SHAPES = 64  # of a function's inputs; torch would run a ninth one as written
MIN_DYNAMIC_ROWS = 2  # torch compiles a function for 0 rows and for 1 row separately
# Options of torch's compiler. If the number of rows is a variable, so is the offset at which the
# second half of a tensor begins. Kernels would therefore store this half element by element. Inputs
# that are not aligned are copied.
OPTIONS_FOR_ANY_ROWS = {"assume_aligned_inputs": True}


@cache
def _compiled(function: Function, *, any_rows: bool) -> Function:
    """Return the function compiled into kernels at its first call (`torch.compile`).

    It is compiled in this process: torch's compile workers would outlive a rank that is killed.
    Inputs are detached; otherwise inputs that require gradients would be compiled separately. The
    limit of shapes is that of the function, because torch's own setting is local to a thread, and
    backward passes on a GPU and the helper of paired passes run in other threads.

    Args:
        any_rows: compile once for all numbers of rows. The other sizes remain constants: with
            `dynamic=True` a kernel reads elements one by one, and divides their indices.
    """
    # The overloads of torch 2.13 leave out `recompile_limit`, which its implementation has.
    run = torch.compile(  # type: ignore[call-overload]
        function,
        dynamic=False,
        recompile_limit=MAX_COMPILED_SHAPES,
        options={"compile_threads": 1, **(OPTIONS_FOR_ANY_ROWS if any_rows else {})},
    )

    def detached(*inputs: Any) -> Any:
        if getattr(function, "native_on_cpu", False) and inputs[0].device.type == "cpu":
            return function(*inputs)
        if any_rows and len(inputs[0]) < MIN_DYNAMIC_ROWS:
            return function(*inputs)
        inputs = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs)
        if any_rows:
            mark_rows(inputs)
        return run(*inputs)

    return detached


def mark_rows(inputs: Sequence[Any]) -> None:
    """Mark the first dimension of each tensor as dynamic for the next compilation."""
    for x in inputs:
        if isinstance(x, torch.Tensor):
            torch._dynamo.maybe_mark_dynamic(x, 0)


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
