"""Attention to some of the keys, and the merging of such parts into attention to all of them.

A part comes with the logsumexp of its scores, which is the logarithm of the softmax's denominator,
so that parts can be merged in any order ("online softmax", Milakov and Gimelshein 2018, arXiv
1805.02867). The backward pass of a part needs the merged result and the merged logsumexp, but no
other part (FlashAttention, arXiv 2205.14135; ring attention, arXiv 2310.01889).

An attention sink is a part, too: a learned logit for each query head, without a value (arXiv
2309.17453). It is merged after all other parts, once.

b sequences, a query heads, g key-value heads, n queries, m keys, d head size. Values may have fewer
columns than keys, as in latent attention; so have the output and its gradient then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
ROWS = 128  # number of queries of a block of attention within limits
MAX_FLASH_HEAD_SIZE = 256  # torch's flash_api.cpp, which also requires a multiple of 8
ALIGNED = 16  # keys, the first of which has an address that is fast to read in a row of scores
LOGSUMEXP_ROWS = 32  # the memory-efficient kernel pads its logsumexps to a multiple of this

Part = tuple[Tensor, Tensor]  # output fp32 [b, a, n, d], and logsumexp fp32 [b, a, n]
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


@dataclass(frozen=True)
class Limits:
    """Limits of attention besides causality.

    window: number of keys that a query sees, its own and those before it (arXiv 2004.05150); None:
        no limit
    soft_cap: limit c of the scores, which become c tanh(score / c) (arXiv 2408.00118, section 2);
        None: no limit
    distance: position of the first query minus that of the first key
    """

    window: int | None = None
    soft_cap: float | None = None
    distance: int = 0

    def for_part(self, queries: int, distance: int) -> "Limits | None":
        """Return the limits of a part that has some of the queries and keys; None: it has none.

        Args:
            queries: number of queries of the part
            distance: position of the first query of the part minus that of its first key
        """
        window = self.window
        if window is not None and distance + queries <= window:
            window = None  # the last query sees the first key
        if window is None and self.soft_cap is None:
            return None
        return Limits(window, self.soft_cap, distance)

    def after(self, queries: int) -> "Limits":
        """Return the limits of the queries after the first ones."""
        return replace(self, distance=self.distance + queries)


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, limits: Limits | None = None) -> Part:
    """Return the attention of q [b, a, n, d] to k and v [b, g, m, d].

    Args:
        causal: query i sees the keys up to i; requires n = m
        limits: limits of the part, within which each query sees a key; None: no limits
    """
    kernel = kernel_for(q, limits)
    if not kernel.grouped:
        k, v = (_for_each_query_head(x, q) for x in (k, v))
    if v.shape[-1] == q.shape[-1] or kernel.any_value_size:
        out, logsumexp = kernel.forward(q, k, v, causal)
    else:
        out, logsumexp = kernel.forward(q, k, widened(v, q), causal)
        out = out[..., : v.shape[-1]]
    return out.float(), logsumexp.float()


def widened(x: Tensor, like: Tensor) -> Tensor:
    """Return x with columns of zeros appended, as many columns as another tensor has."""
    return F.pad(x, (0, like.shape[-1] - x.shape[-1]))


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whole: Part,
    *,
    causal: bool,
    limits: Limits | None = None,
) -> Gradients:
    """Return the gradients of q, k and v that pass through this part, in fp32.

    Args:
        grad: gradient of the merged output, [b, a, n, d]
        whole: the merged output and logsumexp
    """
    kernel, groups, (out, logsumexp) = kernel_for(q, limits), k.shape[1], whole
    if not kernel.grouped:
        k, v = (_for_each_query_head(x, q) for x in (k, v))
    columns = v.shape[-1]
    if columns != q.shape[-1] and not kernel.any_value_size:
        grad, v, out = (widened(x, q) for x in (grad, v, out))
    grads = kernel.backward(grad, q, k, v, (out.to(q.dtype), logsumexp), causal)
    grad_q, grad_k, grad_v = (x.float() for x in grads)
    if columns != grad_v.shape[-1]:
        grad_v = grad_v[..., :columns]
    if not kernel.grouped:
        grad_k, grad_v = (x.unflatten(1, (groups, -1)).sum(dim=2) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def merge(one: Part, other: Part) -> Part:
    """Merge two parts of the same queries; `one` must have a key for every query."""
    (out, logsumexp), (out_other, logsumexp_other) = one, other
    share = torch.sigmoid(logsumexp_other - logsumexp)[..., None]  # of the other part
    merged = logsumexp - F.logsigmoid(logsumexp - logsumexp_other)
    return torch.lerp(out, out_other, share), merged


def merge_sinks(part: Part, sinks: Tensor) -> Part:
    """Merge the sinks [a] into the attention of all queries to all of their keys.

    A sink has no value, so the output is only multiplied by the share of the keys.
    """
    out, logsumexp = part
    logits = sinks.to(logsumexp.dtype)[:, None]
    share = torch.sigmoid(logsumexp - logits)
    return out * share[..., None], torch.logaddexp(logsumexp, logits)


def sink_gradient(grad: Tensor, whole: Part, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks [a], given that of the merged output, [b, a, n, d]."""
    out, logsumexp = whole
    probabilities = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp()
    products = (grad.to(logsumexp.dtype) * out.to(logsumexp.dtype)).sum(dim=-1)  # [b, a, n]
    return -(probabilities * products).sum(dim=(0, 2)).to(sinks.dtype)


