"""The recipe: one TOML file, one complete experiment."""

import math
from typing import Annotated

import tomli_w
from pydantic import Field, ValidationInfo, model_validator

from models.config import MAX_SIZE, ModelConfig, nearest_divisors, nearest_multiples
from models.errors import UserError
from threefold.config.layout import MODEL_CHECKS, WORLD_CHECKS, Cluster, Layout, check_fp8
from threefold.config.optimization import Batch, Optimizer, Training, is_of_a_phase
from threefold.config.parallel_dims import LaunchEnvironment, ParallelDims
from threefold.config.sections import (
    MAX_COUNT,
    Checkpoint,
    Data,
    Evaluation,
    PathText,
    Phase,
    Section,
    Supervision,
    Tracking,
)
from threefold.pipeline.balance import LayerCosts, divide_blocks, layer_costs


class Recipe(Section):
    """One complete experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
    """Name of the run folder, `runs/<name>`, and of the run in Weights & Biases."""

    seed: Annotated[int, Field(ge=0, lt=2**31)]
    """Seed of the initial weights, the order of the samples and dropout."""

    deepspeed: PathText
    """DeepSpeed's JSON, which sets ZeRO, precision and communication, relative to the repository
    root; `ds_configs/` has one for each case."""

    model: ModelConfig
    layout: Layout
    batch: Batch
    optimizer: Optimizer
    training: Training
    data: Data
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint
    supervision: Supervision = Supervision()
    tracking: Tracking = Tracking()

    cluster: Cluster | None = None
    """Leave the section out if the recipe may run on any number of ranks that its layout
    divides."""

    phase: tuple[Phase, ...] = ()
    """Later phases of the run, in order, as `[[phase]]` tables; see docs/phases.md. All other
    sections describe the phase before the first of them."""

    @model_validator(mode="after")
    def _check_steps(self) -> "Recipe":
        steps = self.training.steps
        for key in ("timeline_step", "profile_step"):
            if (step := getattr(self.tracking, key)) > steps:
                raise UserError(
                    f"tracking.{key} = {step} comes after training.steps = {steps}; use "
                    f"tracking.{key} = {steps}"
                )
        if not self.phase:  # phases.py checks the schedule of each phase
            self.optimizer.check_schedule(steps, "training.steps")
        return self

    @model_validator(mode="after")
    def _check_best(self, info: ValidationInfo) -> "Recipe":
        best, every = self.checkpoint.keep_best, self.checkpoint.every
        evaluate_every = self.training.evaluate_every
        if not best:
            return self
        if not self._has_validation(info):
            raise UserError(
                f"checkpoint.keep_best = {best} needs validation losses, and there is no "
                f"data.validation; use checkpoint.keep_best = 0, or for example data.validation = "
                f'"data/books/validation"'
            )
        if not evaluate_every:
            raise UserError(
                f"checkpoint.keep_best = {best} needs validation losses, and "
                f"training.evaluate_every = 0; use training.evaluate_every = {every}"
            )
        if every % evaluate_every:
            raise UserError(
                f"checkpoint.keep_best = {best} needs a validation before every checkpoint, and "
                f"checkpoint.every = {every} is not a multiple of training.evaluate_every = "
                f"{evaluate_every}; use checkpoint.every = "
                f"{nearest_multiples(every, evaluate_every, most=MAX_COUNT)}"
            )
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> "Recipe":
        parts, length = self.training.position_losses, self.model.sequence_length
        if parts and length % parts:
            raise UserError(
                f"training.position_losses = {parts} does not divide model.sequence_length = "
                f"{length}; use training.position_losses = {nearest_divisors(length, parts)}"
            )
        return self

    @model_validator(mode="after")
    def _check_validation(self, info: ValidationInfo) -> "Recipe":
        every = self.training.evaluate_every
        uses_every = self.evaluation.tasks and self.evaluation.every is None
        if every and not self._has_validation(info) and not uses_every:
            raise UserError(
                f"training.evaluate_every = {every} has no effect without data.validation; use "
                f'training.evaluate_every = 0, or for example data.validation = "data/books/'
                f'validation"'
            )
        return self

    def _has_validation(self, info: ValidationInfo) -> bool:
        """Return True if a phase has a validation set, or if only one phase is validated."""
        in_phases = any("validation" in phase.data for phase in self.phase)
        return bool(self.data.validation_sets) or in_phases or is_of_a_phase(info)

    @property
    def evaluate_tasks_every(self) -> int:
        """Steps between evaluations of the tasks; 0: never."""
        if not self.evaluation.tasks:
            return 0
        every = self.evaluation.every
        return self.training.evaluate_every if every is None else every

    @model_validator(mode="after")
    def _check_qk_clip(self) -> "Recipe":
        limit = self.optimizer.qk_clip
        if limit is not None and self.model.qk_norm:
            raise UserError(
                f"optimizer.qk_clip = {limit} has no effect with model.qk_norm = true, because the "
                f"norms undo the rescaling of queries and keys; leave optimizer.qk_clip out"
            )
        return self

    @model_validator(mode="after")
    def _check_tensor(self) -> "Recipe":
        tensor = self.layout.tensor
        for key, size in self._sizes_to_divide.items():
            if size % tensor:
                node = self.cluster.gpus_per_node if self.cluster else 0
                divisible = math.gcd(node, *self._sizes_to_divide.values())
                raise UserError(
                    f"model.{key} = {size} is not divisible by layout.tensor = {tensor}; use "
                    f"layout.tensor = {nearest_divisors(divisible, tensor)}"
                )
        return self

    @property
    def _sizes_to_divide(self) -> dict[str, int]:
        """The keys of the model that layout.tensor must divide, and their values."""
        keys = ["heads", "kv_heads", *(["ffn_hidden_size"] if self.model.has_dense_layers else [])]
        return {key: getattr(self.model, key) for key in keys}

    @model_validator(mode="after")
    def _check_context(self) -> "Recipe":
        model, layout = self.model, self.layout
        if layout.context == 1:
            return self
        if model.sequence_length % (2 * layout.context):
            raise UserError(
                f"model.sequence_length = {model.sequence_length} is not divisible by 2 x "
                f"layout.context = {2 * layout.context}, because each context rank has two slices "
                f"of each sequence; use {self._working_length}"
            )
        groups = model.kv_heads // layout.tensor
        if layout.context_attention == "ulysses" and groups % layout.context:
            raise UserError(
                f"layout.context = {layout.context} does not divide model.kv_heads / layout.tensor "
                f'= {groups}, which layout.context_attention = "ulysses" needs; use '
                f'layout.context_attention = "gather"'
            )
        return self

    @model_validator(mode="after")
    def _check_sequence_parallel(self) -> "Recipe":
        layout, length = self.layout, self.model.sequence_length
        if self._divides_tokens and length // layout.context % layout.tensor:
            reason = "which layout.sequence_parallel needs"
            if not layout.sequence_parallel:
                reason = "whose ranks choose experts for equal parts of the tokens"
            raise UserError(
                f"model.sequence_length = {length} is not divisible by "
                f"layout.tensor = {layout.tensor}"
                + (f" x layout.context = {layout.context}" if layout.context > 1 else "")
                + f", {reason}; use {self._working_length}"
            )
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> "Recipe":
        for check in MODEL_CHECKS:
            check(self.model, self.layout)
        return self

    @model_validator(mode="after")
    def _check_fp8(self) -> "Recipe":
        if self.training.matmul_precision == "fp8":
            check_fp8(self.model, self.layout)
        return self

    @property
    def _divides_tokens(self) -> bool:
        """True if tensor ranks divide the tokens, between layers or to choose experts."""
        return self.layout.sequence_parallel or self.model.experts is not None

    @property
    def _working_length(self) -> str:
        """The nearest sequence lengths that pass, or a context axis that passes if none does."""
        context, tensor = self.layout.context, self.layout.tensor if self._divides_tokens else 1
        divisor = context * (math.lcm(2, tensor) if context > 1 else tensor)
        if divisor > MAX_SIZE:
            return 'layout.context = 1 with layout.context_attention = "gather"'
        lengths = nearest_multiples(self.model.sequence_length, divisor)
        return f"model.sequence_length = {lengths}"

    @model_validator(mode="after")
    def _check_pipeline(self) -> "Recipe":
        layout, layers = self.layout, self.model.layers
        virtual_stages = layout.pipeline * layout.virtual_stages
        if virtual_stages > layers:
            per_stage = layout.virtual_stages
            chunks = f" with {per_stage} virtual stages each" if per_stage > 1 else ""
            most = layers // per_stage
            fewer = f"layout.pipeline = {most}" + (" or fewer" if most > per_stage else "")
            raise UserError(
                f"layout.pipeline = {layout.pipeline}{chunks} has more stages than "
                f"model.layers = {layers}; use "
                + (fewer if most >= per_stage else f"model.layers = {virtual_stages} or more")
            )
        given = layout.layers_per_stage
        if given is not None and (len(given) != virtual_stages or sum(given) != layers):
            raise UserError(
                f"layout.layers_per_stage = {list(given)} assigns {sum(given)} layers to "
                f"{len(given)} virtual stages, and the recipe has model.layers = {layers} and "
                f"layout.pipeline = {layout.pipeline} x layout.virtual_stages = "
                f"{layout.virtual_stages}; use layout.layers_per_stage = "
                f"{list(self._balanced_layers)}, or leave it out"
            )
        return self

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of each sequence on a context rank."""
        return self.model.sequence_length // self.layout.context

    @property
    def blocks_of_virtual_stages(self) -> tuple[int, ...]:
        """Blocks of each virtual stage of the pipeline, in the model's order."""
        if self.layout.layers_per_stage is not None:
            return tuple(self.layout.layers_per_stage)
        return self._balanced_layers

    @property
    def layer_costs(self) -> LayerCosts:
        """Costs of the blocks and of the logits."""
        return layer_costs(self.model, self.layout.recompute)

    @property
    def _balanced_layers(self) -> tuple[int, ...]:
        layout = self.layout
        return divide_blocks(
            self.layer_costs,
            schedule=layout.schedule,
            stages=layout.pipeline,
            virtual_stages=layout.virtual_stages,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.batch.global_sequences * self.model.sequence_length

    def micro_batches(self, data_size: int) -> int:
        """Return the micro-batches per step of each of `data_size` data ranks."""
        return self.batch.global_sequences // (self.batch.micro_sequences * data_size)

    def parallel_dims(self, world: LaunchEnvironment) -> ParallelDims:
        """Return the axes of this recipe on a world.

        Raises:
            UserError: the recipe cannot run on this world.
        """
        if self.cluster is not None:
            self._check_cluster(self.cluster, world)
        self._check_world(world)
        dims = ParallelDims.of_layout(self.layout, world.size)
        if world.local_size % dims.tensor:
            divisible = math.gcd(world.local_size, *self._sizes_to_divide.values())
            raise UserError(
                f"layout.tensor = {dims.tensor} does not divide the {world.local_size} ranks "
                f"of a node, and every tensor group must be inside one node; use layout.tensor = "
                f"{nearest_divisors(divisible, dims.tensor)}"
            )
        self._check_batch(dims)
        return dims

    def _check_cluster(self, cluster: Cluster, world: LaunchEnvironment) -> None:
        expected = cluster.nodes * cluster.gpus_per_node
        if (expected, cluster.gpus_per_node) == (world.size, world.local_size):
            return
        nodes = max(1, world.size // world.local_size)
        raise UserError(
            f"cluster.nodes = {cluster.nodes} x cluster.gpus_per_node = "
            f"{cluster.gpus_per_node} are {expected} ranks, and {world.size} were "
            f"started, {world.local_size} on this node; start {expected}, or use "
            f"--set cluster.nodes={nodes} --set cluster.gpus_per_node={world.local_size}"
        )

    def _check_world(self, world: LaunchEnvironment) -> None:
        layout = self.layout
        ranks = layout.ranks_per_data_rank
        if world.size % ranks == 0:
            for check in WORLD_CHECKS:
                check(self.model, layout, world.size)
            return
        context = f" x layout.context = {layout.context}" if layout.context > 1 else ""
        cluster = " (cluster.nodes x cluster.gpus_per_node)" if self.cluster else ""
        raise UserError(
            f"layout.tensor = {layout.tensor} x layout.pipeline = {layout.pipeline}{context} needs "
            f"a multiple of {ranks} ranks, not {world.size}; use "
            f"{ranks} ranks{cluster}"
        )

    def _check_batch(self, dims: ParallelDims) -> None:
        batch, least = self.batch, self.layout.min_micro_batches
        together = batch.micro_sequences * dims.data
        smallest = least * together
        if batch.whole.ramp:
            described = f"the batch of {batch.global_sequences} sequences"
            works = batch.whole.ramp_that_fits(together, smallest)
        else:
            described = f"batch.global_sequences = {batch.global_sequences}"
            near = max(batch.global_sequences, smallest)
            works = f"batch.global_sequences = {nearest_multiples(near, together, most=MAX_COUNT)}"
        if batch.global_sequences % together:
            raise UserError(
                f"{described} is not divisible by batch.micro_sequences = {batch.micro_sequences} "
                f"x {dims.data} data ranks; use {works}"
            )
        overlap = " with layout.expert_overlap = true" if self.layout.expert_overlap else ""
        if self.micro_batches(dims.data) < least:
            raise UserError(
                f'layout.schedule = "{self.layout.schedule}"{overlap} needs {least} micro-batches '
                f"or more for layout.pipeline = {dims.pipeline}, and {described} makes "
                f"{self.micro_batches(dims.data)} on each of {dims.data} data ranks; use "
                + (works if batch.whole.ramp else f"batch.global_sequences = {smallest}")
            )

    def toml(self) -> str:
        """Return the resolved recipe as TOML, with every default written out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
