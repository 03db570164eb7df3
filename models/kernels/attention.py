"""Causal attention to whole sequences: in blocks of queries on CPUs, and within documents.

On a CPU torch's fused attention is slower than matmuls of the same size (for 512 tokens 1.5
times as slow in fp32, twice in bf16). A block of queries skips the keys that come after the block.
Torch's fused kernels are faster on GPUs, and on CPUs for up to 64 tokens in fp32.

On a GPU one call of flash attention computes all documents of a micro-batch; elsewhere there is one
call per document (arXiv 2402.13991). The work is the sum of the squared lengths, and no mask is
needed, which would be [b, s, s] and rule out fused kernels.

b micro-batch, a query heads, g key-value heads, s sequence, d head size. Values may have fewer
columns than keys, as in latent attention; so has the output then.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.kernels.attention_parts import (
    MAX_FLASH_HEAD_SIZE,
    Limits,
    QueryBlock,
    aten,
    attend,
    attend_backward,
    blocks_of,
    grouped_rows,
    has_flash_attention,
    hide_earlier,
    hide_later,
    logsumexp_of,
    merge_sinks,
    scaled_scores,
    sink_gradient,
    widened,
)

ROWS = 128  # number of queries of a block
WINDOW_ROWS = 64  # number of queries of a block within a window
# The longest sequence whose probabilities are kept for the backward pass; 0 in the trace of a GPU.
MAX_KEPT_LENGTH = 1024
MAX_FUSED_LENGTH = 64  # the longest sequence for which torch's kernel is faster on a CPU in fp32
# Not cuDNN, which builds a plan for each new shape in 0.1 to 0.4 s: document lengths keep changing.
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MIN_PINNED_ELEMENTS = 2048  # enough for the documents of most micro-batches

Lengths = tuple[tuple[int, ...], ...]  # document lengths of each sequence
Varlen = Callable[..., Tensor]  # called like torch.nn.attention.varlen.varlen_attn


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequence: int = 0,
    limits: Limits | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, where no query sees a later key.

    q [b, a, s, d] and k, v [b, g, s, d] to [b, a, s, d].

    Args:
        sequence: length of the sequence of which q is a document; 0: q is a whole sequence
        limits: window and soft cap; None: neither
        sinks: logits [a] of keys that all queries see, without a value; None: none
    """
    if limits is not None:
        limits = limits.for_part(q.shape[2], 0)
    if limits is not None or sinks is not None:
        blocked = keeps_probabilities(q, limits)
        function = _BlockedAttention if blocked else _LimitedAttention
        return function.apply(q, k, v, sinks, limits)
    if in_blocks(q, q.shape[2], sequence):
        return _BlockedAttention.apply(q, k, v, None, None)
    grouped = q.shape[1] != k.shape[1]
    if v.shape[-1] != q.shape[-1] and q.device.type == "cpu":
        return padded_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def padded_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention to values with fewer columns than keys, on a CPU.

    Without the padding, torch keeps all probabilities.
    """
    grouped = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, widened(v, q), is_causal=True, enable_gqa=grouped)
    return y[..., : v.shape[-1]]


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    *,
    varlen: Varlen | None,
    limits: Limits | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of each document by itself.

    q [b, a, s, d] and k, v [b, g, s, d] to [b, a, s, d].

    Args:
        lengths: document lengths of each sequence; the lengths of a sequence sum to s
        varlen: kernel for all documents, from `varlen_kernel`; None: one call per document
        limits: as in `causal_attention`; the kernel for all documents has no soft cap
        sinks: as in `causal_attention`
    """
    if varlen is not None:
        window = None if limits is None else limits.window
        return _packed_attention(q, k, v, lengths, varlen, window, sinks)
    attend = causal_attention
    if limits is not None or sinks is not None:
        attend = partial(causal_attention, limits=limits, sinks=sinks)
    if q.device.type == "cpu":
        return _attention_by_document(q, k, v, lengths, attend)
    with sdpa_kernel(WITHOUT_PLANS):
        return _attention_by_document(q, k, v, lengths, attend)


