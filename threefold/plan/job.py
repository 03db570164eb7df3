"""The planner's description of a training job: model, machine, layout, batch and software."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from models.config import ModelConfig
from models.cost import parameter_count
from models.errors import UserError
from threefold.config.deepspeed_json import (
    BYTES,
    accumulation_precision,
    build_deepspeed_config,
    communication_precision,
    precision,
    read_deepspeed_json,
    zero_stage,
)
from threefold.config.layout import Cluster, Layout
from threefold.config.loading import load_recipe, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment, ParallelDims
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import Gpu, gpu_of_device, load_gpu
from threefold.pipeline.balance import divide_blocks, divide_evenly, layer_costs
from threefold.pipeline.schedules import default_group
from threefold.plan.software import THREEFOLD, Footprint, Quantization, Software, own_quantization

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class LinkOverrides:
    """Links of a cluster that differ from its GPU's datasheet; None keeps the datasheet's value.

    Rates are per GPU and in one direction. The efficiencies of the datasheet apply to them.
    """

    node_link_gigabytes_per_second: float | None = None
    network_gigabytes_per_second: float | None = None
    network_latency_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of a job and their links; rates are per GPU and in one direction."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8
    node_link_gigabytes_per_second: float
    network_gigabytes_per_second: float
    network_contention: float  # share of the network's rate left if groups share a node's links

    @classmethod
    def of_cluster(cls, cluster: Cluster, links: LinkOverrides | None = None) -> "Machine":
        """Return the machine of a recipe's [cluster] section.

        Raises:
            UserError: the GPU is not known.
        """
        given = vars(links) if links else {}
        values = {name: value for name, value in given.items() if value is not None}
        gpu = load_gpu(cluster.gpu)
        gpu = replace(gpu, **values) if values else gpu
        gpus = cluster.nodes * cluster.gpus_per_node
        return cls.of(gpu, gpus=gpus, gpus_per_node=cluster.gpus_per_node)

    @classmethod
    def of(cls, gpu: Gpu, *, gpus: int, gpus_per_node: int = 8) -> "Machine":
        """Return a machine of `gpus` GPUs, in nodes with the usual links of this GPU."""
        return cls(
            gpu=gpu,
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            node_link_gigabytes_per_second=gpu.node_link_gigabytes_per_second,
            network_gigabytes_per_second=gpu.network_gigabytes_per_second,
            network_contention=gpu.network_contention,
        )

    @classmethod
    def of_run(
        cls, cluster: Cluster | None, world: LaunchEnvironment, device: str
    ) -> "Machine | None":
        """Return the machine of a run; None if its GPU has no datasheet.

        Args:
            device: the driver's name of the GPU; "cpu" on a CPU

        Raises:
            UserError: `cluster.gpu` has no datasheet.
        """
        name = cluster.gpu if cluster else device
        gpu = load_gpu(name) if cluster or name == "cpu" else gpu_of_device(name)
        return cls.of(gpu, gpus=world.size, gpus_per_node=world.local_size) if gpu else None

    @property
    def nodes(self) -> int:
        """The number of nodes; the last one may be partly filled."""
        return -(-self.gpus // self.gpus_per_node)

    @cached_property
    def linked_gpus(self) -> int:
        """The GPUs that the links of a node join: those of a node, or a job's share of a rack.

        A job that needs several racks takes about the same number of nodes from each, and the
        smallest share counts.
        """
        nodes = self.gpu.linked_gpus // self.gpus_per_node
        if nodes <= 1:
            return self.gpus_per_node
        if self.nodes <= nodes:
            return self.nodes * self.gpus_per_node
        racks = ceil(self.nodes / nodes)
        return self.nodes // racks * self.gpus_per_node


def links_text(machine: Machine) -> str:
    """Describe the links of a machine; the latency only if it differs from the datasheet's."""
    latency = machine.gpu.network_latency_seconds
    is_datasheets = latency == load_gpu(machine.gpu.name).network_latency_seconds
    return (
        f"links per GPU: {machine.node_link_gigabytes_per_second:g} GB/s within a node, "
        f"{machine.network_gigabytes_per_second:g} GB/s between nodes"
        + ("" if is_datasheets else f", network latency {latency * 1e6:g} microseconds")
    )


