"""The split of a model over ranks, and the cluster that has these ranks."""

import math
from typing import Any, Literal, get_args

from pydantic import model_validator

from models.config import FP8_TILE, ModelConfig, nearest_divisors, nearest_multiples
from models.errors import UserError
from threefold.config.sections import Count, NonNegative, Section
from threefold.pipeline.schedules import (
    SCHEDULES,
    default_group,
    last_stage,
    min_micro_batches,
    schedule_name,
)

ContextAttention = Literal["gather", "ring", "ulysses"]
CONTEXT_ATTENTIONS: tuple[ContextAttention, ...] = get_args(ContextAttention)
PAIRED_SCHEDULES = ("interleaved", "dualpipev")  # with `expert_overlap`
INTERLEAVING_SCHEDULES = [name for name, kind in SCHEDULES.items() if kind.virtual_stages != 1]


class Layout(Section):
    """The split of the model over ranks; data parallelism takes the remaining ranks."""

    tensor: Count = 1
    """Ranks that divide every matrix of a layer. They must be on one node, because they
    communicate several times per layer."""

    pipeline: Count = 1
    """Pipeline stages, which divide the layers. More than one requires ZeRO-1 or ZeRO-2."""

    context: Count = 1
    """Number of ranks that divide each sequence (context parallelism). Each holds 1 / `context` of
    the activations, so that longer sequences fit. ZeRO treats them as data ranks."""

    context_attention: ContextAttention = "gather"
    """Algorithm of attention over context ranks. "gather": all-gather keys and values. "ring": pass
    them from rank to rank, so that at most two ranks' keys are in memory. "ulysses": an all-to-all
    gives each rank whole sequences and a share of the heads; `context` must divide the key-value
    heads of a tensor rank."""

    expert: Count = 1
    """Ranks that divide the experts of each layer (expert parallelism), in addition to the tensor
    ranks. It must be a divisor of data x context. More than one requires ZeRO-1 or ZeRO-2."""

    expert_tensor_parallel: bool = False
    """Let tensor ranks divide the columns of each expert (expert tensor parallelism). Otherwise
    they divide the experts, as whole matrices, which communicates less. Use it if `count` is not
    divisible by `expert` x `tensor`; `expert` must be a divisor of `count`, and `tensor` of
    `ffn_hidden_size`. It has no effect for `tensor = 1`."""

    expert_overlap: bool = False
    """Run each forward pass together with the backward pass that follows it in the schedule: while
    one exchanges tokens with expert ranks, the other computes. It requires "interleaved" or
    "dualpipev" and at least 2 x `pipeline` micro-batches. It has not run on a GPU yet."""

    schedule: Literal["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev", "gpipe"] = "1f1b"
    """Order of the forward and backward passes of a stage. All but "1f1b", the simplest, need two
    stages or more."""

    virtual_stages: Count = 1
    """Virtual stages (model chunks) of each stage. Choose it for "interleaved", where 2 is the
    default and more shorten the pipeline bubble but add messages. The other schedules determine
    it: 2 for "zb-v" and "dualpipev", 1 for "1f1b", "zb-h1" and "gpipe"."""

    layers_per_stage: list[Count] | None = None
    """Transformer layers of each virtual stage, in the model's order. Leave it out to balance the
    stages by computing cost, which counts the output layer too."""

    reduce_every: NonNegative = 0
    """With ZeRO-2, number of micro-batches after which the gradients of a chunk are reduced to the
    data ranks that own them. A smaller number saves memory; a larger one saves communication. 0 is
    the default: `pipeline` with "interleaved", which runs that many micro-batches of a chunk
    consecutively, and 1 otherwise."""

    dp_shard: NonNegative = 0
    """Neighbouring data ranks that divide the optimizer state and, with ZeRO-2, the gradients
    (hybrid sharding). The other groups hold the same shards, and gradients are summed within a
    group first, then over the groups. Choose the data ranks of a node if the network between nodes
    is slow. It must be a divisor of data x context and requires ZeRO-1 or ZeRO-2. 0: all data
    ranks."""

    sequence_parallel: bool = False
    """Also split norms, dropout and residuals over the tensor ranks, along the sequence. It saves
    activation memory at the same communication volume; it has no effect for `tensor = 1`."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping: none of them, those of
    the attention core ("selective"), or those of whole layers ("full")."""

    recompute_interval: Count = 1
    """Layers that are recomputed together with `recompute = "full"`. Only the input of the first
    of them is kept."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_virtual_stages(cls, values: Any) -> Any:
        """Set two virtual stages if the schedule needs several and the recipe has none."""
        if isinstance(values, dict) and values.get("schedule") in INTERLEAVING_SCHEDULES:
            return {"virtual_stages": 2} | values
        return values

    @model_validator(mode="after")
    def _check(self) -> "Layout":
        if self.recompute_interval > 1 and self.recompute != "full":
            raise UserError(
                f"layout.recompute_interval = {self.recompute_interval} has no effect with "
                f'layout.recompute = "{self.recompute}"; use layout.recompute = "full", or leave '
                f"layout.recompute_interval out"
            )
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise UserError(
                f'layout.schedule = "{self.schedule}" needs two stages or more, and '
                f"layout.pipeline = 1 has only one; use layout.pipeline = 2 or more, or "
                f'layout.schedule = "1f1b"'
                + (" and layout.expert_overlap = false" if self.expert_overlap else "")
            )
        if self.context == 1 and self.context_attention != "gather":
            raise UserError(
                f'layout.context_attention = "{self.context_attention}" has no effect with '
                f'layout.context = 1; use layout.context_attention = "gather", or '
                f"layout.context = 2 or more"
            )
        if self.expert_overlap and self.schedule not in PAIRED_SCHEDULES:
            raise UserError(
                f"layout.expert_overlap = true is not possible with layout.schedule = "
                f'"{self.schedule}"; use layout.schedule = "{PAIRED_SCHEDULES[0]}" or '
                f'"{PAIRED_SCHEDULES[1]}", or layout.expert_overlap = false'
            )
        possible = SCHEDULES[self.schedule].virtual_stages
        if self.virtual_stages != (possible or max(2, self.virtual_stages)):
            raise UserError(
                f"layout.virtual_stages = {self.virtual_stages} is not possible with "
                f'layout.schedule = "{self.schedule}"; use layout.virtual_stages = {possible or 2}'
                + ("" if possible else " or more")
            )
        return self

    @property
    def schedule_name(self) -> str:
        """The schedule, with its virtual stages if they are a choice: "interleaved x 2"."""
        return schedule_name(self.schedule, self.virtual_stages)

    def micro_batches_per_reduction(self, zero_stage: int) -> int:
        """Return the micro-batches after which gradients are reduced; 0: not in groups."""
        if zero_stage != 2:
            return 0
        return self.reduce_every or default_group(self.schedule, self.pipeline)

    @property
    def ranks_per_data_rank(self) -> int:
        """Number of ranks that share a data rank. Expert ranks are data ranks, and do not count."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_tensor(self) -> int:
        """Number of tensor ranks that divide the columns of each expert."""
        return self.tensor if self.expert_tensor_parallel else 1

    @property
    def min_micro_batches(self) -> int:
        """The smallest number of micro-batches of a data rank that the schedule can run."""
        return min_micro_batches(self.schedule, self.pipeline, paired=self.expert_overlap)

    @property
    def ends(self) -> set[int]:
        """The stages that hold the first layer, which takes tokens, and the last, with labels."""
        return {0, last_stage(self.schedule, self.pipeline, self.virtual_stages)}


