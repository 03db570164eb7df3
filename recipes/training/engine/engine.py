"""Build the engine of a run, pipelined or sequential: build_engine(...).train_step(...)."""

import contextlib
import importlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import ForwardPass, PipeInstruction
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from models.initialization import initialize
from models.kernels.attention import cumulative_lengths
from models.kernels.fusing import are_compiled, compile_kernels
from models.layer_specs import (
    SequentialModel,
    expect_gradient_scale,
    layer_names,
    layer_specs,
    logical_parameters,
)
from models.parallel.collectives import TensorAxis
from models.parallel.context import Context
from models.pipeline.channels import Boundary
from models.pipeline.process_grid import ProcessGrid
from models.pipeline.schedule.balance import pass_proportions
from models.pipeline.schedule.order import Pipeline
from models.pipeline.scheduled_engine import ScheduledEngine, scheduled_engines
from models.pipeline.stage import Stage
from recipes.training.checkpoint.reader import CheckpointReader
from recipes.training.checkpoint.state import Fragment, TrainingState, training_state
from recipes.training.data.micro_batch import MicroBatch
from recipes.training.engine.deepspeed_patches import replace_timers
from recipes.training.engine.stopwatch import Stopwatch
from recipes.training.engine.zero_patches import without_needless_copies
from recipes.training.recipe.deepspeed_config import precision, zero_stage
from recipes.training.recipe.schema import Optimizer, Recipe
from recipes.training.recipe.topology import Topology
from recipes.training.runtime.processes import compiles, quiet
from recipes.training.supervision.breadcrumb import Breadcrumb
from recipes.training.supervision.replicas import CopyGroup, differing_copies

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """Loss in nats per token (mean of the global batch) and gradient norm before clipping."""

    loss: float
    grad_norm: float


