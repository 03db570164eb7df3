"""Cross-entropy over logits whose vocabulary is split over the tensor axis.

s sequence, b micro-batch, v padded vocabulary, t tensor ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel.collectives import TensorAxis


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, axis: TensorAxis
) -> Tensor:
    """Mean cross-entropy in nats, in fp32.

    logits [s, b, v/t] with v padded; columns beyond vocab_size are left out. labels [b, s].
    Forward: all-reduce (max) and all-reduce (sum) of [s, b]; backward: none (arXiv 1909.08053).
    """
    return _CrossEntropy.apply(logits, labels.t(), vocab_size, axis).mean()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab_size, axis):
        columns = logits.shape[-1]
        first = axis.rank * columns
        real = max(0, min(columns, vocab_size - first))  # columns that are no padding
        exp = logits.to(torch.float32, copy=True)  # [s, b, v/t]
        exp[..., real:] = float("-inf")

        largest = exp.amax(dim=-1)  # [s, b]
        if axis.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
        exp -= largest.unsqueeze(-1)

        local = labels - first
        elsewhere = (local < 0) | (local >= columns)
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)  # [s, b, 1]
        label_logit = exp.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0)  # [s, b]
        exp.exp_()
        sums = torch.stack([exp.sum(dim=-1), label_logit])  # [2, s, b]
        if axis.size > 1:
            dist.all_reduce(sums, group=axis.group)
        total, label_logit = sums
        softmax = exp.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - label_logit

    @staticmethod
    def backward(ctx, grad):
        softmax, local, elsewhere = ctx.saved_tensors
        ones = torch.where(elsewhere, 0.0, 1.0).unsqueeze(-1)
        grad_logits = softmax.scatter_add_(-1, local, -ones).mul_(grad.unsqueeze(-1))  # in place
        return grad_logits.to(ctx.dtype), None, None, None
