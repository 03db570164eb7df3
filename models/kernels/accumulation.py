"""Weight gradients that a matmul adds to fp32 sums, without a temporary for the product.

n tokens of a micro-batch.
"""

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def adds_in_matmul(x: Tensor, total: torch.dtype) -> bool:
    """Return True if the device adds products of tensors like x to sums of type `total`."""
    return is_on_gpu(x) and x.dtype in SIXTEEN_BITS and total == torch.float32


def is_on_gpu(x: Tensor) -> bool:
    """Return True for a tensor on a GPU, whose matmuls can add to sums of another type."""
    return x.device.type == "cuda"


def add_product(total: Tensor, grad: Tensor, x: Tensor, *, replace: bool) -> None:
    """Add grad^T x to a sum, or replace the sum by it.

    In one matmul the product is not rounded to 16 bits before it is added.

    Args:
        total: [out, in]
        grad: [n, out]
        x: [n, in]
        replace: the old values of `total` do not count
    """
    is_empty = not len(x)  # an expert without tokens
    if is_empty and not replace:
        return
    if adds_in_matmul(x, total.dtype) and not is_empty:
        multiply_into(total, grad.t(), x, replace=replace)
        return
    product = grad.t() @ x
    if replace:
        total.copy_(product)
    else:
        total.add_(product)


def multiply_into(total: Tensor, first: Tensor, second: Tensor, *, replace: bool) -> None:
    """Add first second to an fp32 tensor, or replace it, in one matmul of 16-bit tensors."""
    if replace:
        torch.mm(first, second, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, first, second, out_dtype=torch.float32, out=total)
