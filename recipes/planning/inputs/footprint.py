"""The memory that a training stack keeps, in bytes per parameter, activation or logit."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes per parameter, per activation and in fixed buffers.

    weight: per parameter, as the matrix products read it
    gradient: per parameter, from step to step; under ZeRO-2 and 3 spread over the data ranks
    running_gradient: per parameter more between the first backward pass and the update
    optimizer: per parameter, spread over the data ranks from ZeRO-1 on
    zero3_copy: likewise, more of it under ZeRO-3
    bucket_elements: of ZeRO's buckets for gradients; DeepSpeed's reduce_bucket_size
    gathered_elements: that ZeRO-3 holds whole at once; stage3_max_live_parameters
    bucket: bytes that are there from the first backward pass on
    reducing: per parameter more while gradients are added up over the data ranks
    reducing_one_bucket: likewise, where all of a stage's parameters go into one bucket
    reducing_bucket: bytes more then
    updating: per parameter of a data rank's share more while it is updated
    norm: per element that an RMSNorm reads, kept for its backward pass
    apart: whether q, k and v are kept apart instead of their product and what is rotated
    gated: what a SwiGLU keeps, in columns of the MLP: gate, up, silu(gate), their product
    rows: of the hidden size, for each token, that a block's backward pass works with
    loss_in_parts: whether the logits are there for some tokens at a time, and the loss's forward
        pass computes the gradients of its input and of the output matrix
    logit: per logit of the micro-batch at hand, while its loss is computed
    head: per logit while the gradient of the output matrix is computed
    score: per attention score that is written, while it is normalized
    held_logits: of earlier micro-batches that the last stage still holds after a step, in bytes
    stock_pipeline: whether a stage keeps what it has sent, the logits of the micro-batch before the
        one at hand, and a copy of gradients even for one data rank, as DeepSpeed's own pipeline
    dropout: whether its masks are kept even where a model's dropout is unknown
    selective: share of a block's activations that selective recomputation keeps; None: all but the
        attention core's
    overhead_gib: of the CUDA context and the communication library; None: the GPU's usual one
    fragmentation: share of the activations that the caching allocator wastes
    sent: bytes of a gradient while it is summed over the data ranks; None: those of a weight
    zero1: the footprint under ZeRO-1; None: this one
    """

    weight: float = 2
    gradient: float = 4
    running_gradient: float = 0
    optimizer: float = 12  # fp32 weight and two moments
    zero3_copy: float = 0
    bucket_elements: float = 0
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


# DeepSpeed 0.19 as our recipes use it, counted operation by operation (`plan.py --trace`). ZeRO-1
# keeps the fp32 gradients of the whole stage in one tensor from step to step. They are summed over
# the data ranks in place, or in copies if the JSON sets a shorter type. fp32 weights are updated in
# place. ZeRO-2 and 3 have buckets of 5e8 elements.
DEEPSPEED_ZERO = Footprint(bucket_elements=5e8, gathered_elements=1e9)
ZERO = replace(
    DEEPSPEED_ZERO, norm=4, gated=3, apart=True, rows=1, loss_in_parts=True, score=4,
    stock_pipeline=False,
)  # fmt: skip
FP16 = replace(ZERO, gradient=0, running_gradient=2, updating=6)
FP32 = replace(
    ZERO, weight=4, gradient=0, running_gradient=4, optimizer=8, zero3_copy=4, norm=8, score=8,
)  # fmt: skip
DEEPSPEED = {
    "bf16": ZERO,
    "fp16": replace(FP16, zero1=replace(FP16, gradient=4, running_gradient=0, updating=0)),
    "fp32": replace(FP32, zero1=replace(FP32, gradient=4, running_gradient=0)),
}
# DeepSpeed's own pipeline, which keeps gradients in 16 bits until they are added up.
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
# The same in 2022, fitted to what nvidia-smi saw of BLOOM's runs: several communicators, and an
# allocator that gave less back.
DEEPSPEED_2022 = {
    precision: replace(footprint, overhead_gib=9.0, fragmentation=0.12)
    for precision, footprint in STOCK_PIPELINE.items()
}
# Korthikanti et al. 2022 (arXiv 2205.05198), table 2 and section 4: 16-bit weights, fp32 gradients
# and state, dropout everywhere.
MEGATRON = Footprint(norm=4, gated=3, logit=6, dropout=True)
# FSDP: all but the gathered blocks is spread over the data ranks (Zhao et al. 2023, arXiv
# 2304.11277); torchtitan's selective recomputation keeps every second matrix product.
SHARDED = Footprint(norm=4, gated=3, logit=4, selective=0.5, fragmentation=0.02)
# Fitted to the peaks of the Ultra-Scale Playbook's runs.
NANOTRON = Footprint(norm=12, logit=4, overhead_gib=3.0, fragmentation=0.0)


def footprints(footprint: Footprint) -> dict[str, Footprint]:
    """One for all precisions."""
    return dict.fromkeys(DEEPSPEED, footprint)
