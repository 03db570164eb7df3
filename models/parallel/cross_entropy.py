"""Cross-entropy over a vocabulary that is split over the tensor axis.

s sequence, b micro-batch, n tokens of a chunk, h hidden, v padded vocabulary, t tensor ranks.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.cost import sums_head_in_fp32, tokens_at_a_time
from models.kernels.compile import Function, as_written, native_on_cpu
from models.kernels.matmul import add_product
from models.parallel.collectives import TensorAxis, all_gather, begin_sum_of_copies

MAX_TILE = 1024  # columns of logits; the compiler keeps at most this many in registers


def vocab_parallel_loss(
    x: Tensor,
    weight: nn.Parameter,
    labels: Tensor,
    *,
    vocab_size: int,
    tensor: TensorAxis,
    fuse: Function,
    gradient_scale: float = 1.0,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    observe: Callable[[Tensor], None] | None = None,
    further: Sequence[Tensor] = (),
    further_weight: float = 0.0,
    note: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return the mean cross-entropy in nats of labels [b, s], given x W^T [s, b, v/t] as logits.

    The logits exist for a part of the tokens at a time and are replaced by their gradients at once,
    as in Liger Kernel's fused linear cross-entropy (arXiv 2410.10989), but over a split vocabulary.
    In 16 bits each part of the tokens adds a rounding to the gradient of W. All tokens count,
    whether documents are separate or not, including the first token of a document, which is
    predicted from the last token of the previous document in the window.

    The outputs of prediction modules (`models/transformer.py`) share W. Their losses, like the
    z-loss, add gradients but are not part of the returned mean. The label -1 marks a further token
    that does not count; the sum of a module's losses is divided by the number of all tokens.

    Forward: all-reduce (max) and all-reduce (sum) of [n] for each chunk, and the collectives of the
    backward pass of a column-parallel matmul; backward: none.

    Args:
        x: [s, b, h], or [s/t, b, h] under sequence parallelism
        weight: [v/t, h]
        gradient_scale: expected gradient of this loss in the backward pass. The forward pass
            multiplies the gradients by `gradient_scale`, and the backward pass multiplies them by
            the actual gradient divided by `gradient_scale`. In fp16, where gradients without the
            loss scale underflow, it must be the loss scale divided by the number of micro-batches.
            Gradients then overflow exactly where those of an ordinary backward pass would.
        soft_cap: as in `soft_capped`
        z_loss: factor of the mean squared logsumexp of the logits (PaLM, arXiv 2204.02311,
            section 5). The result does not include this loss, but the gradients do.
        observe: called with fp32 [2, b, s], the same on all tensor ranks: the cross-entropy of each
            label in nats, and 1 where no token of the vocabulary has a higher logit than the label,
            otherwise 0; None: nothing is kept
        further: outputs of D prediction modules, each like x; labels are then [b, s, 1 + D]
        further_weight: factor of the loss of each of them
        note: called with the sum of the losses and the number of labels of each of them, [D, 2]
    """
    scale = gradient_scale if torch.is_grad_enabled() else None
    changes = (soft_cap, z_loss)
    return _VocabParallelLoss.apply(
        weight, labels, vocab_size, tensor, fuse, scale, changes, observe, further_weight, note,
        x, *further,
    )  # fmt: skip


