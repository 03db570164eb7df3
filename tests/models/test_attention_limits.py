"""Windows, soft caps and sinks, compared with a plain formula in fp64 with an explicit mask."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from models.kernels import attention, attention_parts
from models.kernels.attention import causal_attention, document_attention
from models.kernels.attention_parts import Limits, attend, attend_backward

B, A, G, S, D = 2, 4, 2, 23, 8
LENGTHS = ((23,), (2, 9, 12))
Tensors = list[Tensor]


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    limits: Limits,
    lengths: tuple[tuple[int, ...], ...] | None = None,
) -> Tensor:
    """Return attention with all probabilities, in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if limits.soft_cap is not None:
        scores = limits.soft_cap * torch.tanh(scores / limits.soft_cap)
    places = torch.arange(q.shape[2])
    distance = places[:, None] - places
    seen = distance >= 0
    if limits.window is not None:
        seen &= distance < limits.window
    if lengths is not None:
        number = [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths]
        seen = seen & torch.stack([n[:, None] == n for n in number])[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.double().view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(dim=-1)[..., : q.shape[2]] @ v


def inputs_of(dtype: torch.dtype = torch.float32, *, sinks: bool = True) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, A, S, D), (B, G, S, D), (B, G, S, D), (A,)]
    drawn = [2 * torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(dtype) for x in drawn[: 4 if sinks else 3]]


def outcome(function: Callable[..., Tensor], inputs: Tensors) -> Tensors:
    """Return the output and the gradients of a weighted sum of its elements."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves, *[None] * (4 - len(leaves)))
    y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves)]


def difference(found: Tensors, expected: Tensors) -> float:
    """Return the largest difference, relative to the largest value of each tensor, or to 0.1."""
    return max(
        float((a.double() - b.double()).abs().max() / b.abs().max().clamp(min=0.1))
        for a, b in zip(found, expected, strict=True)
    )


CASES = [
    (Limits(window, cap), has_sinks)
    for window, cap, has_sinks in itertools.product(
        (None, 1, 5, 22, 23), (None, 1.5), (False, True)
    )
    if window != 1 or has_sinks  # else the gradients of queries and keys are 0
]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-2}


def ours(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    limits: Limits,
    lengths: tuple[tuple[int, ...], ...] | None,
) -> Tensor:
    if lengths is None:
        return causal_attention(q, k, v, limits=limits, sinks=sinks)
    return document_attention(q, k, v, lengths, varlen=None, limits=limits, sinks=sinks)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "documents"])
@pytest.mark.parametrize("rows", [4, 128])
def test_limits_and_sinks_are_their_formula(
    rows: int, lengths: tuple[tuple[int, ...], ...] | None
) -> None:
    for (limits, has_sinks), dtype in itertools.product(CASES, TOLERANCE):
        inputs = inputs_of(dtype, sinks=has_sinks)
        settings = {"limits": limits, "lengths": lengths}
        expected = outcome(partial(formula, **settings), inputs)
        for most in (1024, 0):  # probabilities are kept, or computed again
            with (
                mock.patch.multiple(attention, ROWS=rows, WINDOW_ROWS=rows, MAX_KEPT_LENGTH=most),
                mock.patch.object(attention_parts, "ROWS", rows),
            ):
                found = outcome(partial(ours, **settings), inputs)
            assert all(x.dtype == dtype for x in found)
            assert difference(found, expected) < TOLERANCE[dtype], (limits, has_sinks, dtype)


def flash(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, left: int) -> tuple[Tensor, Tensor]:
    """Return flash attention's output [n, a, d] and logsumexp [a, n] of packed documents."""
    lengths = ends.diff().tolist()
    limits = None if left == -1 else Limits(left + 1)
    heads = (x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v))
    parts = [
        attend(*document, causal=True, limits=limits and limits.for_part(document[0].shape[2], 0))
        for document in zip(*heads, strict=True)
    ]
    out = torch.cat([part[0] for part in parts], dim=2)[0].transpose(0, 1)
    return out.to(q.dtype), torch.cat([part[1] for part in parts], dim=2)[0]


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    longest: int,
    left: int,
) -> Tensors:
    """Return the gradients of packed documents, from the merged output and logsumexp."""
    lengths = ends.diff().tolist()
    assert longest == max(lengths)
    limits = None if left == -1 else Limits(left + 1)
    split = [x.transpose(0, 1)[None].split(lengths, dim=2) for x in (grad, q, k, v, out)]
    grads = [
        attend_backward(
            *document[:4],
            (document[4], total),
            causal=True,
            limits=limits and limits.for_part(total.shape[2], 0),
        )
        for *document, total in zip(*split, logsumexp[None].split(lengths, dim=2), strict=True)
    ]
    return [
        torch.cat(parts, dim=2)[0].transpose(0, 1).to(q.dtype) for parts in zip(*grads, strict=True)
    ]


