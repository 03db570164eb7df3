"""Time of a block and of the model's two ends, forward and backward.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, d head size,
t tensor ranks. All times are seconds, of one micro-batch on one rank.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from models.cost import block_parameters, tokens_at_a_time
from recipes.planning.inputs.job import Job, JobLayout
from recipes.planning.inputs.kernels import (
    BYTES,
    fused_attention_seconds,
    matmul_seconds,
    memory_seconds,
)
from recipes.planning.inputs.stage_contents import tokens_per_micro_batch
from recipes.planning.time.network import all_reduce_seconds, gather_seconds

# Bytes per logit of the cross-entropy, forward and backward, in fp32: converted (6), maximum (4),
# exponential (8), sum (4), scaled and subtracted (8), converted back (6).
LOSS_BYTES = 36
# Times that each logit is read or written where they are there for some tokens at a time, in the
# precision of the model: for the maximum, for the sum, to become its gradient (2).
LOSS_PASSES = 4
BACKWARD_SLOWER = 1 / 0.85  # a fused attention's backward products; fitted
ELEMENTWISE_KERNELS = 8  # of a block's forward pass


@dataclass(frozen=True)
class Spent:
    """One direction of a block or a stage: computation, and tensor collectives it waits for."""

    compute: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.compute + self.tensor

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.compute + other.compute, self.tensor + other.tensor)

    def __mul__(self, count: float) -> "Spent":
        return Spent(self.compute * count, self.tensor * count)


@dataclass(frozen=True)
class Directions:
    """Both directions of a block or a stage.

    weights: the part of the backward one that may be done later, for the weights of linears
    """

    forward: Spent = Spent()
    backward: Spent = Spent()
    weights: Spent = Spent()

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward.total + self.backward.total

    def __add__(self, other: "Directions") -> "Directions":
        return Directions(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
        )

    def __mul__(self, count: float) -> "Directions":
        return Directions(self.forward * count, self.backward * count, self.weights * count)


def block_job(job: Job) -> Job:
    """What of a job decides a block's time, so that many jobs share it."""
    layout = job.layout
    sharded = layout.zero_stage > 1
    return replace(
        job,
        global_sequences=1,
        optimizer_group=None,
        layout=JobLayout(
            tensor=layout.tensor,
            context=layout.context,
            data=layout.data if sharded else 1,
            zero_stage=layout.zero_stage if sharded else 1,
            sequence_parallel=layout.sequence_parallel,
            recompute=layout.recompute,
            micro_sequences=layout.micro_sequences,
        ),
    )


@lru_cache(maxsize=4096)
def block_passes(job: Job) -> Directions:
    """Of one block; the backward pass includes what is computed again.

    job: of `block_job`
    """
    layout, software = job.layout, job.software
    products, products_backward, products_of_weights = _products(job)
    core, core_backward = _attention(job)
    passing, passing_backward = _elementwise(job)
    tensor, tensor_backward = _tensor_collectives(job)
    context = _context_collectives(job, core / software.era)

    forward = (products + core + passing) / software.era
    backward = (products_backward + core_backward + passing_backward) / software.era
    again = Spent()
    if layout.recompute == "full":
        again = Spent(max(forward, software.block_seconds), tensor)
    elif layout.recompute == "selective":
        again = Spent(core / software.era)
    host, host_backward = software.block_seconds, 2 * software.block_seconds
    ahead = Spent(max(forward, host), tensor + context)
    back = Spent(max(backward, host_backward), tensor_backward + 2 * context) + again
    # Of three collectives for each two forward, one gathers an input again for its weight.
    gathered = tensor_backward / 3 if layout.sequence_parallel else 0.0
    weights = Spent(products_of_weights / software.era, gathered)
    if layout.zero_stage > 1:
        ahead, back = _with_shards(job, ahead, back)
    return Directions(ahead, back, weights)


