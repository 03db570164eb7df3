"""Activation memory: bytes kept per block, and the number of micro-batches in flight.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, q and k the
columns of all queries and of all keys, a heads, t tensor ranks; bytes.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import le, mul

from models.config import GATED, Latents, ModelConfig
from models.cost import context_columns, kinds_of_layers
from threefold.pipeline.balance import pass_proportions
from threefold.pipeline.schedules import SCHEDULES, Kind, Pipeline, stage_and_chunk
from threefold.plan.job import Job, PlannedLayout, once_per_job
from threefold.plan.software import Footprint
from threefold.plan.stage_contents import (
    blocks_by_kind,
    last_stage,
    load_factor,
    tokens_per_micro_batch,
)

# Stages of the longest pipeline whose ZB-V passes are counted; the time grows with their cube.
MAX_COUNTED_STAGES = 8
ROW_NUMBER_BYTES = 8 * 4 + 4  # of a token and expert: indices of rows and the gate


@dataclass(frozen=True)
class HeldMicroBatches:
    """Numbers of micro-batches whose activations a stage holds at one moment.

    Attributes:
        whole: in each chunk, micro-batches between their forward and their backward pass
        left: in each chunk, micro-batches with only the weight-gradient pass left
        ends: one micro-batch in `left` still has to run the backward pass of its last block
        counted: the numbers are those of each chunk, not means over the chunks
    """

    whole: tuple[float, ...]
    left: tuple[float, ...]
    ends: bool = False
    counted: bool = False

    @cached_property
    def count(self) -> float:
        """The number of micro-batches; one chunk of a micro-batch counts as a fraction."""
        return (sum(self.whole) + sum(self.left)) / len(self.whole)


def micro_batches_in_flight(layout: PlannedLayout, stage: int, micro_batches: int) -> float:
    """Return the largest number of micro-batches in flight on a stage."""
    full = layout.recompute == "full"
    schedule, p, v = layout.schedule, layout.pipeline, layout.virtual_stages
    return _most_in_flight(schedule, p, v, stage, micro_batches, full)


@lru_cache(maxsize=2**16)
def _most_in_flight(schedule: str, p: int, v: int, i: int, m: int, full: bool) -> float:
    return max(held.count for held in _in_flight(schedule, p, v, i, m, full))


def in_flight(
    layout: PlannedLayout, stage: int, micro_batches: int
) -> tuple[HeldMicroBatches, ...]:
    """Return the moments at which the activations of a stage may peak.

    For stage i of p stages with v chunks:
    1F1B: p - i micro-batches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).
    Interleaved: one more than Megatron's warm-up of 2 (p - i - 1) + r (v - 1) chunks in rounds of r
    (megatron/core/pipeline_parallel/schedules.py).
    GPipe: all micro-batches.
    DualPipeV: 2 p - i in the first chunk and i + 1 in the second.
    ZB-H1: as 1F1B, and i more with deferred weight gradients.
    ZB-V: 2 p chunks (Qi et al. 2023, arXiv 2401.10241).
    `pipeline/schedules.py` defines the orders.
    """
    # With full recomputation, backward passes take longer relative to forward passes.
    full = layout.recompute == "full"
    return _in_flight(
        layout.schedule, layout.pipeline, layout.virtual_stages, stage, micro_batches, full
    )


@lru_cache(maxsize=2**16)
def _in_flight(
    schedule: str, p: int, v: int, i: int, m: int, full: bool
) -> tuple[HeldMicroBatches, ...]:
    if schedule == "gpipe":
        return (HeldMicroBatches((m,), (0,)),)
    if schedule == "dualpipev":
        return (HeldMicroBatches((2 * p - i, i + 1), (0, 0)),)
    if schedule == "zb-h1":
        ahead = min(m, p - i)
        waiting = min(i, m - ahead)
        return (
            HeldMicroBatches((ahead,), (waiting,)),
            HeldMicroBatches((ahead - 1,), (waiting + 1,), ends=True),
            HeldMicroBatches((0,), (min(m, i + 1),), ends=True),
        )
    if schedule == "zb-v":
        out, back = min(m, 2 * p - 1 - i), min(m, i + 1)
        # An upper bound on the deferred passes; the middle of a pipeline has slightly fewer.
        most = p + ((3 * i + 3) // 4 if full else (2 * i + 1) // 3)
        left = min(out + back, most) if m >= 2 * p else out + back
        rest = min(2 * m, 2 * p) - left
        both = HeldMicroBatches((rest / 2, rest / 2), (left / 2, left / 2), ends=True)
        return HeldMicroBatches((out, back), (0, 0)), both
    if v == 1:
        return (HeldMicroBatches((min(m, p - i),), (0,)),)
    per_round = round_size(p, m)
    chunks = min(m * v, per_round * (v - 1) + 2 * (p - i - 1) + 1)
    held = [min(per_round, max(0, chunks - per_round * chunk)) for chunk in range(v)]
    held[0] += max(0, chunks - per_round * v)  # of the next round
    return (HeldMicroBatches(tuple(held), (0,) * v),)


def in_flight_at_the_end(layout: PlannedLayout, stage: int, micro_batches: int) -> HeldMicroBatches:
    """Return the micro-batches in flight when other chunks than the first have been reduced.

    With one chunk, it is the last micro-batch, during whose backward pass buckets are reduced. An
    interleaved stage holds a round of micro-batches. In a folded schedule, a stage holds one
    micro-batch for each stage from itself to the fold.
    """
    if layout.virtual_stages == 1:
        return HeldMicroBatches((1,), (0,))
    if layout.schedule == "interleaved":
        held = round_size(layout.pipeline, micro_batches)
    else:
        held = min(micro_batches, layout.pipeline - stage)
    others = (0,) * (layout.virtual_stages - 1)
    return HeldMicroBatches((held, *others), (0, *others))


def round_size(stages: int, micro_batches: int) -> int:
    """Return the number of consecutive micro-batches of a chunk in an interleaved pipeline."""
    return -(-micro_batches // max(1, micro_batches // stages))


def most_activations(job: Job, stage: int, *, forward_of_zb_v: bool = False) -> float:
    """Return the largest activation memory of a stage while it runs a pass.

    forward_of_zb_v: the peak during a forward pass of ZB-V, when the most weight gradients are
        deferred and none of them has started. In the other schedules, both kinds of passes have the
        same peak.
    """
    layout, micro_batches = job.layout, job.micro_batches
    moments = in_flight(layout, stage, micro_batches)
    if layout.schedule == "zb-v" and layout.pipeline <= MAX_COUNTED_STAGES:
        proportions = pass_proportions(job.model, layout.recompute)
        enough = min(micro_batches, 2 * layout.pipeline)
        moments = counted_in_flight(layout.pipeline, enough, proportions)[stage][forward_of_zb_v]
    elif forward_of_zb_v:
        moments = tuple(replace(held, ends=False) for held in moments)
    return max(held_activations(job, stage, held) for held in moments) + receive_bytes(job)


@lru_cache(maxsize=1024)
def counted_in_flight(
    stages: int, micro_batches: int, proportions: tuple[int, int, int]
) -> tuple[tuple[tuple[HeldMicroBatches, ...], tuple[HeldMicroBatches, ...]], ...]:
    """Return the moments of ZB-V from its order, for each stage in backward and in forward passes.

    The number of deferred weight gradients depends on the durations of the passes. In a short
    pipeline, a formula for all lengths is wrong by a large share of it.
    """
    pipeline = Pipeline(
        stages=stages, micro_batches=micro_batches, virtual_stages=2, schedule="zb-v",
        proportions=proportions,
    )  # fmt: skip
    of_stages = []
    for order in pipeline.orders:
        whole, left = [0, 0], [0, 0]
        forward, begun, ended = (set[tuple[int, ...]]() for _ in range(3))
        for work in order:
            if work.kind == Kind.FORWARD:
                whole[work.chunk] += 1
                forward.add((*whole, *left))
            elif work.kind == Kind.BACKWARD:
                begun.add((*whole, *left))
                whole[work.chunk] -= 1
                left[work.chunk] += 1
                ended.add((*whole, *left))
            else:
                left[work.chunk] -= 1
        backward = (*_largest(begun, ends=False), *_largest(ended, ends=True))
        of_stages.append((backward, _largest(forward, ends=False)))
    return tuple(of_stages)


def _largest(counts: set[tuple[int, ...]], *, ends: bool) -> tuple[HeldMicroBatches, ...]:
    """Return the moments whose counts no other moment reaches or exceeds in every number.

    counts: those of `whole`, then those of `left`
    """
    return tuple(
        HeldMicroBatches(one[:2], one[2:], ends=ends, counted=True)
        for one in sorted(counts)
        if not any(one != other and all(map(le, one, other)) for other in counts)
    )


def held_activations(job: Job, stage: int, moment: HeldMicroBatches) -> float:
    """Return the bytes of a stage's activations at a moment."""
    held = sum(moment.whole) * boundary_bytes(job, stage)
    of_kinds = bytes_of_blocks(job)
    is_deferring = any(moment.left)
    for (kept, deferred), stages in zip(of_kinds, blocks_by_kind(job).values(), strict=True):
        held += kept * sum(map(mul, stages[stage], moment.whole))
        if is_deferring:
            held += deferred * sum(map(mul, stages[stage], moment.left))
    if is_deferring:
        held -= of_kinds[0][1] * moment.ends
    if job.model.prediction and stage == last_stage(job.layout):
        kept, deferred = bytes_of_predictions(job)
        _, chunk = stage_and_chunk(
            job.layout.schedule, job.layout.pipeline, len(job.blocks_of_virtual_stages) - 1
        )
        whole, left = moment.whole[chunk], moment.left[chunk]
        if SCHEDULES[job.layout.schedule].folded and not moment.counted:
            # The numbers of ZB-V are means over both chunks. After the loss of a micro-batch, its
            # backward pass through the last chunk follows at once, and its weight pass soon, except
            # with full recomputation, whose backward passes take longer.
            full = job.layout.recompute == "full"
            most = sum(moment.left) if full else job.layout.pipeline // 4
            whole = min(whole, 1)
            left = min(sum(moment.left), max(0, most - whole))
        held += kept * whole + deferred * left
    return held


