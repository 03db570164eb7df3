"""Properties of training software: kernels, overlap of communication, footprints, quantization."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

from models.errors import UserError
from threefold.config.deepspeed_json import GRADIENT_BUCKET_ELEMENTS
from threefold.config.loading import REPOSITORY
from threefold.gpus.datasheet import Gpu

# Matmuls in 8 and 4 bits: the formats of their operands, and the layers that stay in 16 bits.


@dataclass(frozen=True, kw_only=True)
class OperandFormat:
    """A format of the operands of matmuls.

    Attributes:
        peak: key of `Gpu.peak_tflops`; empty: matmuls multiply the dequantized operands
        bytes_per_element: of an operand, with its scales
        cast_bytes: bytes that a cast reads and writes per element: an operand of 16 bits becomes a
            copy for the matmul along its rows and one for the matmul along its columns
        casts_weights: True if every pass casts the weights again
        needs: another key of `Gpu.peak_tflops` that all GPUs with such matmuls have
    """

    peak: str
    bytes_per_element: float
    cast_bytes: float
    casts_weights: bool = False
    needs: str = ""


# A scale for a whole tensor or for a row needs the maximum, and thus a second read, before the
# cast. Block scales (DeepSeek-V3, arXiv 2412.19437, section 3.3: 1 x 128; OCP Microscaling Formats
# 1.0: 32 elements and a scale of 8 bits; NVFP4: 16 elements, a scale of 8 bits and one for the
# tensor) are found while a tile is in registers. Scales of rows differ from those of columns, so
# that both copies are read and scaled separately.
FORMATS: Mapping[str, OperandFormat] = MappingProxyType(
    {
        "fp8-tensor": OperandFormat(peak="fp8", bytes_per_element=1, cast_bytes=2 + 2 + 2 * 1),
        "fp8-row": OperandFormat(peak="fp8", bytes_per_element=1, cast_bytes=2 * (2 + 2 + 1)),
        "fp8-block": OperandFormat(peak="fp8", bytes_per_element=1 + 4 / 128, cast_bytes=2 + 2 * 1),
        "mxfp8": OperandFormat(
            peak="fp8", bytes_per_element=1 + 1 / 32, cast_bytes=2 + 2 * 1, needs="fp4"
        ),
        # Those of Threefold (models/kernels/matmul.py). It casts along rows and along columns in
        # separate kernels, and dequantizes both copies where no matmul takes scales of blocks.
        "fp8-tiles": OperandFormat(
            peak="fp8", bytes_per_element=1 + 4 / 128, cast_bytes=2 * (2 + 1), casts_weights=True
        ),
        "fp8-dequantized": OperandFormat(
            peak="",
            bytes_per_element=1 + 4 / 128,
            cast_bytes=2 * (2 + 1 + 1 + 2),
            casts_weights=True,
        ),
        "nvfp4": OperandFormat(
            peak="fp4", bytes_per_element=0.5 + 1 / 16, cast_bytes=2 + 2 + 2 * 0.5
        ),
    }
)
# Words of a table's precision, in the order in which they are tried.
WORDS = (
    ("fp8-tiles", "fp8-tiles"),  # ours, as tables of sweeps name them
    ("fp8-dequantized", "fp8-dequantized"),
    (r"nvfp4|(?<!mx)(?<!mx[-_ ])fp4", "nvfp4"),
    (r"mx[-_ ]?(fp8|float8)|(fp8|float8)[-_ ]?mx(?![a-z])", "mxfp8"),
    (r"row[-_ ]?wise", "fp8-row"),
    (r"block|fp8[-_ ]?sc(?![a-z])", "fp8-block"),
    (r"fp8|float8", "fp8-tensor"),
)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The format of the matmuls of blocks; the head, the router and attention stay in 16 bits.

    Attributes:
        kind: a key of `FORMATS`
        wide_layers: number of layers whose matmuls stay in 16 bits; they are assumed to be spread
            over the stages
    """

    kind: str
    wide_layers: int = 0

    @property
    def format(self) -> OperandFormat:
        """The format of the operands."""
        return FORMATS[self.kind]


HOPPER = ("H100", "H200", "H800", "H20")


def own_quantization(gpu: Gpu) -> Quantization:
    """Return the quantization of Threefold's `training.matmul_precision = "fp8"` on a GPU.

    Only on Hopper GPUs torch's matmuls take scales of tiles and blocks
    (`models/kernels/matmul.py`).
    """
    is_hopper = any(word in name for word in HOPPER for name in gpu.device_names)
    return Quantization(
        kind="fp8-tiles" if is_hopper and "fp8" in gpu.peak_tflops else "fp8-dequantized"
    )