def _products(job: Job) -> tuple[float, float, float]:
    """The four matrix products of a block: forward, backward, and the weights' part of that.

    Backward each has two, for its input and its weight.
    """
    model, t, gpu, precision = job.model, job.layout.tensor, job.machine.gpu, job.precision
    tokens, h = tokens_per_micro_batch(model, job.layout), model.hidden_size
    rows = padded(tokens)
    forward = backward = weights = 0.0
    for inner, columns in (
        (h, (model.query_size + 2 * model.key_value_size) // t),
        (model.query_size // t, h),
        (h, model.gate_and_up_size // t),
        (model.ffn_hidden_size // t, h),
    ):
        forward += matmul_seconds(gpu, precision, rows=tokens, columns=columns, inner=inner)
        backward += matmul_seconds(gpu, precision, rows=tokens, columns=inner, inner=columns)
        weight = matmul_seconds(gpu, precision, rows=columns, columns=inner, inner=rows)
        backward += weight
        weights += weight
    return forward, backward, weights


def padded(tokens: int) -> int:
    """The inner size of a weight's gradient: tokens are no row there that could be misaligned."""
    return -(-tokens // 8) * 8


def _attention(job: Job) -> tuple[float, float]:
    """The attention core: fused, or with scores that are written, masked and normalized."""
    model, layout, software, gpu = job.model, job.layout, job.software, job.machine.gpu
    s, d = model.sequence_length, model.attention_head_size
    batch = layout.micro_sequences * model.heads // layout.tensor
    if not job.writes_scores:
        # Half of the scores are masked; a context rank has its share of what is left.
        flops = 4 * s * s * d * batch / 2 / layout.context
        fused = fused_attention_seconds(gpu, job.precision, flops=flops, head_size=d)
        fused /= software.attention
        # Five products instead of two (Dao 2023, arXiv 2307.08691, section 4.1).
        return fused, 2.5 * fused * BACKWARD_SLOWER
    scores = matmul_seconds(gpu, job.precision, rows=s, columns=s, inner=d, batch=batch)
    values = matmul_seconds(gpu, job.precision, rows=s, columns=d, inner=s, batch=batch)
    size = BYTES[job.precision]
    drops = software.attention_dropout or model.attention_dropout > 0
    dropout = 2 * size + 1 if drops else 0
    softmax = memory_seconds(gpu, batch * s * s * (2 * size + dropout))
    softmax_backward = memory_seconds(gpu, batch * s * s * (3 * size + dropout))
    return (
        scores + values + softmax + 3 * gpu.kernel_seconds,
        scores + 3 * values + softmax_backward + 3 * gpu.kernel_seconds,
    )


def _elementwise(job: Job) -> tuple[float, float]:
    """All that reads and writes activations and computes little, as bytes.

    Forward, in passes over [s, b, h] (each read or write one): two norms (2 each), two residual
    additions with bias and dropout (3 each); these are split by sequence parallelism only. Over
    the tensor ranks are split: queries, keys and values made ready (2 each) and the attention's
    output (2), the MLP's activation (2 of its columns, 3 with a gate). Backward half as much again.
    """
    model, layout, gpu = job.model, job.layout, job.machine.gpu
    whole = (2 * 2 + 2 * 3) * model.hidden_size / layout.sequence_ranks
    heads = 4 * (model.query_size + model.key_value_size) / layout.tensor
    activation = (model.gate_and_up_size + model.ffn_hidden_size) / layout.tensor
    columns = (whole + heads + activation) * job.software.elementwise
    moved = tokens_per_micro_batch(model, layout) * columns * BYTES[job.precision]
    forward = memory_seconds(gpu, moved) + ELEMENTWISE_KERNELS * gpu.kernel_seconds
    return forward, 1.5 * forward


def _tensor_collectives(job: Job) -> tuple[float, float]:
    """Two all-reduces of [s, b, h] each way (Shoeybi et al. 2019, arXiv 1909.08053, figure 4).

    With sequence parallelism as many bytes as reduce-scatters and all-gathers, and, backward, the
    gathered inputs twice again (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
    """
    layout, software = job.layout, job.software
    row = tokens_per_micro_batch(job.model, layout) * job.model.hidden_size * BYTES[job.precision]
    once = all_reduce_seconds(job.machine, row, ranks=layout.tensor, stride=1)
    forward = once * (1 if software.parallel_block else 2)
    backward = forward * (1.5 if layout.sequence_parallel else 1.0)
    return (
        forward * (1 - software.tensor_overlap),
        backward * (1 - software.tensor_overlap_backward),
    )


def _context_collectives(job: Job, core: float) -> float:
    """Keys and values passed round the context ranks, behind the attention they are for.

    Liu et al. 2023 (arXiv 2310.01889, section 3).
    """
    layout = job.layout
    width = 2 * job.model.key_value_size // layout.tensor
    tokens = tokens_per_micro_batch(job.model, layout) * layout.context
    moved = tokens * width * BYTES[job.precision]
    passed = gather_seconds(job.machine, moved, ranks=layout.context, stride=layout.tensor)
    return max(0.0, passed - core)


def _with_shards(job: Job, ahead: Spent, back: Spent) -> tuple[Spent, Spent]:
    """Add the communication of weights (ZeRO-3) or gradients (ZeRO-2) split over the data ranks.

    ZeRO-3 gathers the weights before either pass and reduces the gradients after the second
    (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2.2).
    """
    layout, software = job.layout, job.software
    parameters = block_parameters(job.model, layout.tensor)
    group = {"ranks": layout.data, "stride": layout.tensor}
    gathers = 0.0
    if layout.zero_stage == 3:
        gathers = gather_seconds(job.machine, parameters * BYTES[job.precision], **group)
    gradients = parameters * software.bytes_of_gradients(BYTES[job.precision])
    if layout.zero_stage == 2 and (software.zero2_all_reduce or not software.reduce_scatter):
        reduce = all_reduce_seconds(job.machine, gradients, **group)
    else:
        reduce = gather_seconds(job.machine, gradients, **group)
    return (
        ahead + Spent(tensor=_exposed(job, gathers, ahead.total)),
        back + Spent(tensor=_exposed(job, gathers + reduce, back.total)),
    )


def _exposed(job: Job, communication: float, computation: float) -> float:
    """What of a communication beside a computation is waited for."""
    return communication - min(communication, computation) * job.software.shard_overlap


@lru_cache(maxsize=4096)
def end_passes(job: Job) -> tuple[Directions, Directions]:
    """Return the passes of the embedding, and those of the final norm, the logits and the loss.

    job: as `block_job` returns it
    """
    gpu, t, precision, era = job.machine.gpu, job.layout.tensor, job.precision, job.software.era
    tokens, h = tokens_per_micro_batch(job.model, job.layout), job.model.hidden_size
    row = tokens * h * BYTES[precision]
    reduced = all_reduce_seconds(job.machine, row, ranks=t, stride=1)
    # looked up, masked, added; backward: added up by token
    looked_up = memory_seconds(gpu, 4 * row)
    embedding = Directions(Spent(looked_up, reduced), Spent(looked_up))

    columns = job.model.padded_vocab_size(t) // t
    rows = tokens  # of one matrix product
    if job.footprint.loss_in_parts:
        rows = tokens_at_a_time(tokens, columns, gpu.device)
    logits = matmul_seconds(gpu, precision, rows=rows, columns=columns, inner=h)
    backward = matmul_seconds(gpu, precision, rows=rows, columns=h, inner=columns)
    weight = matmul_seconds(gpu, precision, rows=columns, columns=h, inner=padded(rows))
    logits, backward, weight = (tokens / rows * each for each in (logits, backward, weight))
    if job.footprint.loss_in_parts:
        # Both gradients are there after the forward pass, and the backward pass scales them.
        loss = memory_seconds(gpu, tokens * columns * LOSS_PASSES * BYTES[precision])
        scaled = memory_seconds(gpu, 2 * (row + h * columns * BYTES[precision]))
        return embedding, Directions(
            Spent((logits + backward + weight + loss) / era), Spent(scaled / era, reduced)
        )
    loss = memory_seconds(gpu, tokens * columns * LOSS_BYTES / 2)
    return embedding, Directions(
        Spent((logits + loss) / era), Spent((backward + weight + loss) / era, reduced)
    )
