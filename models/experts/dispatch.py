"""Exchange of tokens between the ranks that hold different experts, or columns of the same ones.

A token is sent once for each of its k experts. Tokens are sent in the order of their experts, and
for one expert in their order on the rank. No expert has a capacity, so no token is dropped.

With expert tensor parallelism, several tensor ranks have parts of the same experts. A token is sent
to the one that has the sender's tensor rank, which passes it to the others.

n tokens of this rank, k experts per token, h hidden, m rows that this rank's experts compute.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.experts.routing import ExpertAxis, Routes
from models.kernels.compile import Function, as_written, native_on_cpu
from models.parallel.collectives import TensorAxis, conjugate, wait_for
from models.parallel.layers import Deferral, ImmediateAddition

# Expert tensor parallelism: tensor ranks that divide the columns of the same experts.
#
# Each tensor rank receives other tokens. Before the experts, the ranks gather each other's rows.
# Afterwards they sum their partial outputs, and each keeps the sums of its own rows. The numbers
# of rows differ between ranks, so both steps are all-to-alls.
#
# h hidden, c tensor ranks that divide an expert, m rows of all of them.


def gather_rows(x: Tensor, rows: Sequence[int], axis: TensorAxis) -> Tensor:
    """Gather the rows of all ranks, in rank order; backward: `sum_rows`.

    Args:
        x: this rank's rows, [rows[axis.rank], h]
        axis: the ranks that divide the experts

    Returns:
        [m, h]
    """
    return x if axis.size == 1 else conjugate(x, _gather, _sum, list(rows), axis)


def sum_rows(x: Tensor, rows: Sequence[int], axis: TensorAxis) -> Tensor:
    """Sum the partial outputs of all ranks, and keep this rank's rows; backward: `gather_rows`.

    They are added in fp32, in rank order.

    Args:
        x: this rank's partial output of each row, [m, h]
        axis: the ranks that divide the experts

    Returns:
        [rows[axis.rank], h]
    """
    return x if axis.size == 1 else conjugate(x, _sum, _gather, list(rows), axis)


def _gather(x: Tensor, rows: list[int], axis: TensorAxis) -> Tensor:
    result = x.new_empty((sum(rows), x.shape[1]))
    sent = x.repeat(axis.size, 1)
    dist.all_to_all_single(result, sent, rows, [len(x)] * axis.size, group=axis.group)
    return result


def _sum(x: Tensor, rows: list[int], axis: TensorAxis) -> Tensor:
    own = rows[axis.rank]
    terms = x.new_empty((axis.size, own, x.shape[1]))
    sizes = [own] * axis.size
    dist.all_to_all_single(terms.flatten(0, 1), x.contiguous(), sizes, rows, group=axis.group)
    total = terms[0].float()
    for term in terms[1:]:  # one at a time, to save memory
        total += term
    return total.to(x.dtype)


class DeferralToExchange(Deferral):
    """Weight gradients that the backward pass defers to an exchange, and computes during it.

    weights: the weights, in an order of their own
    addition: adds the gradients to sums; None: autograd receives them
    """

    def __init__(self, weights: Sequence[nn.Parameter], addition: ImmediateAddition | None = None):
        super().__init__()
        self.weights, self.addition = weights, addition

    def gradients(self) -> list[Tensor | None]:
        """Compute the gradients; return those for autograd, in the order of the weights."""
        if self.addition is None:
            gradients = {weight: gradient() for weight, gradient in self.take()}
            return [gradients[weight] for weight in self.weights]
        for weight, gradient in self.take():
            self.addition.put(weight, gradient)
        return [None] * len(self.weights)


class Transfer:
    """An all-to-all of rows that runs in the background, forward or backward.

    sent: number of rows sent to each expert rank in the forward pass
    received: number of rows received from each expert rank in the forward pass
    axis: the expert axis
    """

    def __init__(self, sent: list[int], received: list[int], axis: ExpertAxis):
        self.sent, self.received, self.axis = sent, received, axis
        self.running: tuple[dist.Work, Tensor, Tensor] | None = None

    def begin(self, x: Tensor, *, backward: bool = False) -> Tensor:
        """Begin to exchange rows [sent, h]; return the tensor in which [received, h] arrive."""
        sent, received = (self.received, self.sent) if backward else (self.sent, self.received)
        x = x.contiguous()
        result = x.new_empty((sum(received), *x.shape[1:]))
        work = dist.all_to_all_single(
            result, x, received, sent, group=self.axis.group, async_op=True
        )
        self.running = work, result, x  # x must be kept until it is sent
        return result

    def wait(self) -> Tensor:
        """Wait for the rows that `begin` exchanges, and return those received, [received, h]."""
        self.axis.turns.switch()
        assert self.running is not None
        work, result, _ = self.running
        self.running = None
        wait_for(work)
        return result


def begin_dispatch(
    x: Tensor,
    routes: Routes,
    axis: ExpertAxis,
    *,
    deferral: DeferralToExchange | None = None,
    fuse: Function = as_written,
) -> Callable[[], Tensor]:
    """Begin to send tokens to their experts.

    Args:
        x: the tokens, [n, h]
        deferral: collects the gradients of its weights, which the backward pass computes and
            returns while the gradients of the tokens are sent

    Returns:
        A function that waits for the rows of this rank's experts and returns them, sorted by
        expert, [m, h]. Operations before its call run at the same time as the exchange, forward and
        backward.
    """
    copies = _Copies.apply(x, routes.tokens, routes.sent_rows, fuse)
    arrived = _begin_exchange(copies, Transfer(routes.sent, routes.received, axis), deferral)
    if routes.arrangement is None:
        return arrived
    return lambda: _Rearrange.apply(
        gather_rows(arrived(), routes.gathered, axis.columns),
        routes.arrangement,
        routes.inverse_arrangement,
    )


def begin_combine(
    y: Tensor, gates: Tensor, routes: Routes, axis: ExpertAxis, *, fuse: Function = as_written
) -> Callable[[], Tensor]:
    """Begin to return the experts' outputs to their tokens, where they are added with weights.

    The outputs of a token are added in fp32, in the order of the token's gates.

    Args:
        y: outputs of this rank's experts, with expert tensor parallelism partial ones, [m, h]
        gates: weights of the experts of each token, fp32 [n, k]

    Returns:
        A function that waits for the outputs and returns the results [n, h]. Operations before its
        call run at the same time as the exchange, forward and backward.
    """
    if routes.arrangement is not None:
        y = _Rearrange.apply(y, routes.inverse_arrangement, routes.arrangement)
        y = sum_rows(y, routes.gathered, axis.columns)
    returned = _begin_exchange(y, Transfer(routes.received, routes.sent, axis))
    return lambda: _WeightedSum.apply(returned(), gates, routes.sent_rows, fuse)


def _begin_exchange(
    x: Tensor, transfer: Transfer, deferral: DeferralToExchange | None = None
) -> Callable[[], Tensor]:
    """Begin an all-to-all of rows; return a function that waits for those received."""
    if transfer.axis.size == 1:
        assert deferral is None
        return lambda: x
    weights = () if deferral is None else deferral.weights
    sent = _Begin.apply(x, transfer, deferral, *weights)
    return lambda: _End.apply(sent, transfer)


class _Copies(torch.autograd.Function):
    """[n, h] to [n * k, h], the tokens of the sent rows; backward: the sum of a token's rows.

    The backward pass of plain indexing adds to the same rows in no defined order on a GPU.
    """

    @staticmethod
    def forward(ctx, x, tokens, sent_rows, fuse):
        ctx.fuse = fuse
        ctx.save_for_backward(sent_rows)
        return x[tokens]

    @staticmethod
    def backward(ctx, grad):
        return ctx.fuse(_sum_of_copies)(grad, *ctx.saved_tensors), None, None, None


class _Rearrange(torch.autograd.Function):
    """Rows in the order of a permutation; backward: in the order of its inverse."""

    @staticmethod
    def forward(ctx, x, permutation, inverse):
        ctx.save_for_backward(inverse)
        return x[permutation]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


class _Begin(torch.autograd.Function):
    """Begin an all-to-all of x; backward: wait for the reverse one, which `_End` has begun.

    The output stands for x, and only `_End` may read it. The backward pass computes the deferred
    gradients first.
    """

    @staticmethod
    def forward(ctx, x, transfer, deferral, *weights):
        ctx.transfer, ctx.deferral = transfer, deferral
        transfer.begin(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        gradients = [] if ctx.deferral is None else ctx.deferral.gradients()
        return ctx.transfer.wait(), None, None, *gradients


class _End(torch.autograd.Function):
    """Wait for an all-to-all and return the received rows; backward: begin the reverse one."""

    @staticmethod
    def forward(ctx, sent, transfer):
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    def backward(ctx, grad):
        return ctx.transfer.begin(grad, backward=True), None


class _WeightedSum(torch.autograd.Function):
    """Sums of the rows [n * k, h] of each token, with fp32 weights [n, k], to [n, h].

    Reading the rows where they are avoids a copy of them in the order of the tokens.
    """

    @staticmethod
    def forward(ctx, x, weights, sent_rows, fuse):
        ctx.fuse = fuse
        ctx.save_for_backward(x, weights, sent_rows)
        return fuse(_weighted_sum)(x, weights, sent_rows)

    @staticmethod
    def backward(ctx, grad):
        return *ctx.fuse(_weighted_sum_backward)(grad, *ctx.saved_tensors), None, None


# Functions that a compiler may fuse. `rows` [n, k] is `Routes.sent_rows`. A token's rows are added
# in fp32, in the order of its experts, in every layout. No row belongs to two tokens, so no sum
# depends on the order in which a GPU runs threads. In eager mode the rows of all tokens' first
# experts come first, then those of their second experts, and so on, to save memory.


@native_on_cpu
def _sum_of_copies(x: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of each token's rows: [n * k, h] to [n, h]."""
    total = x[rows[:, 0]].float()
    for of_choice in rows[:, 1:].unbind(1):
        total += x[of_choice]
    return total.to(x.dtype)


@native_on_cpu
def _weighted_sum(x: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Return the sum of each token's rows times their weights: [n * k, h] to [n, h]."""
    total = x[rows[:, 0]].float() * weights[:, :1]
    for number in range(1, rows.shape[1]):
        total.addcmul_(x[rows[:, number]].float(), weights[:, number : number + 1])
    return total.to(x.dtype)


@native_on_cpu
def _weighted_sum_backward(
    grad: Tensor, x: Tensor, weights: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows [n * k, h] and of the weights [n, k]."""
    k = rows.shape[1]
    choices = k if torch.compiler.is_compiling() else 1  # compiled, one kernel reads each row once
    wide = grad.float()[:, None]  # [n, 1, h]
    grad_x, grad_weights = torch.empty_like(x), []
    for of_choices, factors in zip(
        rows.split(choices, dim=1), weights.split(choices, dim=1), strict=True
    ):
        grad_x[of_choices] = (wide * factors[..., None]).to(x.dtype)
        grad_weights.append((wide * x[of_choices].float()).sum(-1))
    return grad_x, torch.cat(grad_weights, dim=1)
