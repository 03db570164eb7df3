"""Self-attention, the core that it shares with latent attention, and norms of queries and keys.

s sequence, b micro-batch, h hidden, t tensor ranks, a/t query heads and g/t key-value heads on
this rank, d head size. Under sequence parallelism the residual stream is [s/t, b, h].
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from models.config import AttentionKind, ModelConfig, RopeScaling
from models.context_parallel.attention import (
    Divided,
    attention_with_dropout,
    gather_keys,
    gathered_attention,
    ring_attention,
    windowed_attention,
    with_whole_sequences,
)
from models.context_parallel.collectives import ContextAxis
from models.context_parallel.division import Slices
from models.context_parallel.tiles import noting_logits, tiles_of
from models.experts.routing import ExpertAxis
from models.initialization import query_multiplier
from models.kernels.attention import (
    causal_attention,
    document_attention,
    in_blocks,
    varlen_kernel,
)
from models.kernels.attention_parts import LargestLogits, Limits
from models.kernels.compile import Fusing
from models.kernels.elementwise import Order, heads_first
from models.kernels.norms import norm_heads
from models.parallel.collectives import TensorAxis
from models.parallel.layers import ColumnParallelLinear, Norm, RMSNorm, RowParallelLinear
from models.parallel.micro_batch_info import (
    Documents,
    MicroBatchInfo,
    positions_in,
    token_positions,
)
from models.sharding import Sharding, declared_parameter

# Frequencies of rotary positions (arXiv 2104.09864), scaled for long sequences if asked for. All
# arithmetic is in fp32 and in the order of transformers' `modeling_rope_utils`. At position
# 100,000, fp32 rounds an angle by up to 0.004 radians. A different order of operations would
# therefore give an imported model slightly different angles than in its training.


@dataclass(frozen=True)
class Frequencies:
    """Rotation frequency of each pair of rotated columns of a head.

    Attributes:
        columns: rotated columns of a head, d
        theta: base of the frequencies
        scaling: None: the frequency of pair i is theta^(-2i/d)
    """

    columns: int
    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the frequencies in radians per position: fp32 [d/2]."""
        columns = torch.arange(0, self.columns, 2, device=device).float()
        base, scaling = self.theta ** (columns / self.columns), self.scaling
        if scaling is None:
            return 1.0 / base
        if scaling.type == "linear":
            return 1.0 / base / scaling.factor
        if scaling.type == "llama3":
            return _llama3(1.0 / base, scaling)
        return _yarn(base, self.theta, scaling)

    @property
    def amplitude(self) -> float:
        """The factor by which rotated queries and keys are each multiplied."""
        return self.scaling.amplitude if self.scaling else 1.0


