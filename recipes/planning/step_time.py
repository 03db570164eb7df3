"""How long a step takes, and where the time goes.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, a heads,
d head size, v vocabulary, t tensor ranks. All times are seconds.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from models.config import ModelConfig
from models.cost import block_parameters
from recipes.planning.hardware import Gpu
from recipes.planning.job import Job, Machine, Spread
from recipes.planning.kernels import (
    BYTES,
    fused_attention_seconds,
    matmul_seconds,
    memory_seconds,
)
from recipes.planning.network import all_reduce_seconds, gather_seconds, transfer_seconds
from recipes.planning.software import Software
from recipes.planning.stages import (
    blocks_of_stages,
    last_stage,
    stage_parameters,
    tokens_per_micro_batch,
)

# Bytes per parameter of an Adam step in mixed precision: fp32 weight and two moments read and
# written (24), fp32 gradient read by the norm, read, scaled and written, and read by the update
# (16), 16-bit weight written (2).
OPTIMIZER_BYTES = 42
# Bytes per logit of the cross-entropy, forward and backward, in fp32: converted (6), maximum (4),
# exponential (8), sum (4), scaled and subtracted (8), converted back (6).
LOSS_BYTES = 36


@dataclass(frozen=True)
class Pass:
    """One direction of a block or a stage: computation, and tensor collectives it waits for."""

    compute: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.compute + self.tensor

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(self.compute + other.compute, self.tensor + other.tensor)

    def __mul__(self, count: float) -> "Pass":
        return Pass(self.compute * count, self.tensor * count)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a step by what they are spent on, on the slowest stage."""

    compute: float
    tensor: float  # collectives of the tensor ranks
    pipeline: float  # transfers between stages
    bubble: float  # waiting for other stages
    data: float  # reduction of gradients, gathering of weights
    optimizer: float
    waiting: float  # for slower nodes
    forward: tuple[float, ...]  # of a micro-batch, by stage
    backward: tuple[float, ...]

    @property
    def total(self) -> float:
        """The whole step."""
        spent = self.compute + self.tensor + self.pipeline + self.bubble
        return spent + self.data + self.optimizer + self.waiting


def step_time(job: Job) -> StepTime:
    """Predict a step.

    A stage's micro-batches run one after the other; before its first and after its last one, the
    slowest stage waits for every other stage once or, interleaved, for a chunk of each (Narayanan
    et al. 2021, arXiv 2104.04473, section 2.2). DualPipeV as DeepSpeed runs it, with the gradients
    of weights and inputs together, hides half a forward pass of each stage (`schedule.py`).
    """
    spread, machine, software = job.spread, job.machine, job.software
    stages = stage_passes(job)
    work = [forward.total + backward.total for forward, backward in stages]
    slowest = max(range(len(work)), key=work.__getitem__)
    forward, backward = stages[slowest]
    transfer = transfer_time(job)
    # Each micro-batch crosses every chunk's border on the way forward and back.
    sent = job.micro_batches * 2 * spread.chunks * transfer * (1 - software.pipeline_overlap)
    filling = 2 * (spread.pipeline - 1) * transfer
    bubble = sum(work) - work[slowest]
    if spread.schedule == "dualpipev":
        bubble = max(0.0, bubble - sum(f.total for f, _ in stages) / 2)
    else:
        bubble /= spread.chunks
    bubble += filling
    data = data_time(job, backward.total)
    optimizer = optimizer_time(job)
    running = job.micro_batches * work[slowest]
    busy = running + sent + bubble + data + optimizer
    doublings = max(0.0, log2(machine.gpus / machine.gpus_per_node))
    return StepTime(
        compute=job.micro_batches * (forward.compute + backward.compute),
        tensor=job.micro_batches * (forward.tensor + backward.tensor),
        pipeline=sent,
        bubble=bubble,
        data=data,
        optimizer=optimizer,
        waiting=busy * machine.gpu.straggling * software.straggling * doublings,
        forward=tuple(f.total for f, _ in stages),
        backward=tuple(b.total for _, b in stages),
    )