def soft_capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Return c tanh(logits / c), which lies between -c and c (Gemma 2, arXiv 2408.00118).

    soft_cap: c; None: the logits remain as they are
    """
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


class _VocabParallelLoss(torch.autograd.Function):
    """Compute the gradients in the forward pass, and scale them in the backward pass.

    scale: factor of the gradients; None: no gradients are needed
    changes: `soft_cap` and `z_loss`
    inputs: the outputs of the model and of its prediction modules
    """

    @staticmethod
    def forward(
        ctx, weight, labels, vocab_size, tensor, fuse, scale, changes, observe, further_weight,
        note, *inputs,
    ):  # fmt: skip
        rows = _computed_rows(len(weight), vocab_size - tensor.rank * len(weight), weight.device)
        table = _Table(weight, weight[:rows], vocab_size, tensor, fuse, changes)
        if sums_head_in_fp32(labels.numel(), len(weight), weight.device.type):
            table.type_of_sums = torch.promote_types(weight.dtype, torch.float32)
        gradient_of_x, losses = [], []
        for depth, x in enumerate(inputs):
            of_depth = labels[..., depth] if labels.dim() == 3 else labels
            factor = further_weight if depth else 1.0
            loss, gradient = table.loss(
                x,
                of_depth,
                scale=None if scale is None else scale * factor,
                observe=None if depth else observe,
                all_count=depth == 0,
            )
            losses.append(loss)
            gradient_of_x.append(gradient)
        if note is not None and len(inputs) > 1:
            counts = (labels[..., 1:] >= 0).sum((0, 1))
            note(torch.stack([torch.stack(losses[1:]), counts], dim=1))
        if table.grad_weight is not None:
            # Not saved with save_for_backward: the backward pass scales them in place, only once.
            ctx.gradient_of_x, ctx.grad_weight = gradient_of_x, table.grad_weight.to(weight.dtype)
            ctx.scale, ctx.fuse = scale, fuse
        return losses[0] / (labels.shape[0] * labels.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        factor = grad / ctx.scale  # 1 if the expected gradient was right
        of_inputs, grad_weight = [gradient() for gradient in ctx.gradient_of_x], ctx.grad_weight
        for gradient in (*of_inputs, grad_weight):
            ctx.fuse(_multiply)(gradient, factor)
        ctx.gradient_of_x = ctx.grad_weight = None
        return grad_weight, *(None for _ in range(9)), *of_inputs


class _Table:
    """The output matrix in a forward pass, and its gradient, to which each loss adds.

    weight: [v/t, h]
    computed: the rows of the weight to use
    changes: `soft_cap` and `z_loss`
    """

    def __init__(
        self,
        weight: Tensor,
        computed: Tensor,
        vocab_size: int,
        tensor: TensorAxis,
        fuse: Function,
        changes: tuple[float | None, float],
    ):
        self.weight, self.computed, self.tensor, self.fuse = weight, computed, tensor, fuse
        self.first = tensor.rank * len(weight)  # token of the first row
        self.own_tokens = max(0, vocab_size - self.first)
        self.soft_cap, self.z_loss = changes
        self.grad_weight: Tensor | None = None
        self.type_of_sums = weight.dtype

    def loss(
        self,
        x: Tensor,
        labels: Tensor,
        *,
        scale: float | None,
        observe: Callable[[Tensor], None] | None,
        all_count: bool,
    ) -> tuple[Tensor, Callable[[], Tensor] | None]:
        """Return the sum of the cross-entropies, and a function that returns the gradient of x.

        Args:
            x: [s, b, h], or [s/t, b, h] under sequence parallelism
            labels: [b, s]
            scale: factor of the gradients of the mean loss; None: no gradients are needed
            all_count: False: labels below 0 do not count
        """
        tensor, fuse, table = self.tensor, self.fuse, self.computed
        whole = all_gather(x, tensor) if tensor.sequence_parallel and tensor.size > 1 else x
        tokens = whole.flatten(0, 1)  # [s * b, h]
        labels = labels.t().flatten()
        grad_tokens = None if scale is None else torch.empty_like(tokens)
        total = torch.zeros((), device=x.device)
        chunks = _chunks(len(tokens), len(self.weight), x.device)
        room = x.new_empty(chunks[0].stop, len(table))
        scores = torch.empty(2, len(tokens), device=x.device) if observe else None
        uses_log_softmax = all_count and observe is None and self._can_use_log_softmax(room)
        for chunk in chunks:
            rows = tokens[chunk]  # [n, h]
            counted = None if all_count else labels[chunk] >= 0
            columns = labels[chunk] if all_count else labels[chunk].clamp(min=0)
            columns = columns - self.first  # of the labels; those of other ranks are outside
            logits = torch.mm(rows, table.t(), out=room[: len(rows)])  # [n, v/t]
            if uses_log_softmax:
                log_probabilities = _turn_into_log_probabilities(logits, columns)
                total -= log_probabilities.sum()
                if grad_tokens is not None and scale is not None:
                    share = scale / len(tokens)
                    _turn_into_plain_gradients(logits, columns, log_probabilities, share)
                    self._add_gradients(logits, rows, grad_tokens[chunk])
                continue
            if self.soft_cap is not None:
                fuse(_cap)(logits, self.soft_cap)
            logits[:, self.own_tokens :] = float("-inf")
            log_sums, label_logits, largest = _reduced(logits, columns, tensor, fuse)
            losses = log_sums - label_logits
            total += losses.sum() if counted is None else losses.masked_fill_(~counted, 0).sum()
            if scores is not None:
                torch.sub(log_sums, label_logits, out=scores[0, chunk])
                scores[1, chunk] = label_logits >= largest
            if grad_tokens is None or scale is None:
                continue
            share = scale / len(tokens)  # d(scaled loss) / d(loss of a token)
            self._turn_into_gradients(logits, columns, log_sums, label_logits, share, counted)
            self._add_gradients(logits, rows, grad_tokens[chunk])
        if scores is not None and observe is not None:
            observe(scores.view(2, *whole.shape[:2]).transpose(1, 2))
        if grad_tokens is None:
            return total, None
        return total, begin_sum_of_copies(grad_tokens.view(whole.shape), tensor)

    def _turn_into_gradients(
        self,
        logits: Tensor,
        columns: Tensor,
        log_sums: Tensor,
        label_logits: Tensor,
        share: float,
        counted: Tensor | None,
    ) -> None:
        """Replace logits [n, v/t] by the gradients of the loss, in place.

        Args:
            share: gradient of the loss of a token
            counted: [n]; None: all tokens count
        """
        of_labels = torch.expm1(label_logits - log_sums) * share
        if self.soft_cap is None and not self.z_loss:
            shifts = log_sums - math.log(share)
            if counted is not None:
                shifts.masked_fill_(~counted, math.inf)
            self.fuse(_turn_into_softmax)(logits, shifts)
        else:
            factors = (1 + 2 * self.z_loss * log_sums) * share
            of_labels += (label_logits - log_sums).exp_() * (factors - share)
            if counted is not None:
                factors *= counted
            self.fuse(_turn_into_changed_softmax)(logits, log_sums, factors, self.soft_cap)
            if self.soft_cap is not None:
                of_labels *= _slope_of_cap(label_logits, self.soft_cap)
        if counted is not None:
            of_labels *= counted
        _set_gradients_of_labels(logits, columns, of_labels)

    def _can_use_log_softmax(self, logits: Tensor) -> bool:
        """Return True if torch's log-softmax of the logits gives the loss: in fp32 on a CPU.

        On CPUs, `computed` has no rows of padding, whose logits would have to be masked.
        """
        is_changed = self.soft_cap is not None or self.z_loss or self.fuse is not as_written
        is_fp32_on_cpu = logits.device.type == "cpu" and logits.dtype == torch.float32
        return self.tensor.size == 1 and is_fp32_on_cpu and not is_changed

    def _add_gradients(self, logits: Tensor, rows: Tensor, grad_rows: Tensor) -> None:
        """Compute the gradients of rows and weight from gradients of logits [n, v/t].

        Args:
            rows: [n, h]
            grad_rows: [n, h], to be overwritten
        """
        torch.mm(logits, self.computed, out=grad_rows)
        used, is_first = len(self.computed), self.grad_weight is None
        if self.grad_weight is None:
            self.grad_weight = torch.empty_like(self.weight, dtype=self.type_of_sums)
            self.grad_weight[used:] = 0
        total = self.grad_weight[:used]
        if total.dtype != rows.dtype:
            add_product(total, logits, rows, replace=is_first)
        elif is_first:
            torch.mm(logits.t(), rows, out=total)
        else:
            total.addmm_(logits.t(), rows)


def _turn_into_log_probabilities(logits: Tensor, columns: Tensor) -> Tensor:
    """Replace logits [n, v] by their log-softmax, in place; return those of the labels, [n, 1].

    On a CPU, torch's log-softmax reads a large vocabulary fewer times than `_reduced`, and takes
    fewer calls for a small one.
    """
    torch.log_softmax(logits, -1, out=logits)
    return logits.gather(1, columns.unsqueeze(1))


def _turn_into_plain_gradients(
    logits: Tensor, columns: Tensor, log_probabilities: Tensor, share: float
) -> None:
    """Replace a log-softmax [n, v] by the gradients of the logits, in place.

    Args:
        log_probabilities: of the labels, [n, 1]
        share: gradient of the loss of a token
    """
    of_labels = torch.expm1(log_probabilities).mul_(share)
    logits.add_(math.log(share)).exp_().scatter_(1, columns.unsqueeze(1), of_labels)


def _computed_rows(rows: int, vocab_size: int, device: torch.device) -> int:
    """Return the number of rows of a rank's table, of which `vocab_size` are not padding, to use.

    On a CPU the padding is left out, because exp(-inf) takes nine times as long as other values. On
    a GPU it aligns the matrices.
    """
    return max(1, min(rows, vocab_size)) if device.type == "cpu" else rows


def _chunks(tokens: int, columns: int, device: torch.device) -> list[slice]:
    """Divide the tokens into parts whose logits exist together."""
    size = tokens_at_a_time(tokens, columns, device.type)
    return [slice(first, first + size) for first in range(0, tokens, size)]


def _reduced(
    logits: Tensor, columns: Tensor, tensor: TensorAxis, fuse: Function
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-sum-exp, label's logit and largest logit of each token over all ranks: [n]."""
    if tensor.size == 1 and sums_in_tiles(logits):
        largest, total, label_logits = fuse(_largest_and_sums)(logits, columns)
        return total.log() + largest, label_logits, largest
    largest = fuse(_largest)(logits)
    if tensor.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tensor.group)
    sums = fuse(_sums)(logits, columns, largest)
    if tensor.size > 1:
        dist.all_reduce(sums, group=tensor.group)
    total, label_logits = sums
    return total.log() + largest, label_logits, largest


