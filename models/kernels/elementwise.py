"""Element-wise operations and look-ups between matmuls, with the backward pass written out.

Autograd would keep each intermediate result, in fp32 where it is computed in fp32; these functions
keep only their inputs and recompute the rest. Where torch's own operation does the same, it is used
in eager mode, because a function in Python costs 20 us. Arithmetic is in fp32. Norms and the
residual stream are in `norms.py`, dropout is at the end of this file.

s sequence, b micro-batch, h hidden, f MLP hidden, a query heads, g key-value heads, d head size.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.kernels.compile import Function, as_written, native_on_cpu

# Order of the heads' dimensions in memory -> (permutation from [s, b, a, d] to this order,
# permutation from this order to [b, a, s, d]).
Order = Literal["basd", "sbad", "bsad"]
PERMUTATIONS: dict[Order, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "basd": ((1, 2, 0, 3), (0, 1, 2, 3)),
    "sbad": ((0, 1, 2, 3), (1, 2, 0, 3)),
    "bsad": ((1, 0, 2, 3), (0, 2, 1, 3)),
}


def swiglu(x: Tensor, fuse: Function) -> Tensor:
    """Return silu(gate) * up (arXiv 2002.05202): gate|up [..., 2f] to [..., f]."""
    return _Gated.apply(x, fuse(_swiglu), fuse(_swiglu_backward))


def geglu(x: Tensor, fuse: Function) -> Tensor:
    """Return gelu(gate) * up (arXiv 2002.05202), with the tanh approximation: as `swiglu`."""
    return _Gated.apply(x, fuse(_geglu), fuse(_geglu_backward))


def clamped_swiglu(x: Tensor, fuse: Function) -> Tensor:
    """Return the gated activation of GPT-OSS: gate|up [..., 2f] to [..., f].

    It is (up + 1) * gate * sigmoid(1.702 gate), after the gate is limited to at most 7 and `up` to
    -7 .. 7 (`GptOssExperts._apply_gate` in transformers).
    """
    return _Gated.apply(x, fuse(_clamped_swiglu), fuse(_clamped_swiglu_backward))


def squared_relu(x: Tensor, fuse: Function) -> Tensor:
    """Return max(x, 0)^2 (Primer, arXiv 2109.08668): [..., f] to [..., f]."""
    return _Activation.apply(x, fuse(_squared_relu), fuse(_squared_relu_backward))


# All activations but `gelu`, whose kernel also computes the gradient of a bias, by name.
ACTIVATIONS: dict[str, Callable[[Tensor, Function], Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "clamped_swiglu": clamped_swiglu,
    "squared_relu": squared_relu,
}


def gelu(x: Tensor, bias: Tensor | None, fuse: Function, *, exact: bool = False) -> Tensor:
    """Return GELU, or its tanh approximation (arXiv 1606.08415): [..., f] to [..., f].

    Args:
        bias: [f], already added to x by the matmul, which does this at no cost but does not return
            the gradient of the bias. That gradient is a column sum of the gradient of x, and
            is computed here together with it.
        exact: not the approximation; on a CPU it takes a third of the time
    """
    approximate = "none" if exact else "tanh"
    if bias is None and fuse is as_written:
        return F.gelu(x, approximate=approximate)
    return _GELU.apply(x, bias, fuse, approximate)


def heads_first(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    *,
    heads: int,
    kv_heads: int,
    order: Order,
    fuse: Function,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split q|k|v [s, b, a + 2g, d] into q [b, a, s, d] and k, v [b, g, s, d].

    Args:
        rotation: cos and sin [s, b or 1, 1, r/2] of the angles by which the pairs (i, i + r/2) of
            the first r columns of q and k are rotated, as Llama's published weights expect (arXiv
            2104.09864); r is d or less
        order: order of the dimensions in memory
    """
    cos, sin = rotation or (None, None)
    if rotation is None and fuse is as_written:
        if order == "sbad":  # torch's kernel reads the parts of q|k|v where they are
            # Split before permuting: autograd then joins the gradients in the order of qkv in
            # memory, without a copy.
            parts = qkv.split_with_sizes([heads, kv_heads, kv_heads], dim=2)
            q, k, v = (part.permute(1, 2, 0, 3) for part in parts)
            return q, k, v
        return _heads_first(qkv, None, None, heads, kv_heads, order)
    return _HeadsFirst.apply(qkv, cos, sin, (heads, kv_heads, order), fuse)