def stage_passes(job: Job) -> list[tuple[Pass, Pass]]:
    """Forward and backward of a micro-batch through all chunks of each stage."""
    spread = job.spread
    forward, backward = block_passes(
        job.model, job.machine, spread_of_block(spread), job.precision, job.software
    )
    first, last = end_passes(
        job.model, job.machine, spread_of_block(spread), job.precision, job.software
    )
    dealt = blocks_of_stages(job.model.layers, spread.pipeline, spread.chunks, spread.schedule)
    end = last_stage(spread.pipeline, spread.schedule)
    stages = []
    for stage, blocks in enumerate(dealt):
        ends = [first] * (stage == 0) + [last] * (stage == end)
        stages.append(
            (
                sum((each[0] for each in ends), forward * blocks),
                sum((each[1] for each in ends), backward * blocks),
            )
        )
    return stages


def spread_of_block(spread: Spread) -> Spread:
    """What of a spread decides a block's time, so that many spreads share it."""
    return Spread(
        tensor=spread.tensor,
        context=spread.context,
        data=spread.data if spread.zero_stage > 1 else 1,
        zero_stage=spread.zero_stage if spread.zero_stage > 1 else 1,
        sequence_parallel=spread.sequence_parallel,
        recompute=spread.recompute,
        micro_sequences=spread.micro_sequences,
    )


@lru_cache(maxsize=4096)
def block_passes(
    model: ModelConfig, machine: Machine, spread: Spread, precision: str, software: Software
) -> tuple[Pass, Pass]:
    """Forward and backward of one block; the backward pass includes what is computed again."""
    gpu = machine.gpu
    products, products_backward = _products(model, gpu, spread, precision)
    core, core_backward = _attention(model, gpu, spread, precision, software)
    passing, passing_backward = _elementwise(model, gpu, spread, precision, software)
    tensor, tensor_backward = _tensor_collectives(model, machine, spread, precision, software)
    context = _context_collectives(model, machine, spread, precision, core)

    forward = (products + core + passing) / software.era
    backward = (products_backward + core_backward + passing_backward) / software.era
    again = Pass()
    if spread.recompute == "full":
        again = Pass(max(forward, software.block_seconds), tensor)
    elif spread.recompute == "selective":
        again = Pass(core / software.era)
    host, host_backward = software.block_seconds, 2 * software.block_seconds
    ahead = Pass(max(forward, host), tensor + context)
    back = Pass(max(backward, host_backward), tensor_backward + 2 * context) + again
    if spread.zero_stage < 2:
        return ahead, back
    return _with_shards(model, machine, spread, precision, software, ahead, back)