def varlen_kernel(device: torch.device, dtype: torch.dtype, head_size: int) -> Varlen | None:
    """Return torch's attention over documents of any lengths, or None if it is not available.

    It is flash attention, which needs an NVIDIA GPU of compute capability 8.0 or higher and a
    16-bit type.
    """
    fits = head_size % 8 == 0 and head_size <= MAX_FLASH_HEAD_SIZE
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or not fits:
        return None
    return _varlen_attention(device)


@lru_cache(maxsize=8)
def _varlen_attention(device: torch.device) -> Varlen | None:
    """Import the kernel on first use: the import loads torch's compiler, for more than a second."""
    if not has_flash_attention(device):
        return None
    try:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:  # torch before 2.10
        return None
    parameters = inspect.signature(attend).parameters
    if "window_size" not in parameters:  # torch 2.10
        return None
    return attend if "enable_gqa" in parameters else _with_repeated_heads(attend)


def _with_repeated_heads(attend: Varlen) -> Varlen:
    """Wrap a kernel that requires as many key-value heads as query heads: that of torch 2.11.

    Each key and value head is repeated for its query heads. The copies cost much less than one call
    per document.
    """

    def attend_grouped(
        q: Tensor, k: Tensor, v: Tensor, *others: Any, enable_gqa: bool, **settings: Any
    ) -> Tensor:
        if enable_gqa:
            repeats = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        return attend(q, k, v, *others, **settings)

    return attend_grouped


def document_kernel_name(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Describe in a few words how attention to separate documents is computed."""
    if varlen_kernel(device, dtype, head_size) is not None:
        return "one call of flash attention for all documents of a micro-batch"
    return "one call per document"


def in_blocks(x: Tensor, length: int, sequence: int = 0) -> bool:
    """Return True if attention over `length` tokens runs in blocks, not in torch's kernel.

    Args:
        x: a tensor of the same device and type as queries, keys and values
        sequence: length of the sequence of which the tokens are a document; 0: they are all
    """
    is_short = x.dtype == torch.float32 and (sequence or length) <= MAX_FUSED_LENGTH
    return x.device.type == "cpu" and length <= MAX_KEPT_LENGTH and not is_short


def keeps_probabilities(q: Tensor, limits: Limits | None) -> bool:
    """Return True if attention of q [b, a, s, d] within limits keeps its probabilities.

    For a query, it keeps at most as many as the last one of a whole sequence.
    """
    if q.device.type != "cpu" or (limits is not None and limits.soft_cap is not None):
        return False
    visited = q.shape[2]
    if limits is not None and limits.window is not None:
        visited = min(visited, limits.window + WINDOW_ROWS)
    return visited <= MAX_KEPT_LENGTH


def _packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    varlen: Varlen,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute all documents in one call, laid end to end: [b * s, a or g, d].

    The packed tensors are views if the order in memory is [b, s, a, d]
    (`elementwise.heads_first` arranges it).
    """
    b, a, s, d = q.shape
    columns = v.shape[-1]
    if columns != d:
        v = widened(v, q)
    packed = (x.transpose(1, 2).reshape(b * s, -1, d) for x in (q, k, v))
    ends = cumulative_lengths(lengths, q.device)
    longest = max(map(max, lengths))
    # A query sees `left` keys before its own; -1: all of them.
    left = -1 if window is None or window >= longest else window - 1
    if sinks is not None:
        y = _PackedAttention.apply(*packed, sinks, ends, longest, left)
    else:
        y = varlen(
            *packed,
            ends,
            ends,
            longest,
            longest,
            window_size=(left, 0),
            enable_gqa=a != k.shape[1],
        )
    y = y.view(b, s, a, d).transpose(1, 2)
    return y if columns == d else y[..., :columns]


@lru_cache(maxsize=4096)  # for all layers and all micro-batches of a step; each has a few KB
def cumulative_lengths(lengths: Lengths, device: torch.device) -> Tensor:
    """Return the offset of each document and the end of the last one: int32 [documents + 1].

    The offsets are copied from pinned memory, so that neither host nor device waits for the other.
    The pinned tensor always has the same size, so that torch can reuse the memory of earlier
    micro-batches: a new allocation of pinned memory may wait for the device.
    """
    ends = [0, *accumulate(n for documents in lengths for n in documents)]
    if device.type != "cuda":
        return torch.tensor(ends, dtype=torch.int32, device=device)
    padding = [0] * (MIN_PINNED_ELEMENTS - len(ends))
    pinned = torch.tensor(ends + padding, dtype=torch.int32).pin_memory()
    return pinned[: len(ends)].to(device, non_blocking=True)


def _attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, attend: Callable[..., Tensor]
) -> Tensor:
    """Call attention per document; adjacent sequences with equal document lengths share calls."""
    divisions, counts = zip(
        *((documents, len(list(run))) for documents, run in groupby(lengths)), strict=True
    )
    attended = []
    # The backward pass of split is one cat; each slice would allocate a full-size tensor of zeros.
    for *run, lengths_of_run in zip(*(t.split(counts) for t in (q, k, v)), divisions, strict=True):
        parts = zip(*(t.split(lengths_of_run, dim=2) for t in run), strict=True)
        attended.append(
            torch.cat([attend(*document, sequence=q.shape[2]) for document in parts], dim=2)
        )
    return torch.cat(attended)