def _llama3(usual: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between.

    As in transformers' `_compute_llama3_parameters`; published with Llama 3.1.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    length = scaling.original_sequence_length
    assert length is not None  # `RopeScaling` requires it
    wavelength = 2 * math.pi / usual
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * usual / scaling.factor + smooth * usual
    scaled = torch.where(wavelength > length / low, usual / scaling.factor, between)
    return torch.where(wavelength < length / high, usual, scaled)


def _yarn(base: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend in between.

    The "NTK-by-parts" interpolation of arXiv 2309.00071, section 3.2. The bounds of the blend are
    indices of pairs, as in transformers' `_compute_yarn_parameters`.
    """
    count, length = base.shape[0], scaling.original_sequence_length
    assert length is not None  # `RopeScaling` requires it

    def pair_of(turns: float) -> float:
        return count * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # transformers limits the last pair by the number of columns, twice that of the pairs.
    first, last = max(first, 0), min(last, 2 * count - 1)
    width = last - first or 0.001
    pairs = torch.arange(count, dtype=torch.float32, device=base.device)
    kept = 1 - ((pairs - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * base) * (1 - kept) + 1.0 / base * kept


@dataclass(frozen=True, kw_only=True)
class ModelAxes:
    """The parallel axes over which layers communicate, from the perspective of one rank.

    The default is one rank that has everything.
    """

    tensor: TensorAxis = field(default_factory=TensorAxis)
    context: ContextAxis = field(default_factory=ContextAxis)
    expert: ExpertAxis = field(default_factory=ExpertAxis)


class AttentionCore(Fusing):
    """Causal attention of this rank's heads, within each document, between projections.

    Communication: that of attention over context ranks.

    output: the projection of the heads, which a subclass defines
    kind: "full", "window", or "nope", which is full attention without positions
    recompute_core: the backward pass recomputes the attention core (arXiv 2205.05198)
    """

    output: RowParallelLinear

    def __init__(
        self,
        config: ModelConfig,
        axes: ModelAxes,
        *,
        name: str,
        kind: AttentionKind = "full",
        recompute_core: bool = False,
    ):
        super().__init__()
        self.config, self.name = config, name
        self.tensor, self.context = axes.tensor, axes.context
        self.recompute_core = recompute_core
        self.heads = config.heads // self.tensor.size  # a/t
        self.kv_heads = config.kv_heads // self.tensor.size  # g/t
        self.query_multiplier = query_multiplier(config)
        self.frequencies = rotary_frequencies(config, kind)
        self.has_table_of_its_own = self.frequencies not in (None, rotary_frequencies(config))
        self.largest_logits: LargestLogits | None = None  # set if the optimizer limits logits
        window = config.window.size if kind == "window" and config.window else None
        self.limits: Limits | None = None
        if window is not None or config.attention_soft_cap is not None:
            self.limits = Limits(window, config.attention_soft_cap)
        self.sinks: nn.Parameter | None = None
        if config.attention_sinks:
            sharding = Sharding((config.heads,), dimension=0, blocks=(config.heads,))
            self.sinks = declared_parameter(sharding, self.tensor)  # [a/t]

    def _rotation(self, x: Tensor, info: MicroBatchInfo) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin for the tokens of x [s, ...], as `rotary_table` does."""
        if self.frequencies is None:
            return None
        slices = info.slices or (range(len(x)),)
        table = rotary_table_of_windows if self.has_table_of_its_own else rotary_table
        return table(slices, self.frequencies, x.device, info.documents)

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, info: MicroBatchInfo
    ) -> Tensor:
        """q [b, a/t, s, d] and k, v [b, g/t, s, d] to [s, b, a/t * d]."""
        context, division = self.context, info.division
        if division is None:
            y = self._attend(q, k, v, sinks, info=info)
        elif context.attention == "ulysses":
            share = self.heads // context.size
            whole, head = replace(info, division=None), context.rank * share
            of_share = None if sinks is None else sinks[head : head + share]
            attend = partial(self._attend, sinks=of_share, info=whole, head=head)
            y = with_whole_sequences(attend, q, k, v, context, division.order)
        elif self._drops(info):
            y = self._attend(q, *gather_keys(k, v, context, division.order), sinks, info=info)
        else:
            lengths = info.documents.lengths if info.documents else None
            limits = self.limits and self.limits.for_part(division.length, 0)
            tiles = tiles_of(division.slices, lengths, limits)
            divided = Divided(context, division, tiles, self.largest_logits)
            if limits is not None and limits.window is not None:
                y = windowed_attention(q, k, v, divided, sinks)
            elif context.attention == "ring":
                y = ring_attention(q, k, v, divided, sinks)
            else:
                y = gathered_attention(q, k, v, divided, sinks)
        return y.permute(2, 0, 1, 3).flatten(2)  # [s, b, a/t * d]

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        *,
        info: MicroBatchInfo,
        head: int = 0,
    ) -> Tensor:
        """Return the attention of q [b, a/t, s, d] to k and v of whole sequences: [b, a/t, s, d].

        Args:
            sinks: of the heads in q, [a/t]; None: none
            head: number of the first head among this tensor rank's heads
        """
        if self.largest_logits is not None:
            slices = info.slices or (range(q.shape[2]),)
            lengths = info.documents.lengths if info.documents else None
            tiles = tiles_of(slices, lengths, self.limits)
            q = noting_logits(q, k, tiles, self.largest_logits, head=head)
        if self._drops(info):
            return attention_with_dropout(
                q,
                k,
                v,
                probability=self.config.attention_dropout,
                info=info,
                layer=self.name,
                first_head=self.tensor.rank * self.heads + head,
                fuse=self.fuse,
                limits=self.limits,
                sinks=sinks,
            )
        if self.limits is not None or sinks is not None:
            return self._attend_specially(q, k, v, sinks, info)
        if info.documents is not None:
            varlen = varlen_kernel(q.device, q.dtype, q.shape[-1])
            return document_attention(q, k, v, info.documents.lengths, varlen=varlen)
        return causal_attention(q, k, v)

    def _attend_specially(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, info: MicroBatchInfo
    ) -> Tensor:
        """Return the attention with a window, sinks or a soft cap, as `_attend` does."""
        varlen, lengths = None, info.documents.lengths if info.documents else None
        if self.limits is None or self.limits.soft_cap is None:
            varlen = varlen_kernel(q.device, q.dtype, q.shape[-1])
        if varlen is not None and lengths is None:
            lengths = ((q.shape[2],),) * len(q)  # each sequence is one document
        if lengths is None:
            return causal_attention(q, k, v, limits=self.limits, sinks=sinks)
        return document_attention(q, k, v, lengths, varlen=varlen, limits=self.limits, sinks=sinks)

    @abstractmethod
    def rescaled_rows(self, factors: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the parameters whose rescaling multiplies the logits of each head by its factor.

        Args:
            factors: of this rank's query heads, [a/t]

        Returns:
            Parameters, and the factor of each of their rows on this rank.
        """

    def _drops(self, info: MicroBatchInfo) -> bool:
        """Return True if attention probabilities are dropped."""
        return info.dropout is not None and self.config.attention_dropout > 0

    def _order(self, qkv: Tensor, info: MicroBatchInfo) -> Order:
        """Return the memory order of the heads in which the attention core needs no copies.

        The order is contiguous if attention runs in blocks or keys are exchanged with other context
        ranks, and one sequence after the other if one call computes all documents. Otherwise it is
        [s, b, a, d]: torch's kernel then writes its output in the same order, which the next matmul
        needs.
        """
        if info.division is not None or in_blocks(qkv, len(qkv)):
            return "basd"
        is_special = self.limits is not None or self.sinks is not None
        if info.documents is not None or is_special:
            if varlen_kernel(qkv.device, qkv.dtype, qkv.shape[-1]):
                return "bsad"
            if is_special:
                return "basd"
        return "sbad"


class Attention(AttentionCore):
    """Causal self-attention over this rank's heads, within each document; without the output bias.

    Communication: that of its column-parallel linear layer, of attention over context ranks, and of
    its row-parallel linear layer.

    kind: "full", "window", or "nope", which is full attention without positions
    """

    def __init__(
        self,
        config: ModelConfig,
        axes: ModelAxes,
        *,
        name: str,
        kind: AttentionKind = "full",
        recompute_core: bool = False,
    ):
        super().__init__(config, axes, name=name, kind=kind, recompute_core=recompute_core)
        d, tensor = config.attention_head_size, self.tensor
        blocks = (config.heads * d, config.kv_heads * d, config.kv_heads * d)  # q|k|v
        self.qkv = ColumnParallelLinear(
            config.hidden_size, blocks, bias=config.has_qkv_bias, tensor=tensor
        )
        self.output = RowParallelLinear(
            config.heads * d,
            config.hidden_size,
            bias=config.has_attention_output_bias,
            tensor=tensor,
        )
        self.qk_norm_over = config.qk_norm_over if config.qk_norm else None
        self.q_norm: RMSNorm
        self.k_norm: RMSNorm
        if self.qk_norm_over == "head":
            self.q_norm = RMSNorm(d, config.norm_epsilon, input_is_split=True, tensor=tensor)
            self.k_norm = RMSNorm(d, config.norm_epsilon, input_is_split=True, tensor=tensor)
        elif self.qk_norm_over == "projection":
            self.q_norm = SplitRMSNorm(blocks[0], config.norm_epsilon, tensor=tensor)
            self.k_norm = SplitRMSNorm(blocks[1], config.norm_epsilon, tensor=tensor)

    def forward(self, x: Tensor, info: MicroBatchInfo) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        d = self.config.attention_head_size
        qkv = self.qkv(x)  # [s, b, (a + 2g)/t * d]
        if self.qk_norm_over == "projection":
            qkv = norm_queries_and_keys(qkv, self.q_norm, self.k_norm)
        qkv = qkv.unflatten(-1, (-1, d))  # [s, b, a/t + 2g/t, d]
        if self.qk_norm_over == "head":
            qkv = norm_heads(
                qkv,
                self.q_norm.parameters_here()[0],
                self.k_norm.parameters_here()[0],
                heads=(self.heads, self.kv_heads),
                epsilon=self.q_norm.epsilon,
                fuse=self.fuse,
            )
        q, k, v = heads_first(
            qkv,
            self._rotation(qkv, info),
            heads=self.heads,
            kv_heads=self.kv_heads,
            order=self._order(qkv, info),
            fuse=self.fuse,
        )
        if self.query_multiplier != 1:
            q = q * self.query_multiplier
        core = partial(self._core, info=info)
        inputs = (q, k, v) if self.sinks is None else (q, k, v, self.sinks)
        y = recomputed(core, *inputs) if self.recompute_core else core(*inputs)
        return self.output(y)

    @override
    def rescaled_rows(self, factors: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the projection of queries, keys and values.

        If each query head has a key of its own, both are multiplied by the square root of the
        factor. A shared key stays as it is, so that the other heads keep their logits.
        """
        keys = values = factors.new_ones(self.kv_heads)
        if self.heads == self.kv_heads:
            factors = keys = factors.sqrt()
        rows = torch.cat([factors, keys, values]).repeat_interleave(self.config.attention_head_size)
        for parameter in (self.qkv.weight, self.qkv.bias):
            if parameter is not None:
                yield parameter, rows


def recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), whose intermediate results the backward pass recomputes.

    No random state has to be restored, because dropout masks are functions of their key.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def rotary_frequencies(config: ModelConfig, kind: AttentionKind = "full") -> Frequencies | None:
    """Return the frequencies of the rotary positions of a kind of attention; None: it has none."""
    if config.positions != "rope" or kind == "nope":
        return None
    theta, scaling = config.rope_theta, config.rope_scaling
    if kind == "window" and config.window is not None:
        theta = config.window.rope_theta or theta
        scaling = scaling if config.window.rope_scaled else None
    return Frequencies(config.rotary_columns, theta, scaling)