def quantization_of(text: str) -> Quantization | None:
    """Return the quantization that a table's precision names; None for 16 or 32 bits.

    "nvfp4 (last 6 of 36 layers bf16)" leaves six layers in 16 bits, and "FP8-CS (FP8-MX)" is the
    format before the bracket: the numbers in brackets of such tables are other runs.
    """
    words = text.lower()
    wide = re.search(r"(\d{1,4}) (?:of \d+ )?layers (?:in )?(?:bf16|fp16|16)", words)
    name = words.split("(")[0]
    kind = next((kind for pattern, kind in WORDS if re.search(pattern, name)), None)
    return Quantization(kind=kind, wide_layers=int(wide[1]) if wide else 0) if kind else None


# Memory footprints of training software, in bytes per parameter, activation or logit.

RUNNING_BUCKETS = 2  # `MAX_RUNNING` of `threefold/pipeline/gradients.py`


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes per parameter, per activation and in fixed buffers.

    Attributes:
        weight: bytes per parameter in the precision of the matmuls
        gradient: bytes per parameter kept between steps, sharded over data ranks by ZeRO-2 and 3
        running_gradient: additional bytes per parameter from the first backward pass to the update
        optimizer: bytes per parameter, sharded over the data ranks from ZeRO-1 on
        zero3_copy: additional bytes per parameter under ZeRO-3, sharded likewise
        bucket_elements: elements of a ZeRO gradient bucket (DeepSpeed's reduce_bucket_size)
        group_bucket_elements: elements of a bucket of Threefold's ZeRO-1 and ZeRO-2
        gathered_elements: most elements that ZeRO-3 gathers in advance
            (stage3_max_live_parameters)
        bucket: bytes of buckets, allocated from the first backward pass on
        reducing: additional bytes per parameter during the gradient reduction
        reducing_one_bucket: the same if all of a stage's parameters fit into one bucket
        reducing_bucket: additional bytes of buckets during the gradient reduction
        updating: additional bytes per parameter of a rank's share during its update
        norm: bytes per input element of an RMSNorm, kept for its backward pass
        separate_qkv: q, k and v are kept separately, instead of the fused projection and rotated
            q and k
        swiglu_tensors: number of f-sized tensors that a SwiGLU keeps (gate, up, silu(gate), their
            product)
        working_tensors: number of h-sized tensors in the working memory of a block's backward pass
        loss_in_parts: logits exist for only a part of the tokens at a time, and the loss's forward
            pass computes the gradients of its input and of the output matrix
        logit: bytes per logit of the current micro-batch during its loss
        head: bytes per logit while the gradient of the output matrix is computed
        score: bytes per written attention score that its backward pass adds to the kept ones
        held_logits: bytes per logit that the last stage still holds after a step
        stock_pipeline: like DeepSpeed's pipeline, a stage keeps sent activations, the previous
            micro-batch's logits, and a copy of the gradients even for one data rank
        dropout: dropout masks are kept even if the model's dropout is unknown
        keeps_gathered: with a pipeline, ZeRO-3 keeps the gathered weights and whole fp32 gradients
            during a step
        recomputes_modules: selective recomputation is that of norms, activations of MLPs and up
            projections of latent attention
        selective: share of a block's activations that selective recomputation keeps; None: all
            except those of the attention core
        overhead_gib: GiB of the CUDA context and the communication library; None: the datasheet's
        fragmentation: share of the activations that the caching allocator wastes
        keeps_quantized: inputs of quantized matmuls are kept in 8 or 4 bits for the backward pass
        sent: bytes of a gradient during its reduction over the data ranks; None: as `weight`
        sums: bytes of a gradient's sum over micro-batches on one rank; None: as `gradient`
        zero1: the footprint under Threefold's ZeRO-1 and 2; None: this one
    """

    weight: float = 2
    gradient: float = 4
    running_gradient: float = 0
    optimizer: float = 12  # fp32 weight and two moments
    zero3_copy: float = 0
    bucket_elements: float = 0
    group_bucket_elements: float = GRADIENT_BUCKET_ELEMENTS
    gathered_elements: float = 0
    bucket: float = 0
    reducing: float = 0
    reducing_one_bucket: float = 0
    reducing_bucket: float = 0
    updating: float = 0
    norm: float = 8
    swiglu_tensors: float = 4
    separate_qkv: bool = False
    working_tensors: float = 3
    loss_in_parts: bool = False
    logit: float = 10
    head: float = 6
    score: float = 8
    held_logits: float = 0
    stock_pipeline: bool = True
    dropout: bool = False
    keeps_gathered: bool = False
    recomputes_modules: bool = False
    selective: float | None = None
    overhead_gib: float | None = None
    fragmentation: float = 0.05
    keeps_quantized: bool = False
    sent: float | None = None
    sums: float | None = None
    zero1: "Footprint | None" = None

    @property
    def sum_bytes(self) -> float:
        """Bytes of the sum of a gradient over micro-batches."""
        return self.gradient if self.sums is None else self.sums


# DeepSpeed 0.19 with our recipes, counted operation by operation (`plan.py trace`). ZeRO-1
# keeps the summed gradients of the whole stage from step to step. The data ranks sum them in place,
# or in copies if the JSON sets another type for that. fp32 weights are updated in place. ZeRO-2 of
# DeepSpeed and ZeRO-3 have buckets of 5e8 elements.
DEEPSPEED_ZERO = Footprint(bucket_elements=5e8, gathered_elements=1e9)
ZERO = replace(
    DEEPSPEED_ZERO, norm=4, swiglu_tensors=3, separate_qkv=True, working_tensors=1, score=3,
    loss_in_parts=True, stock_pipeline=False,
)  # fmt: skip
FP16 = replace(ZERO, gradient=0, running_gradient=2, updating=6)
FP32 = replace(
    ZERO, weight=4, gradient=0, running_gradient=4, optimizer=8, zero3_copy=4, norm=8, score=7,
)  # fmt: skip
DEEPSPEED = {
    "bf16": ZERO,
    "fp16": replace(FP16, zero1=replace(FP16, gradient=4, running_gradient=0, updating=0)),
    "fp32": replace(FP32, zero1=replace(FP32, gradient=4, running_gradient=0)),
}
# Korthikanti et al. 2022 (arXiv 2205.05198), table 2 and section 4: 16-bit weights, fp32 gradients
# and state, dropout everywhere.
MEGATRON = Footprint(norm=4, swiglu_tensors=3, logit=6, dropout=True)
# Megatron-Core with Transformer Engine, whose kernels fuse the rotation of q and k and keep one
# h-sized tensor per norm, as counted by the allocator in runs of 131,072 tokens.
MEGATRON_CORE = replace(MEGATRON, norm=2, separate_qkv=True, keeps_quantized=True)


@cache
def _with_efficiencies(gpu: Gpu, depth: float | None, memory: float | None) -> Gpu:
    """Return the GPU with other efficiencies; None keeps the datasheet's."""
    return replace(
        gpu,
        matmul_depth_cost=gpu.matmul_depth_cost if depth is None else depth,
        memory_efficiency=gpu.memory_efficiency if memory is None else memory,
    )


# Bytes per logit that the cross-entropy reads and writes, forward and backward, in fp32: conversion
# (6), maximum (4), exponential (8), sum (4), scaling and subtraction (8), conversion back (6).
LOSS_BYTES = 36
NARROW_HEAD = 64  # columns of a head that reaches `narrow_attention`; twice as many: `attention`


@dataclass(frozen=True, kw_only=True)
class Software:
    """A version of a training stack: its fused kernels and its overlap of communication.

    Attributes:
        kernel_efficiency: speed of its kernels relative to the efficiencies in the GPU's datasheet;
            this single number covers all differences between library versions
    """

    name: str
    footprint: Mapping[str, Footprint] = field(
        default_factory=lambda: DEEPSPEED, compare=False
    )  # by precision
    framework: tuple[str, ...] = ()  # prefixes of the framework column of a table
    first_release: str = ""  # of the framework, such as "26.06"; empty: all releases
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # of rows with these frameworks
    # Column -> words. The stack is that of rows whose cell has one of the words, in every column.
    row_words: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    kernel_efficiency: float = 1.0
    fused_attention: bool = True  # False: scores are written, with a fused softmax
    # The datasheet's `matmul_depth_cost` and `memory_efficiency` with its kernels, if measured.
    depth_cost: float | None = None
    memory_efficiency: float | None = None
    attention: float = 1.0  # speed of its fused attention relative to the datasheet
    # The same with heads of up to 64 columns, and of flash attention to windows, sinks, documents
    # and parts of a sequence; None: as `attention`. Heads of 64 to 128 columns are in between.
    narrow_attention: float | None = None
    limited_attention: float | None = None
    sink_attention: float | None = None  # with sinks; None: as other limited attention
    attention_dropout: bool = False  # dropout on written scores
    elementwise: float = 1.0  # bytes of element-wise kernels, relative to one pass per operation
    tensor_overlap: float = 0.0  # hidden share of the forward tensor collectives
    tensor_overlap_backward: float = 0.0  # of the backward ones, by weight gradients
    balances_stages: bool = False  # blocks are divided by cost; False: by number
    split_transfers: bool = True  # each tensor rank sends its part to the next stage
    pipeline_overlap: float = 0.0  # hidden share of transfers between stages
    # Shares of what the passes could hide of the reductions of gradients and of the gathering of
    # weights that they do hide.
    data_overlap: float = 0.0
    gather_overlap: float = 0.0
    loss_bytes: float = LOSS_BYTES
    # Each token crosses the network once for all its experts of a node, and the links of the node
    # distribute it (DeepEP).
    sends_once_per_node: bool = False
    row_moves: float = 1.0  # copies of the rows of experts, relative to a kernel for each of them
    exchange_speed: float = 1.0  # of exchanges of tokens, relative to the datasheet's links
    expert_overlap: float = 0.0  # of what shared experts, weight gradients and pairs could hide
    gathers_quantized: bool = False  # weights are gathered in the format of quantized matmuls
    row_scaling: float = 1.0  # speed of matmuls with a scale per row, relative to other 8-bit ones
    # Of rows of a table that do not state them.
    usual_zero_stage: int = 0
    usual_recompute: str = ""  # empty: the least that fits
    usual_expert_overlap: bool = False
    divides_local_batch: bool = False  # a pipeline divides `mbs` into micro-batches of a sequence
    sequence_parallel: bool = False
    # Columns as in Megatron-Core's options: `ep` counts the tensor ranks, and the embedding and the
    # head count as a block each if that divides the blocks into equal stages.
    megatron_columns: bool = False
    divides_experts: bool = False  # tensor ranks divide each expert, if `etp` is not stated
    gradient_bytes: int | None = None  # bytes of a gradient as sent; None: as a weight
    reduce_scatter: bool = True  # False: all-reduce, although the optimizer state is sharded
    reduces_in_groups: bool = False  # ZeRO-2 reduces gradients after groups of micro-batches
    shard_overlap: float = 0.9  # hidden share of the communication of ZeRO-2 and 3
    messages_per_block: int = 1  # collectives that a block's weights or gradients are divided into
    # Weights that ZeRO-3 keeps between recomputation and backward pass (max_reuse_distance).
    kept_elements: float = float("inf")
    # Each rank broadcasts the weights that it has updated, tensor by tensor, instead of one
    # all-gather of equal shares.
    broadcasts_weights: bool = False
    block_seconds: float = 5e-4  # host time to launch a block's forward pass
    expert_block_seconds: float = 0.0  # the same for a block with experts, if that takes longer
    # A forward pass, also a recomputed one, waits for the host to route tokens to experts.
    routing_seconds: float = 0.0
    step_seconds: float = 0.02  # host time of a step in addition to its micro-batches
    straggler_factor: float = 1.0  # relative to the datasheet
    parallel_block: bool = False  # attention and MLP in parallel: half the tensor collectives
    # The same stack on a CPU, which has other kernels; None: this one.
    on_cpu: "Software | None" = field(default=None, compare=False)

    def on_device(self, device: str) -> "Software":
        """Return this stack on a kind of device, as in `torch.device.type`."""
        return self.on_cpu if device == "cpu" and self.on_cpu is not None else self

    def kernels_on(self, gpu: Gpu) -> Gpu:
        """Return the GPU with the efficiencies of this stack's kernels on it."""
        stack = self.on_device(gpu.device)
        return _with_efficiencies(gpu, stack.depth_cost, stack.memory_efficiency)

    def attention_speed(self, head_size: int, *, limited: bool, sinks: bool = False) -> float:
        """Return the speed of fused attention relative to the datasheet.

        Args:
            limited: flash attention to windows, sinks, documents or parts of a sequence
            sinks: attention with sinks
        """
        if sinks and self.sink_attention is not None:
            return self.sink_attention
        if limited and self.limited_attention is not None:
            return self.limited_attention
        if self.narrow_attention is None:
            return self.attention
        share = min(1.0, max(0.0, head_size / NARROW_HEAD - 1))
        return self.narrow_attention + share * (self.attention - self.narrow_attention)

    def bytes_of_gradients(self, weight: int) -> int:
        """Return the bytes of a gradient as sent.

        Args:
            weight: bytes of a weight in the model's precision
        """
        return self.gradient_bytes or weight


THREEFOLD_ON_CPU = Software(
    name="threefold",
    framework=("Threefold",),
    gradient_bytes=4,  # the shipped JSON files sum gradients in fp32
    kernel_efficiency=0.95,
    elementwise=1.5,  # norms, rotations and additions are separate kernels
    shard_overlap=0.0,  # as measured for FSDP on the same GPUs
    data_overlap=0.9,  # as fitted to Megatron-Core, which overlaps the same collectives
    gather_overlap=0.9,
    expert_overlap=0.7,  # not measured: the tensor overlap fitted to Megatron-Core
    reduces_in_groups=True,
    block_seconds=6.4e-4,
    balances_stages=True,
    pipeline_overlap=1.0,  # receives are posted ahead and sends do not block, as simulated
)
# The speed of the kernels was measured on an H100 with torch 2.11: in steps of llama/1b and of four
# layers of OLMoE, and for single kernels. The same values are assumed for other GPUs, none of which
# has been measured. Overlap has not been measured on GPUs.
THREEFOLD = replace(
    THREEFOLD_ON_CPU,
    # The matmuls of both steps run at 680 to 720 TFLOP/s, almost as fast with an inner size of
    # 2,048 as with 16,384. The datasheet's cost of a short inner size is that of other stacks.
    kernel_efficiency=1.02,
    depth_cost=230.0,
    # cuDNN with heads of 64 columns: 0.73 in the step of llama/1b, 0.86 when no other kernel runs,
    # because the step reaches the power limit. Heads of 128 columns: 1.08 to 1.17 when no other
    # kernel runs. Flash attention runs at 225 to 320 TFLOP/s with either.
    attention=1.05,
    narrow_attention=0.73,
    limited_attention=0.6,
    # Gates run at 3.0 TB/s of 3.35, the maximum and sum of logits at 1.9, AdamW at 2.6.
    memory_efficiency=0.85,
    elementwise=0.85,  # norms and residual additions are fused
    step_seconds=0.013,
    routing_seconds=0.0035,  # OLMoE's GPU is idle for 69 ms of a step with 16 waits for counts
    on_cpu=THREEFOLD_ON_CPU,
)
MEGATRON_CORE_STACK = Software(
    name="megatron-core",
    footprint=dict.fromkeys(DEEPSPEED, MEGATRON_CORE),
    framework=("Megatron-Core",),
    usual_zero_stage=1,
    sequence_parallel=True,
    megatron_columns=True,
    elementwise=0.7,
    tensor_overlap=0.7,
    tensor_overlap_backward=0.75,
    pipeline_overlap=0.8,
    data_overlap=0.9,
    gather_overlap=0.9,
)
PUBLISHED_STACKS = REPOSITORY / "benchmarks" / "planner_accuracy" / "stacks.toml"


@cache
def stacks() -> tuple[Software, ...]:
    """Return Threefold, the stacks of published runs, and Megatron-Core.

    A row of a table has the first of several stacks that suit it equally well (`stack_of`).
    """
    tables = (
        tomllib.loads(PUBLISHED_STACKS.read_text(encoding="utf-8"))
        if PUBLISHED_STACKS.exists()
        else {}
    )
    footprints: dict[str, Mapping[str, Footprint]] = {
        "threefold": DEEPSPEED,
        "megatron": dict.fromkeys(DEEPSPEED, MEGATRON),
        "megatron-core": MEGATRON_CORE_STACK.footprint,
    }
    for name, table in tables.get("footprints", {}).items():
        footprints[name] = {
            precision: Footprint(**table.get(precision, table)) for precision in DEEPSPEED
        }
    published = []
    by_name: dict[str, dict[str, Any]] = {}
    for table in tables.get("software", []):
        table = by_name.get(table.pop("like", ""), {}) | table
        by_name[table["name"]] = table
        for name in ("framework", "zero_stages"):
            if name in table:
                table[name] = tuple(table[name])
        published.append(Software(**table | {"footprint": footprints[table["footprint"]]}))
    return (THREEFOLD, *published, MEGATRON_CORE_STACK)


def load_software(name: str) -> Software:
    """Return the software stack with a given name.

    Raises:
        UserError: the name is not known.
    """
    for stack in stacks():
        if stack.name == name:
            return stack
    names = ", ".join(stack.name for stack in stacks())
    raise UserError(f"invalid --software {name}: expected one of {names}")