@pytest.mark.parametrize("window", [None, 5, 9, 23])
def test_packed_documents_with_sinks_are_their_formula(window: int | None) -> None:
    """Flash attention itself runs on GPUs only; its results are computed in another way."""
    inputs, limits = inputs_of(), Limits(window)

    def packed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return document_attention(q, k, v, LENGTHS, varlen=unused, limits=limits, sinks=sinks)

    def unused(*inputs: Tensor, **settings: object) -> Tensor:
        raise AssertionError("the kernel has no sinks")

    with mock.patch.multiple(
        attention,
        flash_forward=lambda q, k, v, ends, longest, left: flash(q, k, v, ends, left),
        flash_backward=flash_backward,
    ):
        found = outcome(packed, inputs)
    expected = outcome(partial(formula, limits=limits, lengths=LENGTHS), inputs)
    assert difference(found, expected) < 5e-6


@pytest.mark.parametrize("window", [None, 5, 23])
def test_the_kernel_for_documents_gets_the_window(window: int | None) -> None:
    seen = []

    def varlen(q: Tensor, *others: object, window_size: tuple[int, int], **rest: object) -> Tensor:
        seen.append(window_size)
        return torch.empty_like(q)

    q, k, v = inputs_of(sinks=False)
    document_attention(q, k, v, LENGTHS, varlen=varlen, limits=Limits(window))
    assert seen == [(4, 0) if window == 5 else (-1, 0)]  # its own key does not count


def test_torchs_flash_attention_accepts_our_arguments() -> None:
    """Only shapes are checked, on tensors without values."""
    settings = {"device": "meta", "dtype": torch.bfloat16}
    q, k = (torch.empty(48, n, 64, **settings) for n in (4, 2))  # packed
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    for left in (-1, 7):
        out, logsumexp = attention.flash_forward(q, k, k, ends, 24, left)
        assert out.shape == q.shape and logsumexp.shape == (4, 48)
        grads = attention.flash_backward(out, q, k, k, out, logsumexp, ends, 24, left)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    q = torch.empty(2, 4, 24, 64, **settings)
    for causal, keys, limits in ((True, 24, Limits(8)), (False, 16, Limits(40, distance=16))):
        k = torch.empty(2, 2, keys, 64, **settings)
        part = attention_parts._flash_window_forward(limits, q, k, k, causal)
        assert [x.shape for x in part] == [(2, 4, 24, 64), (2, 4, 24)]
        grads = attention_parts._flash_window_backward(limits, q, q, k, k, part, causal)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


def test_the_kernel_within_limits_fits_the_device() -> None:
    def chosen(device: str, dtype: torch.dtype, limits: Limits, head_size: int = 64) -> object:
        q = mock.Mock(device=torch.device(device), dtype=dtype, shape=(1, 1, 1, head_size))
        with mock.patch.object(attention_parts, "has_flash_attention", lambda device: True):
            forward: Any = attention_parts.kernel_for(q, limits).forward
            return forward.func

    blocked, flash = attention_parts._blocked_forward, attention_parts._flash_window_forward
    window, capped = Limits(8), Limits(8, soft_cap=2.0)
    assert chosen("cuda", torch.bfloat16, window) is flash
    assert chosen("cuda", torch.bfloat16, capped) is blocked
    assert chosen("cuda", torch.bfloat16, window, head_size=12) is blocked
    assert chosen("cuda", torch.float32, window) is blocked
    assert chosen("cpu", torch.bfloat16, window) is blocked