class _PackedAttention(torch.autograd.Function):
    """Flash attention over documents laid end to end, [b * s, a or g, d], with sinks."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, ends, longest, left):
        out, logsumexp = flash_forward(q, k, v, ends, longest, left)
        # merged as for one sequence, [1, a, b * s, d], where the kernel's logsumexp is [a, b * s]
        part = out.transpose(0, 1)[None].float(), logsumexp[None].float()
        out, logsumexp = merge_sinks(part, sinks)
        y = out[0].transpose(0, 1).to(q.dtype)
        ctx.save_for_backward(q, k, v, y, logsumexp, sinks, ends)
        ctx.longest, ctx.left = longest, left
        return y

    @staticmethod
    def backward(ctx, grad):
        q, k, v, y, logsumexp, sinks, ends = ctx.saved_tensors
        grad = grad.contiguous()
        whole = y.transpose(0, 1)[None], logsumexp
        grad_sinks = sink_gradient(grad.transpose(0, 1)[None], whole, sinks)
        grads = flash_backward(grad, q, k, v, y, logsumexp[0], ends, ctx.longest, ctx.left)
        return *grads, grad_sinks, None, None, None


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, left: int
) -> tuple[Tensor, Tensor]:
    """Return the output, [b * s, a, d], and the logsumexp, [a, b * s], of packed documents."""
    return aten._flash_attention_forward(
        q, k, v, ends, ends, longest, longest, 0.0, left == -1, False,
        window_size_left=left, window_size_right=0,
    )[:2]  # fmt: skip


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of packed documents, given the merged output and logsumexp."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is not used
    return aten._flash_attention_backward(
        grad, q, k, v, out, logsumexp.contiguous(), ends, ends, longest, longest,
        0.0, left == -1, state, state[:1], window_size_left=left, window_size_right=0,
    )  # fmt: skip


class _LimitedAttention(torch.autograd.Function):
    """Keeps only the output and its logsumexp, as fused kernels do."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, limits):
        part = attend(q, k, v, causal=True, limits=limits)
        merged, logsumexp = part if sinks is None else merge_sinks(part, sinks)
        b, a, s, d = q.shape
        out = q.new_empty(s, b, a, d).permute(1, 2, 0, 3)  # as the next matmul reads it
        out.copy_(merged)
        ctx.save_for_backward(q, k, v, out, logsumexp, sinks)
        ctx.limits = limits
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, logsumexp, sinks = ctx.saved_tensors
        whole = out, logsumexp
        grads = attend_backward(grad, q, k, v, whole, causal=True, limits=ctx.limits)
        grad_sinks = None if sinks is None else sink_gradient(grad, whole, sinks)
        return *(x.to(q.dtype) for x in grads), grad_sinks, None