@once_per_job
def bytes_of_predictions(job: Job) -> tuple[float, float]:
    """Return (kept, deferred) bytes of all prediction modules.

    In addition to those of its block, a module keeps the two vectors of size h that it joins, the
    input of the projection with 2 h, the input of the last norm, and statistics of three norms. A
    module that is recomputed keeps the two vectors.
    """
    model, layout, size = job.model, job.layout, job.footprint.weight
    row = tokens_per_micro_batch(model, layout) * model.hidden_size * size / layout.sequence_ranks
    statistics = 3 * 4 * tokens_per_micro_batch(model, layout) / layout.sequence_ranks
    kept, deferred = bytes_of_blocks(job)[0]  # of the last block's kind
    kept = 2 * row if layout.recompute == "full" else kept + 5 * row + statistics
    return model.prediction_depth * kept, model.prediction_depth * (deferred + 3 * row)


@once_per_job
def bytes_of_blocks(job: Job) -> tuple[tuple[float, float], ...]:
    """Return (kept, deferred) bytes of a block of each kind, in the order of `kinds_of_layers`.

    They are the results of `activation_bytes` and `deferred_bytes`.
    """
    layout, footprint = job.layout, job.footprint
    fused = not job.writes_scores
    share = job.recomputed_share if layout.recompute != "none" else 1.0
    without = replace(layout, recompute="none") if share < 1 else layout
    more = job.expert_imbalance, job.separate_documents

    def kept(kind: ModelConfig) -> float:
        of_share = activation_bytes(kind, layout, footprint, fused, *more)
        if share == 1:
            return of_share
        whole = activation_bytes(kind, without, footprint, fused, *more)
        return share * of_share + (1 - share) * whole

    here = 1 - job.offloaded_share
    return tuple(
        (
            here * (kept(kind) - quantized_savings(job, kind)),
            deferred_bytes(kind, layout, footprint),
        )
        for kind in kinds_of_layers(job.model)
    )


