"""Look-up in a table of vectors, with the backward pass written out.

The gradient of a row is a sum over all its occurrences. For 16-bit gradients, torch's kernel rounds
the running sum after every addition on CPUs, so that a row that occurs 16,384 times receives only a
fraction of its gradient. On GPUs it rounds less often. This function accumulates in fp32 and rounds
only the result.

n tokens of a micro-batch, h hidden, v rows of the table.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Maximum number of elements of each fp32 tensor in the backward pass, 64 MiB.
MAX_WIDE_ELEMENTS = 2**24


def look_up(rows: Tensor, table: Tensor) -> Tensor:
    """Return the rows [...] of a table [v, h]: [..., h]."""
    return _LookUp.apply(rows, table)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, table):
        ctx.table_rows = len(table)
        ctx.save_for_backward(rows)
        return F.embedding(rows, table)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        return None, table_gradient(grad.flatten(0, -2), rows.flatten(), ctx.table_rows)


def table_gradient(grad: Tensor, rows: Tensor, table_rows: int) -> Tensor:
    """Return the gradient of a table [v, h] from the gradients [n, h] of its rows [n].

    No tensor's size depends on the token values, so the host never waits for the device. The fp32
    tensors have n rows instead of v.
    """
    if grad.dtype not in (torch.bfloat16, torch.float16):
        return torch.ops.aten.embedding_dense_backward(grad, rows, table_rows, -1, False)
    tokens, hidden = grad.shape
    # A row's slot is the position of any one of its occurrences; the sums are the same for each.
    indices = torch.arange(tokens, device=rows.device)
    slots = rows.new_empty(table_rows).index_copy_(0, rows, indices).index_select(0, rows)
    gradient = grad.new_zeros(table_rows, hidden)
    width = max(1, MAX_WIDE_ELEMENTS // tokens)
    for first in range(0, hidden, width):
        part = slice(first, first + width)
        sums = torch.ops.aten.embedding_dense_backward(
            grad[:, part].float(), slots, tokens, -1, False
        )
        # Each occurrence of a row writes the same values.
        gradient[:, part].index_copy_(0, rows, sums.to(grad.dtype).index_select(0, slots))
    return gradient