@dataclass(frozen=True, kw_only=True)
class PlannedLayout(ParallelDims):
    """The sizes of the axes and all other settings that the planner chooses.

    Settings have the names and defaults of the [layout] section.
    """

    virtual_stages: int = 1
    context_attention: str = "gather"
    expert_overlap: bool = False
    zero_stage: int = 1
    reduce_every: int = 0
    schedule: str = "1f1b"
    layers_per_stage: tuple[int, ...] | None = None  # blocks per virtual stage; None: automatic
    sequence_parallel: bool = False
    recompute: str = "none"  # "selective": the attention core, "full": blocks
    recompute_interval: int = 1
    micro_sequences: int = 1

    @property
    def sequence_ranks(self) -> int:
        """Tensor ranks that shard the activations between matmuls."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that shard the optimizer state, from ZeRO-1 on."""
        return self.dp_shard_size if self.zero_stage else 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job whose memory and step time are predicted.

    Attributes:
        precision: precision of the matmuls, a key of `Gpu.peak_tflops`
        expert_imbalance: rows of the expert rank with the most tokens, relative to the mean
        optimizer: `optimizer.kind` of the recipe
        separate_documents: attention needs the kernel for documents, although it is counted over
            whole sequences
        limits_logits: the recipe has `optimizer.qk_clip`, so that backward passes find the largest
            attention logits
        average_every: the weights are averaged after every N-th update (`optimizer.average`); 0:
            no average
        quantization: format of the matmuls of blocks; None: `precision`
        recomputed_share: share of the blocks that `layout.recompute` applies to
        offloaded_share: share of the kept activations that the host holds until the backward pass
    """

    model: ModelConfig
    machine: Machine
    layout: PlannedLayout
    global_sequences: int
    precision: str
    software: Software
    expert_imbalance: float = 1.0
    optimizer: str = "adamw"
    separate_documents: bool = False
    limits_logits: bool = False
    average_every: int = 0
    quantization: Quantization | None = None
    recomputed_share: float = 1.0
    offloaded_share: float = 0.0

    def with_layout(self, layout: PlannedLayout) -> "Job":
        """Return the same job in another layout; `dataclasses.replace` takes much longer."""
        return Job(
            model=self.model,
            machine=self.machine,
            layout=layout,
            global_sequences=self.global_sequences,
            precision=self.precision,
            software=self.software,
            expert_imbalance=self.expert_imbalance,
            optimizer=self.optimizer,
            separate_documents=self.separate_documents,
            limits_logits=self.limits_logits,
            average_every=self.average_every,
            quantization=self.quantization,
            recomputed_share=self.recomputed_share,
            offloaded_share=self.offloaded_share,
        )

    def with_model(self, model: ModelConfig) -> "Job":
        """Return the same job for another model, or itself if that is its own."""
        return self if model is self.model else replace(self, model=model)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step of each data rank."""
        layout = self.layout
        return max(1, round(self.global_sequences / (layout.data * layout.micro_sequences)))

    @cached_property
    def blocks_of_virtual_stages(self) -> tuple[int, ...]:
        """Number of blocks of each virtual stage, in the model's order."""
        layout, model = self.layout, self.model
        if layout.layers_per_stage is not None:
            return layout.layers_per_stage
        if not self.software.balances_stages:
            return divide_evenly(model.layers, layout.pipeline * layout.virtual_stages)
        return divide_blocks(
            layer_costs(model, layout.recompute),
            schedule=layout.schedule,
            stages=layout.pipeline,
            virtual_stages=layout.virtual_stages,
        )

    @property
    def matmul_format(self) -> str:
        """The format of the matmuls of blocks: a kind of quantization or the precision."""
        return self.quantization.kind if self.quantization else self.precision

    @property
    def peak_tflops(self) -> float:
        """The GPU's peak for the matmuls of blocks."""
        name = self.quantization.format.peak if self.quantization else ""
        return self.machine.gpu.peak_tflops[name or self.precision]

    @property
    def gpu(self) -> Gpu:
        """The machine's GPU with the efficiencies of the software's kernels."""
        return self.software.kernels_on(self.machine.gpu)

    @cached_property
    def footprint(self) -> Footprint:
        """The memory footprint of the software in this precision and ZeRO stage."""
        footprint = self.software.footprint[self.precision]
        footprint = footprint.zero1 if footprint.zero1 and not self.shards_in_passes else footprint
        if self.average_every:
            footprint = replace(footprint, optimizer=footprint.optimizer + BYTES["fp32"])
        if self.machine.gpu.device == "cpu":  # which holds only the written part of an allocation
            written = parameter_count(self.model) / self.layout.tensor
            return replace(footprint, bucket_elements=min(footprint.bucket_elements, written))
        return footprint

    @property
    def shards_in_passes(self) -> bool:
        """True if every pass communicates shards: ZeRO-3, and ZeRO-2 without groups."""
        stage = self.layout.zero_stage
        return stage == 3 or (stage == 2 and not self.software.reduces_in_groups)

    @property
    def micro_batches_per_reduction(self) -> int:
        """Micro-batches after which gradients are reduced over the data ranks."""
        layout = self.layout
        if layout.zero_stage < 2 or self.shards_in_passes:
            return self.micro_batches
        default = default_group(layout.schedule, layout.pipeline)
        return min(self.micro_batches, layout.reduce_every or default)

    @property
    def writes_scores(self) -> bool:
        """True if attention scores are written to memory, for dropout or without a fused kernel."""
        return not self.software.fused_attention or self.model.attention_dropout > 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.global_sequences * self.model.sequence_length