def rotated_last(
    x: Tensor, rotation: tuple[Tensor, Tensor], *, order: Order, fuse: Function
) -> Tensor:
    """Rotate the last columns of each head: [s, b, a, d] to [b, a, s, d].

    Args:
        rotation: cos and sin [s, b or 1, 1, r/2] for the last r columns, as in `heads_first`
        order: order of the dimensions in memory
    """
    return _RotatedLast.apply(x, *rotation, order, fuse)


def keys_and_values(
    heads: Tensor, rotated: Tensor, *, key_size: int, order: Order, fuse: Function
) -> tuple[Tensor, Tensor]:
    """Return the keys [b, a, s, d + r] and the values [b, a, s, v] of latent attention.

    Args:
        heads: d columns of a key and v columns of a value of each head, [b, s, a, d + v]
        rotated: rotated columns of the keys of all heads, [b, s, r]
        key_size: d
        order: order of the dimensions in memory
    """
    return _KeysAndValues.apply(heads, rotated, key_size, order, fuse)


def keys_and_values_gradients(
    grad_k: Tensor, grad_v: Tensor, *, key_size: int, fuse: Function
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `heads` and `rotated` in `keys_and_values`."""
    return fuse(_keys_and_values_backward)(grad_k, grad_v, key_size)


class _RotatedLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, order, fuse):
        ctx.fuse = fuse
        ctx.save_for_backward(cos, sin)
        return fuse(_rotated_last)(x, cos, sin, order)

    @staticmethod
    def backward(ctx, grad):
        return ctx.fuse(_rotated_last_backward)(grad, *ctx.saved_tensors), None, None, None, None


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, rotated, key_size, order, fuse):
        ctx.key_size, ctx.fuse = key_size, fuse
        return fuse(_keys_and_values)(heads, rotated, key_size, order)

    @staticmethod
    def backward(ctx, grad_k, grad_v):
        grads = keys_and_values_gradients(grad_k, grad_v, key_size=ctx.key_size, fuse=ctx.fuse)
        return *grads, None, None, None


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, gradient):
        ctx.gradient = gradient
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.gradient(grad, *ctx.saved_tensors), None, None


class _Gated(_Activation):
    """Gated activation, whose compiled gradient reads each of its inputs once.

    The compiled function receives the result's halves as separate [n, f] matrices. If it joined
    them, the kernel would compute both halves for each element. torch's compiler recognises only
    matrices as parts of a tensor that do not overlap.
    """

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gradient = x.new_empty(x.shape)  # contiguous
        halves = gradient.flatten(0, -2).chunk(2, dim=-1)
        ctx.gradient(grad.flatten(0, -2), x.flatten(0, -2), *halves)
        return gradient, None, None


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, fuse, approximate):
        ctx.fuse, ctx.settings = fuse, (bias is not None, approximate)
        ctx.save_for_backward(x)
        return fuse(_gelu)(x, approximate)

    @staticmethod
    def backward(ctx, grad):
        return *ctx.fuse(_gelu_backward)(grad, *ctx.saved_tensors, *ctx.settings), None, None


class _HeadsFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, cos, sin, order, fuse):
        ctx.fuse = fuse
        ctx.save_for_backward(cos, sin)
        return fuse(_heads_first)(qkv, cos, sin, *order)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.fuse(_heads_first_backward)(*grads, *ctx.saved_tensors), None, None, None, None


def _check_halves(x: Tensor, gate: Tensor, up: Tensor) -> None:
    """Tell torch's compiler that the rows of both halves are as far apart as those of x [n, 2f].

    If n is dynamic, it would otherwise treat the distance as dynamic, too, and store element by
    element.
    """
    for half in (gate, up):
        torch._check(half.stride(0) == x.shape[1])


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(x.dtype)


def _swiglu_backward(grad: Tensor, x: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    _check_halves(x, grad_gate, grad_up)
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    grad_gate.copy_(grad * up * (sigmoid + silu * (1 - sigmoid)))
    grad_up.copy_(grad * silu)


SQRT_2_OVER_PI, CUBIC = math.sqrt(2 / math.pi), 0.044715  # of the approximation of GELU


def _tanh_of_gelu(x: Tensor) -> Tensor:
    """Return the tanh in x (1 + tanh) / 2, the approximation of GELU."""
    return torch.tanh(SQRT_2_OVER_PI * x * (1 + CUBIC * x * x))


def _geglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (0.5 * gate * (1 + _tanh_of_gelu(gate)) * up).to(x.dtype)


def _geglu_backward(grad: Tensor, x: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    _check_halves(x, grad_gate, grad_up)
    gate, up = x.float().chunk(2, dim=-1)
    tanh = _tanh_of_gelu(gate)
    slope = SQRT_2_OVER_PI * (1 + 3 * CUBIC * gate * gate)  # of the argument of tanh
    half = 0.5 * (1 + tanh)
    grad_gate.copy_(grad * up * (half + 0.5 * gate * (1 - tanh * tanh) * slope))
    grad_up.copy_(grad * gate * half)


SIGMOID_FACTOR, LIMIT = 1.702, 7.0  # `swiglu_limit` of every published GPT-OSS


def _clamped_swiglu(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return ((up + 1) * gate * (SIGMOID_FACTOR * gate).sigmoid()).to(x.dtype)


def _clamped_swiglu_backward(grad: Tensor, x: Tensor, grad_gate: Tensor, grad_up: Tensor) -> None:
    _check_halves(x, grad_gate, grad_up)
    gate, up = x.float().chunk(2, dim=-1)
    limited = gate.clamp(max=LIMIT)
    sigmoid = (SIGMOID_FACTOR * limited).sigmoid()
    slope = sigmoid * (1 + SIGMOID_FACTOR * limited * (1 - sigmoid))
    grad_gate.copy_(grad * (up.clamp(-LIMIT, LIMIT) + 1) * slope * (gate <= LIMIT))
    grad_up.copy_(grad * limited * sigmoid * (up.abs() <= LIMIT))


def _squared_relu(x: Tensor) -> Tensor:
    return x.float().relu().square().to(x.dtype)


def _squared_relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return (2 * grad * x.float().relu()).to(x.dtype)


@native_on_cpu
def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


@native_on_cpu
def _gelu_backward(
    grad: Tensor, x: Tensor, has_bias: bool, approximate: str
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of the bias."""
    grad_x = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return grad_x, grad_x.flatten(0, -2).sum(0) if has_bias else None


def _heads_first(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    kv_heads: int,
    order: Order,
) -> tuple[Tensor, Tensor, Tensor]:
    if cos is None or sin is None:
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    else:
        queries_keys, v = qkv.split([heads + kv_heads, kv_heads], dim=2)
        q, k = _rotate(queries_keys, cos, sin).split([heads, kv_heads], dim=2)
    there, back = PERMUTATIONS[order]
    return tuple(tensor.permute(there).contiguous().permute(back) for tensor in (q, k, v))


def _heads_first_backward(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """Return the gradient of q|k|v [s, b, a + 2g, d]."""
    q, k, v = (gradient.permute(2, 0, 1, 3) for gradient in (grad_q, grad_k, grad_v))
    if cos is None or sin is None:
        return torch.cat([q, k, v], dim=2)
    q, k = _rotate(q, cos, -sin), _rotate(k, cos, -sin)
    return torch.cat([q, k, v], dim=2)


def _rotated_last(x: Tensor, cos: Tensor, sin: Tensor, order: Order) -> Tensor:
    there, back = PERMUTATIONS[order]
    return _rotate_last(x, cos, sin).permute(there).contiguous().permute(back)


def _rotated_last_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the gradient of the heads, [s, b, a, d]."""
    return _rotate_last(grad.permute(2, 0, 1, 3), cos, -sin)


def _rotate_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first = x.shape[-1] - 2 * cos.shape[-1]
    return torch.cat([x[..., :first], _rotate(x[..., first:], cos, sin)], dim=-1)


def _keys_and_values(
    heads: Tensor, rotated: Tensor, key_size: int, order: Order
) -> tuple[Tensor, Tensor]:
    own, v = heads[..., :key_size], heads[..., key_size:]
    shared = rotated[:, :, None].expand(*own.shape[:3], -1)
    there, back = PERMUTATIONS[order]
    k, v = (
        x.transpose(0, 1).permute(there).contiguous().permute(back)
        for x in (torch.cat([own, shared], dim=-1), v)
    )
    return k, v


def _keys_and_values_backward(
    grad_k: Tensor, grad_v: Tensor, key_size: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients [b, s, a, d + v] and [b, s, r]."""
    k, v = grad_k.transpose(1, 2), grad_v.transpose(1, 2)  # [b, s, a, ...]
    shared = k[..., key_size:].sum(2, dtype=torch.promote_types(k.dtype, torch.float32))
    return torch.cat([k[..., :key_size], v], dim=-1), shared.to(k.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + r/2) of the first r columns of x [s, b, a, d]."""
    columns = 2 * cos.shape[-1]
    if columns < x.shape[-1]:
        rotated = _rotate(x[..., :columns], cos, sin)
        return torch.cat([rotated, x[..., columns:]], dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


# Look-up in a table of vectors, with the backward pass written out.
#
# The gradient of a row is a sum over all its occurrences. For 16-bit gradients, torch's kernel
# rounds the running sum after every addition on CPUs, so that a row that occurs 16,384 times
# receives only a fraction of its gradient. On GPUs it rounds less often. This function accumulates
# in fp32 and rounds only the result.
#
# n tokens of a micro-batch, h hidden, v rows of the table.

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
# Maximum number of elements of each fp32 tensor in the backward pass, 64 MiB.
MAX_WIDE_ELEMENTS = 2**24


def look_up(rows: Tensor, table: Tensor) -> Tensor:
    """Return the rows [...] of a table [v, h]: [..., h]."""
    if table.dtype not in SIXTEEN_BITS:
        return F.embedding(rows, table)  # whose sums need not be wider than fp32
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
    if grad.dtype not in SIXTEEN_BITS:
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


# Dropout with masks that are computed from row numbers, in the kernel that applies them. A row
# number is 64 bits that identify a row of the logical tensor
# (`models/parallel/micro_batch_info.py` computes it); the mask of an element is a hash of its row
# number and its column. A compiled kernel computes the mask, applies it and writes the mask, one
# byte per element, for the backward pass.


def signed(number: int, bits: int) -> int:
    """Return the signed integer with the same bits."""
    return number - (1 << bits) if number >> (bits - 1) else number


# 2^64 and 2^32 divided by the golden ratio, the latter with the same 32 bits as a signed number for
# GPUs: Triton multiplies positions in int32 and rejects constants that do not fit. With the signed
# number, torch 2.13's compiled CPU code also multiplies in int32, and writes past the mask's end.
GOLDEN_64 = signed(0x9E3779B97F4A7C15, 64)
GOLDEN_32_ON_CPU, GOLDEN_32_ON_GPU = 0x9E3779B9, signed(0x9E3779B9, 32)


def drop_out(x: Tensor, rows: Tensor, probability: float, fuse: Function) -> Tensor:
    """Return x / (1 - probability) where the mask keeps x, else 0.

    Args:
        x: [..., columns]
        rows: int64 [...], the row numbers
    """
    return _DropOut.apply(x, rows, probability, fuse)


class _DropOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, probability, fuse):
        ctx.probability, ctx.fuse = probability, fuse
        dropped, keep = fuse(_drop_out)(x, rows, probability)
        ctx.save_for_backward(keep)
        return dropped

    @staticmethod
    def backward(ctx, grad):
        return ctx.fuse(drop)(grad, *ctx.saved_tensors, ctx.probability), None, None, None


@native_on_cpu
def _drop_out(x: Tensor, rows: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    keep = keep_mask(rows, x.shape[-1], probability)
    return drop(x, keep, probability), keep


def drop(x: Tensor, keep: Tensor, probability: float) -> Tensor:
    """Return x / (1 - probability) where `keep`, else 0; its gradient is the same function."""
    return torch.where(keep, x * (1 / (1 - probability)), 0)


def keep_mask(rows: Tensor, columns: int, probability: float) -> Tensor:
    """Draw from Bernoulli(1 - probability): rows int64 [...] to bool [..., columns].

    Each element hashes the 64 bits of its row and its column to 32 bits (with the constants of
    lowbias32, Wellons 2018, "Prospecting for hash functions"); int64 would take twice the memory.
    """
    low, high = rows.to(torch.int32), (rows >> 32).to(torch.int32)
    golden = GOLDEN_32_ON_CPU if rows.device.type == "cpu" else GOLDEN_32_ON_GPU
    counters = torch.arange(columns, device=rows.device) * golden  # int64: see above
    bits = low.unsqueeze(-1) + counters.to(torch.int32)  # wraps around, as intended throughout
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(signed(0x7FEB352D, 32))
    bits.add_(high.unsqueeze(-1))
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(signed(0x846CA68B, 32))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    return bits >= round(probability * 2**32) - 2**31


def mix(numbers: Tensor) -> Tensor:
    """Hash int64 [...] with splitmix64 (Steele et al. 2014): neighbours get unrelated results."""
    mixed = numbers * GOLDEN_64
    mixed = (mixed ^ _shifted(mixed, 30)) * signed(0xBF58476D1CE4E5B9, 64)
    mixed = (mixed ^ _shifted(mixed, 27)) * signed(0x94D049BB133111EB, 64)
    return mixed ^ _shifted(mixed, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right logically; torch's own shift copies the sign bit."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