class FlashAttention:
    """Windows of torch's flash attention on a GPU: `mha_fwd` and `mha_bwd` in flash_api.cpp.

    Query i of n sees the keys from i + m - n - left to i + m - n + right of m.
    """

    @staticmethod
    def scores(q: Tensor, k: Tensor, left: int, right: int) -> Tensor:
        (n, m), q, k = (q.shape[2], k.shape[2]), q.double(), k.double()
        left, right = (-1 if side >= m else side for side in (left, right))
        if left >= 0 or right >= 0:  # a side without a limit gets m
            left, right = (m if side < 0 else side for side in (left, right))
        else:
            left = right = n + m
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        apart = torch.arange(m) - torch.arange(n)[:, None] - (m - n)  # key - query
        hidden = (apart < -left) | (apart > right)
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sides: tuple[int, int]) -> list[Tensor]:
        scores = self.scores(q, k, *sides)
        v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return [scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1)]

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: tuple[Tensor, Tensor],
        sides: tuple[int, int],
    ) -> list[Tensor]:
        groups, repeats = k.shape[1], q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.double().repeat_interleave(repeats, dim=1) for x in (k, v))
        probabilities = (self.scores(q, k, *sides) - whole[1][..., None]).exp()
        delta = (grad * whole[0]).sum(dim=-1, keepdim=True)
        grad_scores = probabilities * (grad @ wide_v.mT - delta) * q.shape[-1] ** -0.5
        of_keys, of_values = grad_scores.mT @ q.double(), probabilities.mT @ grad
        sums = (x.unflatten(1, (groups, repeats)).sum(2) for x in (of_keys, of_values))
        return [grad_scores @ wide_k, *sums]

    # As torch calls them; _flash_attention_... has the tensors as [b, n, a, d].

    def _flash_attention_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *_: object,
        window_size_left: int,
        window_size_right: int,
    ) -> list[Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, logsumexp = self.forward(q, k, v, (window_size_left, window_size_right))
        return [out.transpose(1, 2), logsumexp]

    def _flash_attention_backward(
        self, *tensors: Tensor, window_size_left: int, window_size_right: int
    ) -> list[Tensor]:
        grad, q, k, v, out = (x.transpose(1, 2) for x in tensors[:5])
        sides = (window_size_left, window_size_right)
        grads = self.backward(grad, q, k, v, (out, tensors[5]), sides)
        return [x.transpose(1, 2) for x in grads]

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool
    ) -> list[Tensor]:
        return self.forward(q, k, v, (-1, 0 if causal else -1))

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *whole: Any
    ) -> list[Tensor]:
        return self.backward(grad, q, k, v, (whole[0], whole[1]), (-1, 0 if whole[7] else -1))


def test_windows_by_flash_attention_are_ours() -> None:
    """All numbers of queries and keys, and all windows in which each query sees a key."""
    generator = torch.Generator().manual_seed(0)
    for causal, n, m, distance in [
        *((True, n, n, 0) for n in (1, 5, 9)),
        *((False, n, m, m) for n, m in itertools.product((1, 2, 5, 9), (1, 2, 3, 7))),
        *((False, n, m, m + 3) for n, m in itertools.product((2, 9), (3, 7))),
    ]:
        draws = {"generator": generator, "dtype": torch.float64}
        q, grad = (torch.randn(1, 4, n, 8, **draws) for _ in range(2))
        k, v = (torch.randn(1, 2, m, 8, **draws) for _ in range(2))
        for window in range(max(1, n + distance - m + 1), n + distance):
            limits = Limits(window, distance=distance)
            expected = attention_parts._blocked_forward(limits, q, k, v, causal)
            backward = limits, grad, q, k, v, expected, causal
            expected_grads = attention_parts._blocked_backward(*backward)
            with mock.patch.object(attention_parts, "aten", FlashAttention()):
                found = attention_parts._flash_window_forward(limits, q, k, v, causal)
                grads = attention_parts._flash_window_backward(*backward)
            assert difference(found, expected) < 1e-12, (causal, n, m, window)
            # The gradients of keys and values are added up in fp32.
            assert difference(grads, expected_grads) < 1e-6, (causal, n, m, window)
