"""Causal attention: in blocks of queries on CPUs, within documents, and to some of the keys.

On a CPU torch's fused attention is slower than matmuls of the same size (for 512 tokens 1.5
times as slow in fp32, twice in bf16). A block of queries skips the keys that come after the block.
Torch's fused kernels are faster on GPUs, and on CPUs for up to 64 tokens in fp32.

On a GPU one call of flash attention computes all documents of a micro-batch; elsewhere there is one
call per document (arXiv 2402.13991). The work is the sum of the squared lengths, and no mask is
needed, which would be [b, s, s] and rule out fused kernels.

b micro-batch, a query heads, g key-value heads, s sequence, d head size.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROWS = 128  # number of queries of a block
# The longest sequence whose probabilities are kept for the backward pass; 0 in the trace of a GPU.
MAX_KEPT_LENGTH = 1024
MAX_FUSED_LENGTH = 64  # the longest sequence for which torch's kernel is faster on a CPU in fp32
MAX_FLASH_HEAD_SIZE = 256  # torch's flash_api.cpp, which also requires a multiple of 8
# Not cuDNN, which builds a plan for each new shape in 0.1 to 0.4 s: document lengths keep changing.
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MIN_PINNED_ELEMENTS = 2048  # enough for the documents of most micro-batches

Lengths = tuple[tuple[int, ...], ...]  # document lengths of each sequence
Varlen = Callable[..., Tensor]  # called like torch.nn.attention.varlen.varlen_attn


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int = 0) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, where no query sees a later key.

    q [b, a, s, d] and k, v [b, g, s, d] to [b, a, s, d].

    Args:
        window: length of the sequence of which q is a document; 0: q is a whole sequence
    """
    if in_blocks(q, q.shape[2], window):
        return _BlockedAttention.apply(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def document_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, *, varlen: Varlen | None
) -> Tensor:
    """Return the causal attention of each document by itself.

    q [b, a, s, d] and k, v [b, g, s, d] to [b, a, s, d].

    Args:
        lengths: document lengths of each sequence; the lengths of a sequence sum to s
        varlen: kernel for all documents, from `varlen_kernel`; None: one call per document
    """
    if varlen is not None:
        return _packed_attention(q, k, v, lengths, varlen)
    if q.device.type == "cpu":
        return _attention_by_document(q, k, v, lengths)
    with sdpa_kernel(WITHOUT_PLANS):
        return _attention_by_document(q, k, v, lengths)


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


@lru_cache(maxsize=8)
def has_flash_attention(device: torch.device) -> bool:
    """Return True if torch's flash attention for 16 bits runs on a GPU."""
    if not torch.backends.cuda.is_flash_attention_available() or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def in_blocks(x: Tensor, length: int, window: int = 0) -> bool:
    """Return True if attention over `length` tokens runs in blocks, not in torch's kernel.

    Args:
        x: a tensor of the same device and type as queries, keys and values
        window: length of the sequence of which the tokens are a document; 0: they are all
    """
    is_short = x.dtype == torch.float32 and (window or length) <= MAX_FUSED_LENGTH
    return x.device.type == "cpu" and length <= MAX_KEPT_LENGTH and not is_short


def _packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, varlen: Varlen) -> Tensor:
    """Compute all documents in one call, laid end to end: [b * s, a or g, d].

    The packed tensors are views if the order in memory is [b, s, a, d]
    (`elementwise.heads_first` arranges it).
    """
    b, a, s, d = q.shape
    packed = (x.transpose(1, 2).reshape(b * s, -1, d) for x in (q, k, v))
    ends = cumulative_lengths(lengths, q.device)
    longest = max(map(max, lengths))
    y = varlen(
        *packed,
        ends,
        ends,
        longest,
        longest,
        window_size=(-1, 0),  # causal
        enable_gqa=a != k.shape[1],
    )
    return y.view(b, s, a, d).transpose(1, 2)


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