def quantized_savings(job: Job, kind: ModelConfig) -> float:
    """Return the bytes that a block saves by keeping inputs of linear layers in 8 or 4 bits.

    These are the inputs of the MLPs' output matrices, and of the first matrices if the norms keep
    their outputs. The attention keeps its own output. Recomputed blocks save nothing.
    """
    layout, footprint, quantization = job.layout, job.footprint, job.quantization
    if quantization is None:
        return 0.0
    if not footprint.keeps_quantized and quantization.format.peak != "fp4":
        return 0.0
    narrower = footprint.weight - quantization.format.bytes_per_element
    norms = 2 * kind.hidden_size if footprint.norm > footprint.weight else 0
    inner = kind.mlp_size
    if kind.experts is not None:
        inner += kind.experts.per_token * kind.experts.ffn_hidden_size
    elements = norms / layout.sequence_ranks + inner / layout.tensor
    kept = 1 - quantization.wide_layers / job.model.layers
    if layout.recompute == "full":
        kept *= 1 - job.recomputed_share
    elif layout.recompute == "selective" and footprint.recomputes_modules:
        kept = 0.0
    elif layout.recompute == "selective" and footprint.selective is not None:
        kept *= footprint.selective
    return kept * narrower * elements * tokens_per_micro_batch(kind, layout)


