"""Properties of training software: fused kernels, overlap of communication, memory footprints."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from models.errors import UserError
from threefold.config.deepspeed_json import GRADIENT_BUCKET_ELEMENTS

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
        gathered_elements: most elements that ZeRO-3 gathers at once (stage3_max_live_parameters)
        bucket: bytes of buckets, allocated from the first backward pass on
        reducing: additional bytes per parameter during the gradient reduction
        reducing_one_bucket: the same if all of a stage's parameters fit into one bucket
        reducing_bucket: additional bytes of buckets during the gradient reduction
        updating: additional bytes per parameter of a rank's share during its update
        norm: bytes per input element of an RMSNorm, kept for its backward pass
        apart: q, k and v are kept separately, instead of the fused projection and rotated q and k
        gated: number of f-sized tensors that a SwiGLU keeps (gate, up, silu(gate), their product)
        rows: number of h-sized tensors in the working memory of a block's backward pass
        loss_in_parts: logits exist for only a part of the tokens at a time, and the loss's forward
            pass computes the gradients of its input and of the output matrix
        logit: bytes per logit of the current micro-batch during its loss
        head: bytes per logit while the gradient of the output matrix is computed
        score: bytes per written attention score that its backward pass adds to the kept ones
        held_logits: bytes per logit that the last stage still holds after a step
        stock_pipeline: like DeepSpeed's pipeline, a stage keeps sent activations, the previous
            micro-batch's logits, and a copy of the gradients even for one data rank
        dropout: dropout masks are kept even if the model's dropout is unknown
        selective: share of a block's activations that selective recomputation keeps; None: all
            except those of the attention core
        overhead_gib: GiB of the CUDA context and the communication library; None: the datasheet's
        fragmentation: share of the activations that the caching allocator wastes
        sent: bytes of a gradient during its reduction over the data ranks; None: as `weight`
        zero1: the footprint under ZeRO-1; None: this one
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
    gated: float = 4
    apart: bool = False
    rows: float = 3
    loss_in_parts: bool = False
    logit: float = 10
    head: float = 6
    score: float = 8
    held_logits: float = 0
    stock_pipeline: bool = True
    dropout: bool = False
    selective: float | None = None
    overhead_gib: float | None = None
    fragmentation: float = 0.05
    sent: float | None = None
    zero1: "Footprint | None" = None


# DeepSpeed 0.19 with our recipes, counted operation by operation (`plan.py trace`). ZeRO-1
# keeps the fp32 gradients of the whole stage in one tensor from step to step. It sums them over the
# data ranks in place, or in copies if the JSON sets a type with fewer bytes. fp32 weights are
# updated in place. ZeRO-2 of DeepSpeed and ZeRO-3 have buckets of 5e8 elements.
DEEPSPEED_ZERO = Footprint(bucket_elements=5e8, gathered_elements=1e9)
ZERO = replace(
    DEEPSPEED_ZERO, norm=4, gated=3, apart=True, rows=1, loss_in_parts=True, score=3,
    stock_pipeline=False,
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
# DeepSpeed's own pipeline, which keeps gradients in 16 bits until their reduction.
STOCK_PIPELINE = {
    "bf16": replace(
        DEEPSPEED_ZERO, running_gradient=2, reducing=2, reducing_one_bucket=6, held_logits=4
    ),
    "fp16": replace(
        DEEPSPEED_ZERO, gradient=0, running_gradient=2, bucket=1e9, reducing_bucket=1e9, updating=6,
        held_logits=4,
    ),
    "fp32": replace(
        DEEPSPEED_ZERO, weight=4, gradient=0, running_gradient=4, bucket=2e9, reducing_bucket=2e9,
        norm=12, logit=12, head=12, held_logits=8,
    ),
}  # fmt: skip
# The same pipeline in 2022, fitted to nvidia-smi's figures for BLOOM's runs, which had several
# communicators and an allocator that returned less memory.
DEEPSPEED_2022 = {
    precision: replace(footprint, overhead_gib=9.0, fragmentation=0.12)
    for precision, footprint in STOCK_PIPELINE.items()
}
# Korthikanti et al. 2022 (arXiv 2205.05198), table 2 and section 4: 16-bit weights, fp32 gradients
# and state, dropout everywhere.
MEGATRON = Footprint(norm=4, gated=3, logit=6, dropout=True)
# Megatron-Core with Transformer Engine, whose kernels fuse the rotation of q and k and keep one
# h-sized tensor per norm, as counted by the allocator in runs of 131,072 tokens.
MEGATRON_CORE = replace(MEGATRON, norm=2, apart=True)
# The same with gradients in 16 bits: NeMo's runs of Llama 3 8B on 8 GPUs have no room for fp32.
NEMO = replace(MEGATRON_CORE, gradient=2)
INTERNEVO = replace(MEGATRON, gradient=2)
# FSDP: everything but the gathered blocks is sharded over the data ranks (Zhao et al. 2023, arXiv
# 2304.11277). Between steps, a rank keeps the fp32 weights (4 bytes, of which `weight` counts 2)
# and Adam's moments (8 bytes). 16-bit weights exist only while they are gathered, two blocks at a
# time.
SHARDED = Footprint(
    norm=4, gated=3, optimizer=10, gathered_elements=1e9, logit=4, selective=0.5,
    fragmentation=0.02,
)  # fmt: skip
# torchtitan's selective recomputation keeps every second matmul. Its loss converts the logits of
# the whole micro-batch to fp32, so they exist in 16 bits (2), in fp32 (4), as logarithms of
# probabilities (4) and as their gradient (4).
TORCHTITAN = replace(SHARDED, logit=14)
# Fitted to the peaks of the Ultra-Scale Playbook's runs.
NANOTRON = Footprint(norm=12, gated=3, logit=8, overhead_gib=2.5, fragmentation=0.0)


def footprints(footprint: Footprint) -> dict[str, Footprint]:
    """Return the same footprint for every precision."""
    return dict.fromkeys(DEEPSPEED, footprint)


@dataclass(frozen=True, kw_only=True)
class Software:
    """A version of a training stack: its fused kernels and its overlap of communication.

    Attributes:
        era: speed of its kernels relative to the efficiencies in the GPU's datasheet; this single
            number covers all differences between library versions
    """

    name: str
    footprint: Mapping[str, Footprint] = field(
        default_factory=lambda: DEEPSPEED, compare=False
    )  # by precision
    framework: tuple[str, ...] = ()  # prefixes of the framework column of a table
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)  # of rows with these frameworks
    era: float = 1.0
    fused_attention: bool = True  # False: scores are written, with a fused softmax
    attention: float = 1.0  # speed of its fused attention relative to the datasheet
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
    expert_overlap: float = 0.0  # of what shared experts, weight gradients and pairs could hide
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
    step_seconds: float = 0.02  # host time of a step in addition to its micro-batches
    straggling: float = 1.0  # relative to the datasheet
    parallel_block: bool = False  # attention and MLP in parallel: half the tensor collectives

    def bytes_of_gradients(self, weight: int) -> int:
        """Return the bytes of a gradient as sent.

        Args:
            weight: bytes of a weight in the model's precision
        """
        return self.gradient_bytes or weight


THREEFOLD = Software(
    name="threefold",
    framework=("Threefold",),
    gradient_bytes=4,  # the shipped JSON files sum gradients in fp32
    era=0.95,  # that of Megatron-DeepSpeed, because Threefold has not been measured yet
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
MEGATRON_CORE_STACK = Software(
    name="megatron-core",
    footprint=footprints(MEGATRON_CORE),
    framework=("Megatron-Core", "Megatron-Bridge"),
    elementwise=0.7,
    tensor_overlap=0.7,
    tensor_overlap_backward=0.75,
    pipeline_overlap=0.8,
    data_overlap=0.9,
    gather_overlap=0.9,
)
# Each stack overlaps the communication that its documentation names. The overlapped shares and the
# era are fitted to its published measurements.
STACKS = (
    THREEFOLD,
    Software(
        name="megatron-lm-2021",
        footprint=footprints(MEGATRON),
        framework=("Megatron-LM (Jan 2021)", "Megatron-LM (Apr 2021)"),
        fused_attention=False,
        attention_dropout=True,
    ),
    Software(
        name="megatron-lm-2022",
        footprint=footprints(MEGATRON),
        framework=("Megatron-LM (2022)",),
        era=1.077,
        fused_attention=False,
        attention_dropout=True,
        tensor_overlap_backward=0.12,
    ),
    Software(
        name="megatron-lm-2023",
        footprint=footprints(MEGATRON),
        framework=("Megatron-LM (commit",),
        era=0.98,
        tensor_overlap_backward=0.4,
        gradient_bytes=4,
    ),
    Software(
        name="megascale",
        footprint=footprints(MEGATRON),
        framework=("MegaScale",),
        era=1.062,
        tensor_overlap=0.7,
        tensor_overlap_backward=0.33,
        pipeline_overlap=0.8,
        data_overlap=0.9,
        gather_overlap=0.9,
        parallel_block=True,
    ),
    Software(
        name="megatron-deepspeed-bigscience",
        footprint=DEEPSPEED_2022,
        framework=("Megatron-DeepSpeed (BigScience)",),
        era=0.93,
        fused_attention=False,
        attention_dropout=True,
        reduce_scatter=False,
        elementwise=2.2,
    ),
    Software(
        name="deepspeed-zero3-2022",
        footprint=DEEPSPEED,
        framework=("Megatron-DeepSpeed",),
        zero_stages=(3,),
        era=0.955,
        fused_attention=False,
        attention_dropout=True,
        shard_overlap=0.26,
        messages_per_block=4,  # each linear is a module, and each module is gathered by itself
        kept_elements=1e9,  # DeepSpeed's default stage3_max_reuse_distance
        block_seconds=6.4e-4,
    ),
    Software(
        name="megatron-deepspeed",
        footprint=DEEPSPEED_2022,
        framework=("Megatron-DeepSpeed",),
        era=0.96,
        fused_attention=False,
        attention_dropout=True,
        elementwise=0.5,
        tensor_overlap_backward=0.9,
        reduce_scatter=False,
        block_seconds=6.9e-4,
    ),
    Software(
        name="megatron-core-without-overlap",  # as in a run without its overlap options
        footprint=footprints(MEGATRON_CORE),
        framework=("Megatron-Core (0.14)",),
        elementwise=0.7,
    ),
    MEGATRON_CORE_STACK,
    replace(
        MEGATRON_CORE_STACK,
        name="nemo",
        footprint=footprints(NEMO),
        framework=("NeMo/Megatron-Core",),
    ),
    Software(
        name="composer-fsdp",
        footprint=footprints(SHARDED),
        framework=("llm-foundry/composer FSDP",),
        attention=0.455,
        shard_overlap=0.1,
        data_overlap=0.9,
        gather_overlap=0.9,
    ),
    Software(
        name="torchtitan",
        footprint=footprints(TORCHTITAN),
        framework=("torchtitan",),
        era=0.88,
        attention=0.46,
        elementwise=0.7,
        data_overlap=0.9,
        gather_overlap=0.9,
        shard_overlap=0.93,
    ),
    Software(
        name="maxtext",
        footprint=footprints(SHARDED),
        framework=("MaxText",),
        era=1.05,
        elementwise=0.7,
        data_overlap=0.9,
        gather_overlap=0.9,
    ),
    Software(
        name="internevo",
        footprint=footprints(INTERNEVO),
        framework=("InternEvo",),
        era=0.896,
        data_overlap=0.74,
        broadcasts_weights=True,
    ),
    Software(
        name="nanotron",
        footprint=footprints(NANOTRON),
        balances_stages=True,
        framework=("nanotron",),
        era=0.88,
        gradient_bytes=4,
        elementwise=0.6,
        data_overlap=0.8,
        step_seconds=0.025,
    ),
)


def load_software(name: str) -> Software:
    """Return the software stack with a given name.

    Raises:
        UserError: the name is not known.
    """
    for stack in STACKS:
        if stack.name == name:
            return stack
    names = ", ".join(stack.name for stack in STACKS)
    raise UserError(f"invalid --software {name}: expected one of {names}")