def _attention_by_document(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> Tensor:
    """Call attention per document; adjacent sequences with equal document lengths share calls."""
    divisions, counts = zip(
        *((documents, len(list(run))) for documents, run in groupby(lengths)), strict=True
    )
    attended = []
    # The backward pass of split is one cat; each slice would allocate a full-size tensor of zeros.
    for *run, lengths_of_run in zip(*(t.split(counts) for t in (q, k, v)), divisions, strict=True):
        parts = zip(*(t.split(lengths_of_run, dim=2) for t in run), strict=True)
        attended.append(
            torch.cat([causal_attention(*document, window=q.shape[2]) for document in parts], dim=2)
        )
    return torch.cat(attended)


class _BlockedAttention(torch.autograd.Function):
    """Keeps each block's probabilities, a s (s + ROWS) / 2 of them for a sequence.

    The heads that share a key and a value are rows of one matmul, [b * g, a/g * ROWS, d].
    """

    @staticmethod
    def forward(ctx, q, k, v):
        b, a, s, d = q.shape
        keys, values = k.flatten(0, 1), v.flatten(0, 1)  # [b * g, s, d]
        out, kept = q.new_empty(s, b, a, d).permute(1, 2, 0, 3), []  # as the next matmul reads it
        for first, last in _blocks(q):
            queries = _rows(q, k, first, last)
            scores = _scores(queries, keys[:, :last], first)
            kept.append(scores.softmax(dim=-1))
            block = torch.bmm(kept[-1], values[:, :last])
            out[:, :, first:last] = block.view(b, a, last - first, d)
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *kept = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        keys, values = k.flatten(0, 1), v.flatten(0, 1)
        grad_q = torch.empty_like(q)
        # A single block overwrites the gradients of keys and values, several are added up.
        several = len(kept) > 1
        create = torch.zeros_like if several else torch.empty_like
        grad_keys, grad_values = create(keys), create(values)
        for (first, last), probabilities in zip(_blocks(q), kept, strict=True):
            queries, rows = _rows(q, k, first, last), _rows(grad, k, first, last)
            grad_values[:, :last].baddbmm_(probabilities.transpose(1, 2), rows, beta=several)
            grad_scores = torch.bmm(rows, values[:, :last].transpose(1, 2))
            grad_scores = torch._softmax_backward_data(
                grad_scores, probabilities, -1, probabilities.dtype
            )
            block = torch.bmm(grad_scores, keys[:, :last]).mul_(scale)
            block = block.view(q[:, :, first:last].shape)
            if several:
                grad_q[:, :, first:last] = block
            else:
                grad_q = block
            grad_keys[:, :last].baddbmm_(
                grad_scores.transpose(1, 2), queries, beta=several, alpha=scale
            )
        return grad_q, grad_keys.view(k.shape), grad_values.view(v.shape)


def _blocks(q: Tensor) -> list[tuple[int, int]]:
    """Return the first row of each block, and the row after its last one."""
    length = q.shape[2]
    return [(first, min(first + ROWS, length)) for first in range(0, length, ROWS)]


def _rows(x: Tensor, k: Tensor, first: int, last: int) -> Tensor:
    """Return a block of [b, a, s, d] grouped by key-value head: [b * g, a/g * rows, d]."""
    b, g = k.shape[:2]
    return x[:, :, first:last].reshape(b * g, -1, x.shape[-1])


def _scores(queries: Tensor, keys: Tensor, first: int) -> Tensor:
    """Return scaled scores [b * g, a/g * rows, keys], -inf where a key follows the query."""
    rows = keys.shape[1] - first
    scale = queries.shape[-1] ** -0.5
    scores = torch.baddbmm(
        queries.new_empty(1), queries, keys.transpose(1, 2), beta=0, alpha=scale
    )  # scaled before it is rounded
    later = scores.new_full((rows, rows), float("-inf")).triu_(1)
    scores.unflatten(1, (-1, rows))[..., first:].add_(later)
    return scores


# Attention to some of the keys, and the merging of such parts into attention to all of them.
#
# A part comes with the logsumexp of its scores, which is the logarithm of the softmax's
# denominator, so that parts can be merged in any order ("online softmax", Milakov and Gimelshein
# 2018, arXiv 1805.02867). The backward pass of a part needs the merged result and the merged
# logsumexp, but no other part (FlashAttention, arXiv 2205.14135; ring attention, arXiv
# 2310.01889).
#
# b sequences, a query heads, g key-value heads, n queries, m keys, d head size.

aten = torch.ops.aten
LOGSUMEXP_ROWS = 32  # the memory-efficient kernel pads its logsumexps to a multiple of this

Part = tuple[Tensor, Tensor]  # output fp32 [b, a, n, d], and logsumexp fp32 [b, a, n]
Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Part:
    """Return the attention of q [b, a, n, d] to k and v [b, g, m, d].

    Args:
        causal: query i sees the keys up to i; requires n = m
    """
    kernel = kernel_for(q)
    if not kernel.grouped:
        k, v = (_for_each_query_head(x, q) for x in (k, v))
    out, logsumexp = kernel.forward(q, k, v, causal)
    return out.float(), logsumexp.float()


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Part, *, causal: bool
) -> Gradients:
    """Return the gradients of q, k and v that pass through this part, in fp32.

    Args:
        grad: gradient of the merged output, [b, a, n, d]
        whole: the merged output and logsumexp
    """
    kernel, groups, (out, logsumexp) = kernel_for(q), k.shape[1], whole
    if not kernel.grouped:
        k, v = (_for_each_query_head(x, q) for x in (k, v))
    grads = kernel.backward(grad, q, k, v, (out.to(q.dtype), logsumexp), causal)
    grad_q, grad_k, grad_v = (x.float() for x in grads)
    if not kernel.grouped:
        grad_k, grad_v = (x.unflatten(1, (groups, -1)).sum(dim=2) for x in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def merge(one: Part, other: Part) -> Part:
    """Merge two parts of the same queries; `one` must have a key for every query."""
    (out, logsumexp), (out_other, logsumexp_other) = one, other
    share = torch.sigmoid(logsumexp_other - logsumexp)[..., None]  # of the other part
    merged = logsumexp - F.logsigmoid(logsumexp - logsumexp_other)
    return torch.lerp(out, out_other, share), merged


@dataclass(frozen=True)
class Kernel:
    """A fused kernel whose forward pass also returns the logsumexp.

    Attributes:
        forward: function of q, k, v and causal
        backward: function of the gradient, q, k, v, the merged part and causal
        grouped: several query heads may share a key and a value
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], Part]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Part, bool], Gradients]
    grouped: bool


def kernel_for(q: Tensor) -> Kernel:
    """Return the fastest kernel for the type, the device and the head size of q."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return REFERENCE
    if q.device.type == "cpu":
        return CPU_FLASH
    if q.device.type != "cuda" or q.shape[-1] % 8 or q.shape[-1] > MAX_FLASH_HEAD_SIZE:
        return REFERENCE
    if q.dtype == torch.float32:
        return EFFICIENT
    return FLASH if has_flash_attention(q.device) else REFERENCE


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


REFERENCE = Kernel(
    _reference_forward, _reference_backward, grouped=False
)  # materialises the scores
CPU_FLASH = Kernel(_cpu_forward, _cpu_backward, grouped=True)
FLASH = Kernel(_flash_forward, _flash_backward, grouped=True)
EFFICIENT = Kernel(_efficient_forward, _efficient_backward, grouped=False)
