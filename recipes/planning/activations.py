"""Activations: what a block keeps for its backward pass, and how many are kept at once.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, q and k the
columns of all queries and of all keys, a heads, t tensor ranks; bytes.
"""

from functools import lru_cache

from models.config import ModelConfig
from recipes.planning.footprint import Footprint
from recipes.planning.job import Job, Spread
from recipes.planning.stages import blocks_of_stages, deal, tokens_per_micro_batch


def micro_batches_in_flight(spread: Spread, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds, at most; parts of one count as parts.

    1F1B: the stages after this one and itself (Narayanan et al. 2021, arXiv 2104.04473, section
    2.2.1); interleaved: Megatron's warm-up of 2 (p - i - 1) + p (v - 1) chunks and one more
    (megatron/core/pipeline_parallel/schedules.py); DualPipeV: 2 p + 1 half stages, as DeepSpeed's
    schedule runs (deepspeed/runtime/pipe/schedule.py).
    """
    p, v = spread.pipeline, spread.chunks
    if p == 1:
        return 1
    if spread.schedule == "dualpipev":
        return (2 * p + 1) / 2
    if v == 1:
        return min(micro_batches, p - stage)
    return min(micro_batches * v, p * (v - 1) + 2 * (p - stage - 1) + 1) / v


def blocks_in_flight(job: Job, stage: int) -> float:
    """Blocks whose activations a stage holds, at most, each as often as micro-batches are there.

    DualPipeV: rank r of p has 2 p - r micro-batches in its part on the way out and r + 1 in the
    one on the way back, as DeepSpeed's schedule runs.
    """
    spread, p = job.spread, job.spread.pipeline
    if spread.schedule == "dualpipev":
        parts = deal(job.model.layers, 2 * p)
        return (2 * p - stage) * parts[stage] + (stage + 1) * parts[2 * p - 1 - stage]
    held = blocks_of_stages(job.model.layers, p, spread.chunks, spread.schedule)[stage]
    return micro_batches_in_flight(spread, stage, job.micro_batches) * held


@lru_cache(maxsize=4096)
def block_bytes(
    model: ModelConfig, spread: Spread, footprint: Footprint, fused_attention: bool
) -> float:
    """Activations that a block keeps for its backward pass when nothing is computed again.

    Korthikanti et al. 2022 (arXiv 2205.05198), section 4: per token 10 h + 24 h / t for GPT's
    block in 16 bits with dropout, and 5 a s / t for written scores; here by its parts, for grouped
    queries and gated MLPs too. Fused attention keeps a statistic of 4 bytes per head instead.
    """
    tokens, t = tokens_per_micro_batch(model, spread), spread.tensor
    size = footprint.weight
    h, f = model.hidden_size, model.ffn_hidden_size
    q, k = model.query_size, model.key_value_size
    if model.norm == "layernorm":  # its input and what it gives
        norms = 2 * (2 * size) * h + 2 * 8
    else:  # with an fp32 copy of it
        norms = 2 * footprint.norm * h + 2 * 4
    whole = norms + (2 * h if footprint.dropout or model.dropout else 0)
    split = size * (q + 2 * k) + size * q
    if model.positions == "rope":
        split += size * (q + k)
    if model.qk_norm:
        split += (footprint.norm - size) * (q + k) + 4 * (model.heads + model.kv_heads)
    split += size * (footprint.gated if model.activation == "swiglu" else 2) * f
    split += core_bytes(model, footprint, fused_attention)
    return tokens * (whole / spread.sequence_ranks + split / t)


def activation_bytes(
    model: ModelConfig, spread: Spread, footprint: Footprint, fused_attention: bool
) -> float:
    """Activations that a block keeps, with the recomputation of this spread."""
    if spread.recompute == "full":
        row = tokens_per_micro_batch(model, spread) * model.hidden_size * footprint.weight
        return row / spread.sequence_ranks / spread.recompute_interval
    kept = block_bytes(model, spread, footprint, fused_attention)
    if spread.recompute == "none":
        return kept
    if footprint.selective is not None:
        return kept * footprint.selective
    core = core_bytes(model, footprint, fused_attention) / spread.tensor
    return kept - tokens_per_micro_batch(model, spread) * core


def core_bytes(model: ModelConfig, footprint: Footprint, fused_attention: bool) -> float:
    """What the attention core keeps per token: a statistic of each head, or scores and dropout."""
    if fused_attention:
        return 4 * model.heads
    return (2 * footprint.weight + 1) * model.heads * model.sequence_length


def border_bytes(job: Job, stage: int) -> float:
    """What a stage keeps of each micro-batch in flight at its borders: its input, its output."""
    spread, model = job.spread, job.model
    if spread.pipeline == 1:
        return 0.0
    row = tokens_per_micro_batch(model, spread) * model.hidden_size * job.footprint.weight
    outer = spread.tensor if spread.sequence_parallel or spread.schedule == "1f1b" else 1
    received = row / spread.sequence_ranks if stage > 0 else 0.0
    sent = row / outer if stage < spread.pipeline - 1 else 0.0
    if spread.recompute == "full" and stage > 0:
        received = 0.0  # it is the first block's input
    return (received + sent) * spread.chunks