class Cluster(Section):
    """The cluster that the recipe is meant for; a run on another size is rejected."""

    nodes: Count
    """Number of nodes."""

    gpus_per_node: Count
    """GPUs per node, and therefore ranks per node."""

    gpu: str
    """Name of the GPU, for example "H100"; `threefold/gpus/datasheets/` lists them. "cpu" trains on
    CPUs."""

    minimum_nodes: Count = 1
    """Smallest number of nodes on which `launch.py` continues the run after nodes were lost."""

    spare_nodes: NonNegative = 0
    """Spare nodes that `slurm/submit.sh --elastic` requests in addition to `nodes`. With a
    hostfile, all hosts beyond `nodes` are spare, and this key has no effect."""

    node_failures: NonNegative = 2
    """Number of failures within `failure_hours` after which `launch.py` stops using a node; 0: no
    limit."""

    failure_hours: Count = 24
    """Hours after which a failure of a node no longer counts, and a node that was left out is used
    again."""

    on_gpu_error: Literal["leave_out", "count"] = "leave_out"
    """Reaction of `launch.py` to an error after which a GPU needs a reset, a reboot or a
    replacement: "leave_out" stops using the node at once, "count" counts the error as a failure of
    the node if the ranks fail."""

    on_slow_rank: Literal["replace", "warn"] = "replace"
    """Reaction of `launch.py` to a node whose ranks stay slow for `supervision.slow_comparisons`
    comparisons: "replace" saves and restarts the run with a spare node in its place, if there is
    one; "warn" only reports it."""

    standby: bool = True
    """Let `launch.py` keep one standby process per GPU, with torch and DeepSpeed already imported,
    so that restarts are faster. Each standby process needs about 0.5 GB of host memory."""


