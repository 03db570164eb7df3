"""One training job as the predictions see it: model, machine, layout, batch and software."""

from dataclasses import dataclass, replace
from functools import cached_property

from models.config import ModelConfig
from models.errors import UserError
from models.pipeline.schedule.balance import divide_blocks, divide_evenly, head_in_blocks
from recipes.gpus.datasheet import Gpu, load_gpu
from recipes.planning.inputs.footprint import Footprint
from recipes.planning.inputs.kernels import BYTES
from recipes.planning.inputs.software import THREEFOLD, Software
from recipes.training.recipe.deepspeed_config import (
    build_deepspeed_config,
    communication_precision,
    precision,
    read_deepspeed_json,
    zero_stage,
)
from recipes.training.recipe.schema import Cluster, Recipe
from recipes.training.recipe.topology import World


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of a job; link rates per GPU and in one direction."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8
    node_link_gigabytes_per_second: float
    network_gigabytes_per_second: float
    network_contention: float  # share of it that is left when groups use the same links of a node

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> "Machine":
        """The machine that a recipe names.

        Raises:
            UserError: its GPU is not known.
        """
        gpus = cluster.nodes * cluster.gpus_per_node
        return cls.of(load_gpu(cluster.gpu), gpus=gpus, gpus_per_node=cluster.gpus_per_node)

    @classmethod
    def of(cls, gpu: Gpu, *, gpus: int, gpus_per_node: int = 8) -> "Machine":
        """As many nodes of the usual kind."""
        return cls(
            gpu=gpu,
            gpus=gpus,
            gpus_per_node=gpus_per_node,
            node_link_gigabytes_per_second=gpu.node_link_gigabytes_per_second,
            network_gigabytes_per_second=gpu.network_gigabytes_per_second,
            network_contention=gpu.network_contention,
        )

    @property
    def nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a model is spread over the machine: what the planner chooses."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1  # parts of the model that a stage holds
    context: int = 1  # ranks that share a sequence; none of our recipes, some of the tables
    data: int = 1
    zero_stage: int = 1
    schedule: str = "1f1b"
    layers_per_stage: tuple[int, ...] | None = None  # blocks of each part; None: as usual
    sequence_parallel: bool = False
    recompute: str = "none"  # "selective": the attention core, "full": blocks
    recompute_interval: int = 1
    micro_sequences: int = 1

    @property
    def sequence_ranks(self) -> int:
        """Tensor ranks that share the activations between matrix products."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that share the optimizer's state: from ZeRO-1 on, those of a stage's part."""
        return self.data * self.context if self.zero_stage else 1

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.context * self.data


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is predicted.

    precision: of the matrix products, a key of `Gpu.peak_tflops`
    optimizer_group: ranks that share the optimizer's state; None: all data ranks
    """

    model: ModelConfig
    machine: Machine
    spread: Spread
    global_sequences: int
    precision: str
    software: Software
    optimizer_group: int | None = None

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step of each data rank."""
        spread = self.spread
        return max(1, round(self.global_sequences / (spread.data * spread.micro_sequences)))

    @cached_property
    def blocks_of_positions(self) -> tuple[int, ...]:
        """Blocks of each chunk of the pipeline, in the model's order."""
        spread, model = self.spread, self.model
        if spread.layers_per_stage is not None:
            return spread.layers_per_stage
        if not self.software.balances_stages:
            return divide_evenly(model.layers, spread.pipeline * spread.chunks)
        return divide_blocks(
            model.layers,
            schedule=spread.schedule,
            stages=spread.pipeline,
            chunks=spread.chunks,
            head=head_in_blocks(model, spread.recompute),
        )

    @property
    def footprint(self) -> Footprint:
        """Return the memory footprint of the software in this precision and ZeRO stage."""
        found = self.software.footprint[self.precision]
        return found.zero1 if found.zero1 and self.spread.zero_stage < 2 else found

    @property
    def writes_scores(self) -> bool:
        """Whether attention scores are written: dropout needs them, or no kernel is fused."""
        return not self.software.fused_attention or self.model.attention_dropout > 0

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that share the optimizer's state."""
        return self.optimizer_group or self.spread.optimizer_ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.global_sequences * self.model.sequence_length


def job_of(recipe: Recipe, machine: Machine, software: Software = THREEFOLD) -> Job:
    """A recipe's job on a machine, in the recipe's own layout.

    Raises:
        UserError: the recipe cannot run there.
    """
    topology = recipe.topology(World(size=machine.gpus, local_size=machine.gpus_per_node))
    config = build_deepspeed_config(recipe, topology)
    layout = recipe.layout
    spread = Spread(
        tensor=topology.tensor,
        pipeline=topology.pipeline,
        chunks=layout.chunks,
        data=topology.data,
        zero_stage=zero_stage(config),
        schedule=layout.schedule,
        layers_per_stage=tuple(layout.layers_per_stage) if layout.layers_per_stage else None,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        recompute_interval=layout.recompute_interval,
        micro_sequences=recipe.batch.micro_sequences,
    )
    return replace(unspread_job(recipe, machine, software), spread=spread)


def unspread_job(recipe: Recipe, machine: Machine, software: Software = THREEFOLD) -> Job:
    """Describe a recipe's model, batch and precision on a machine, without a layout.

    Our own stack sums gradients in the precision that the recipe's JSON sets; other stacks use
    their own precision.

    Raises:
        UserError: the GPU does not compute in the recipe's precision.
    """
    config = read_deepspeed_json(recipe.deepspeed)
    kind = precision(config)
    if kind not in machine.gpu.peak_tflops:
        raise UserError(
            f'deepspeed = "{recipe.deepspeed}" computes in {kind}, which a {machine.gpu.name} does '
            f"not; use ds_configs/zero1_{next(iter(machine.gpu.peak_tflops))}.json"
        )
    footprint = software.footprint[kind]
    if software.name == THREEFOLD.name:
        sent = BYTES[communication_precision(config)]
        software = replace(software, gradient_bytes=sent)
        footprint = with_sent_bytes(footprint, sent)
    zero = config["zero_optimization"]
    footprint = replace(
        footprint,
        bucket_elements=zero.get("reduce_bucket_size", footprint.bucket_elements),
        gathered_elements=zero.get("stage3_max_live_parameters", footprint.gathered_elements),
    )
    return Job(
        model=recipe.model,
        machine=machine,
        spread=Spread(),
        global_sequences=recipe.batch.global_sequences,
        precision=kind,
        software=replace(software, footprint={**software.footprint, kind: footprint}),
    )


def with_sent_bytes(footprint: Footprint, sent: int) -> Footprint:
    """Return the footprint of a stack that sums gradients in a precision of `sent` bytes.

    ZeRO-1 sums fp32 gradients in place, and gradients of another type in a copy.
    """
    zero1 = footprint.zero1 and with_sent_bytes(footprint.zero1, sent)
    copied = 0 if sent == BYTES["fp32"] else sent
    return replace(footprint, sent=sent, reducing=copied, zero1=zero1)