@dataclass(frozen=True)
class Kernel:
    """A fused kernel whose forward pass also returns the logsumexp.

    Attributes:
        forward: function of q, k, v and causal
        backward: function of the gradient, q, k, v, the merged part and causal
        grouped: several query heads may share a key and a value
        any_value_size: values need not have as many columns as keys
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], Part]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Part, bool], Gradients]
    grouped: bool
    any_value_size: bool = False


def kernel_for(q: Tensor, limits: Limits | None = None) -> Kernel:
    """Return the fastest kernel for the type, the device and the head size of q."""
    if limits is not None:
        return limited_kernel(q, limits)
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return REFERENCE
    if q.device.type == "cpu":
        return CPU_FLASH
    if q.device.type != "cuda" or q.shape[-1] % 8 or q.shape[-1] > MAX_FLASH_HEAD_SIZE:
        return REFERENCE
    if q.dtype == torch.float32:
        return EFFICIENT
    return FLASH if has_flash_attention(q.device) else REFERENCE


def limited_kernel(q: Tensor, limits: Limits) -> Kernel:
    """Return the fastest kernel within limits: flash attention for windows on a GPU in 16 bits."""
    can_flash = (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= MAX_FLASH_HEAD_SIZE
    )
    if can_flash and limits.soft_cap is None and has_flash_attention(q.device):
        forward, backward = _flash_window_forward, _flash_window_backward
    else:
        forward, backward = _blocked_forward, _blocked_backward
    return Kernel(
        partial(forward, limits),
        partial(backward, limits),
        grouped=True,
        any_value_size=forward is _blocked_forward,
    )


@lru_cache(maxsize=8)
def has_flash_attention(device: torch.device) -> bool:
    """Return True if torch's flash attention for 16 bits runs on a GPU."""
    if not torch.backends.cuda.is_flash_attention_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values [b, g, m, d] for the query heads that share them: [b, a, m, d]."""
    repeats = q.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, *whole, 0.0, causal
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is not used
    out, logsumexp = whole
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out,
        logsumexp.contiguous(),  # the kernel ignores its strides (pytorch's mha_bwd)
        None, None, q.shape[2], k.shape[2], 0.0, causal, state, state[:1],
    )  # fmt: skip


def _flash_window_forward(limits: Limits, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    if first := _queries_to_separate(limits, q, k, causal):
        parts = (
            _flash_forward(q[:, :, :first], k, v, False),
            _flash_window_forward(limits.after(first), q[:, :, first:], k, v, False),
        )
        out, logsumexp = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
        return out, logsumexp
    out, logsumexp, *_ = aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)),  # [b, n, a, d]
        None, None, q.shape[2], k.shape[2], 0.0, False, False,
        **_flash_window(limits, q, k, causal),
    )  # fmt: skip
    return out.transpose(1, 2), logsumexp


def _flash_window_backward(
    limits: Limits, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    out, logsumexp = whole
    if first := _queries_to_separate(limits, q, k, causal):
        part = out[:, :, :first], logsumexp[:, :, :first]
        grads = _flash_backward(grad[:, :, :first], q[:, :, :first], k, v, part, False)
        part = out[:, :, first:], logsumexp[:, :, first:]
        limits = limits.after(first)
        grad, q = grad[:, :, first:], q[:, :, first:]
        others = _flash_window_backward(limits, grad, q, k, v, part, False)
        grad_k, grad_v = (x.float() + y.float() for x, y in zip(grads[1:], others[1:], strict=True))
        return torch.cat([grads[0], others[0]], dim=2), grad_k, grad_v
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is not used
    grads = aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)),
        logsumexp.contiguous(),
        None, None, q.shape[2], k.shape[2], 0.0, False, state, state[:1],
        **_flash_window(limits, q, k, causal),
    )  # fmt: skip
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return grad_q, grad_k, grad_v


def _queries_to_separate(limits: Limits, q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the number of first queries to compute by themselves, because they see all keys.

    Flash attention replaces an unlimited `right` by the number of keys m. With more than m + 1
    queries, the first of them would then see no key. The queries after those that see all keys are
    fewer than m, as each of them sees one key at least and fewer than the query before it.
    """
    assert limits.window is not None
    return 0 if causal or q.shape[2] <= k.shape[2] + 1 else limits.window - limits.distance