def _products(model: ModelConfig, gpu: Gpu, spread: Spread, precision: str) -> tuple[float, float]:
    """The four matrix products of a block; backward each has two, for its input and its weight."""
    tokens, t = tokens_per_micro_batch(model, spread), spread.tensor
    h, f = model.hidden_size, model.ffn_hidden_size
    forward = backward = 0.0
    for inner, columns in (
        (h, (model.query_size + 2 * model.key_value_size) // t),
        (model.query_size // t, h),
        (h, model.gate_and_up_size // t),
        (f // t, h),
    ):
        forward += matmul_seconds(gpu, precision, rows=tokens, columns=columns, inner=inner)
        backward += matmul_seconds(gpu, precision, rows=tokens, columns=inner, inner=columns)
        backward += matmul_seconds(gpu, precision, rows=columns, columns=inner, inner=tokens)
    return forward, backward


def _attention(
    model: ModelConfig, gpu: Gpu, spread: Spread, precision: str, software: Software
) -> tuple[float, float]:
    """The attention core: fused, or with scores that are written, masked and normalized."""
    s, d = model.sequence_length, model.attention_head_size
    batch = spread.micro_sequences * model.heads // spread.tensor
    if software.fused_attention:
        # Half of the scores are masked; a context rank has its share of what is left.
        flops = 4 * s * s * d * batch / 2 / spread.context
        fused = fused_attention_seconds(gpu, precision, flops=flops, head_size=d)
        fused /= software.attention
        return (
            fused,
            2.5 * fused / 0.85,
        )  # five products instead of two, slower (Dao 2023, sections 3.1, 4.1)
    scores = matmul_seconds(gpu, precision, rows=s, columns=s, inner=d, batch=batch)
    values = matmul_seconds(gpu, precision, rows=s, columns=d, inner=s, batch=batch)
    size = BYTES[precision]
    dropout = 2 * size + 1 if software.attention_dropout else 0
    softmax = memory_seconds(gpu, batch * s * s * (2 * size + dropout))
    softmax_backward = memory_seconds(gpu, batch * s * s * (3 * size + dropout))
    return (
        scores + values + softmax + 3 * gpu.kernel_seconds,
        scores + 3 * values + softmax_backward + 3 * gpu.kernel_seconds,
    )


def _elementwise(
    model: ModelConfig, gpu: Gpu, spread: Spread, precision: str, software: Software
) -> tuple[float, float]:
    """All that reads and writes activations and computes little, as bytes.

    Forward, in passes over [s, b, h] (each read or write one): two norms (2 each), two residual
    additions with bias and dropout (3 each); these are split by sequence parallelism only. Over
    the tensor ranks are split: queries, keys and values made ready (2 each) and the attention's
    output (2), the MLP's activation (2 of its columns, 3 with a gate). Backward half as much again.
    """
    tokens, t = tokens_per_micro_batch(model, spread), spread.tensor
    h, f = model.hidden_size, model.ffn_hidden_size
    whole = (2 * 2 + 2 * 3) * h / spread.sequence_ranks
    heads = 4 * (model.query_size + model.key_value_size) / t
    activation = (model.gate_and_up_size + f) / t
    moved = tokens * (whole + heads + activation) * BYTES[precision] * software.elementwise
    forward = memory_seconds(gpu, moved) + 8 * gpu.kernel_seconds
    return forward, 1.5 * forward


def _tensor_collectives(
    model: ModelConfig, machine: Machine, spread: Spread, precision: str, software: Software
) -> tuple[float, float]:
    """Two all-reduces of [s, b, h] each way (Shoeybi et al. 2019, arXiv 1909.08053, figure 4).

    With sequence parallelism as many bytes as reduce-scatters and all-gathers, and, backward, the
    gathered inputs twice again (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
    """
    moved = tokens_per_micro_batch(model, spread) * model.hidden_size * BYTES[precision]
    once = all_reduce_seconds(machine, moved, ranks=spread.tensor, stride=1)
    count = 1 if software.parallel_block else 2
    backward = count * once * (1.5 if spread.sequence_parallel else 1.0)
    return (
        count * once * (1 - software.tensor_overlap),
        backward * (1 - software.tensor_overlap_backward),
    )


def _context_collectives(
    model: ModelConfig, machine: Machine, spread: Spread, precision: str, core: float
) -> float:
    """Keys and values passed round the context ranks, behind the attention they are for.

    Liu et al. 2023 (arXiv 2310.01889, section 3).
    """
    width = 2 * model.key_value_size // spread.tensor
    moved = tokens_per_micro_batch(model, spread) * width * BYTES[precision] * spread.context
    passed = gather_seconds(machine, moved, ranks=spread.context, stride=spread.tensor)
    return max(0.0, passed - core)


def _with_shards(
    model: ModelConfig, machine: Machine, spread: Spread, precision: str, software: Software,
    ahead: Pass, back: Pass,
) -> tuple[Pass, Pass]:  # fmt: skip
    """A block whose weights (ZeRO-3) or gradients (ZeRO-2) are spread over the data ranks.

    ZeRO-3 gathers the weights before either pass and reduces the gradients after the second
    (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2.2).
    """
    weights = block_parameters(model, spread.tensor) * BYTES[precision]
    gather = gather_seconds(machine, weights, ranks=spread.data, stride=spread.tensor)
    gathers = gather if spread.zero_stage == 3 else 0.0
    reduce = gather * max(1.0, software.gradient_bytes / BYTES[precision])
    if spread.zero_stage == 2 and not software.reduce_scatter:
        reduce = all_reduce_seconds(machine, weights, ranks=spread.data, stride=spread.tensor)
    return (
        ahead + Pass(tensor=_exposed(gathers, ahead.total, software)),
        back + Pass(tensor=_exposed(gathers + reduce, back.total, software)),
    )


def _exposed(communication: float, computation: float, software: Software) -> float:
    """What of a communication beside a computation is waited for."""
    hidden = min(communication, computation) * software.shard_overlap
    return communication - hidden


@lru_cache(maxsize=4096)
def end_passes(
    model: ModelConfig, machine: Machine, spread: Spread, precision: str, software: Software
) -> tuple[tuple[Pass, Pass], tuple[Pass, Pass]]:
    """Forward and backward of the embedding, and of final norm, logits and loss."""
    gpu, t = machine.gpu, spread.tensor
    tokens, h = tokens_per_micro_batch(model, spread), model.hidden_size
    size = BYTES[precision]
    row = tokens * h * size
    reduced = all_reduce_seconds(machine, row, ranks=t, stride=1)
    # looked up, masked, added; backward: added up by token
    embedding = Pass(memory_seconds(gpu, 4 * row), reduced), Pass(memory_seconds(gpu, 4 * row))

    columns = model.padded_vocab_size(t) // t
    logits = matmul_seconds(gpu, precision, rows=tokens, columns=columns, inner=h)
    backward = matmul_seconds(gpu, precision, rows=tokens, columns=h, inner=columns)
    backward += matmul_seconds(gpu, precision, rows=columns, columns=h, inner=tokens)
    loss = memory_seconds(gpu, tokens * columns * LOSS_BYTES / 2)
    head = (
        Pass((logits + loss) / software.era),
        Pass((backward + loss) / software.era, reduced),
    )
    return embedding, head


def transfer_time(job: Job) -> float:
    """One micro-batch's activation from a stage to the next."""
    spread = job.spread
    if spread.pipeline == 1:
        return 0.0
    row = tokens_per_micro_batch(job.model, spread) * job.model.hidden_size * BYTES[job.precision]
    stride = spread.tensor * spread.context * spread.data
    if not (job.software.split_transfers or spread.sequence_parallel):
        return transfer_seconds(job.machine, row, stride=stride)
    part = transfer_seconds(job.machine, row / spread.tensor, stride=stride)
    if spread.sequence_parallel:
        return part
    return part + gather_seconds(job.machine, row, ranks=spread.tensor, stride=1)


def data_time(job: Job, last_backward: float) -> float:
    """Gradients added up over the data ranks and new weights gathered, once per step.

    Where it overlaps, the last micro-batch's backward pass hides it, the first forward pass the
    weights. ZeRO-2 and 3 have done most of it with every micro-batch.
    """
    spread, software = job.spread, job.software
    ranks = spread.data * spread.context
    if ranks == 1 or spread.zero_stage == 3:
        return 0.0
    stride = spread.tensor
    parameters = max(stage_parameters(job.model, job.spread))
    weights = parameters * BYTES[job.precision]
    gradients = parameters * max(software.gradient_bytes, BYTES[job.precision])
    reduced = gather_seconds(job.machine, gradients, ranks=ranks, stride=stride)
    gathered = gather_seconds(job.machine, weights, ranks=ranks, stride=stride)
    if spread.zero_stage == 0:
        gathered = 0.0
    if spread.zero_stage == 0 or not software.reduce_scatter:
        reduced = all_reduce_seconds(job.machine, gradients, ranks=ranks, stride=stride)
    if spread.zero_stage == 2:
        reduced = 0.0
    hidden = min(reduced + gathered, last_backward * 1.5) * software.data_overlap
    return reduced + gathered - hidden


def optimizer_time(job: Job) -> float:
    """The update of this rank's share of the parameters, the host's time of a step, tied tables."""
    spread = job.spread
    parameters = max(stage_parameters(job.model, job.spread))
    update = memory_seconds(job.machine.gpu, parameters / job.optimizer_ranks * OPTIMIZER_BYTES)
    tied = 0.0
    if job.model.tie_embeddings and spread.pipeline > 1:
        table = job.model.padded_vocab_size(spread.tensor) // spread.tensor * job.model.hidden_size
        tied = 2 * transfer_seconds(
            job.machine,
            table * max(job.software.gradient_bytes, BYTES[job.precision]),
            stride=spread.tensor * spread.context * spread.data,
        )
    return update + tied + job.software.step_seconds
