"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are projected from one latent vector of each token, and queries may be
projected from another one. Rotated columns of the queries come from their latent, too; those of the
keys are shared by all heads, so that a token has one rotated key.

s sequence, b micro-batch, h hidden, t tensor ranks, a/t heads on this rank, c size of the latent of
keys and values, d columns of a query or key from the latents, r rotated columns, v columns of a
value. Under sequence parallelism the residual stream is [s/t, b, h].
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from models.attention import AttentionCore, ModelAxes, recomputed
from models.config import AttentionKind, ModelConfig
from models.context_parallel.attention import Divided
from models.context_parallel.collectives import gather, heads_to_sequence, sequence_to_heads
from models.context_parallel.division import Division
from models.context_parallel.latents import (
    Expansion,
    gathered_latent_attention,
    ring_latent_attention,
)
from models.context_parallel.tiles import tiles_of
from models.cost import sends_latents
from models.kernels.attention_parts import widened
from models.kernels.elementwise import Order, keys_and_values, rotated_last
from models.parallel.collectives import enter_tensor_region
from models.parallel.layers import (
    ColumnParallelLinear,
    Deferral,
    GradientReceiver,
    ReplicatedLinear,
    RMSNorm,
    RowParallelLinear,
    WeightGradient,
    matmul,
)
from models.parallel.micro_batch_info import MicroBatchInfo