def _flash_window(limits: Limits, q: Tensor, k: Tensor, causal: bool) -> dict[str, int]:
    """Return the window in the terms of flash attention.

    In flash attention, query i of n sees the keys from i + m - n - left to i + m - n + right of m
    (Dao-AILab/flash-attention, `flash_attn_interface.py`). -1 means no limit. Query i may see the
    keys from i + distance - window + 1 on. As each query sees a key, `left` is not negative.
    """
    assert limits.window is not None
    left = limits.window - 1 - limits.distance + k.shape[2] - q.shape[2]
    assert left >= 0, "a query without keys"
    return {"window_size_left": left, "window_size_right": 0 if causal else -1}


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal
    )
    return out, logsumexp[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    out, logsumexp = whole
    # As in the forward kernel: the probabilities of the rows that pad the last block are 0.
    padding = (0, -logsumexp.shape[-1] % LOGSUMEXP_ROWS)
    padded = F.pad(logsumexp, padding, value=float("inf"))
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    wanted = [True, True, True, False]  # no gradient of a bias
    *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, padded, state, state, 0.0, wanted, causal
    )
    return grads[0], grads[1], grads[2]


def _masked_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return scaled scores fp32 [b, a, n, m], -inf for keys that a query does not see."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    scores = _masked_scores(q, k, causal)
    logsumexp = scores.logsumexp(dim=-1)
    return torch.matmul((scores - logsumexp[..., None]).exp(), v.to(scores.dtype)), logsumexp


def _reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    out, logsumexp = whole
    probabilities = (_masked_scores(q, k, causal) - logsumexp[..., None]).exp()
    wide = probabilities.dtype
    grad, out, q, k, v = (x.to(wide) for x in (grad, out, q, k, v))
    delta = (grad * out).sum(dim=-1, keepdim=True)
    grad_scores = probabilities * (torch.matmul(grad, v.transpose(-1, -2)) - delta)
    grad_scores *= q.shape[-1] ** -0.5
    return (
        torch.matmul(grad_scores, k),
        torch.matmul(grad_scores.transpose(-1, -2), q),
        torch.matmul(probabilities.transpose(-1, -2), grad),
    )


def grouped_rows(x: Tensor, k: Tensor, first: int, last: int) -> Tensor:
    """Return a block of [b, a, s, d] grouped by key-value head: [b * g, a/g * rows, d]."""
    b, g = k.shape[:2]
    return x[:, :, first:last].reshape(b * g, -1, x.shape[-1])