class Engine(ABC):
    """A model that trains: the same interface over a pipeline and over one sequence of layers."""

    def __init__(
        self,
        wrapped: deepspeed.DeepSpeedEngine,
        recipe: Recipe,
        axis: TensorAxis,
        crumb: Breadcrumb,
    ):
        self.wrapped, self.recipe, self.axis, self.crumb = wrapped, recipe, axis, crumb
        self.stopwatch = Stopwatch(self.device, off=not recipe.supervision.compare_speed_every)
        self.state: TrainingState = training_state(wrapped.optimizer, dict(self.parameters()))

    @property
    def compiled(self) -> bool:
        """Whether what runs between matrix products is compiled."""
        return are_compiled(self.wrapped.module)

    def train_step(self, micro_batches: Iterable[MicroBatch], learning_rate: float) -> StepResult:
        """Forward, backward and update over one global batch."""
        for group in self.wrapped.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self._train(micro_batches)
        return StepResult(loss=float(loss), grad_norm=float(self.wrapped.get_global_grad_norm()))

    @abstractmethod
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """The mean loss, in nats per token, over all data ranks' micro-batches."""

    @abstractmethod
    def _train(self, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Forward, backward and update; the mean loss over all data ranks' micro-batches."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(logical name, parameter) of all that this rank holds."""
        return logical_parameters(self.wrapped.module, self.recipe.model)

    def differing_copies(self) -> list[str]:
        """Return a sentence for each weight whose replicas differ; the same on all ranks."""

        def noted() -> Iterator[CopyGroup]:
            for group in self._copies():
                self.crumb.note(f"comparing replicas of {group.kind}")
                yield group

        return differing_copies(noted(), self.wrapped.device)

    def _from_disk(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches as they are read from disk, which does not count as a hang."""
        iterator = iter(micro_batches)
        for number in itertools.count():
            with self.crumb.waiting_for_disk("reading data", micro_batch=number):
                micro_batch = next(iterator, None)
            if micro_batch is None:
                return
            yield micro_batch

    def _copies(self) -> list[CopyGroup]:
        data_rank = dist.get_rank(self.data_group)
        held = [(n, held_values(p, data_rank), p) for n, p in self.parameters()]
        copies = []
        if self.axis.size > 1:
            replicated = [(n, values) for n, values, p in held if p.sharding.dimension is None]
            copies.append(CopyGroup("tensor ranks", self.axis.group, replicated))
        group = self.data_group
        if dist.get_world_size(group) > 1:
            whole = [(n, values) for n, values, p in held if not is_partitioned(p)]
            copies.append(CopyGroup("data ranks", group, whole))
        return copies

    @property
    @abstractmethod
    def data_group(self) -> dist.ProcessGroup:
        """This rank's group along the data axis."""

    def load(self, reader: CheckpointReader, *, weights_only: bool = False) -> None:
        """Read this rank's share of a checkpoint, whichever layout wrote it.

        weights_only: the optimizer starts afresh
        """

        def read(kind: str, fragment: Fragment) -> torch.Tensor:
            self.crumb.note(f"loading {kind} of {fragment.name}")
            return self.state.parameters[fragment.name].sharding.local_elements(
                partial(reader.rows, kind, fragment.name),
                fragment.elements,
                tensor_rank=self.axis.rank,
                tensor_size=self.axis.size,
            )

        manifest = reader.manifest
        self.state.restore(
            read,
            updates=None if weights_only else manifest.updates,
            loss_scale=None if weights_only else manifest.loss_scale,
        )

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.wrapped.device

    @property
    def on_gpu(self) -> bool:
        """Whether that is a GPU."""
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        """What the device calls itself: "cpu", "NVIDIA H100 80GB HBM3", ..."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else self.device.type


class PipelinedEngine(Engine):
    """Stages that pass activations on; ZeRO-1."""

    def __init__(self, wrapped: ScheduledEngine, *parts: Any):
        super().__init__(wrapped, *parts)
        wrapped._INSTRUCTION_MAP = {
            instruction: partial(self._observe, instruction, run)
            for instruction, run in wrapped._INSTRUCTION_MAP.items()
        }

    def _observe(
        self,
        instruction: type[PipeInstruction],
        run: Callable[..., None],
        wrapped: ScheduledEngine,
        **arguments: Any,
    ) -> None:
        """Run an instruction of the pipeline, leaving a crumb; forward passes are timed."""
        name = instruction.__name__
        self.crumb.note(name, micro_batch=arguments.get("buffer_id"))
        is_forward = instruction is ForwardPass
        with self.stopwatch.running() if is_forward else contextlib.nullcontext():
            run(wrapped, **arguments)

    def _train(self, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        return self._run(self.wrapped.train_batch, list(micro_batches))

    def _copies(self) -> list[CopyGroup]:
        tied = [
            CopyGroup("stages", comm["group"], list(comm["module"].named_parameters(prefix=key)))
            for key, comm in self.wrapped.module.tied_comms.items()
        ]
        return super()._copies() + tied

    @property
    def data_group(self) -> dist.ProcessGroup:
        """This rank's group along the data axis."""
        return self.wrapped.grid.get_data_parallel_group()

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Return the mean loss, in nats per token, over all data ranks' micro-batches."""
        micro_batches = list(self._from_disk(micro_batches))
        together = self.wrapped.micro_batches
        losses = [
            self._run(self.wrapped.eval_batch, micro_batches[first : first + together])
            for first in range(0, len(micro_batches), together)
        ]
        return float(torch.stack(losses).mean())

    def _run(
        self, schedule: Callable[..., torch.Tensor], micro_batches: list[MicroBatch]
    ) -> torch.Tensor:
        """Return the mean loss of micro-batches after DeepSpeed's train_batch or eval_batch.

        DeepSpeed hands tokens and labels to the ends of the pipeline; every stage has the contexts.
        """
        prepare_documents([each.context for each in micro_batches], self.device)
        if self.wrapped.needs_warm_up:
            first = micro_batches[0]
            self.wrapped.warm_up(first.tokens, first.labels, first.context, note=self.crumb.note)
        self.wrapped.module.take_contexts([each.context for each in micro_batches])
        loss = schedule(iter([(each.tokens, each.labels) for each in micro_batches]))
        self.wrapped.module.check_contexts_taken()
        return loss


class SequentialEngine(Engine):
    """All layers on every rank; ZeRO-2 over several data ranks, and ZeRO-3."""

    def _train(self, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        self.wrapped.train()
        losses = []
        for number, micro_batch in enumerate(micro_batches):
            self.crumb.note("forward pass", micro_batch=number)
            with self.stopwatch.running():
                loss = self._loss(micro_batch)
            self.crumb.note("backward pass", micro_batch=number)
            self.wrapped.backward(loss)
            self.wrapped.step()
            losses.append(loss.detach())
        return self._mean(losses)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Return the mean loss, in nats per token, over all data ranks' micro-batches."""
        self.wrapped.eval()
        losses = []
        for number, micro_batch in enumerate(self._from_disk(micro_batches)):
            self.crumb.note("validation pass", micro_batch=number)
            losses.append(self._loss(micro_batch))
        return float(self._mean(losses))

    def _loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        here = micro_batch.on(self.wrapped.device)
        return self.wrapped(here.tokens, here.labels, here.context)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        total = torch.stack(losses).mean()
        dist.all_reduce(total, group=self.data_group)
        return total / dist.get_world_size(self.data_group)

    @property
    def data_group(self) -> dist.ProcessGroup:
        """This rank's group along the data axis."""
        return self.wrapped.mpu.get_data_parallel_group()


def prepare_documents(contexts: Iterable[Context], device: torch.device) -> None:
    """Make the tables of all micro-batches for attention within documents, before the first pass.

    They are copied from pinned memory. Allocating that memory may wait for the whole device, and in
    a pipeline for a posted receive.
    """
    for context in contexts:
        if context.documents is not None and device.type == "cuda":
            cumulative_lengths(context.documents.lengths, device)


def build_engine(
    recipe: Recipe,
    topology: Topology,
    config: dict[str, Any],
    crumb: Breadcrumb | None = None,
    lap: Callable[[str], None] = lambda part: None,
) -> Engine:
    """Build the model and its DeepSpeed engine: a pipeline with ZeRO-1, sequential otherwise.

    crumb: where the engine notes its current activity, for hang reports
    lap: called when the model has been built, before DeepSpeed wraps it
    """
    axes = PipeModelDataParallelTopology(
        num_pp=topology.pipeline, num_dp=topology.data, num_mp=topology.tensor
    )
    grid = ProcessGrid(axes)
    axis = tensor_axis(grid, recipe.layout.sequence_parallel)
    recompute = recipe.layout.recompute
    interval = recipe.layout.recompute_interval if recompute == "full" else 0
    specs = layer_specs(recipe.model, axis, recompute_core=recompute == "selective")
    pipelined = zero_stage(config) == 1
    with quiet():
        if pipelined:
            model = Stage(
                specs,
                pipeline=pipeline_of(recipe, topology),
                grid=grid,
                layers_of_positions=layers_of_positions(recipe),
                recompute_interval=interval,
            )
        else:
            model = SequentialModel(specs, recompute_interval=interval)
    initialize(
        logical_parameters(model, recipe.model),
        recipe.model,
        seed=recipe.seed,
        tensor_rank=axis.rank,
        tensor_size=axis.size,
    )
    if compiles(recipe.training.compile):
        compile_kernels(model)
    lap("model")
    import_muon()
    with quiet(), scheduled_engines(boundary(recipe, axis, config)):
        wrapped, *_ = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(model, recipe.optimizer),
            config=config,
            mpu=None if pipelined else grid,
        )
    without_needless_copies(wrapped.optimizer)
    replace_timers(wrapped)
    if precision(config) == "fp16":
        expect_gradient_scale(wrapped.module, partial(loss_gradient, wrapped))
    engine = PipelinedEngine if pipelined else SequentialEngine
    return engine(wrapped, recipe, axis, crumb or Breadcrumb())


def loss_gradient(wrapped: deepspeed.DeepSpeedEngine) -> float:
    """Return the gradient of a micro-batch's loss in fp16: loss scale / number of micro-batches."""
    return wrapped.optimizer.loss_scale / wrapped.gradient_accumulation_steps()


def import_muon() -> None:
    """Import an optimizer that DeepSpeed asks every optimizer whether it is, and none of ours is.

    Without the variable its decorators would import all of torch's compiler, for most of a second.
    """
    with mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "1"} | os.environ):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def pipeline_of(recipe: Recipe, topology: Topology) -> Pipeline:
    """What orders the passes of a recipe's pipeline."""
    return Pipeline(
        stages=topology.pipeline,
        chunks=recipe.layout.chunks,
        micro_batches=recipe.micro_batches(topology.data),
        schedule=recipe.layout.schedule,
        proportions=pass_proportions(recipe.model, recipe.layout.recompute),
    )