class _BlockedAttention(torch.autograd.Function):
    """Keeps each block's probabilities: a s (s + ROWS) / 2 of them, or a s (window + WINDOW_ROWS).

    The heads that share a key and a value are rows of one matmul, [b * g, a/g * ROWS, d]. The
    results of a block are freed before the next one begins, which then finds their memory in cache.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, limits):
        (b, a, s, _), d = q.shape, v.shape[-1]
        keys, values = k.flatten(0, 1), v.flatten(0, 1)  # [b * g, s, d]
        out, kept, totals = q.new_empty(s, b, a, d).permute(1, 2, 0, 3), [], []
        for block in _blocks(s, limits):  # `out` is in the order in which the next matmul reads it
            first, last, low, _ = block
            scores = scaled_scores(grouped_rows(q, k, first, last), keys[:, low:last])
            hide_later(scores, block)
            if limits is not None:
                hide_earlier(scores, block, limits)
            kept.append(scores.softmax(dim=-1))
            if sinks is not None:
                totals.append(_add_sinks(kept[-1], scores, sinks, b))
            del scores
            outputs = torch.bmm(kept[-1], values[:, low:last])
            out[:, :, first:last] = outputs.view(b, a, last - first, d)
            del outputs
        with_sinks = [] if sinks is None else [sinks, out, torch.cat(totals, dim=-1)]
        ctx.save_for_backward(q, k, v, *with_sinks, *kept)
        ctx.limits, ctx.has_sinks = limits, sinks is not None
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *kept = ctx.saved_tensors
        scale, grad_sinks = q.shape[-1] ** -0.5, None
        if ctx.has_sinks:
            sinks, out, logsumexp, *kept = kept
            grad_sinks = sink_gradient(grad, (out, logsumexp), sinks)
        keys, values = k.flatten(0, 1), v.flatten(0, 1)
        grad_q = torch.empty_like(q)
        # A single block overwrites the gradients of keys and values, several are added up.
        several = len(kept) > 1
        create = torch.zeros_like if several else torch.empty_like
        grad_keys, grad_values = create(keys), create(values)
        blocks = _blocks(q.shape[2], ctx.limits)
        for (first, last, low, _), probabilities in zip(blocks, kept, strict=True):
            queries, rows = grouped_rows(q, k, first, last), grouped_rows(grad, k, first, last)
            grad_scores = torch.bmm(rows, values[:, low:last].transpose(1, 2))
            # This reads the probabilities in order; the matmuls then find them in cache.
            torch._softmax_backward_data(
                grad_scores, probabilities, -1, probabilities.dtype, grad_input=grad_scores
            )
            grad_values[:, low:last].baddbmm_(probabilities.transpose(1, 2), rows, beta=several)
            grad_rows = torch.bmm(grad_scores, keys[:, low:last]).mul_(scale)
            grad_rows = grad_rows.view(q[:, :, first:last].shape)
            if several:
                grad_q[:, :, first:last] = grad_rows
            else:
                grad_q = grad_rows
            grad_keys[:, low:last].baddbmm_(
                grad_scores.transpose(1, 2), queries, beta=several, alpha=scale
            )
            del grad_scores, grad_rows
        return grad_q, grad_keys.view(k.shape), grad_values.view(v.shape), grad_sinks, None


def _blocks(length: int, limits: Limits | None) -> Iterator[QueryBlock]:
    rows = ROWS if limits is None else WINDOW_ROWS
    return blocks_of(length, length, limits, causal=True, rows=rows)


def _add_sinks(probabilities: Tensor, scores: Tensor, sinks: Tensor, b: int) -> Tensor:
    """Multiply probabilities [b * g, a/g * rows, keys] by the share of the keys, in place.

    Returns:
        the logsumexp of scores and sinks, fp32 [b, a, rows]
    """
    logsumexp = logsumexp_of(scores, probabilities).view(b, len(sinks), -1)
    total = torch.logaddexp(logsumexp, sinks.to(logsumexp.dtype)[:, None])
    shares = (logsumexp - total).exp().to(probabilities.dtype)
    probabilities.mul_(shares.view(len(probabilities), -1, 1))
    return total