def check_experts(model: ModelConfig, layout: Layout) -> None:
    """Check that the expert and tensor ranks can divide the experts of a model.

    Raises:
        UserError: they cannot; the message gives a value that works.
    """
    experts = model.experts
    if experts is None:
        _check_without_experts(layout)
        return
    split = layout.expert_tensor > 1
    ranks = layout.expert * layout.tensor // layout.expert_tensor
    if layout.expert_overlap and ranks == 1:
        raise UserError(
            "layout.expert_overlap = true has no effect with layout.expert = 1, because no ranks "
            "exchange tokens; use layout.expert = 2 or more, or layout.expert_overlap = false"
        )
    divided = experts.ffn_hidden_size if split else experts.count
    divisible = math.gcd(divided, experts.shared_ffn_hidden_size, model.kv_heads)
    fewer = f"layout.tensor = {nearest_divisors(divisible, layout.tensor)}"
    fewer += " and layout.expert = 1" if layout.expert > 1 and not split else ""
    if experts.count % ranks:
        share, rest = divmod(experts.count, layout.tensor // layout.expert_tensor)
        works = fewer if rest else f"layout.expert = {nearest_divisors(share, layout.expert)}"
        columns_fit = experts.ffn_hidden_size % layout.tensor == 0 == experts.count % layout.expert
        if layout.tensor > 1 and not split and columns_fit:
            works += ", or layout.expert_tensor_parallel = true"
        names = "layout.expert" if split else "layout.expert x layout.tensor"
        raise UserError(
            f"model.experts.count = {experts.count} is not divisible by {names} = {ranks}; "
            f"use {works}"
        )
    if experts.ffn_hidden_size % layout.expert_tensor:
        whole_fit = experts.count % (layout.expert * layout.tensor) == 0
        raise UserError(
            f"model.experts.ffn_hidden_size = {experts.ffn_hidden_size} is not divisible by "
            f"layout.tensor = {layout.tensor}, which layout.expert_tensor_parallel needs; use "
            f"{fewer}" + (", or layout.expert_tensor_parallel = false" if whole_fit else "")
        )
    if model.bias and model.hidden_size % layout.expert_tensor:
        divisible = math.gcd(divisible, model.hidden_size)
        raise UserError(
            f"model.hidden_size = {model.hidden_size} is not divisible by layout.tensor = "
            f"{layout.tensor}, which layout.expert_tensor_parallel needs with model.bias = true; "
            f"use layout.tensor = {nearest_divisors(divisible, layout.tensor)}"
        )
    if experts.shared_ffn_hidden_size % layout.tensor:
        raise UserError(
            f"model.experts.shared x model.experts.ffn_hidden_size = "
            f"{experts.shared_ffn_hidden_size} is not divisible by layout.tensor = "
            f"{layout.tensor}; use {fewer}"
        )


def _check_without_experts(layout: Layout) -> None:
    """Check that a layout has no settings for experts."""
    for key, default in (
        ("expert", 1),
        ("expert_tensor_parallel", False),
        ("expert_overlap", False),
    ):
        value = getattr(layout, key)
        if value != default:
            raise UserError(
                f"layout.{key} = {str(value).lower()} has no effect without model.experts; use "
                f"layout.{key} = {str(default).lower()}"
            )


def check_expert_ranks(model: ModelConfig, layout: Layout, world_size: int) -> None:
    """Check that the expert ranks divide the ranks with the same part of the model.

    Raises:
        UserError: they do not; the message gives a value that works.
    """
    replicas = world_size // (layout.tensor * layout.pipeline)
    if model.experts is None or replicas % layout.expert == 0:
        return
    share = model.experts.count * layout.expert_tensor // layout.tensor
    common = math.gcd(replicas, share)
    # With layout.expert = 1, nothing is exchanged, so layout.expert_overlap has no effect.
    least = 2 if layout.expert_overlap and share == model.experts.count else 1
    if common >= least:
        works = f"layout.expert = {nearest_divisors(common, layout.expert, least=least)}"
    else:
        ranks = math.lcm(layout.ranks_per_data_rank, world_size // replicas * layout.expert)
        works = (
            f"layout.expert = 1 and layout.expert_overlap = false, or a multiple of {ranks} ranks"
        )
    raise UserError(
        f"layout.expert = {layout.expert} does not divide the {replicas} ranks with the same part "
        f"of the model ({world_size} / layout.tensor / layout.pipeline); use {works}"
    )


def check_dp_shard(model: ModelConfig, layout: Layout, world_size: int) -> None:
    """Check that the shard group divides the ranks with the same part of the model.

    Raises:
        UserError: it does not; the message gives a value that works.
    """
    replicas = world_size // (layout.tensor * layout.pipeline)
    size = layout.dp_shard
    if not size:
        return
    if layout.expert > 1 and size != replicas:
        whole = "" if replicas % size else ", or layout.expert = 1"
        raise UserError(
            f"layout.dp_shard = {size} with layout.expert = {layout.expert} is not supported, "
            f"because expert ranks already divide the data ranks; use layout.dp_shard = 0{whole}"
        )
    if replicas % size:
        raise UserError(
            f"layout.dp_shard = {size} does not divide the {replicas} ranks with the same part "
            f"of the model ({world_size} / layout.tensor / layout.pipeline); use "
            f"layout.dp_shard = {nearest_divisors(replicas, size)}"
        )


def check_fp8(model: ModelConfig, layout: Layout) -> None:
    """Check that no tile or block of a matrix in FP8 is divided between ranks.

    Raises:
        UserError: one is divided; the message gives a value that works.
    """
    shares = _divided_in_fp8(model, layout)
    # 1 if a size has no whole block, because one rank may have smaller ones.
    gcd = math.gcd(*shares.values())
    whole = gcd // FP8_TILE if gcd % FP8_TILE == 0 else 1
    for key, size in shares.items():
        if layout.tensor > 1 and size % (FP8_TILE * layout.tensor):
            works = math.gcd(layout.tensor, whole)
            raise UserError(
                f"{key} = {size} is not divisible by {FP8_TILE} x layout.tensor = "
                f"{FP8_TILE * layout.tensor}, so that tensor ranks would divide the blocks of "
                f'training.matmul_precision = "fp8"; use layout.tensor = {works}, or '
                f'training.matmul_precision = "weights"'
            )
    slices = 2 * layout.context if layout.context > 1 else 1
    # Tensor ranks divide the tokens of the projections that all of them have.
    repeats = layout.tensor if layout.sequence_parallel and model.latent else 1
    ranks = math.lcm(slices, layout.context * repeats)
    if ranks > 1 and model.sequence_length % (FP8_TILE * ranks):
        divisor = math.lcm(FP8_TILE * ranks, layout.context * layout.tensor)
        lengths = nearest_multiples(model.sequence_length, divisor)
        raise UserError(
            f"model.sequence_length = {model.sequence_length} is not divisible by {FP8_TILE} x "
            f"{ranks}, so that ranks would divide the tiles of tokens of "
            f'training.matmul_precision = "fp8"; use model.sequence_length = {lengths}, or '
            f'training.matmul_precision = "weights"'
        )


def _divided_in_fp8(model: ModelConfig, layout: Layout) -> dict[str, int]:
    """Return the sizes that tensor ranks divide of matrices in FP8, by description."""
    sizes = {"columns of the queries": model.query_size}
    if model.latent is None:
        sizes["columns of the keys (model.kv_heads x head size)"] = model.key_value_size
    else:
        sizes["columns of the values"] = model.attention_output_size
    if model.has_dense_layers:
        sizes["model.ffn_hidden_size"] = model.ffn_hidden_size
    if model.experts is not None and model.experts.shared:
        key = "model.experts.shared x model.experts.ffn_hidden_size"
        sizes[key] = model.experts.shared_ffn_hidden_size
    if model.experts is not None and layout.expert_tensor > 1:
        sizes["model.experts.ffn_hidden_size"] = model.experts.ffn_hidden_size
    return sizes


# recipe.py calls these checks, and has those of other axes.
MODEL_CHECKS = (check_experts,)
WORLD_CHECKS = (check_expert_ranks, check_dp_shard)
