"""Contestants that train the same two stages: our engine, DeepSpeed's, torch's, one process.

Each starts from the same weights and takes the same optimizer steps.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.adamw import adamw
from models.initialization import initialize
from models.layer_specs import (
    SequentialModel,
    TokenEmbedding,
    layer_specs,
    logical_parameters,
)
from models.parallel.micro_batch_info import MicroBatchInfo
from models.transformer import Block
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import DEFAULT_RECIPE, load_recipe
from threefold.config.parallel_dims import ParallelDims
from threefold.config.recipe import Recipe
from threefold.data.dataset import MicroBatch
from threefold.engine.build import (
    build_from_recipe,
    layers_of_virtual_stages,
)
from threefold.pipeline.engine import Event, EventRecorder
from threefold.runtime.processes import quiet

STAGES = 2
ONE = "one process"
OURS = {  # name -> schedule, chunks
    "1f1b": ("1f1b", 1),
    "interleaved": ("interleaved", 2),
    "zb-h1": ("zb-h1", 1),
    "zb-v": ("zb-v", 2),
}
STOCK, STOCK_V = "DeepSpeed's 1f1b", "DeepSpeed's dualpipev"
TORCH = {"1f1b": "torch's 1f1b", "interleaved": "torch's interleaved"}  # by our schedule
RIVALS = {  # our schedule -> contestants that it is compared with
    "1f1b": (STOCK, TORCH["1f1b"]),
    "interleaved": (STOCK, TORCH["interleaved"]),
    "zb-h1": (STOCK,),
    "zb-v": (STOCK, STOCK_V),
}


@dataclass(frozen=True)
class Setting:
    """The model, a larger version of that in recipes/tiny.toml, and its batch.

    rounds: number of timed rounds, after an untimed one
    """

    layers: int = 12
    hidden_size: int = 384
    ffn_hidden_size: int = 1024
    vocab_size: int = 512
    sequence_length: int = 256
    micro_sequences: int = 2
    micro_batches: int = 8
    rounds: int = 7

    def recipe(self, schedule: str, virtual_stages: int) -> Recipe:
        """Return the recipe with a schedule."""
        settings = {
            "model.layers": self.layers,
            "model.hidden_size": self.hidden_size,
            "model.ffn_hidden_size": self.ffn_hidden_size,
            "model.heads": self.hidden_size // 64,
            "model.kv_heads": self.hidden_size // 64,
            "model.vocab_size": self.vocab_size,
            "model.sequence_length": self.sequence_length,
            "batch.micro_sequences": self.micro_sequences,
            "batch.global_sequences": self.micro_sequences * self.micro_batches,
            "layout.pipeline": STAGES,
            "layout.schedule": schedule,
            "layout.virtual_stages": virtual_stages,
            "optimizer.learning_rate": 1e-3,
        }
        return load_recipe(DEFAULT_RECIPE, [f"{key}={value}" for key, value in settings.items()])


class Turn(NamedTuple):
    """The results of a contestant's step on a rank.

    loss: None if it is not known
    events: events of our engine
    parts: seconds of all passes and of the optimizer, where one process does everything
    computed: time at which all gradients were computed
    """

    loss: float | None = None
    events: Sequence[Event] = ()
    parts: tuple[float, float] = (math.nan, math.nan)
    computed: float = math.nan


Contestant = Callable[[Tensor, Tensor], Turn]  # tokens and labels, [b, s] of all micro-batches


def build_match(setting: Setting, ours: str) -> Iterator[tuple[str, Contestant]]:
    """Build one process, one of our schedules and its rivals, in the order of their turns.

    Other schedules are measured separately, because memory of idle contestants slows the others.
    """
    whole = setting.recipe("1f1b", 1)
    is_first = dist.get_rank() == 0
    yield ONE, Sequential(whole, setting).step if is_first else lambda tokens, labels: Turn()
    recipe = setting.recipe(*OURS[ours])
    yield ours, build_ours(recipe, setting)
    for name in RIVALS[ours]:
        if name == STOCK:
            yield name, build_stock(whole, setting)
        elif name == STOCK_V:
            yield name, build_stock(setting.recipe("dualpipev", 2), setting)
        else:
            yield name, build_torch(recipe, setting)


class PlainEmbedding(TokenEmbedding):
    """A layer for engines that do not pass a MicroBatchInfo."""

    def forward(self, tokens: Tensor, info: MicroBatchInfo = MicroBatchInfo()) -> Tensor:  # noqa: B008
        """[b, s] to [s, b, h]."""
        return super().forward(tokens, info)


class PlainBlock(Block):
    """A layer for engines that do not pass a MicroBatchInfo."""

    def forward(self, x: Tensor, info: MicroBatchInfo = MicroBatchInfo()) -> Tensor:  # noqa: B008
        """[s, b, h] to [s, b, h]."""
        return super().forward(x, info)


PLAIN = {TokenEmbedding: PlainEmbedding, Block: PlainBlock}


def plain_specs(recipe: Recipe) -> list[LayerSpec]:
    """Return the model's layers in a form that other engines can call."""
    return [
        LayerSpec(PLAIN.get(spec.typename, spec.typename), *spec.module_args, **spec.module_kwargs)
        for spec in layer_specs(recipe.model)
    ]


