"""Cross-entropy over a vocabulary that is split over the tensor axis.

s sequence, b micro-batch, n tokens of a chunk, h hidden, v padded vocabulary, t tensor ranks.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.cost import tokens_at_a_time
from models.kernels.fusing import Function
from models.parallel.collectives import TensorAxis, all_gather, begin_sum_of_copies
from models.parallel.linear import column_parallel_product


def vocab_parallel_loss(
    x: Tensor,
    weight: nn.Parameter,
    labels: Tensor,
    *,
    vocab_size: int,
    axis: TensorAxis,
    fuse: Function,
) -> Tensor:
    """Mean cross-entropy in nats of labels [b, s] where x W^T [s, b, v/t] are the logits.

    x [s, b, h], or [s/t, b, h] under sequence parallelism; W [v/t, h]. The logits are there for
    some tokens at a time and give way to their gradients at once, as in Liger Kernel's fused linear
    cross-entropy (arXiv 2410.10989), but over a split vocabulary. In bf16 each part of the tokens
    adds a rounding to the gradient of W. All tokens count, whether documents are separate or not: a
    document's first one too, which the one before it in the window has to predict.

    Forward: all-reduce (max) and all-reduce (sum) of [n] for each chunk, and what the backward pass
    of a column-parallel product communicates; backward: none.
    """
    if x.dtype == torch.float16:  # gradients that are computed without the loss scale underflow
        # Not deferred: until then a micro-batch would keep the gradient of its logits.
        logits = column_parallel_product(x, weight, None, axis=axis, deferral=None)
        return vocab_parallel_cross_entropy(logits, labels, vocab_size=vocab_size, axis=axis)
    with_gradients = torch.is_grad_enabled()
    return _ProductLoss.apply(x, weight, labels, vocab_size, axis, fuse, with_gradients)


class _ProductLoss(torch.autograd.Function):
    """The forward pass computes the gradients too, and the backward pass scales them."""

    @staticmethod
    def forward(ctx, x, weight, labels, vocab_size, axis, fuse, with_gradients):
        whole = all_gather(x, axis) if axis.sequence_parallel and axis.size > 1 else x
        tokens = whole.flatten(0, 1)  # [s * b, h]
        first = axis.rank * len(weight)
        columns = labels.t().flatten() - first  # of the labels; those of other ranks are outside
        grad_tokens = torch.empty_like(tokens) if with_gradients else None
        grad_weight = None
        total = torch.zeros((), device=x.device)
        chunks = _chunks(len(tokens), len(weight))
        room = x.new_empty(chunks[0].stop, len(weight))
        for chunk in chunks:
            rows = tokens[chunk]  # [n, h]
            logits = torch.mm(rows, weight.t(), out=room[: len(rows)])  # [n, v/t]
            logits[:, max(0, vocab_size - first) :] = float("-inf")
            log_sums, label_logits = _reduced(logits, columns[chunk], axis, fuse)
            total += (log_sums - label_logits).sum()
            if not with_gradients:
                continue
            of_labels = torch.expm1(label_logits - log_sums) / len(tokens)
            _turn_into_gradients(
                logits, columns[chunk], log_sums, of_labels, count=len(tokens), fuse=fuse
            )
            torch.mm(logits, weight, out=grad_tokens[chunk])
            if grad_weight is None:
                grad_weight = logits.t() @ rows
            else:
                grad_weight.addmm_(logits.t(), rows)
        if with_gradients:
            # No saved tensors: they are nobody else's, and are scaled where they are, once.
            ctx.grad_x = begin_sum_of_copies(grad_tokens.view(whole.shape), axis)
            ctx.grad_weight = grad_weight
        return total / len(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.grad_x().mul_(grad), ctx.grad_weight.mul_(grad)
        ctx.grad_x = ctx.grad_weight = None
        return grad_x, grad_weight, None, None, None, None, None


def _chunks(tokens: int, columns: int) -> list[slice]:
    """The tokens whose logits are there at a time."""
    size = tokens_at_a_time(tokens, columns)
    return [slice(first, first + size) for first in range(0, tokens, size)]


def _reduced(
    logits: Tensor, columns: Tensor, axis: TensorAxis, fuse: Function
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each token's logits over all ranks, and its label's logit: each [n]."""
    largest = fuse(_largest)(logits)
    if axis.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
    sums = fuse(_sums)(logits, columns, largest)
    if axis.size > 1:
        dist.all_reduce(sums, group=axis.group)
    total, label_logits = sums
    return total.log() + largest, label_logits


def _turn_into_gradients(
    logits: Tensor,
    columns: Tensor,
    log_sums: Tensor,
    label_gradients: Tensor,
    *,
    count: int,
    fuse: Function,
) -> None:
    """In place: (softmax - one-hot) / count, the gradient of a mean over so many tokens.

    label_gradients: fp32 [n], of the labels' logits; rounded only after one has been subtracted
    """
    fuse(_turn_into_softmax)(logits, log_sums + math.log(count))
    outside = (columns < 0) | (columns >= logits.shape[1])
    columns = columns.masked_fill(outside, 0).unsqueeze(1)
    others = logits.gather(1, columns).squeeze(1)
    gradients = torch.where(outside, others, label_gradients.to(logits.dtype))
    logits.scatter_(1, columns, gradients.unsqueeze(1))


def _largest(logits: Tensor) -> Tensor:
    return logits.amax(dim=-1).float()


def _sums(logits: Tensor, columns: Tensor, largest: Tensor) -> Tensor:
    """[2, n]: the sum of exp(logit - largest), and the label's logit where it is here."""
    total = (logits - largest.unsqueeze(1)).exp_().sum(dim=-1)  # in fp32, as `largest` is
    outside = (columns < 0) | (columns >= logits.shape[1])
    labels = logits.gather(1, columns.masked_fill(outside, 0).unsqueeze(1)).squeeze(1).float()
    return torch.stack([total, labels.masked_fill(outside, 0)])


def _turn_into_softmax(logits: Tensor, log_sums: Tensor) -> None:
    logits.copy_(logits.float().sub_(log_sums.unsqueeze(1)).exp_())


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, axis: TensorAxis
) -> Tensor:
    """Mean cross-entropy in nats, in fp32, of all logits at once: for fp16, see above.

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