def sums_in_tiles(logits: Tensor) -> bool:
    """Return True if one pass over the logits is faster than two."""
    return logits.device.type != "cpu"


def _set_gradients_of_labels(logits: Tensor, columns: Tensor, label_gradients: Tensor) -> None:
    """Replace the gradients of the labels' logits on this rank, in place.

    label_gradients: fp32 [n], which are rounded only after subtracting one
    """
    outside = (columns < 0) | (columns >= logits.shape[1])
    columns = columns.masked_fill(outside, 0).unsqueeze(1)
    others = logits.gather(1, columns).squeeze(1)
    gradients = torch.where(outside, others, label_gradients.to(logits.dtype))
    logits.scatter_(1, columns, gradients.unsqueeze(1))


def _largest(logits: Tensor) -> Tensor:
    return logits.amax(dim=-1).float()


def _sums(logits: Tensor, columns: Tensor, largest: Tensor) -> Tensor:
    """Return the sum of exp(logit - largest) and the label's logit, 0 on other ranks: [2, n]."""
    total = (logits - largest.unsqueeze(1)).exp_().sum(dim=-1)  # in fp32, as `largest` is
    outside = (columns < 0) | (columns >= logits.shape[1])
    labels = logits.gather(1, columns.masked_fill(outside, 0).unsqueeze(1)).squeeze(1).float()
    return torch.stack([total, labels.masked_fill(outside, 0)])