@lru_cache(maxsize=2)  # shared by all layers, for a micro-batch and for a recomputed one
def rotary_table(
    slices: Slices, frequencies: Frequencies, device: torch.device, documents: Documents | None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, each [s, b, 1, d/2], in fp32 (arXiv 2104.09864).

    d are the rotated columns of a head.
    Both are multiplied by YaRN's attention factor. Without documents all sequences share the given
    positions, [s, 1, 1, d/2]. Attention depends only on differences of positions. They restart in
    each document so that the numbers of a document do not depend on its offset in the sequence. The
    tables are cached here instead of in a buffer of the model, because DeepSpeed would cast a
    buffer to bf16.
    """
    if documents is None:
        places = token_positions(slices, device)[:, None]  # [s, 1]
    else:
        places = positions_in(documents, device, slices)  # [s, b]
    per_position = frequencies.on(device)
    angles = (places[..., None].float() * per_position).unsqueeze(2)  # [s, b, 1, d/2]
    return angles.cos() * frequencies.amplitude, angles.sin() * frequencies.amplitude


# A second cache, for layers with other frequencies.
rotary_table_of_windows = lru_cache(maxsize=2)(rotary_table.__wrapped__)


# RMSNorm of the queries, and of the keys, over all heads together, as in OLMo 2.
#
# Tensor ranks divide the heads. They add up their sums between functions that a compiler may fuse.
# q, k and v in shapes are the numbers of their columns on this rank.


class SplitRMSNorm(RMSNorm):
    """RMSNorm over columns that are split over the tensor axis, as its weight is.

    `norm_queries_and_keys` applies two such norms, because their sums travel together.

    size: columns of all tensor ranks
    """

    def __init__(self, size: int, epsilon: float, *, tensor: TensorAxis):
        super().__init__(size, epsilon, input_is_split=True, tensor=tensor)
        self.weight = declared_parameter(Sharding((size,), 0, (size,)), tensor)


def norm_queries_and_keys(qkv: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
    """Return q|k|v with RMSNorm applied to q and to k, each over all heads: [s, b, (a + 2g)/t * d].

    As in OLMo 2 (arXiv 2501.00656, section 3.2). Forward: all-reduce of the mean squares, fp32
    [s, b, 2]; backward: all-reduce of as many means.
    """
    sizes = (q_norm.size, k_norm.size)
    return _QueryKeyNorm.apply(
        qkv, q_norm.weight, k_norm.weight, sizes, q_norm.epsilon, q_norm.tensor, q_norm.fuse
    )


class _QueryKeyNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, sizes, epsilon, tensor, fuse):
        columns = (len(q_weight), len(k_weight), qkv.shape[-1] - len(q_weight) - len(k_weight))
        ctx.shape, ctx.tensor, ctx.fuse = (columns, sizes), tensor, fuse
        mean_squares = _summed(fuse(_query_key_squares)(qkv, columns, sizes), tensor)
        inverse_rms = torch.rsqrt(mean_squares + epsilon)
        ctx.save_for_backward(qkv, q_weight, k_weight, inverse_rms)
        return fuse(_query_key_norm)(qkv, q_weight, k_weight, inverse_rms, columns)

    @staticmethod
    def backward(ctx, grad):
        (columns, sizes), fuse = ctx.shape, ctx.fuse
        saved = ctx.saved_tensors  # read once, because a recomputed pass unpacks them only once
        products = fuse(_query_key_products)(grad, *saved, columns, sizes)
        means = _summed(products, ctx.tensor)
        gradients = fuse(_query_key_norm_backward)(grad, *saved, means, columns)
        return *gradients, None, None, None, None


def _summed(terms: Tensor, tensor: TensorAxis) -> Tensor:
    if tensor.size > 1:
        dist.all_reduce(terms, group=tensor.group)
    return terms


def _query_key_squares(
    qkv: Tensor, columns: tuple[int, int, int], sizes: tuple[int, int]
) -> Tensor:
    """Return this rank's terms of the mean squares of q and k: [s, b, q + k + v] to fp32 [s, b, 2].

    sizes: columns of q and of k on all ranks
    """
    q, k, _ = qkv.float().split(columns, dim=-1)
    terms = [q.square().sum(-1) / sizes[0], k.square().sum(-1) / sizes[1]]
    return torch.stack(terms, dim=-1)


def _query_key_norm(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    inverse_rms: Tensor,
    columns: tuple[int, int, int],
) -> Tensor:
    """Return normed q, normed k and v: [s, b, q + k + v].

    inverse_rms: of q and k, fp32 [s, b, 2]
    """
    q, k, v = qkv.split(columns, dim=-1)
    of_q, of_k = inverse_rms.split(1, dim=-1)
    q = (q.float() * of_q).to(qkv.dtype) * q_weight
    k = (k.float() * of_k).to(qkv.dtype) * k_weight
    return torch.cat([q, k, v], dim=-1)


def _query_key_products(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    inverse_rms: Tensor,
    columns: tuple[int, int, int],
    sizes: tuple[int, int],
) -> Tensor:
    """Return this rank's terms of the means of gradient times normed value: fp32 [s, b, 2].

    sizes: as in `_query_key_squares`
    """
    q, k, _ = qkv.float().split(columns, dim=-1)
    grad_q, grad_k, _ = grad.float().split(columns, dim=-1)
    of_q = (grad_q * q_weight * q).sum(-1) / sizes[0]
    of_k = (grad_k * k_weight * k).sum(-1) / sizes[1]
    return torch.stack([of_q, of_k], dim=-1) * inverse_rms


def _query_key_norm_backward(
    grad: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    inverse_rms: Tensor,
    means: Tensor,
    columns: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q|k|v and of both weights.

    means: the sum of `_query_key_products` over the ranks, fp32 [s, b, 2]
    """
    q, k, _ = qkv.float().split(columns, dim=-1)
    grad_q, grad_k, grad_v = grad.float().split(columns, dim=-1)
    of_q, of_k = inverse_rms.split(1, dim=-1)
    mean_q, mean_k = means.split(1, dim=-1)
    q, k = q * of_q, k * of_k
    grad_q_weight = (grad_q * q).flatten(0, -2).sum(0).to(q_weight.dtype)
    grad_k_weight = (grad_k * k).flatten(0, -2).sum(0).to(k_weight.dtype)
    grad_q = of_q * (grad_q * q_weight - q * mean_q)
    grad_k = of_k * (grad_k * k_weight - k * mean_k)
    grad_x = torch.cat([grad_q, grad_k, grad_v], dim=-1).to(qkv.dtype)
    return grad_x, grad_q_weight, grad_k_weight