def block_bytes(
    model: ModelConfig,
    layout: PlannedLayout,
    footprint: Footprint,
    fused_attention: bool,
    imbalance: float = 1.0,
    separate_documents: bool = False,
) -> float:
    """Return the bytes that a block keeps for its backward pass, without recomputation.

    Korthikanti et al. 2022 (arXiv 2205.05198), section 4: per token 10 h + 24 h / t for GPT's
    block in 16 bits with dropout, and 5 a s / t for written scores. This function adds up the parts
    and also covers grouped queries and gated MLPs. Fused attention keeps 4 bytes per head instead
    of the scores.
    """
    tokens, t = tokens_per_micro_batch(model, layout), layout.tensor
    size = footprint.weight
    h, f = model.hidden_size, model.mlp_size
    if model.norm == "layernorm":  # input, output and statistics
        norms = 2 * (2 * size) * h + 2 * 8
    else:  # `footprint.norm` covers an fp32 copy of the input, if there is one
        norms = 2 * footprint.norm * h + 2 * 4
    # The norms of outputs keep their inputs, too. Without norms of inputs, the inputs of the linear
    # layers take the place of the outputs of these norms.
    if model.norm_placement == "both":
        norms += norms - 2 * size * h
    whole = norms + (2 * h if footprint.dropout or model.dropout else 0)
    split = query_key_value_bytes(model, layout, footprint) + size * model.attention_output_size
    if model.latent is not None:
        of_sequence, everywhere = latent_bytes(model, model.latent, footprint)
        whole += of_sequence
        split += everywhere * t
    split += size * (footprint.swiglu_tensors if model.activation in GATED else 2) * f
    split += core_bytes(model, layout, footprint, fused_attention, separate_documents)
    split += routed_bytes(model, layout, footprint, imbalance)
    return tokens * (whole / layout.sequence_ranks + split / t)