def once_per_job(function: Callable[[Job], Value]) -> Callable[[Job], Value]:
    """Cache a function's result in its job, as `cached_property` does for a method.

    A search calls such a function many times per job.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def cached(job: Job) -> Value:
        known = job.__dict__
        try:
            return known[name]
        except KeyError:
            value = known[name] = function(job)
            return value

    return cached


def job_of(recipe: Recipe, machine: Machine, software: Software = THREEFOLD) -> Job:
    """Return a recipe's job on a machine, in the recipe's own layout.

    Raises:
        UserError: the recipe cannot run on this machine.
    """
    dims = recipe.parallel_dims(
        LaunchEnvironment(size=machine.gpus, local_size=machine.gpus_per_node)
    )
    config = build_deepspeed_config(recipe, dims)
    layout = layout_of(recipe, dims, zero_stage(config))
    return replace(job_without_layout(recipe, machine, software), layout=layout)


def layout_of(recipe: Recipe, dims: ParallelDims, stage: int) -> PlannedLayout:
    """Return a recipe's layout with the sizes of the axes and a ZeRO stage."""
    section = recipe.layout
    names = PlannedLayout.__annotations__.keys() & Layout.model_fields.keys()  # without the axes
    settings = {name: getattr(section, name) for name in names} | dims.sizes
    if section.layers_per_stage:
        settings["layers_per_stage"] = tuple(section.layers_per_stage)
    settings["dp_shard"] = dims.dp_shard if dims.is_hsdp else 0
    micro_sequences = recipe.batch.micro_sequences
    return PlannedLayout(**settings, zero_stage=stage, micro_sequences=micro_sequences)


def own_job(recipe: Recipe, machine: Machine, software: Software) -> tuple[Job | None, str]:
    """Return the recipe's job in its own layout, or None and the reason why it is not valid."""
    try:
        return job_of(recipe, machine, software), ""
    except UserError as problem:
        return None, str(problem)


