"""Activations: what a block keeps for its backward pass, and how many are kept at once.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, q and k the
columns of all queries and of all keys, a heads, t tensor ranks; bytes.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from models.config import ModelConfig
from recipes.planning.inputs.footprint import Footprint
from recipes.planning.inputs.job import Job, JobLayout
from recipes.planning.inputs.stage_contents import blocks_of_stages, tokens_per_micro_batch


@dataclass(frozen=True)
class InFlight:
    """Micro-batches of which a stage holds something at a moment.

    whole: in each chunk, those between their forward and their backward pass
    left: likewise, those whose weights have their backward pass still to come
    ends: whether one that is counted there still has a block of its backward pass before it
    """

    whole: tuple[float, ...]
    left: tuple[float, ...]
    ends: bool = False

    @cached_property
    def count(self) -> float:
        """All of them; parts of one count as parts."""
        return (sum(self.whole) + sum(self.left)) / len(self.whole)


def micro_batches_in_flight(layout: JobLayout, stage: int, micro_batches: int) -> float:
    """Micro-batches of which a stage holds something, at most."""
    return max(each.count for each in in_flight(layout, stage, micro_batches))


def in_flight(layout: JobLayout, stage: int, micro_batches: int) -> tuple[InFlight, ...]:
    """The moments at which a stage may hold most.

    1F1B: the stages after this one and itself (Narayanan et al. 2021, arXiv 2104.04473, section
    2.2.1); interleaved: Megatron's warm-up of 2 (p - i - 1) + r (v - 1) chunks in rounds of r, and
    one more (megatron/core/pipeline_parallel/schedules.py); DualPipeV: 2 p - i on the way out and
    i + 1 on the way back; ZB-H1: as 1F1B and i more, whose weights wait; ZB-V: 2 p chunks (Qi et
    al. 2023, arXiv 2401.10241). `order.py` has the orders.
    """
    twice = layout.recompute == "full"  # forward passes, so that backward ones are long
    return _in_flight(layout.schedule, layout.pipeline, layout.chunks, stage, micro_batches, twice)


@lru_cache(maxsize=2**16)
def _in_flight(schedule: str, p: int, v: int, i: int, m: int, twice: bool) -> tuple[InFlight, ...]:
    if schedule == "dualpipev":
        return (InFlight((2 * p - i, i + 1), (0, 0)),)
    if schedule == "zb-h1":
        ahead = min(m, p - i)
        waiting = min(i, m - ahead)
        return (
            InFlight((ahead,), (waiting,)),
            InFlight((ahead - 1,), (waiting + 1,), ends=True),
            InFlight((0,), (min(m, i + 1),), ends=True),
        )
    if schedule == "zb-v":
        out, back = min(m, 2 * p - 1 - i), min(m, i + 1)
        # Never more are left for later than this; a few less in the middle of a pipeline.
        most = p + ((3 * i + 3) // 4 if twice else (2 * i + 1) // 3)
        left = min(out + back, most) if m >= 2 * p else out + back
        rest = min(2 * m, 2 * p) - left
        both = InFlight((rest / 2, rest / 2), (left / 2, left / 2), ends=True)
        return InFlight((out, back), (0, 0)), both
    if v == 1:
        return (InFlight((min(m, p - i),), (0,)),)
    each = round_size(p, m)
    chunks = min(m * v, each * (v - 1) + 2 * (p - i - 1) + 1)
    held = [min(each, max(0, chunks - each * chunk)) for chunk in range(v)]
    held[0] += max(0, chunks - each * v)  # of the next round
    return (InFlight(tuple(held), (0,) * v),)


def in_flight_at_the_end(layout: JobLayout, stage: int, micro_batches: int) -> InFlight:
    """When all chunks but the first one have had their last backward pass.

    Interleaved, the first one has a round of micro-batches before it then; where the model leads
    back, those that are between this stage and the turn.
    """
    if layout.schedule == "interleaved":
        held = round_size(layout.pipeline, micro_batches)
    else:
        held = min(micro_batches, layout.pipeline - stage)
    others = (0,) * (layout.chunks - 1)
    return InFlight((held, *others), (0, *others))


def round_size(stages: int, micro_batches: int) -> int:
    """Micro-batches that a chunk of an interleaved pipeline runs in a row."""
    return -(-micro_batches // max(1, micro_batches // stages))


def most_activations(job: Job, stage: int, *, forward: bool) -> float:
    """Bytes of the activations that a stage holds at most, in a backward or in a forward pass.

    The latter counts on its own in ZB-V, whose forward passes find as many weights left as there
    ever are, and all of them whole.
    """
    moments = in_flight(job.layout, stage, job.micro_batches)
    if forward and job.layout.schedule == "zb-v":
        moments = tuple(replace(each, ends=False) for each in moments)
    return max(held_activations(job, stage, each) for each in moments) + expected_bytes(job)


def held_activations(job: Job, stage: int, moment: InFlight) -> float:
    """Bytes of the activations that a stage holds then."""
    layout, footprint = job.layout, job.footprint
    kept = activation_bytes(job.model, layout, footprint, not job.writes_scores)
    blocks = blocks_of_stages(job)[stage]
    held = kept * sum(n * micro for n, micro in zip(blocks, moment.whole, strict=True))
    held += sum(moment.whole) * border_bytes(job, stage)
    if any(moment.left):
        each = split_bytes(job.model, layout, footprint)
        left = sum(n * micro for n, micro in zip(blocks, moment.left, strict=True))
        held += each * (left - moment.ends)
    return held


@lru_cache(maxsize=4096)
def block_bytes(
    model: ModelConfig, layout: JobLayout, footprint: Footprint, fused_attention: bool
) -> float:
    """Activations that a block keeps for its backward pass when nothing is computed again.

    Korthikanti et al. 2022 (arXiv 2205.05198), section 4: per token 10 h + 24 h / t for GPT's
    block in 16 bits with dropout, and 5 a s / t for written scores; here by its parts, for grouped
    queries and gated MLPs too. Fused attention keeps a statistic of 4 bytes per head instead.
    """
    tokens, t = tokens_per_micro_batch(model, layout), layout.tensor
    size = footprint.weight
    h, f = model.hidden_size, model.ffn_hidden_size
    q, k = model.query_size, model.key_value_size
    if model.norm == "layernorm":  # its input and what it gives
        norms = 2 * (2 * size) * h + 2 * 8
    else:  # with an fp32 copy of it
        norms = 2 * footprint.norm * h + 2 * 4
    whole = norms + (2 * h if footprint.dropout or model.dropout else 0)
    split = size * (q + 2 * k) + size * q
    if model.positions == "rope" and not footprint.apart:
        split += size * (q + k)
    if model.qk_norm:
        more = size * (q + 2 * k) if footprint.apart else (footprint.norm - size) * (q + k)
        split += more + 4 * (model.heads + model.kv_heads)
    split += size * (footprint.gated if model.activation == "swiglu" else 2) * f
    split += core_bytes(model, footprint, fused_attention)
    return tokens * (whole / layout.sequence_ranks + split / t)


def activation_bytes(
    model: ModelConfig, layout: JobLayout, footprint: Footprint, fused_attention: bool
) -> float:
    """Activations that a block keeps, with the recomputation of this spread."""
    if layout.recompute == "full":
        row = tokens_per_micro_batch(model, layout) * model.hidden_size * footprint.weight
        return row / layout.sequence_ranks / layout.recompute_interval
    kept = block_bytes(model, layout, footprint, fused_attention)
    if layout.recompute == "none":
        return kept
    if footprint.selective is not None:
        return kept * footprint.selective
    core = core_bytes(model, footprint, fused_attention) / layout.tensor
    return kept - tokens_per_micro_batch(model, layout) * core


def core_bytes(model: ModelConfig, footprint: Footprint, fused_attention: bool) -> float:
    """What the attention core keeps per token: a statistic of each head, or scores and dropout."""
    if fused_attention:
        return 4 * model.heads
    return (2 * footprint.weight + 1) * model.heads * model.sequence_length


def split_bytes(model: ModelConfig, layout: JobLayout, footprint: Footprint) -> float:
    """What a block's linears keep for the gradients of their weights: inputs, outputs' gradients.

    Under sequence parallelism the inputs of the first and the third one are split along the
    sequence, and gathered again; the gradients of the outputs of the others are whole.
    """
    t, h, f = layout.tensor, model.hidden_size, model.ffn_hidden_size
    inputs = 2 * h / layout.sequence_ranks + (model.query_size + f) / t
    gradients = (model.query_size + 2 * model.key_value_size + model.gate_and_up_size) / t + 2 * h
    return footprint.weight * tokens_per_micro_batch(model, layout) * (inputs + gradients)


def border_bytes(job: Job, stage: int) -> float:
    """What a stage keeps of each micro-batch of a chunk at its borders: its input, its output.

    Our own engine sends outputs and forgets them, and its input is that of the first block's norm.
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


def expected_bytes(job: Job) -> float:
    """What a stage is about to receive: the next activation or gradient, before it is needed."""
    layout, model = job.layout, job.model
    if layout.pipeline == 1 or job.footprint.stock_pipeline:
        return 0.0
    row = tokens_per_micro_batch(model, layout) * model.hidden_size * job.footprint.weight
    return row / layout.tensor