def query_key_value_bytes(model: ModelConfig, layout: PlannedLayout, footprint: Footprint) -> float:
    """Return the bytes of queries, keys and values per token, before division by tensor ranks."""
    size, q = footprint.weight, model.query_size
    if model.latent is not None:
        return size * (2 * q + model.attention_output_size)
    k = model.key_value_size
    split = size * (q + 2 * k)
    if model.has_rotary_layers and not footprint.separate_qkv:
        split += size * (q + k)
    if model.qk_norm:
        more = size * (q + 2 * k) if footprint.separate_qkv else (footprint.norm - size) * (q + k)
        if model.qk_norm_over == "head":
            more += 4 * (model.heads + model.kv_heads)
        else:  # a statistic of all queries and one of all keys, on each tensor rank
            more += 2 * 4 * layout.tensor
        split += more
    return split


def latent_bytes(model: ModelConfig, latent: Latents, footprint: Footprint) -> tuple[float, float]:
    """Return the bytes that latent attention keeps for its latents per token.

    Returns:
        the inputs of their norms and the normed latent of queries, which sequence parallelism
        divides; and the rotated latents of keys and values, which every tensor rank has
    """
    everywhere = footprint.weight * model.latent_columns
    of_sequence = everywhere + 4
    if latent.query_rank is not None:
        of_sequence += footprint.norm * latent.query_rank + 4
    return of_sequence, everywhere


def routed_bytes(
    model: ModelConfig, layout: PlannedLayout, footprint: Footprint, imbalance: float
) -> float:
    """Return the bytes that the router and the experts keep per token of a tensor rank.

    For each of a token's experts: the input, that of the activation and its result, which a rank
    keeps for the tokens that it computes, and the output, which the rank of the token keeps. For
    the router, logits and scores in fp32, and the numbers of the rows. With expert tensor
    parallelism, each tensor rank keeps the inputs of all tensor ranks.
    """
    experts = model.experts
    if experts is None:
        return 0.0
    size, h, f = footprint.weight, model.hidden_size, experts.ffn_hidden_size
    divided = layout.expert * layout.tensor > 1
    input_bytes = layout.expert_tensor * (size * h + (8 if divided else 0))  # and a row's number
    computed = input_bytes + size * (model.activation_columns(f) + f)
    of_token = size * h + ROW_NUMBER_BYTES
    rows = experts.per_token * (computed * load_factor(layout, imbalance) + of_token)
    return rows + 2 * 4 * experts.count


def activation_bytes(
    model: ModelConfig,
    layout: PlannedLayout,
    footprint: Footprint,
    fused_attention: bool,
    imbalance: float = 1.0,
    separate_documents: bool = False,
) -> float:
    """Return the bytes that a block keeps for its backward pass in a layout."""
    if layout.recompute == "full":
        row = tokens_per_micro_batch(model, layout) * model.hidden_size * footprint.weight
        return row / layout.sequence_ranks / layout.recompute_interval
    kept = block_bytes(model, layout, footprint, fused_attention, imbalance, separate_documents)
    if layout.recompute == "none":
        return kept
    if footprint.recomputes_modules:
        return kept - modules_bytes(model, layout, footprint)
    if footprint.selective is not None:
        return kept * footprint.selective
    core = core_bytes(model, layout, footprint, fused_attention, separate_documents)
    core /= layout.tensor
    if model.latent is not None:  # keys and values are computed again, too
        columns = model.query_size + model.attention_output_size
        core += footprint.weight * columns / layout.tensor
    return kept - tokens_per_micro_batch(model, layout) * core


def modules_bytes(model: ModelConfig, layout: PlannedLayout, footprint: Footprint) -> float:
    """Return the bytes that recomputing norms, activations of MLPs and up projections saves."""
    size, inner = footprint.weight, model.mlp_size
    if model.experts is not None:
        inner += model.experts.per_token * model.experts.ffn_hidden_size
    if model.latent is not None:
        inner += 2 * model.query_size + model.attention_output_size
    outputs = 2 * model.hidden_size if footprint.norm > size else 0
    saved = size * (outputs / layout.sequence_ranks + inner / layout.tensor)
    return tokens_per_micro_batch(model, layout) * saved