def job_without_layout(recipe: Recipe, machine: Machine, software: Software = THREEFOLD) -> Job:
    """Return a recipe's job on a machine, with a one-rank layout that the caller replaces.

    Threefold adds up and sends gradients in the precisions that the recipe's JSON sets; other
    software stacks use their own precisions.

    Raises:
        UserError: the GPU does not compute in the recipe's precision.
    """
    config = read_deepspeed_json(recipe.deepspeed, recipe)
    kind = precision(config)
    if kind not in machine.gpu.peak_tflops:
        raise UserError(
            f'deepspeed = "{recipe.deepspeed}" computes in {kind}, which the GPU '
            f"{machine.gpu.name} does not support; use "
            f"ds_configs/zero1_{next(iter(machine.gpu.peak_tflops))}.json"
        )
    software = software.on_device(machine.gpu.device)
    footprint = software.footprint[kind]
    if software.name == THREEFOLD.name:
        sent = BYTES[communication_precision(config)]
        software = replace(software, gradient_bytes=sent)
        footprint = with_gradient_bytes(
            footprint, sums=BYTES[accumulation_precision(config)], sent=sent
        )
    zero = config["zero_optimization"]
    footprint = replace(
        footprint,
        bucket_elements=zero.get("reduce_bucket_size", footprint.bucket_elements),
        group_bucket_elements=zero.get("reduce_bucket_size", footprint.group_bucket_elements),
        gathered_elements=zero.get("stage3_max_live_parameters", footprint.gathered_elements),
    )
    return Job(
        model=recipe.model,
        machine=machine,
        layout=PlannedLayout(),
        global_sequences=recipe.batch.global_sequences,
        precision=kind,
        software=replace(software, footprint={**software.footprint, kind: footprint}),
        optimizer=recipe.optimizer.kind,
        separate_documents=recipe.data.separate_documents,
        limits_logits=recipe.optimizer.qk_clip is not None,
        quantization=own_quantization(machine.gpu)
        if recipe.training.matmul_precision == "fp8"
        else None,
        average_every=average.every if (average := recipe.optimizer.average) else 0,
    )


def with_gradient_bytes(footprint: Footprint, *, sums: int, sent: int) -> Footprint:
    """Return Threefold's footprint with gradients in the types of a JSON.

    Args:
        sums: bytes of a sum over micro-batches
        sent: bytes of a gradient while it is summed over the data ranks
    """
    staged = replace(footprint.zero1 or footprint, sums=sums, sent=sent, zero1=None)
    # The shards of ZeRO-3 have the type of the sums, and those of ZeRO-2 are in fp32.
    gradient = min(footprint.gradient, sums)
    return replace(footprint, gradient=gradient, sums=sums, sent=sent, zero1=staged)


# The cluster that a job is planned for: the recipe's own or one that options describe.

MAX_GPUS = 10**6
DEFAULT_CLUSTER: dict[str, Any] = {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"}


def recipe_on_cluster(
    path: Path,
    overrides: Sequence[str],
    *,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
) -> tuple[Recipe, Cluster]:
    """Load a recipe and set keys of its [cluster] section.

    A value of None keeps the recipe's value, or that of DEFAULT_CLUSTER if the recipe has none.

    Raises:
        UserError: the recipe or the cluster is not valid.
    """
    recipe = load_recipe(path, overrides)
    table = recipe.model_dump(mode="json", exclude_none=True)
    options = {"nodes": nodes, "gpus_per_node": gpus_per_node, "gpu": gpu}
    given = {key: value for key, value in options.items() if value is not None}
    cluster = table["cluster"] = DEFAULT_CLUSTER | table.get("cluster", {}) | given
    if cluster["nodes"] * cluster["gpus_per_node"] > MAX_GPUS:
        raise UserError(
            f"cluster.nodes = {cluster['nodes']} x cluster.gpus_per_node = "
            f"{cluster['gpus_per_node']} are more than {MAX_GPUS:,} GPUs; use fewer"
        )
    recipe = parse_recipe(table, str(path))  # validates the new cluster
    assert recipe.cluster is not None
    return recipe, recipe.cluster
