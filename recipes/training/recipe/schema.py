"""The recipe: one TOML file, one complete experiment."""

import math
from typing import Annotated

import tomli_w
from pydantic import Field, model_validator

from models.config import ModelConfig, nearest_divisors, nearest_multiples
from models.errors import UserError
from models.pipeline.schedule.balance import deal_blocks, head_in_blocks
from models.pipeline.schedule.order import least_micro_batches
from recipes.training.recipe.sections import (
    Batch,
    Checkpoint,
    Cluster,
    Data,
    Layout,
    Optimizer,
    Section,
    Supervision,
    Tracking,
    Training,
)
from recipes.training.recipe.topology import Topology, World


class Recipe(Section):
    """One complete experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    deepspeed: str
    model: ModelConfig
    layout: Layout
    batch: Batch
    optimizer: Optimizer
    training: Training
    data: Data
    checkpoint: Checkpoint
    supervision: Supervision = Supervision()
    tracking: Tracking = Tracking()
    cluster: Cluster | None = None

    @model_validator(mode="after")
    def _check_timeline(self) -> "Recipe":
        first, steps = self.tracking.timeline_step, self.training.steps
        if first > steps:
            raise UserError(
                f"tracking.timeline_step = {first} comes after training.steps = {steps}; use "
                f"tracking.timeline_step = {steps}"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        model, tensor = self.model, self.layout.tensor
        divisible = math.gcd(model.heads, model.kv_heads, model.ffn_hidden_size)
        for key in ("heads", "kv_heads", "ffn_hidden_size"):
            size = getattr(model, key)
            if size % tensor:
                raise UserError(
                    f"model.{key} = {size} is not divisible by layout.tensor = {tensor}; use "
                    f"layout.tensor = {nearest_divisors(divisible, tensor)}"
                )
        if self.layout.sequence_parallel and model.sequence_length % tensor:
            raise UserError(
                f"model.sequence_length = {model.sequence_length} is not divisible by "
                f"layout.tensor = {tensor}, which layout.sequence_parallel needs; use "
                f"model.sequence_length = {nearest_multiples(model.sequence_length, tensor)}"
            )
        parts = self.layout.pipeline * self.layout.chunks
        if parts > model.layers:
            each = f" with {self.layout.chunks} parts each" if self.layout.chunks > 1 else ""
            most = model.layers // self.layout.chunks
            fewer = f"layout.pipeline = {most}" + (" or fewer" if most > self.layout.chunks else "")
            raise UserError(
                f"layout.pipeline = {self.layout.pipeline}{each} has more stages than "
                f"model.layers = {model.layers}; use "
                + (fewer if most >= self.layout.chunks else f"model.layers = {parts} or more")
            )
        dealt = self.layout.layers_per_stage
        if dealt is not None and (len(dealt) != parts or sum(dealt) != model.layers):
            raise UserError(
                f"layout.layers_per_stage = {dealt} deals {sum(dealt)} blocks to {len(dealt)} "
                f"parts, and model.layers = {model.layers} go to layout.pipeline = "
                f"{self.layout.pipeline} x layout.chunks = {self.layout.chunks}; use "
                f"layout.layers_per_stage = {list(self._dealt_by_cost)}, or leave it out"
            )
        schedule = self.optimizer.schedule
        if schedule.decay == "wsd" and (
            schedule.warmup_steps + schedule.decay_steps > self.training.steps
        ):
            raise UserError(
                f"optimizer.schedule.warmup_steps = {schedule.warmup_steps} and decay_steps = "
                f"{schedule.decay_steps} do not fit into training.steps = {self.training.steps}; "
                f"use training.steps = {schedule.warmup_steps + schedule.decay_steps} or more"
            )
        return self

    @property
    def blocks_of_positions(self) -> tuple[int, ...]:
        """Blocks of each part of the pipeline, in the model's order."""
        if self.layout.layers_per_stage is not None:
            return tuple(self.layout.layers_per_stage)
        return self._dealt_by_cost

    @property
    def head_in_blocks(self) -> float:
        """What the logits cost, as a multiple of a block."""
        return head_in_blocks(self.model, self.layout.recompute)

    @property
    def _dealt_by_cost(self) -> tuple[int, ...]:
        layout = self.layout
        return deal_blocks(
            self.model.layers,
            schedule=layout.schedule,
            stages=layout.pipeline,
            chunks=layout.chunks,
            head=self.head_in_blocks,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.batch.global_sequences * self.model.sequence_length

    def micro_batches(self, data_size: int) -> int:
        """Micro-batches per step of each of `data_size` data ranks."""
        return self.batch.global_sequences // (self.batch.micro_sequences * data_size)

    def topology(self, world: World) -> Topology:
        """The axes of this recipe on this world.

        Raises:
            UserError: the world is not one that the recipe can run on.
        """
        if self.cluster is not None:
            meant = self.cluster.nodes * self.cluster.gpus_per_node
            if (meant, self.cluster.gpus_per_node) != (world.size, world.local_size):
                nodes = max(1, world.size // world.local_size)
                raise UserError(
                    f"cluster.nodes = {self.cluster.nodes} x cluster.gpus_per_node = "
                    f"{self.cluster.gpus_per_node} are {meant} ranks, and {world.size} were "
                    f"started, {world.local_size} on this node; start {meant}, or use "
                    f"--set cluster.nodes={nodes} --set cluster.gpus_per_node={world.local_size}"
                )
        topology = Topology.for_world(
            world.size, pipeline=self.layout.pipeline, tensor=self.layout.tensor
        )
        if world.local_size % topology.tensor:
            raise UserError(
                f"layout.tensor = {topology.tensor} does not divide the {world.local_size} ranks "
                f"of a node, and tensor groups belong inside one; use layout.tensor = "
                f"{nearest_divisors(world.local_size, topology.tensor)}"
            )
        together = self.batch.micro_sequences * topology.data
        if self.batch.global_sequences % together:
            raise UserError(
                f"batch.global_sequences = {self.batch.global_sequences} is not divisible by "
                f"batch.micro_sequences = {self.batch.micro_sequences} x {topology.data} data "
                f"ranks; use batch.global_sequences = "
                f"{nearest_multiples(self.batch.global_sequences, together)}"
            )
        least = least_micro_batches(self.layout.schedule, topology.pipeline)
        if self.micro_batches(topology.data) < least:
            raise UserError(
                f'layout.schedule = "{self.layout.schedule}" needs {least} micro-batches or more '
                f"for layout.pipeline = {topology.pipeline}, and batch.global_sequences = "
                f"{self.batch.global_sequences} makes {self.micro_batches(topology.data)} on each "
                f"of {topology.data} data ranks; use batch.global_sequences = {least * together}"
            )
        return topology

    def toml(self) -> str:
        """The resolved recipe, every default written out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))