def core_bytes(
    model: ModelConfig,
    layout: PlannedLayout,
    footprint: Footprint,
    fused_attention: bool,
    separate_documents: bool = False,
) -> float:
    """Return the bytes that the attention core keeps per token.

    Fused attention keeps a statistic per head, and its output as well if that is copied: by the
    exchange with "ulysses", and for the next linear layer if the kernel of documents computes
    several sequences. Otherwise scores, softmax and dropout mask are kept, and the keys
    and values that were gathered from other context ranks.
    """
    if fused_attention:
        copied = layout.context_attention == "ulysses" or (
            is_packed(model, footprint, separate_documents)
            and layout.context == 1
            and layout.micro_sequences > 1
        )
        output = footprint.weight * model.attention_output_size
        return 4 * model.heads + (output if copied else 0)
    scores = (2 * footprint.weight + 1) * model.heads * model.sequence_length
    if layout.context > 1 and layout.context_attention != "ulysses":
        columns = context_columns(model, layout.tensor) * layout.tensor
        return scores + footprint.weight * columns * layout.context
    return scores


def is_packed(model: ModelConfig, footprint: Footprint, separate_documents: bool) -> bool:
    """Return True if one kernel computes all sequences of a micro-batch, laid end to end.

    It is that of separate documents, in 16 bits; windows and sinks need it, too.
    """
    if footprint.weight > 2 or model.attention_soft_cap is not None:
        return False
    window = model.window_size(model.layers - 1)
    is_windowed = window is not None and window < model.sequence_length
    return separate_documents or model.attention_sinks or is_windowed


def deferred_bytes(model: ModelConfig, layout: PlannedLayout, footprint: Footprint) -> float:
    """Return the bytes that a block keeps for deferred weight gradients of its four linears.

    They are the inputs and the gradients of the outputs. Under sequence parallelism the inputs of
    the first and third linear are sharded along the sequence and gathered again when needed; the
    gradients of the outputs of the second and fourth are not sharded.
    """
    t, h, f = layout.tensor, model.hidden_size, model.mlp_size
    inputs = 2 * h / layout.sequence_ranks + (model.attention_output_size + f) / t
    gradients = (model.query_size + model.gate_and_up_size) / t + 2 * h
    if model.latent is None:
        gradients += 2 * model.key_value_size / t
    else:
        latent, columns = model.latent, model.latent_columns + (model.latent.query_rank or 0)
        inputs += (latent.query_rank or 0) / layout.sequence_ranks + latent.key_value_rank
        of_heads = model.heads * (model.attention_head_size + latent.value_size)
        gradients += columns / layout.sequence_ranks + of_heads / t
    if model.experts is not None:
        f = model.experts.ffn_hidden_size
        row = 2 * h * layout.expert_tensor + model.activation_columns(f) + f
        inputs += model.experts.per_token * row / t
    return footprint.weight * tokens_per_micro_batch(model, layout) * (inputs + gradients)


def boundary_bytes(job: Job, stage: int) -> float:
    """Return the bytes of a chunk's input and output that a stage keeps per micro-batch.

    Threefold's engine frees an output once it is sent, and the input already counts as the input of
    the first block's norm.
    """
    layout, model = job.layout, job.model
    if layout.pipeline == 1 or not job.footprint.stock_pipeline:
        return 0.0
    row = tokens_per_micro_batch(model, layout) * model.hidden_size * job.footprint.weight
    received = row / layout.sequence_ranks if stage > 0 else 0.0
    sent = row / layout.tensor if stage < layout.pipeline - 1 else 0.0
    if layout.recompute == "full" and stage > 0:
        received = 0.0  # it is the first block's input
    return received + sent


def receive_bytes(job: Job) -> float:
    """Return the bytes of the buffer for the next activation or gradient, allocated in advance."""
    layout, model = job.layout, job.model
    if layout.pipeline == 1 or job.footprint.stock_pipeline:
        return 0.0
    row = tokens_per_micro_batch(model, layout) * model.hidden_size * job.footprint.weight
    return row / layout.tensor