def layers_of_positions(recipe: Recipe) -> list[int]:
    """Layers of each chunk, in the model's order: its blocks, and at the ends what is no block."""
    names = layer_names(recipe.model)
    layers = list(recipe.blocks_of_positions)
    layers[0] += names.index("blocks.0")
    layers[-1] += len(names) - 1 - names.index(f"blocks.{recipe.model.layers - 1}")
    return layers


def boundary(recipe: Recipe, axis: TensorAxis, config: dict[str, Any]) -> Boundary:
    """What goes from one chunk of the pipeline to the next."""
    length = recipe.model.sequence_length // (axis.size if axis.sequence_parallel else 1)
    shape = (length, recipe.batch.micro_sequences, recipe.model.hidden_size)
    return Boundary(shape, DTYPES[precision(config)], axis)


def tensor_axis(grid: ProcessGrid, sequence_parallel: bool) -> TensorAxis:
    """Return the tensor axis as this rank sees it."""
    size = grid.slice_parallel_size
    if size == 1:
        return TensorAxis()
    return TensorAxis(
        group=grid.get_slice_parallel_group(),
        rank=grid.get_slice_parallel_rank(),
        size=size,
        sequence_parallel=sequence_parallel,
    )


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW; matrices and embeddings decay, norms and biases do not.

    Every stage has both groups: DeepSpeed reduces the norm group by group, and a stage with
    fewer groups would leave the others waiting.
    """
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    undecayed = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    assert decayed and undecayed
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )


def held_values(parameter: nn.Parameter, data_rank: int) -> torch.Tensor:
    """What this rank holds of a parameter: all of its part, or under ZeRO-3 a share of that.

    The share is cut to what the parameter has: DeepSpeed never writes the padding after it.
    """
    if not is_partitioned(parameter):
        return parameter
    share = parameter.ds_tensor
    return share[: max(0, parameter.ds_numel - data_rank * share.numel())]


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 has spread the parameter over the data ranks."""
    return hasattr(parameter, "ds_tensor")
