"""Properties of training software: its fused kernels and its overlap of communication."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from models.errors import UserError
from threefold.plan.footprint import (
    DEEPSPEED,
    DEEPSPEED_2022,
    INTERNEVO,
    MEGATRON,
    MEGATRON_CORE,
    NANOTRON,
    NEMO,
    SHARDED,
    TORCHTITAN,
    Footprint,
    footprints,
)


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