class LatentAttention(AttentionCore):
    """Causal self-attention with keys and values from latents, without biases.

    Each tensor rank has some of the heads. The latents are computed on all tensor ranks, under
    sequence parallelism each for its positions.

    With recomputation of the core, the latent of keys and values is kept, not keys and values.

    Communication: forward, under sequence parallelism all-gathers of both latents over the tensor
    axis; backward, a sum of their gradients, all-reduced or reduce-scattered. In addition, that of
    attention over context ranks, and of the row-parallel linear layer. Context ranks exchange
    latents, or keys and values if these have fewer columns (`models.cost.sends_latents`).
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
        latent, h, tensor = config.latent, config.hidden_size, self.tensor
        assert latent is not None
        self.latent = latent
        norm = partial(
            RMSNorm,
            epsilon=config.norm_epsilon,
            input_is_split=tensor.sequence_parallel,
            tensor=tensor,
        )
        column_parallel = partial(ColumnParallelLinear, bias=False, tensor=tensor)
        if latent.query_rank is None:
            self.q = column_parallel(h, (config.query_size,))
        else:
            self.q_down = ReplicatedLinear(h, latent.query_rank, tensor=tensor)
            self.q_latent_norm = norm(latent.query_rank)
            self.q_up = column_parallel(latent.query_rank, (config.query_size,))
        self.kv_down = ReplicatedLinear(h, config.latent_columns, tensor=tensor)
        self.kv_latent_norm = norm(latent.key_value_rank)
        # The rows of a head are those of its key, then those of its value.
        head_columns = config.attention_head_size + latent.value_size
        self.kv_up = column_parallel(latent.key_value_rank, (config.heads * head_columns,))
        self.output = RowParallelLinear(
            config.heads * latent.value_size, h, bias=False, tensor=tensor
        )
        shares = self.context.size if self.context.attention == "ulysses" else 1
        self.sends_latents = sends_latents(config, tensor.size, shares=shares)

    def forward(self, x: Tensor, info: MicroBatchInfo) -> Tensor:
        """[s, b, h] to [s, b, h]."""
        q = self._queries(x).unflatten(-1, (self.heads, -1))  # [s, b, a/t, d + r]
        latent = self._latent(x).unsqueeze(2)  # [s, b, 1, c + r]
        rotation = self._rotation(q, info)
        assert rotation is not None, "latent attention has rotary positions"
        order = self._order(q, info)
        q = rotated_last(q, rotation, order=order, fuse=self.fuse)
        latent = rotated_last(latent, rotation, order="basd", fuse=self.fuse)  # [b, 1, s, c + r]
        if self.query_multiplier != 1:
            q = q * self.query_multiplier
        core = partial(self._latent_core, info=info, order=order)
        y = recomputed(core, q, latent) if self.recompute_core else core(q, latent)
        return self.output(y)

    @override
    def rescaled_rows(self, factors: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the projections to queries and to keys and values.

        Keys and columns of queries that are not rotated are multiplied by the square root of the
        factor, and rotated columns of queries by the factor, because all heads share the rotated
        key (Kimi K2, arXiv 2507.20534, algorithm 1).
        """
        roots, d = factors.sqrt()[:, None], self.config.attention_head_size
        rotated = factors[:, None].expand(-1, self.latent.rotary_size)
        queries = self.q if self.latent.query_rank is None else self.q_up
        yield queries.weight, torch.cat([roots.expand(-1, d), rotated], dim=1).flatten()
        values = roots.new_ones(self.heads, self.latent.value_size)
        yield self.kv_up.weight, torch.cat([roots.expand(-1, d), values], dim=1).flatten()

    def _queries(self, x: Tensor) -> Tensor:
        """[s, b, h] (s/t under sequence parallelism) to [s, b, a/t * (d + r)]."""
        if self.latent.query_rank is None:
            return self.q(x)
        return self.q_up(self.q_latent_norm(self.q_down(x)))

    def _latent(self, x: Tensor) -> Tensor:
        """[s, b, h] (s/t under sequence parallelism) to latents and rotated keys, [s, b, c + r].

        Each rank reads them for its heads, so that their gradients are summed over the ranks.
        """
        sizes = [self.latent.key_value_rank, self.latent.rotary_size]
        latent, key = self.kv_down(x).split(sizes, dim=-1)
        return enter_tensor_region(
            torch.cat([self.kv_latent_norm(latent), key], dim=-1), self.tensor
        )

    def _latent_core(
        self, q: Tensor, latent: Tensor, *, info: MicroBatchInfo, order: Order
    ) -> Tensor:
        """q [b, a/t, s, d + r] and latent [b, 1, s, c + r] to [s, b, a/t * v]."""
        context, division = self.context, info.division
        if division is None:
            y = self._attend(q, *self._expanded(latent, order), info=info)
        elif not self.sends_latents:
            k, v = self._expanded(latent, order)
            wide = self._core(q, k, widened(v, k), info=info).unflatten(-1, (self.heads, -1))
            return wide[..., : self.latent.value_size].flatten(2)
        elif context.attention == "ulysses":
            y = self._with_whole_sequences(q, latent, info, division)
        elif self._drops(info):
            whole = gather(latent, context, division.order)
            y = self._attend(q, *self._expanded(whole, order), info=info)
        else:
            lengths = info.documents.lengths if info.documents else None
            attend = (
                ring_latent_attention if context.attention == "ring" else gathered_latent_attention
            )
            y = attend(
                q,
                latent,
                self.kv_up.weight,
                Expansion(self.config.attention_head_size, self.fuse, self.kv_up.deferral),
                Divided(
                    context,
                    division,
                    tiles_of(division.slices, lengths),
                    self.largest_logits,
                ),
            )
        return y.permute(2, 0, 1, 3).flatten(2)

    def _with_whole_sequences(
        self, q: Tensor, latent: Tensor, info: MicroBatchInfo, division: Division
    ) -> Tensor:
        """Return the attention of a share of the heads of whole sequences: [b, a/t, s, v]."""
        context = self.context
        share = self.heads // context.size
        first = context.rank * share
        q = heads_to_sequence(q.unflatten(1, (context.size, -1)), context, division.order)
        whole = gather(latent, context, division.order)
        k, v = self._expanded(whole, "basd", heads=range(first, first + share))
        y = self._attend(q, k, v, info=replace(info, division=None), head=first)
        return sequence_to_heads(y, context, division.order).flatten(1, 2)

    def _expanded(
        self, latent: Tensor, order: Order, *, heads: range | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return keys [b, a/t, s, d + r] and values [b, a/t, s, v] of latents [b, 1, s, c + r].

        Args:
            heads: numbers of the heads among those of this tensor rank; None: all
        """
        config, whole, deferral = self.config, self.kv_up.weight, self.kv_up.deferral
        weight: Tensor = whole
        columns = config.attention_head_size + self.latent.value_size  # of a head
        if heads is not None:
            rows = slice(heads.start * columns, heads.stop * columns)
            deferral = deferral and _RowsOf(deferral, whole, rows)
            weight = whole[rows]
        sizes = [self.latent.key_value_rank, self.latent.rotary_size]
        shared, rotated = latent.squeeze(1).split(sizes, dim=-1)
        of_heads = matmul(shared, weight, None, deferral).unflatten(-1, (-1, columns))
        return keys_and_values(
            of_heads,
            rotated,
            key_size=config.attention_head_size,
            order=order,
            fuse=self.fuse,
        )


class _RowsOf(Deferral):
    """Defers the gradients of some rows of a weight, as gradients of the whole weight."""

    def __init__(self, deferral: GradientReceiver, weight: nn.Parameter, rows: slice):
        super().__init__()
        self.deferral, self.weight, self.rows = deferral, weight, rows

    def put(self, weight: nn.Parameter, gradient: WeightGradient) -> None:
        def whole() -> Tensor:
            of_rows = gradient()
            total = of_rows.new_zeros(self.weight.shape)
            total[self.rows] = of_rows
            return total

        self.deferral.put(self.weight, whole)
