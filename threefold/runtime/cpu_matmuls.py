"""Fast 16-bit matmuls on CPUs that have no instructions for bf16 or fp16.

On these CPUs, such as AMD's before Zen 4 and those of most laptops, torch computes 16-bit matmuls
and the backward pass of attention in scalar loops, several times as slow as in fp32. Here they are
computed in fp32 and rounded once. Operands and results are copied to fp32 during the call, but
autograd still saves the 16-bit tensors.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Copies to fp32 cost more than they save if a matrix has fewer rows or columns, for example one
# token's activations.
MIN_SIZE = 8
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"

_registrations: list[torch.library.Library] = []  # a kernel is replaced as long as its object lives


def replace_slow_cpu_matmuls() -> None:
    """Replace this process's CPU kernels for 16-bit matmuls, if the CPU lacks instructions.

    A matmul in fp32 takes 5 microseconds longer afterwards.
    """
    dtypes = dtypes_without_instructions()
    if _registrations or not dtypes:
        return
    library = torch.library.Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its kernels are replaced
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            library.impl(name, _fp32_matmul(name, dtypes), with_keyset=True)
            library.impl(f"{name}.out", _fp32_out_matmul(f"{name}.out", dtypes), with_keyset=True)
        for name in ("addmm_", "baddbmm_"):
            library.impl(name, _fp32_out_matmul(name, dtypes), with_keyset=True)
        library.impl(ATTENTION_BACKWARD, _fp32_attention_backward(dtypes), with_keyset=True)
    _registrations.append(library)


def dtypes_without_instructions() -> set[torch.dtype]:
    """Return the 16-bit dtypes that this CPU has no instructions for, as far as oneDNN knows."""
    is_supported = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    has_onednn = torch.backends.mkldnn.is_available()
    return {
        dtype
        for dtype, name in is_supported.items()
        if not has_onednn or not getattr(torch.ops.mkldnn, name)()
    }


def _fp32_matmul(name: str, dtypes: set[torch.dtype]) -> Callable[..., Tensor]:
    """Return a kernel for an operator that allocates its result."""
    torch_kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: torch.DispatchKeySet, first: Tensor, *rest: Any, **scales: Any) -> Tensor:
        if not _is_slow(dtypes, first, *rest):
            return torch_kernel.call_boxed(keys, first, *rest, **scales)
        wide = map(_to_fp32, (first, *rest))
        return torch_kernel.call_boxed(keys, *wide, **scales).to(first.dtype)

    return kernel


def _fp32_out_matmul(name: str, dtypes: set[torch.dtype]) -> Callable[..., Tensor]:
    """Return a kernel for an operator that writes to its first argument or to `out`."""
    torch_kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    allocating = name.removesuffix(".out").removesuffix("_")
    allocating_kernel = torch.library.get_kernel(f"aten::{allocating}", "CPU")

    def kernel(keys: torch.DispatchKeySet, first: Tensor, *rest: Any, **options: Any) -> Tensor:
        out = options.get("out", first)
        if _is_slow(dtypes, first, *rest) and out.dtype == first.dtype:
            scales = {name: scale for name, scale in options.items() if name != "out"}
            wide = map(_to_fp32, (first, *rest))
            result = allocating_kernel.call_boxed(keys, *wide, **scales)
            if result.shape == out.shape:
                return out.copy_(result)
        return torch_kernel.call_boxed(keys, first, *rest, **options)

    return kernel


def _fp32_attention_backward(dtypes: set[torch.dtype]) -> Callable[..., Any]:
    """Return a kernel for the gradients of the queries, keys and values of attention.

    torch's forward pass is fast in 16 bits.
    """
    torch_kernel = torch.library.get_kernel(f"aten::{ATTENTION_BACKWARD}", "CPU")

    def kernel(keys: torch.DispatchKeySet, grad: Tensor, *rest: Any, **options: Any) -> Any:
        tensors, others = (grad, *rest[:4]), rest[4:]  # others: log-sum-exp in fp32 and options
        if grad.dtype not in dtypes or any(each.dtype != grad.dtype for each in tensors):
            return torch_kernel.call_boxed(keys, grad, *rest, **options)
        mask = options.get("attn_mask")
        if mask is not None and mask.dtype == grad.dtype:
            options["attn_mask"] = mask.float()
        grads = torch_kernel.call_boxed(keys, *map(_to_fp32, tensors), *others, **options)
        return tuple(each.to(grad.dtype) for each in grads)

    return kernel


def _is_slow(dtypes: set[torch.dtype], *operands: Any) -> bool:
    """Return True for the operands of a 16-bit matmul, the last two of which are multiplied."""
    dtype, (left, right) = operands[0].dtype, operands[-2:]
    if dtype not in dtypes or any(each.dtype != dtype for each in operands):
        return False  # torch rejects different dtypes
    return min(*left.shape[-2:], *right.shape[-2:]) >= MIN_SIZE


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float()