def with_first_weights(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Initialize the model like our engine's, and return it."""
    initialize(
        logical_parameters(model, recipe.model),
        recipe.model,
        seed=recipe.seed,
    )
    return model


def loss_of_logits(recipe: Recipe) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss, for engines that compute it separately from the layers."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        real = logits[..., : recipe.model.vocab_size].float()  # [s, b, v] without the padding
        return F.cross_entropy(real.flatten(0, 1), labels.t().flatten())

    return loss


class Sequential:
    """A single process with all layers and a plain optimizer."""

    def __init__(self, recipe: Recipe, setting: Setting):
        specs = plain_specs(recipe)
        self.model = with_first_weights(SequentialModel(specs), recipe)
        self.optimizer = adamw(self.model, recipe.optimizer)
        self.clipping = recipe.optimizer.gradient_clipping
        self.micro_batches = setting.micro_batches

    def step(self, tokens: Tensor, labels: Tensor) -> Turn:
        """Run forward, backward and update."""
        start = time.perf_counter()
        losses = []
        batch = tokens.chunk(self.micro_batches), labels.chunk(self.micro_batches)
        for micro_batch in zip(*batch, strict=True):
            loss = self.model(*micro_batch, MicroBatchInfo()) / self.micro_batches
            loss.backward()
            losses.append(loss.detach())
        computed = time.perf_counter()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        parts = computed - start, time.perf_counter() - computed
        return Turn(loss=float(sum(losses)), parts=parts)


def build_ours(recipe: Recipe, setting: Setting) -> Contestant:
    """Build our engine as recipes/pretrain.py does."""
    dims = ParallelDims(pipeline=STAGES, data=1, tensor=1)
    engine = build_from_recipe(recipe, dims, build_deepspeed_config(recipe, dims))
    recording = EventRecorder(engine.wrapped)

    def step(tokens: Tensor, labels: Tensor) -> Turn:
        recording.clear()
        parts = tokens.chunk(setting.micro_batches), labels.chunk(setting.micro_batches)
        micro_batches = [MicroBatch(*part, MicroBatchInfo()) for part in zip(*parts, strict=True)]
        result = engine.train_step(micro_batches, recipe.optimizer.learning_rate)
        (update,) = [each for each in recording.events if each.instruction == "OptimizerStep"]
        return Turn(loss=result.loss, events=recording.events, computed=update.start)

    return step


def build_stock(recipe: Recipe, setting: Setting) -> Contestant:
    """Build DeepSpeed's engine with the same settings and the same layers on each stage."""
    dims = ParallelDims(pipeline=STAGES, data=1, tensor=1)
    with quiet():
        model = (DualPipeVModule if recipe.layout.virtual_stages == 2 else PipelineModule)(
            plain_specs(recipe),
            topology=PipeModelDataParallelTopology(num_pp=STAGES, num_dp=1, num_mp=1),
            loss_fn=loss_of_logits(recipe),
            partition_method="type:Block",
        )
        assert list(model.parts) == [0, *accumulate(layers_of_virtual_stages(recipe))]
        with_first_weights(model, recipe)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adamw(model, recipe.optimizer),
            config=build_deepspeed_config(recipe, dims),
        )

    def step(tokens: Tensor, labels: Tensor) -> Turn:
        parts = tokens.chunk(setting.micro_batches), labels.chunk(setting.micro_batches)
        return Turn(loss=float(engine.train_batch(zip(*parts, strict=True))))

    return step


def build_torch(recipe: Recipe, setting: Setting) -> Contestant:
    """Build torch.distributed.pipelining with the same optimizer and clipping over both stages."""
    rank, device = dist.get_rank(), torch.device("cpu")
    loss_fn = loss_of_logits(recipe)
    model = SequentialModel(plain_specs(recipe))
    with_first_weights(model, recipe)
    layers = [layer for layer in model.layers if isinstance(layer, nn.Module)]
    assert len(layers) == len(model.layers)
    parts = [0, *accumulate(layers_of_virtual_stages(recipe))]
    places = range(rank, len(parts) - 1, STAGES)
    chunks = [nn.Sequential(*layers[parts[place] : parts[place + 1]]) for place in places]
    stages = [
        PipelineStage(chunk, place, len(parts) - 1, device)
        for chunk, place in zip(chunks, places, strict=True)
    ]
    schedule: Schedule1F1B | ScheduleInterleaved1F1B
    if len(stages) == 1:
        schedule = Schedule1F1B(stages[0], setting.micro_batches, loss_fn=loss_fn)
    else:
        schedule = ScheduleInterleaved1F1B([*stages], setting.micro_batches, loss_fn=loss_fn)
    mine = nn.ModuleList(chunks)
    optimizer = adamw(mine, recipe.optimizer)

    def step(tokens: Tensor, labels: Tensor) -> Turn:
        losses: list[Tensor] = []
        run = partial(schedule.step, return_outputs=False)
        if rank == 0:
            run(tokens)
        else:
            run(target=labels, losses=losses)
        computed = time.perf_counter()
        squared = (
            get_total_norm([each.grad for each in mine.parameters() if each.grad is not None]) ** 2
        )
        dist.all_reduce(squared)
        clip_grads_with_norm_(mine.parameters(), recipe.optimizer.gradient_clipping, squared.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        loss = float(torch.stack(losses).mean()) if losses else None
        return Turn(loss=loss, computed=computed)

    return step
