"""Predicted seconds of kernels, collectives and transfers, and of a block, embedding and head.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, d head size,
t tensor ranks. All times are seconds of one micro-batch on one rank.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil, inf, log2
from typing import NamedTuple

from models.config import ModelConfig
from models.cost import (
    DOWN,
    attention_matrices,
    block_parameters,
    columns_of_window,
    context_columns,
    kind_of_predictions,
    kinds_of_layers,
    norms_per_block,
    routed_parameters,
    sends_latents,
    tokens_at_a_time,
)
from threefold.config.deepspeed_json import BYTES
from threefold.gpus.datasheet import Gpu
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.job import Job, Machine, PlannedLayout
from threefold.plan.memory.activations import bytes_of_blocks
from threefold.plan.software import THREEFOLD, OperandFormat, Quantization
from threefold.plan.stage_contents import (
    exchanged_rows,
    reached_keys_of,
    routed_rows,
    table_parameters,
    tokens_per_micro_batch,
)

# Predicted seconds of a transformer's kernels on one GPU.

TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
)  # cuBLAS's output tiles


def matmul_seconds(
    gpu: Gpu, precision: str, *, rows: int, columns: int, inner: int, batch: int = 1,
    operands: OperandFormat | None = None,
) -> float:  # fmt: skip
    """Return the seconds of `batch` matmuls [rows, inner] x [inner, columns] in one kernel.

    The multiprocessors compute output tiles in waves. If the last wave is only partly filled, the
    share `wave_quantization` of its empty part adds to the time (tile and wave quantization, NVIDIA
    Deep Learning Performance: Matrix Multiplication Background). Like cuBLAS, the function uses the
    fastest tile size. Memory traffic is a lower bound (roofline, Williams et al. 2009). With
    operands of 8 or 4 bits, the start and end of a tile take as long as with 16 bits.

    Args:
        operands: format of quantized operands; None: `precision`
    """
    peak = gpu.peak_tflops[precision] * 1e12 * gpu.matmul_efficiency
    size: float = BYTES[precision]
    depth = inner + gpu.matmul_depth_cost
    if operands is not None and operands.peak:
        narrow = gpu.peak_tflops[operands.peak] * 1e12
        narrow *= gpu.fp4_efficiency if operands.peak == "fp4" else gpu.fp8_efficiency
        depth = inner + gpu.matmul_depth_cost * narrow / peak
        peak, size = narrow, operands.bytes_per_element
    peak *= min(alignment(gpu, precision, inner), alignment(gpu, precision, columns))
    best = float("inf")
    for tile_rows, tile_columns in TILES:
        tiles = ceil(rows / tile_rows) * ceil(columns / tile_columns) * batch
        waves = tiles / gpu.multiprocessors
        waves += gpu.wave_quantization * (ceil(waves) - waves)
        cost = 1 + gpu.matmul_tile_cost * (1 / tile_rows + 1 / tile_columns)
        multiplications = waves * gpu.multiprocessors * tile_rows * tile_columns * depth
        best = min(best, multiplications * cost)
    moved = (rows * inner + inner * columns) * size + rows * columns * BYTES[precision]
    moved *= batch
    return max(2 * best / peak, memory_seconds(gpu, moved)) + gpu.kernel_seconds


def alignment(gpu: Gpu, precision: str, size: int) -> float:
    """Return the relative speed of matmuls with rows of `size` elements.

    Tensor cores need rows that are multiples of 16 bytes (cuBLAS documentation, "Tensor Core
    Usage").
    """
    return 1.0 if size * BYTES[precision] % 16 == 0 else gpu.unaligned_efficiency


def memory_seconds(gpu: Gpu, moved: float) -> float:
    """Return the seconds of memory-bound kernels that read and write `moved` bytes."""
    return moved / (gpu.memory_gigabytes_per_second * 1e9 * gpu.memory_efficiency)


def fused_attention_seconds(gpu: Gpu, precision: str, *, flops: float) -> float:
    """Return the seconds of attention without written scores (Dao 2023, arXiv 2307.08691).

    Published runs with heads of 64 to 128 reach the same rate.

    Args:
        flops: floating-point operations of the unmasked scores
    """
    peak = gpu.peak_tflops[precision] * 1e12 * gpu.matmul_efficiency * gpu.attention_efficiency
    return flops / peak + gpu.kernel_seconds


# Predicted seconds of collectives and of transfers between stages.

# Number of ring steps, within a node or between nodes, that take as long as the network's latency.
# Fitted to InternEvo's broadcasts and DeepSpeed's ZeRO-3: 8 microseconds per step on A100s.
RING_STEPS_PER_LATENCY = 8


def all_reduce_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds of an all-reduce of `moved` bytes.

    It moves twice the bytes of a gather. Across nodes, NCCL uses trees for it.
    """
    return 2 * (
        _moving_seconds(machine, moved, ranks=ranks, stride=stride)
        + _tree_seconds(machine, ranks=ranks, stride=stride)
    )


def gather_seconds(
    machine: Machine, moved: float, *, ranks: int, stride: int, messages: int = 1
) -> float:
    """Return the seconds of all-gathers or reduce-scatters of `moved` bytes per rank in total.

    NCCL uses rings for gathers, scatters and broadcasts. Each message visits all ranks one after
    another. If many ranks share few bytes, this latency exceeds the time of the transfer.

    Args:
        stride: distance between neighbouring global ranks of the group; `stride` groups share a
            node
        messages: number of collectives that the bytes are divided into, one after the other
    """
    if _ranks_inside(machine, ranks=ranks, stride=stride) == ranks:
        latency = _tree_seconds(machine, ranks=ranks, stride=stride)
    else:
        latency = machine.gpu.network_latency_seconds / RING_STEPS_PER_LATENCY * ranks
    return _moving_seconds(machine, moved, ranks=ranks, stride=stride) + messages * latency


def _ranks_inside(machine: Machine, *, ranks: int, stride: int) -> int:
    """Return the number of a group's ranks in each node."""
    return max(1, min(ranks, machine.linked_gpus // stride))


def _tree_seconds(machine: Machine, *, ranks: int, stride: int) -> float:
    """Return the latency of a collective on a tree of nodes, or of ranks within one node."""
    inside = _ranks_inside(machine, ranks=ranks, stride=stride)
    if ranks == 1:
        return 0.0
    if inside == ranks:
        return machine.gpu.node_link_latency_seconds * log2(2 * ranks)
    return machine.gpu.network_latency_seconds * log2(2 * ranks / inside)


def _moving_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds of gathering `moved` bytes per rank, without latency.

    A ring moves (n - 1) / n of the bytes through each link (Thakur et al. 2005, section 4.1;
    NCCL's bus bandwidth). Across nodes, a group with several GPUs in each node divides the bytes
    over the network links of these GPUs (NCCL has one ring per link), while the links within the
    node carry their part at the same time.
    """
    gpu = machine.gpu
    inside = _ranks_inside(machine, ranks=ranks, stride=stride)
    part = (ranks - 1) / ranks * moved
    rate = machine.node_link_gigabytes_per_second * 1e9 * gpu.node_link_efficiency
    if inside < ranks:
        outside = machine.network_gigabytes_per_second * 1e9 * gpu.network_efficiency * inside
        if stride > 1 and inside > 1:
            outside *= machine.network_contention
        rate = min(rate, outside)
    return part / rate


def transfer_seconds(machine: Machine, moved: float, *, stride: int) -> float:
    """Return the seconds of sending `moved` bytes to the next stage, `stride` ranks away."""
    gpu = machine.gpu
    if stride < machine.linked_gpus:
        rate = machine.node_link_gigabytes_per_second * 1e9 * gpu.node_link_efficiency
        return moved / rate + gpu.node_link_latency_seconds
    rate = machine.network_gigabytes_per_second * 1e9 * gpu.network_efficiency
    return moved / rate + gpu.network_latency_seconds


def pass_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds in which each rank of a ring sends `moved` bytes to the next rank.

    The slowest link decides. Between nodes, it is the network link of one GPU.
    """
    spans_nodes = _ranks_inside(machine, ranks=ranks, stride=stride) < ranks
    distance = machine.linked_gpus if spans_nodes else stride
    return transfer_seconds(machine, moved, stride=distance)


def all_to_all_seconds(
    machine: Machine, moved: float, *, ranks: int, stride: int, outside_share: float = 1.0
) -> float:
    """Return the seconds in which each rank sends an equal part of `moved` bytes to every rank.

    The bytes for other nodes leave over the GPU's own network link, while those for the same node
    use the links within the node.

    Args:
        outside_share: part of the bytes for other nodes that crosses the network
    """
    gpu = machine.gpu
    inside = _ranks_inside(machine, ranks=ranks, stride=stride)
    node_rate = machine.node_link_gigabytes_per_second * 1e9 * gpu.node_link_efficiency
    network_rate = machine.network_gigabytes_per_second * 1e9 * gpu.network_efficiency
    seconds = max(
        moved * (inside - 1) / ranks / node_rate,
        outside_share * moved * (ranks - inside) / ranks / network_rate,
    )
    return seconds + _tree_seconds(machine, ranks=ranks, stride=stride)


# Reads and writes of each logit, in the model's precision, if the loss computes a part of the
# tokens at a time: one for the maximum, one for the sum, two to overwrite it with its gradient.
LOSS_PASSES = 4
LOSS_PASSES_IN_TILES = 3  # one for the maximum and the sum; see `sums_in_tiles`
BACKWARD_SLOWER = 1 / 0.85  # slowdown of matmuls in fused attention's backward pass; fitted
# Reads and writes of a row that a rank sends to an expert: copied before the exchange, in the order
# of the experts (2), copied back after the reverse one (2), read and added (2).
SENT_MOVES = 6
# Reads and writes of a row that an expert computes: copied in the order of the experts after the
# exchange (2), copied back before the reverse one (2).
COMPUTED_MOVES = 4
# Reads and writes of a row that tensor ranks gather: copied for every rank (1), and its partial
# outputs added (1).
GATHERED_MOVES = 2
ELEMENTWISE_KERNELS = 8  # launches in a block's forward pass
# Reads and writes of an attention's output, in 16 bits, to multiply it by the share of the keys in
# fp32: converted (3), multiplied (4), converted back (3).
SINK_MOVES = 10
LARGEST_LOGIT_KERNELS = 5  # launches for the largest logits of a block of queries
ATTENTION_BLOCK = 128  # keys of a block of flash attention with heads of up to 128 columns


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass: computation, and exposed communication of the axes within a stage."""

    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.compute + self.tensor + self.context + self.expert

    def __add__(self, other: "PassTime") -> "PassTime":
        return PassTime(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def __mul__(self, count: float) -> "PassTime":
        return PassTime(
            self.compute * count, self.tensor * count, self.context * count, self.expert * count
        )


@dataclass(frozen=True)
class ForwardBackward:
    """Times of the forward and the backward pass of a block or a stage.

    Attributes:
        weights: the part of the backward pass that can be deferred: gradients of linear weights
    """

    forward: PassTime = PassTime()
    backward: PassTime = PassTime()
    weights: PassTime = PassTime()

    @property
    def total(self) -> float:
        """The seconds of both passes."""
        return self.forward.total + self.backward.total

    def __add__(self, other: "ForwardBackward") -> "ForwardBackward":
        return ForwardBackward(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
        )

    def __mul__(self, count: float) -> "ForwardBackward":
        return ForwardBackward(self.forward * count, self.backward * count, self.weights * count)


def block_job(job: Job) -> Job:
    """Return a job reduced to the settings that affect a block's time, as a key for caching."""
    layout = job.layout
    sharded = job.shards_in_passes
    splits = SCHEDULES[layout.schedule].splits
    return replace(
        job,
        global_sequences=1,
        layout=PlannedLayout(
            tensor=layout.tensor,
            context=layout.context,
            context_attention=layout.context_attention,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
            data=layout.data if sharded else 1,
            zero_stage=layout.zero_stage if sharded else 1,
            sequence_parallel=layout.sequence_parallel,
            recompute=layout.recompute,
            micro_sequences=layout.micro_sequences,
            # Deferred weight gradients cannot hide exchanges of tokens. ZB-H1 stands for all
            # schedules that defer them.
            schedule="zb-h1" if job.model.experts and splits else "1f1b",
        ),
    )


def _with_host(job: Job, seconds: float, host_seconds: float) -> float:
    """Return the time of kernels that the host launches: a GPU runs earlier ones meanwhile."""
    if job.machine.gpu.device == "cpu":
        return seconds + host_seconds
    return max(seconds, host_seconds)


@lru_cache(maxsize=4096)
def block_passes(job: Job) -> ForwardBackward:
    """Return the times of one block; the backward pass includes recomputation.

    Args:
        job: a job as returned by `block_job`
    """
    layout, software, quantization = job.layout, job.software, job.quantization
    if layout.recompute != "none" and job.recomputed_share < 1:
        kept = replace(job, layout=replace(layout, recompute="none"), recomputed_share=1.0)
        share, recomputed = job.recomputed_share, replace(job, recomputed_share=1.0)
        return block_passes(recomputed) * share + block_passes(kept) * (1 - share)
    if quantization is not None and quantization.wide_layers:
        share = min(1.0, quantization.wide_layers / sum(kinds_of_layers(job.model).values()))
        narrow = replace(job, quantization=replace(quantization, wide_layers=0))
        wide = replace(job, quantization=None)
        return block_passes(wide) * share + block_passes(narrow) * (1 - share)
    matmuls, matmuls_backward, matmuls_of_weights = _matmuls(job)
    core, core_backward = _attention(job)
    elementwise, elementwise_backward = _elementwise(job)
    tensor, tensor_backward = _tensor_collectives(job)
    context, context_backward = _context_collectives(
        job, core / software.kernel_efficiency, core_backward / software.kernel_efficiency
    )

    expert, expert_backward = _expert_collectives(job)
    columns = _column_collectives(job)
    forward = (matmuls + core + elementwise) / software.kernel_efficiency
    backward = (
        matmuls_backward + core_backward + elementwise_backward + _largest_logits(job)
    ) / software.kernel_efficiency
    host = software.block_seconds
    if job.model.experts:
        host = max(host, software.expert_block_seconds)
    routing = software.routing_seconds if job.model.experts else 0.0
    recomputing = PassTime()
    if layout.recompute == "full":
        again = _with_host(job, forward, host) + routing
        recomputing = PassTime(again, tensor + columns, context, expert)
    elif layout.recompute == "selective" and job.footprint.recomputes_modules:
        ups = _up_projections(job, ("q_up", "q", "kv_up"))
        recomputing = PassTime((elementwise + ups) / software.kernel_efficiency)
    elif layout.recompute == "selective":
        core += _up_projections(job, ("kv_up",))
        recomputing = PassTime(core / software.kernel_efficiency, context=context)
    host_backward = 2 * host
    offloading = _offloading(job)
    seconds = max(_with_host(job, forward, host), offloading) + routing
    ahead = PassTime(seconds, tensor + columns, context, expert)
    slower = max(_with_host(job, backward, host_backward), offloading)
    back = PassTime(slower, tensor_backward + columns, context_backward, expert_backward)
    back += recomputing
    # The backward pass has three collectives for every two of the forward pass. One of the three
    # gathers an input again for the gradient of a weight.
    width = gathered_size_ratio(job)
    gathered = tensor_backward * width / (2 + width) if layout.sequence_parallel else 0.0
    weights = PassTime(matmuls_of_weights / software.kernel_efficiency, gathered)
    if job.shards_in_passes:
        parameters = block_parameters(job.model, layout.tensor, layout.expert)
        routed = routed_parameters(job.model, layout.tensor, layout.expert)
        ahead, back = _with_shards(job, ahead, back, parameters, routed)
    return ForwardBackward(ahead, back, weights)


def _offloading(job: Job) -> float:
    """Return the seconds in which a block's activations move to the host, or back.

    They move during the passes of the block.
    """
    share = job.offloaded_share
    if not share:
        return 0.0
    kept, _ = bytes_of_blocks(job)[0]  # without the offloaded ones
    rate = job.machine.gpu.host_link_gigabytes_per_second * 1e9
    return kept * share / (1 - share) / rate


class MatmulTime(NamedTuple):
    """Seconds of a matmul and of its backward pass.

    For each forward matmul, the backward pass has two: the gradient of the input and the gradient
    of the weight. `backward` includes both; `weights` is the part for weight gradients.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0


def _matmuls(job: Job) -> MatmulTime:
    """Return the times of all matmuls of a block.

    A dense block has four. A block with experts has the attention's two, those of the shared
    experts, the router's, and the experts', among which the rows are divided equally.
    """
    model, t = job.model, job.layout.tensor
    tokens, h = tokens_per_micro_batch(model, job.layout), model.hidden_size
    times: list[MatmulTime] = []
    if model.latent is None:
        shapes = [
            (tokens, h, (model.query_size + 2 * model.key_value_size) // t, 1),
            (tokens, model.query_size // t, h, 1),
        ]
    else:
        latents = _latent_shapes(job)
        if has_own_fp8(job):
            times.append(_matmul(replace(job, quantization=None), latents.pop("kv_up")))
        shapes = list(latents.values())
    if model.mlp_size:
        shapes += _mlp_shapes(job)
    times += [_matmul(job, shape) for shape in shapes]
    if model.experts is not None:
        of_experts = _expert_shapes(job)
        if job.matmul_format == "fp8-tiles":  # one grouped matmul, which has no scales of tiles
            job = replace(job, quantization=Quantization(kind="fp8-dequantized"))
        times += [_matmul(job, shape) for shape in of_experts]
        shapes += of_experts
        router = (tokens // t, h, model.experts.count, 1)
        times.append(_matmul(replace(job, quantization=None), router))
    if job.quantization is not None:
        times += [_casts(job, shape) for shape in shapes]
    return MatmulTime(*(sum(parts) for parts in zip(*times, strict=True)))


MatmulShape = tuple[int, int, int, int]  # rows, inner, columns, number of equal matmuls


def has_own_fp8(job: Job) -> bool:
    """Return True if matmuls are in Threefold's FP8, which leaves the matrix `kv_up` in 16 bits."""
    return job.matmul_format in ("fp8-tiles", "fp8-dequantized")


def _latent_shapes(job: Job) -> dict[str, MatmulShape]:
    """Return the matmuls of latent attention; sequence parallelism divides those into latents."""
    model, layout = job.model, job.layout
    tokens, t = tokens_per_micro_batch(model, layout), layout.tensor
    shapes: dict[str, MatmulShape] = {}
    for name, (columns, inner) in attention_matrices(model).items():
        if name in DOWN:
            shapes[name] = (tokens // layout.sequence_ranks, inner, columns, 1)
        elif name == "output":
            shapes[name] = (tokens, inner // t, columns, 1)
        else:
            shapes[name] = (tokens, inner, columns // t, 1)
    return shapes


def _up_projections(job: Job, names: tuple[str, ...]) -> float:
    """Return the forward time of these matrices of latent attention, or 0 without it."""
    if job.model.latent is None:
        return 0.0
    wide = replace(job, quantization=None) if has_own_fp8(job) else job
    return sum(
        _matmul(wide if name == "kv_up" else job, shape).forward
        for name, shape in _latent_shapes(job).items()
        if name in names
    )


def _mlp_shapes(job: Job) -> list[MatmulShape]:
    """Return the two matmuls of a dense block's MLP, or of the shared experts."""
    model, t = job.model, job.layout.tensor
    tokens, h = tokens_per_micro_batch(model, job.layout), model.hidden_size
    return [(tokens, h, model.gate_and_up_size // t, 1), (tokens, model.mlp_size // t, h, 1)]


def _expert_shapes(job: Job) -> list[MatmulShape]:
    """Return the two matmuls of a rank's experts, among which the rows are divided equally."""
    model, layout, parts = job.model, job.layout, job.layout.expert_tensor
    assert model.experts is not None
    f = model.experts.ffn_hidden_size
    here = model.experts.count * parts // (layout.tensor * layout.expert)
    rows, h = ceil(routed_rows(job) / here), model.hidden_size
    columns = model.activation_columns(f) // parts
    return [(rows, h, columns, here), (rows, f // parts, h, here)]


def _matmul(job: Job, shape: MatmulShape) -> MatmulTime:
    rows, inner, columns, batch = shape
    operands = job.quantization.format if job.quantization else None
    seconds = partial(matmul_seconds, job.gpu, job.precision, batch=batch, operands=operands)
    speed = 1.0
    if job.quantization is not None and job.quantization.kind == "fp8-row":
        speed = job.software.row_scaling
    forward = seconds(rows=rows, columns=columns, inner=inner) / speed
    of_input = seconds(rows=rows, columns=inner, inner=columns) / speed
    weights = seconds(rows=columns, columns=inner, inner=padded(rows)) / speed
    return MatmulTime(forward, of_input + weights, weights)


def _casts(job: Job, shape: MatmulShape) -> MatmulTime:
    """Return the times of quantizing the operands of a matmul and of its backward pass.

    The forward pass casts the input, the backward pass the gradient of the output. With sharded
    weights, which are gathered in 16 bits, every pass casts them, and always in Threefold; others
    cast them once in a step, which is neglected.
    """
    assert job.quantization is not None
    rows, inner, columns, batch = shape
    operands = job.quantization.format
    cast_bytes = operands.cast_bytes * job.software.elementwise
    weights = 0.0
    is_gathered_wide = job.layout.zero_stage == 3 and not job.software.gathers_quantized
    if operands.casts_weights or is_gathered_wide:
        weights = batch * inner * columns
    forward = memory_seconds(job.gpu, cast_bytes * (batch * rows * inner + weights))
    backward = memory_seconds(job.gpu, cast_bytes * (batch * rows * columns + weights))
    return MatmulTime(forward, backward)


def padded(tokens: int) -> int:
    """Return the number of tokens rounded up to a multiple of 8, to count as aligned.

    It is the inner size of a weight gradient. The tokens are not the contiguous dimension of this
    matmul's inputs, so an odd number of tokens does not slow it down.
    """
    return -(-tokens // 8) * 8


def _attention(job: Job) -> tuple[float, float]:
    """Return the forward and backward times of the attention core, fused or with written scores."""
    model, layout, software, gpu = job.model, job.layout, job.software, job.gpu
    s, d, value = model.sequence_length, model.score_size, model.value_head_size
    batch = layout.micro_sequences * model.heads // layout.tensor
    if not (job.writes_scores or model.attention_soft_cap):
        # Half of the scores are masked, and the context ranks share the other half.
        flops = 2 * s * computed_columns(model) * (d + value) * batch / 2 / layout.context
        fused = fused_attention_seconds(gpu, job.precision, flops=flops)
        fused /= software.attention_speed(
            d, limited=_has_limited_attention(job), sinks=model.attention_sinks
        )
        # The backward pass has five matmuls instead of two (Dao 2023, arXiv 2307.08691, section
        # 4.1).
        return fused, 2.5 * fused * BACKWARD_SLOWER
    rows, columns = s // layout.context, s
    if not job.writes_scores:  # capped scores are computed again, in blocks without masked ones
        columns = ceil(computed_columns(model) / 2)
    scores = matmul_seconds(gpu, job.precision, rows=rows, columns=columns, inner=d, batch=batch)
    values = matmul_seconds(
        gpu, job.precision, rows=rows, columns=value, inner=columns, batch=batch
    )
    size = BYTES[job.precision]
    drops = software.attention_dropout or model.attention_dropout > 0
    dropout = 2 * size + 1 if drops else 0
    softmax = memory_seconds(gpu, batch * rows * columns * (2 * size + dropout))
    softmax_backward = memory_seconds(gpu, batch * rows * columns * (3 * size + dropout))
    again = 0.0 if job.writes_scores else scores
    return (
        scores + values + softmax + 3 * gpu.kernel_seconds,
        again + scores + 3 * values + softmax_backward + 3 * gpu.kernel_seconds,
    )


def _largest_logits(job: Job) -> float:
    """Return the time in which the backward pass computes the scores again for their maximum.

    The scores of `ATTENTION_BLOCK` queries at a time are written, masked where they are in the
    future, and read once.
    """
    if not job.limits_logits:
        return 0.0
    model, layout, gpu = job.model, job.layout, job.gpu
    rows = model.sequence_length // layout.context
    columns = ceil(computed_columns(model) / 2)
    batch = layout.micro_sequences * model.heads // layout.tensor
    scores = matmul_seconds(
        gpu, job.precision, rows=rows, columns=columns, inner=model.score_size, batch=batch
    )
    read = memory_seconds(gpu, batch * rows * columns * BYTES[job.precision])
    return scores + read + LARGEST_LOGIT_KERNELS * ceil(rows / ATTENTION_BLOCK) * gpu.kernel_seconds


def _has_limited_attention(job: Job) -> bool:
    """Return True if attention needs flash attention.

    It computes windows, sinks, separate documents, and the parts of a sequence that context ranks
    attend to, except with "ulysses".
    """
    model, layout = job.model, job.layout
    window = model.window_size(model.layers - 1)
    in_parts = layout.context > 1 and layout.context_attention != "ulysses"
    has_window = (window or inf) < model.sequence_length
    return in_parts or job.separate_documents or model.attention_sinks or has_window


def computed_columns(model: ModelConfig) -> float:
    """Return the keys per query that the last block's attention computes, twice as in full.

    `cost.attention_columns` counts the keys within the window. A fused kernel also computes the
    other keys of the blocks at both ends of the window of a block of queries.
    """
    window = model.window_size(model.layers - 1)
    return columns_of_window(model.sequence_length, window and window + ATTENTION_BLOCK)


def _elementwise(job: Job) -> tuple[float, float]:
    """Return the forward and backward times of element-wise operations, by the bytes they move.

    Reads and writes of [s, b, h] in the forward pass: two norms, or four with norms of inputs and
    outputs (2 each), and two residual additions with bias and dropout (3 each), which only sequence
    parallelism shards. Sharded over the tensor ranks: the preparation of queries, keys and values
    (2 each), the attention's output (2, more with sinks), and the MLP's activation (2 of its
    columns, 3 with a gate). Each row of an expert is also copied to its place before and after the
    exchanges. The backward pass moves 1.5 times as much.
    """
    model, layout, gpu = job.model, job.layout, job.gpu
    whole = (norms_per_block(model) * 2 + 2 * 3) * model.hidden_size / layout.sequence_ranks
    if model.latent is None:
        of_heads = 4 * (model.query_size + model.key_value_size)
    else:  # keys have as many columns as queries, and values as the output
        of_heads = 4 * (model.query_size + model.attention_output_size)
        latents = model.latent_columns + (model.latent.query_rank or 0)
        whole += 4 * latents / layout.sequence_ranks  # their norms and their rotation
    if model.attention_sinks:
        of_heads += SINK_MOVES * model.query_size
    heads = of_heads / layout.tensor
    activation = (model.gate_and_up_size + model.mlp_size) / layout.tensor
    columns = (whole + heads + activation) * job.software.elementwise
    moved = tokens_per_micro_batch(model, layout) * columns
    if model.experts is not None:
        h, f, parts = model.hidden_size, model.experts.ffn_hidden_size, layout.expert_tensor
        copied = job.software.row_moves
        moves = copied * COMPUTED_MOVES + (GATHERED_MOVES if parts > 1 else 0)
        row = moves * h + (model.activation_columns(f) + f) / parts
        routed = routed_rows(job) * row + exchanged_rows(job) * copied * SENT_MOVES * h
        moved += routed * job.software.elementwise
    moved *= BYTES[job.precision]
    forward = memory_seconds(gpu, moved) + ELEMENTWISE_KERNELS * gpu.kernel_seconds
    return forward, 1.5 * forward


def _tensor_collectives(job: Job) -> tuple[float, float]:
    """Return the exposed times of the tensor-parallel collectives, forward and backward.

    Each pass has two all-reduces of [s, b, h] (Shoeybi et al. 2019, arXiv 1909.08053, figure 4).
    With sequence parallelism, reduce-scatters and all-gathers move the same number of bytes, and
    the backward pass gathers both inputs again (Korthikanti et al. 2022, arXiv 2205.05198, section
    4.2.2). Experts need none, but without sequence parallelism an all-gather of their outputs, half
    of an all-reduce; the shared experts have the collectives of an MLP. Norms of queries and keys
    over all heads sum two fp32 statistics per token, forward and backward. Gathers in 8 bits, which
    are one of the two collectives of the forward pass and two of the three of the backward pass,
    take half as long. In Threefold's FP8, only the inputs are gathered in 8 bits, once in each pass
    (`gathered_size_ratio`).
    """
    layout, software, model = job.layout, job.software, job.model
    row = tokens_per_micro_batch(model, layout) * model.hidden_size * BYTES[job.precision]
    once = all_reduce_seconds(job.machine, row, ranks=layout.tensor, stride=1)
    halves = 2.0 if model.mlp_size else 1.0
    if model.experts is not None and not layout.sequence_parallel:
        halves += 0.5
    forward = once * (1 if software.parallel_block else halves)
    backward = forward * (1.5 if layout.sequence_parallel else 1.0)
    if layout.sequence_parallel and gathers_inputs_quantized(job):
        forward, backward = forward * 3 / 4, backward * 2 / 3
    elif layout.sequence_parallel:
        width = gathered_size_ratio(job)
        forward, backward = forward * (1 + width) / 2, backward * (2 + width) / 3
    if model.qk_norm and model.qk_norm_over == "projection":
        statistics = tokens_per_micro_batch(model, layout) * 2 * BYTES["fp32"]
        summed = all_reduce_seconds(job.machine, statistics, ranks=layout.tensor, stride=1)
        forward, backward = forward + summed, backward + summed
    return (
        forward * (1 - software.tensor_overlap),
        backward * (1 - software.tensor_overlap_backward),
    )


def _expert_collectives(job: Job) -> tuple[float, float]:
    """Return the exposed times of the exchanges of tokens, forward and backward.

    Each pass has two all-to-alls; that of the numbers of tokens is too short to count. The two
    matmuls of the shared experts run during one exchange each, forward and backward. The gradients
    of the experts' first matrices run during the last one, unless the schedule defers them.
    """
    layout, model, software = job.layout, job.model, job.software
    ranks = layout.ep_size
    if model.experts is None or ranks == 1:
        return 0.0, 0.0
    moved = exchanged_rows(job) * model.hidden_size * BYTES[job.precision]
    once = all_to_all_seconds(
        job.machine, moved, ranks=ranks, stride=layout.expert_tensor,
        outside_share=_share_of_network(job),
    )  # fmt: skip
    # On a CPU, the same cores compute and communicate.
    share = 0.0 if job.machine.gpu.device == "cpu" else software.expert_overlap
    first, second = MatmulTime(), MatmulTime()
    if model.mlp_size:
        first, second = (_matmul(job, shape) for shape in _mlp_shapes(job))
    if SCHEDULES[layout.schedule].splits:
        back = [first.backward - first.weights, second.backward - second.weights]
    else:
        of_experts = _matmul(job, _expert_shapes(job)[0]).weights
        back = [first.backward + of_experts, second.backward]

    once /= software.exchange_speed

    def exposed(*computed: float) -> float:
        return sum(once - share * min(once, time / software.kernel_efficiency) for time in computed)

    return exposed(first.forward, second.forward), exposed(*back)


def _share_of_network(job: Job) -> float:
    """Return the rows that cross the network relative to one row for each expert elsewhere.

    With k experts chosen at random among n nodes, a token needs n (1 - (1 - 1/n)^k) of them, and
    at most as many as a router allows that chooses among groups of experts.
    """
    experts, layout = job.model.experts, job.layout
    nodes = layout.ep_size * layout.expert_tensor / job.machine.linked_gpus
    if experts is None or not job.software.sends_once_per_node or nodes <= 1:
        return 1.0
    chosen = nodes * (1 - (1 - 1 / nodes) ** experts.per_token)
    if experts.groups > 1:
        chosen = min(chosen, experts.groups_per_token)
    return min(1.0, chosen / experts.per_token)


def _column_collectives(job: Job) -> float:
    """Return the time in which expert tensor parallelism gathers rows and sums partial outputs.

    It is the same in both passes.
    """
    ranks = job.layout.expert_tensor
    if job.model.experts is None or ranks == 1:
        return 0.0
    moved = routed_rows(job) * job.model.hidden_size * BYTES[job.precision]
    return 2 * gather_seconds(job.machine, moved, ranks=ranks, stride=1)


def context_seconds(job: Job) -> float:
    """Return the exposed time of all blocks' communication on the context axis, in both passes."""
    total, efficiency = 0.0, job.software.kernel_efficiency
    for kind, blocks in kinds_of_layers(job.model).items():
        of_kind = job.with_model(kind)
        core, core_backward = _attention(of_kind)
        both = _context_collectives(of_kind, core / efficiency, core_backward / efficiency)
        total += blocks * sum(both)
    return total


def _context_collectives(job: Job, core: float, core_backward: float) -> tuple[float, float]:
    """Return the exposed times of the context axis's communication, forward and backward.

    "ring": keys and values travel during attention, which hides them up to its own time (Liu et al.
    2023, arXiv 2310.01889, section 3). In the backward pass, fp32 gradients travel with them, and
    one more pass returns the gradients to their owners.
    "gather": only attention to a rank's own slices hides the gathers, 1 / 2c of all pairs. The
    backward pass also sums fp32 gradients. With attention dropout, which needs whole rows, nothing
    hides the gather, and the keys are kept for the backward pass.
    "ulysses": two all-to-alls in each pass, which nothing hides (Jacobs et al. 2023, arXiv
    2309.14509, section 3.2).
    Except with "ulysses", windows reach the keys of few other ranks (`_window_exchanges`).
    """
    layout, model, machine = job.layout, job.model, job.machine
    ranks, stride, size, wide = layout.context, layout.tensor, BYTES[job.precision], BYTES["fp32"]
    if ranks == 1:
        return 0.0, 0.0
    tokens = tokens_per_micro_batch(model, layout)
    shares = layout.context if layout.context_attention == "ulysses" else 1
    keys = tokens * context_columns(model, layout.tensor, shares=shares)  # elements of a rank
    if layout.context_attention == "ulysses":
        queries = tokens * model.query_size / layout.tensor
        outputs = tokens * model.attention_output_size / layout.tensor
        sent, whole = queries + keys, 0.0
        if sends_latents(model, layout.tensor, shares=shares):  # gathered, and not exchanged
            sent, whole = queries, ranks * keys * size
        both = sum(
            all_to_all_seconds(machine, elements * size, ranks=ranks, stride=stride)
            for elements in (sent, outputs)
        )
        both += gather_seconds(machine, whole, ranks=ranks, stride=stride) if whole else 0.0
        return both, both
    gathered, summed = (
        gather_seconds(machine, ranks * keys * width, ranks=ranks, stride=stride)
        for width in (size, wide)
    )
    if model.attention_dropout:
        return gathered, summed
    if reached_keys_of(model, layout) is not None:
        return _window_exchanges(job, core, core_backward)
    if layout.context_attention == "ring":
        forward, backward, last = (
            pass_seconds(machine, keys * width, ranks=ranks, stride=stride)
            for width in (size, size + wide, wide)
        )
        exposed_backward = max(0.0, (ranks - 1) * backward - core_backward) + last
        return max(0.0, (ranks - 1) * forward - core), exposed_backward
    exposed_backward = max(0.0, gathered - core_backward / (2 * ranks))
    return max(0.0, gathered - core / (2 * ranks)), exposed_backward + summed


def _window_exchanges(job: Job, core: float, core_backward: float) -> tuple[float, float]:
    """Return the exposed times of exchanging the keys that windows reach, forward and backward.

    Keys and values travel once, during attention to a rank's own slices. The backward pass also
    returns their fp32 gradients, which nothing hides. The keys come from the ranks with the slices
    before, so that the slowest link decides, as in a ring.
    """
    model, layout = job.model, job.layout
    reached = reached_keys_of(model, layout)
    window = model.window_size(model.layers - 1)
    assert reached is not None
    elements = reached * layout.micro_sequences * context_columns(model, layout.tensor)
    exchanged, returned = (
        pass_seconds(
            job.machine, elements * BYTES[precision], ranks=layout.context, stride=layout.tensor
        )
        for precision in (job.precision, "fp32")
    )
    of_slice = columns_of_window(model.sequence_length // (2 * layout.context), window)
    own = of_slice / columns_of_window(model.sequence_length, window)  # share of the scores
    return max(0.0, exchanged - own * core), max(0.0, exchanged - own * core_backward) + returned


def _with_shards(
    job: Job, ahead: PassTime, back: PassTime, parameters: int, routed: int = 0
) -> tuple[PassTime, PassTime]:
    """Add the communication of weights (ZeRO-3) and gradients sharded over the data ranks.

    ZeRO-3 gathers the weights before both passes and reduces the gradients after the backward pass
    (Rajbhandari et al. 2020, arXiv 1910.02054, section 7.2.2). Weights that are released between
    the recomputation and the backward pass of a block are gathered a third time. Experts are
    gathered among the ranks with the same experts.

    Args:
        parameters: of the block, or of an embedding or head
        routed: number of `parameters` that belong to experts
    """
    layout, software = job.layout, job.software
    spans = (
        (parameters - routed, layout.dp_cp_size, layout.tensor),
        (routed, layout.dp_cp_size // layout.expert, layout.tensor * layout.expert),
    )

    def gathered(size: float) -> float:
        """Return the seconds of gathering or reducing a block, with `size` bytes per parameter."""
        return sum(
            gather_seconds(
                job.machine, count * size, ranks=ranks, stride=stride,
                messages=software.messages_per_block,
            )
            for count, ranks, stride in spans
            if count and ranks > 1
        )  # fmt: skip

    gathers = again = 0.0
    if layout.zero_stage == 3:
        gathers = gathered(weight_bytes(job))
        if layout.recompute == "full":
            again = gathers * max(0.0, 1 - software.kept_elements / parameters)
    size = software.bytes_of_gradients(BYTES[job.precision])
    if layout.zero_stage == 2 and not software.reduce_scatter:
        reduce = all_reduce_seconds(
            job.machine, parameters * size, ranks=layout.dp_cp_size, stride=layout.tensor
        )
    else:
        reduce = gathered(size)
    return (
        ahead + PassTime(tensor=_exposed(job, gathers, ahead.total)),
        back + PassTime(tensor=_exposed(job, gathers + again + reduce, back.total)),
    )


def gathers_inputs_quantized(job: Job) -> bool:
    """Return True if inputs are cast to 8 bits with one scale before tensor ranks gather them.

    With scales of rows or blocks, the copies along the rows and along the columns differ, and both
    would have to be gathered.
    """
    quantization = job.quantization
    return (
        quantization is not None
        and quantization.kind == "fp8-tensor"
        and job.software.gathers_quantized
    )


def gathered_size_ratio(job: Job) -> float:
    """Return the size of a gathered input in Threefold's FP8 relative to the job's precision.

    It is 1 without this FP8.
    """
    if job.quantization is None or not has_own_fp8(job):
        return 1.0
    return job.quantization.format.bytes_per_element / BYTES[job.precision]


def weight_bytes(job: Job) -> float:
    """Return the bytes of a block's weight when it is gathered."""
    if job.quantization is not None and job.software.gathers_quantized:
        return job.quantization.format.bytes_per_element
    return BYTES[job.precision]


def _exposed(job: Job, communication: float, computation: float) -> float:
    """Return the part of a communication that the concurrent computation does not hide."""
    return communication - min(communication, computation) * job.software.shard_overlap


MODULE_MOVES = 12  # reads and writes of [s, b, h]: three norms (2 each), joined inputs, two sums


@lru_cache(maxsize=4096)
def prediction_passes(job: Job) -> ForwardBackward:
    """Return the times of a prediction module without its logits and loss.

    All tensor ranks compute the projection, each for its own tokens under sequence parallelism.

    Args:
        job: a job as returned by `block_job`
    """
    model, layout, efficiency = job.model, job.layout, job.software.kernel_efficiency
    embedding, _ = end_passes(job)
    tokens, h = tokens_per_micro_batch(model, layout) // layout.sequence_ranks, model.hidden_size
    forward, backward, weights = _matmul(job, (tokens, 2 * h, h, 1))
    moved = MODULE_MOVES * tokens * h * BYTES[job.precision] * job.software.elementwise
    norms = memory_seconds(job.gpu, moved)
    ahead, back = (forward + norms) / efficiency, (backward + 1.5 * norms) / efficiency
    if layout.recompute == "full":
        back += ahead
    summed = 0.0
    if layout.sequence_ranks > 1:
        size = 2 * h * h * BYTES[job.precision]
        summed = all_reduce_seconds(job.machine, size, ranks=layout.tensor, stride=1)
    module = ForwardBackward(
        PassTime(ahead), PassTime(back, summed), PassTime(weights / efficiency, summed)
    )
    return embedding + module + block_passes(job.with_model(kind_of_predictions(model)))


def sharded_end_passes(job: Job) -> tuple[ForwardBackward, ForwardBackward]:
    """Return `end_passes` with the communication of ZeRO-3; tied tables are gathered once.

    The numbers of other software stacks are fitted without it.
    """
    embedding, head = end_passes(job)
    if job.layout.zero_stage != 3 or job.software.name != THREEFOLD.name:
        return embedding, head
    # Neither end is recomputed.
    job = replace(job, layout=replace(job.layout, recompute="none"))
    table = table_parameters(job.model, job.layout.tensor)

    def gathered(end: ForwardBackward) -> ForwardBackward:
        ahead, back = _with_shards(job, end.forward, end.backward, table)
        return ForwardBackward(ahead, back, end.weights)

    return embedding if job.model.tie_embeddings else gathered(embedding), gathered(head)


@lru_cache(maxsize=4096)
def end_passes(job: Job) -> tuple[ForwardBackward, ForwardBackward]:
    """Return the times of the embedding, and those of the final norm, the logits and the loss.

    Those of the loss include the logits of prediction modules.
    """
    gpu, t, precision, efficiency = (
        job.gpu,
        job.layout.tensor,
        job.precision,
        job.software.kernel_efficiency,
    )
    tokens, h = tokens_per_micro_batch(job.model, job.layout), job.model.hidden_size
    row = tokens * h * BYTES[precision]
    reduced = all_reduce_seconds(job.machine, row, ranks=t, stride=1)
    # Forward: lookup, mask and addition. Backward: the gradients are summed by token.
    lookup = memory_seconds(gpu, 4 * row)
    embedding = ForwardBackward(PassTime(lookup, reduced), PassTime(lookup))

    columns = job.model.padded_vocab_size(t) // t
    rows = tokens  # of one matmul
    if job.footprint.loss_in_parts:
        rows = tokens_at_a_time(tokens, columns, gpu.device)
    logits = matmul_seconds(gpu, precision, rows=rows, columns=columns, inner=h)
    backward = matmul_seconds(gpu, precision, rows=rows, columns=h, inner=columns)
    weight = matmul_seconds(gpu, precision, rows=columns, columns=h, inner=padded(rows))
    inputs = 1 + job.model.prediction_depth
    tokens *= inputs
    logits, backward, weight = (tokens / rows * time for time in (logits, backward, weight))
    if job.footprint.loss_in_parts:
        # The forward pass computes both gradients, and the backward pass only scales them.
        in_tiles = gpu.device != "cpu" and t == 1
        passes = LOSS_PASSES_IN_TILES if in_tiles else LOSS_PASSES
        loss = memory_seconds(gpu, tokens * columns * passes * BYTES[precision])
        scaled = memory_seconds(gpu, 2 * BYTES[precision] * h * (tokens + columns))
        return embedding, ForwardBackward(
            PassTime((logits + backward + weight + loss) / efficiency),
            PassTime(scaled / efficiency, inputs * reduced),
        )
    loss = memory_seconds(gpu, tokens * columns * job.software.loss_bytes / 2)
    return embedding, ForwardBackward(
        PassTime((logits + loss) / efficiency),
        PassTime((backward + weight + loss) / efficiency, inputs * reduced),
    )