# Attention within limits in blocks of queries, which skip the keys that none of them sees. Scores
# are in fp32 where they are exponentiated, and rounded to the type of q where they are multiplied.


def _blocked_forward(limits: Limits, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Part:
    (b, a, n, _), d = q.shape, v.shape[-1]
    keys, values = k.flatten(0, 1), v.flatten(0, 1)  # [b * g, m, d]
    out = q.new_empty(n, b, a, d).permute(1, 2, 0, 3)  # as the next matmul reads it
    logsumexp = torch.empty((b, a, n), dtype=_wide(q), device=q.device)
    for block in blocks_of(n, k.shape[2], limits, causal=causal, rows=ROWS):
        first, last, low, high = block
        queries = grouped_rows(q, k, first, last)
        scores, _ = _limited_scores(queries, keys[:, low:high], block, limits, causal)
        probabilities = scores.softmax(dim=-1)
        logsumexp[:, :, first:last] = logsumexp_of(scores, probabilities).view(b, a, -1)
        outputs = torch.bmm(probabilities.to(q.dtype), values[:, low:high])
        out[:, :, first:last] = outputs.view(b, a, -1, d)
    return out, logsumexp


def _blocked_backward(
    limits: Limits, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, causal: bool
) -> Gradients:
    (out, logsumexp), scale = whole, q.shape[-1] ** -0.5
    keys, values = k.flatten(0, 1), v.flatten(0, 1)
    grad_q = torch.empty_like(q, dtype=_wide(q))
    grad_keys, grad_values = (torch.zeros_like(x, dtype=_wide(q)) for x in (keys, values))
    for block in blocks_of(q.shape[2], k.shape[2], limits, causal=causal, rows=ROWS):
        first, last, low, high = block
        queries, rows, outputs = (grouped_rows(x, k, first, last) for x in (q, grad, out))
        scores, slopes = _limited_scores(queries, keys[:, low:high], block, limits, causal)
        total = grouped_rows(logsumexp[..., None], k, first, last)
        probabilities = scores.sub_(total).exp_()
        products = (rows.to(scores.dtype) * outputs).sum(dim=-1, keepdim=True)
        grad_scores = torch.bmm(rows, values[:, low:high].transpose(1, 2)).to(scores.dtype)
        grad_scores = grad_scores.sub_(products).mul_(probabilities)
        if slopes is not None:
            grad_scores *= slopes
        grad_scores, probabilities = grad_scores.to(q.dtype), probabilities.to(q.dtype)
        grad_rows = torch.bmm(grad_scores, keys[:, low:high])
        grad_q[:, :, first:last] = grad_rows.view(q[:, :, first:last].shape)
        grad_keys[:, low:high] += torch.bmm(grad_scores.transpose(1, 2), queries)
        grad_values[:, low:high] += torch.bmm(probabilities.transpose(1, 2), rows)
    return grad_q.mul_(scale), grad_keys.mul_(scale).view(k.shape), grad_values.view(v.shape)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


class QueryBlock(NamedTuple):
    """Queries from `first` to `last`, and the keys that some of them see, from `low` to `high`."""

    first: int
    last: int
    low: int
    high: int


def blocks_of(
    queries: int, keys: int, limits: Limits | None, *, causal: bool, rows: int
) -> Iterator[QueryBlock]:
    """Yield the blocks of all queries, each with `rows` of them but for the last one."""
    for first in range(0, queries, rows):
        last = min(first + rows, queries)
        low = 0
        if limits is not None and limits.window is not None:
            low = max(0, first + limits.distance - limits.window + 1) // ALIGNED * ALIGNED
        yield QueryBlock(first, last, low, last if causal else keys)


def _limited_scores(
    queries: Tensor, keys: Tensor, block: QueryBlock, limits: Limits, causal: bool
) -> tuple[Tensor, Tensor | None]:
    """Return scaled scores [b * g, a/g * rows, keys], -inf where a query does not see a key.

    The second result has the derivatives of capped scores with respect to the scores.
    """
    scores, slopes = scaled_scores(queries, keys).to(_wide(queries)), None
    if limits.soft_cap is not None:
        shares = scores.div_(limits.soft_cap).tanh_()
        scores, slopes = shares * limits.soft_cap, 1 - shares.square()
    if causal:
        hide_later(scores, block)
    if limits.window is not None:
        hide_earlier(scores, block, limits)
    return scores, slopes


def scaled_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return scores [b * g, a/g * rows, keys], scaled before they are rounded."""
    scale = queries.shape[-1] ** -0.5
    return torch.baddbmm(queries.new_empty(1), queries, keys.transpose(1, 2), beta=0, alpha=scale)


def logsumexp_of(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Return the logsumexp of scores along the last dimension, in fp32.

    The largest probability is the reciprocal of the sum of exp(score - largest score).
    """
    largest, probability = scores.amax(dim=-1), probabilities.amax(dim=-1)
    return largest.to(_wide(scores)) - probability.to(_wide(scores)).log()


def hide_later(scores: Tensor, block: QueryBlock) -> None:
    """Replace the scores of keys after their query by -inf, in place."""
    first, last, low, _ = block
    later = scores.new_full((last - first, last - first), float("-inf")).triu_(1)
    scores.unflatten(1, (-1, last - first))[..., first - low :].add_(later)


def hide_earlier(scores: Tensor, block: QueryBlock, limits: Limits) -> None:
    """Replace the scores of keys before the window of their query by -inf, in place."""
    first, last, low, high = block
    assert limits.window is not None
    # Query first + i does not see key low + j if j - i is `hidden` or less.
    hidden = first + limits.distance - limits.window - low
    width = min(last - first + hidden, high - low)
    if width > 0:
        earlier = scores.new_full((last - first, width), float("-inf")).tril_(hidden)
        scores.unflatten(1, (-1, last - first))[..., :width].add_(earlier)


class LargestLogits:
    """The largest logit of each query head of a layer on this rank, over all noted parts.

    A logit is a score that its query sees, scaled but not capped. The scores of a block of queries
    are computed again, because fused kernels do not return their maximum. In 16 bits they are
    rounded once; the product is accumulated in fp32.

    heads: number of query heads on this rank
    """

    def __init__(self, heads: int):
        self.heads = heads
        self.values: Tensor | None = None  # fp32 [a]; None: nothing was noted

    def reset(self) -> None:
        """Forget everything, before a step."""
        self.values = None

    @torch.no_grad()
    def note(
        self, q: Tensor, k: Tensor, *, causal: bool, limits: Limits | None = None, head: int = 0
    ) -> None:
        """Note the logits of q [b, a, n, d] and k [b, g, m, d], without waiting for the device.

        Args:
            causal, limits: as in `attend`
            head: number of the first head in q
        """
        if self.values is None:
            self.values = q.new_full((self.heads,), float("-inf"), dtype=torch.float32)
        if q.dtype == torch.float16:
            q, k = q.float(), k.float()  # the largest logits may exceed the range of fp16
        keys, values = k.flatten(0, 1), self.values[head : head + q.shape[1]]
        is_windowed = limits is not None and limits.window is not None
        for block in blocks_of(q.shape[2], k.shape[2], limits, causal=causal, rows=ROWS):
            first, last, low, high = block
            scores = scaled_scores(grouped_rows(q, k, first, last), keys[:, low:high])
            if causal:
                hide_later(scores, block)
            if limits is not None and is_windowed:
                hide_earlier(scores, block, limits)
            largest = scores.view(len(q), q.shape[1], -1).amax(dim=(0, 2))
            torch.maximum(values, largest, out=values)


REFERENCE = Kernel(
    _reference_forward, _reference_backward, grouped=False, any_value_size=True
)  # materialises the scores
CPU_FLASH = Kernel(_cpu_forward, _cpu_backward, grouped=True)
FLASH = Kernel(_flash_forward, _flash_backward, grouped=True)
EFFICIENT = Kernel(_efficient_forward, _efficient_backward, grouped=False, any_value_size=True)