def _largest_and_sums(logits: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `_largest` and `_sums` for one rank, reading the logits once.

    A GPU keeps a tile of a row in registers between the maximum and the sum. The compiler's online
    softmax also reads once, but computes two exponentials for each logit instead of one.
    """
    tiles = logits.unflatten(1, (-1, math.gcd(logits.shape[1], MAX_TILE)))
    largest_of_tiles = tiles.amax(dim=-1).float()
    # The limit avoids inf - inf in a tile of padding.
    shifts = largest_of_tiles.clamp(min=torch.finfo(torch.float32).min)
    sums_of_tiles = (tiles - shifts.unsqueeze(-1)).exp_().sum(dim=-1)
    largest = largest_of_tiles.amax(dim=-1)
    total = ((largest_of_tiles - largest.unsqueeze(1)).exp_() * sums_of_tiles).sum(dim=-1)
    return largest, total, logits.gather(1, columns.unsqueeze(1)).squeeze(1).float()


@native_on_cpu
def _multiply(gradient: Tensor, factor: Tensor) -> None:
    """Multiply a gradient by a number on the same device, in place.

    torch's own kernel for GPUs is not vectorised if the two data types differ.
    """
    gradient.mul_(factor)


def _turn_into_softmax(logits: Tensor, log_sums: Tensor) -> None:
    logits.copy_(logits.float().sub_(log_sums.unsqueeze(1)).exp_())


def _turn_into_changed_softmax(
    logits: Tensor, log_sums: Tensor, factors: Tensor, soft_cap: float | None
) -> None:
    """Replace capped logits by the softmax times factors, as gradients of uncapped logits.

    factors: fp32 [n], with the z-loss: the gradient of a squared logsumexp is the softmax times
        twice the logsumexp
    """
    wide = logits.float()
    gradients = (wide - log_sums.unsqueeze(1)).exp_().mul_(factors.unsqueeze(1))
    if soft_cap is not None:
        gradients *= _slope_of_cap(wide, soft_cap)
    logits.copy_(gradients)


def _cap(logits: Tensor, soft_cap: float) -> None:
    """Replace logits by capped ones, in place; arithmetic is in fp32."""
    logits.copy_((logits.float() / soft_cap).tanh_().mul_(soft_cap))


def _slope_of_cap(capped: Tensor, soft_cap: float) -> Tensor:
    """Return the derivative of `soft_capped`, given its result; 0 for minus infinity."""
    return (1 - (capped / soft_cap).square()).clamp_(min=0)
