"""Contestants of the step benchmark: our model and transformers' class, each also in a bare loop.

All start from the same weights, take the same batches and have the same optimizer and clipping.
Everything here runs in a contestant's own process.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._inductor.compile_fx  # once, before the contestants are forked
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from benchmarks.adamw import adamw
from benchmarks.one_step import probes
from benchmarks.one_step.bare_loop import BareLoop
from benchmarks.one_step.shapes import Shape, can_compile
from benchmarks.one_step.transformers_model import TransformersModel
from benchmarks.taking_turns import Turn, serve
from models.context_parallel import attention
from models.context_parallel import attention as attention_module
from models.context_parallel.division import divide
from models.initialization import initialize
from models.kernels.compile import compile_kernels
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.parallel import layers
from models.parallel.micro_batch_info import MicroBatchInfo
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.data.dataset import MicroBatch
from threefold.engine.build import build_from_recipe
from threefold.runtime.cpu_matmuls import replace_slow_cpu_matmuls
from threefold.runtime.processes import (
    driver_name,
    on_gpu,
    quiet,
    should_compile,
    start_processes,
)

Batch = Sequence[tuple[Tensor, Tensor]]  # tokens and labels [b, s] of each micro-batch
OVERLAPPED: Sequence[tuple[Any, str]] = (  # functions that begin a collective
    (layers, "begin_all_gather"),
    (layers, "begin_sum_of_copies"),
    (attention_module, "begin_gather"),
    (attention, "begin_pass"),
)
Train = Callable[[Batch], float]  # a step's mean loss


@dataclass(frozen=True)
class Entry:
    """The description of a contestant.

    of: "ours" or "transformers"
    bare: runs in a loop without DeepSpeed
    compiled: by torch.compile; ours is as its recipe says
    autocast: in bf16, fp32 weights with matmuls in bf16 by autocast; otherwise bf16 weights
        with an fp32 copy and fp32 gradients
    keeps_memory: its process reuses memory as our runs do on a CPU (`processes.keep_memory`);
        otherwise malloc returns it to the system, which is its default
    overlaps: tensor ranks reduce gradients during matmuls, and context ranks exchange keys during
        attention; otherwise before them
    """

    of: str
    bare: bool = False
    compiled: bool = False
    autocast: bool = False
    keeps_memory: bool = False
    overlaps: bool = True

    @property
    def name(self) -> str:
        """A name such as "transformers compiled, bare"."""
        if self.of == "ours":
            return "ours, bare" if self.bare else "ours"
        name = f"{self.of} {'compiled' if self.compiled else 'eager'}"
        return f"{name}, bare" if self.bare else name


def play(pipe: Connection, entry: Entry, shape: Shape, precision: str, more: dict) -> None:
    """Build a contestant and answer the parent's requests.

    more: keyword arguments of `Shape.recipe`
    """
    if not entry.overlaps:
        for module, name in OVERLAPPED:
            setattr(module, name, partial(at_once, getattr(module, name)))
    serve(pipe, Contestant(entry, shape, precision, more))


def at_once(begin: Callable[..., Callable[[], Tensor]], *arguments: Any) -> Callable[[], Tensor]:
    """Run a collective synchronously, in place of its asynchronous form."""
    result = begin(*arguments)()
    return lambda: result


class Contestant:
    """A contestant with the methods that the parent may call."""

    def __init__(self, entry: Entry, shape: Shape, precision: str, more: dict):
        if not on_gpu():
            torch.set_num_threads(1)
            if precision != "fp32":  # for all contestants, so that the rest of the step decides
                replace_slow_cpu_matmuls()
        world = start(keeps_memory=entry.keeps_memory)
        warm_libraries()
        # On a CPU, torch has no fused attention for values with fewer columns than keys, and would
        # convert them to fp32.
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        self.recipe = shape.recipe(precision, **more)
        self.device = torch.device(get_accelerator().current_device_name())
        self.memory_before = start_of_memory(self.device)
        self.train = BUILDERS[entry.of, entry.bare](entry, self.recipe, world)
        self.steps = 0

    def step(self) -> Turn:
        """Run the next step."""
        self.steps += 1
        batch = draw_batch(self.recipe, self.steps, self.device)
        self._synchronize()
        started = time.perf_counter()
        loss = self.train(batch)
        self._synchronize()
        return Turn(started, time.perf_counter(), loss)

    def memory(self) -> float:
        """Return the peak bytes so far, in addition to the memory before the model was built."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        return resident_bytes("VmHWM") - self.memory_before

    def gemm_libraries(self) -> dict[str, float]:
        """Return the shares of a step's matmul time by library and precision."""
        return probes.gemm_libraries(self.step, self.device)

    def top_kernels(self, count: int) -> list[dict[str, Any]]:
        """Return the slowest kernels of a step."""
        return probes.top_kernels(self.step, self.device, count)

    def device_name(self) -> str:
        """Return the device's name."""
        return driver_name()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def start(*, keeps_memory: bool) -> LaunchEnvironment:
    """Join the world of the environment, or a world of one process."""
    world = LaunchEnvironment.from_environment(os.environ)
    start_processes(world, keeps_memory=keeps_memory)
    return world


def warm_libraries() -> None:
    """Load libraries that are loaded at first use, so that their memory is not counted."""
    device = get_accelerator().current_device_name()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(1, 2, 64, 64, dtype=dtype, device=device, requires_grad=True)
        y = nn.functional.scaled_dot_product_attention(x @ x, x, x, is_causal=True)
        square = torch.compile(sum_of_squares) if can_compile() else sum_of_squares
        square(y).backward()


def sum_of_squares(y: Tensor) -> Tensor:
    """Return the sum of a tensor's squares."""
    return (y * y).sum()


def start_of_memory(device: torch.device) -> float:
    """Reset the counter of peak memory, and return the bytes held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0.0
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now (proc(5))
    return resident_bytes("VmRSS")


def resident_bytes(key: str) -> float:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(key))


def draw_batch(recipe: Recipe, step: int, device: torch.device) -> Batch:
    """Return the micro-batches of a step, equal for all contestants; int64 [b, s] each."""
    generator = torch.Generator().manual_seed(step)
    batch = []
    for _ in range(recipe.micro_batches(1)):
        shape = (recipe.batch.micro_sequences, recipe.model.sequence_length + 1)
        drawn = torch.randint(recipe.model.vocab_size, shape, generator=generator)  # [b, s + 1]
        tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        batch.append((tokens.to(device), labels.to(device)))
    return batch


def build_ours(entry: Entry, recipe: Recipe, world: LaunchEnvironment) -> Train:
    """Build our engine as recipes/pretrain.py does."""
    dims = recipe.parallel_dims(world)
    engine = build_from_recipe(recipe, dims, build_deepspeed_config(recipe, dims))
    rate = recipe.optimizer.learning_rate
    info = MicroBatchInfo()
    if dims.context > 1:
        rank = dims.coordinates(world.rank).context
        length = recipe.model.sequence_length
        info = MicroBatchInfo(division=divide(length, rank, dims.context))

    data_rank = dims.coordinates(world.rank).data

    def train(batch: Batch) -> float:
        mine = batch[data_rank :: dims.data]
        here = [MicroBatch(own_part(x, info), own_part(y, info), info) for x, y in mine]
        return engine.train_step(here, rate).loss

    return train


def own_part(x: Tensor, info: MicroBatchInfo) -> Tensor:
    """Return the tokens of this context rank, [b, s/c], of [b, s]."""
    if info.slices is None:
        return x
    return torch.cat([x[:, each.start : each.stop] for each in info.slices], dim=1)


def build_ours_bare(entry: Entry, recipe: Recipe, world: LaunchEnvironment) -> Train:
    """Build our model in a bare loop."""
    model = SequentialModel(layer_specs(recipe.model))
    if should_compile(recipe.training.compile):
        compile_kernels(model)
    parameters = logical_parameters(model, recipe.model)
    initialize(parameters, recipe.model, seed=recipe.seed)
    loop = BareLoop(
        model.to(get_accelerator().current_device_name()), recipe, autocast=entry.autocast
    )
    return lambda batch: loop.train([(*each, MicroBatchInfo()) for each in batch])


def build_theirs(entry: Entry, recipe: Recipe, world: LaunchEnvironment) -> Train:
    """Build transformers' class under DeepSpeed, with the same JSON as ours.

    Under autocast it is the JSON of fp32, because DeepSpeed's `torch_autocast` would reduce
    gradients in bf16.
    """
    dims = recipe.parallel_dims(world)
    model = TransformersModel(recipe, entry.autocast)
    config = build_deepspeed_config(json_of(recipe, entry), dims)
    with quiet():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model, recipe.optimizer), config=config
        )
    if entry.compiled:
        engine.compile()

    def train(batch: Batch) -> float:
        losses = []
        for tokens, labels in batch:
            loss = engine(tokens, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    return train


def json_of(recipe: Recipe, entry: Entry) -> Recipe:
    """Return the recipe with DeepSpeed's JSON for an entry."""
    if not entry.autocast:
        return recipe
    return recipe.model_copy(update={"deepspeed": recipe.deepspeed.replace("bf16", "fp32")})


def build_theirs_bare(entry: Entry, recipe: Recipe, world: LaunchEnvironment) -> Train:
    """Build transformers' class in a bare loop."""
    model = TransformersModel(recipe, entry.autocast).to(get_accelerator().current_device_name())
    if entry.compiled:
        model.compile()
    return BareLoop(model, recipe, autocast=entry.autocast).train


BUILDERS: dict[tuple[str, bool], Callable[[Entry, Recipe, LaunchEnvironment], Train]] = {
    ("ours", False): build_ours,
    ("ours", True): build_ours_bare,
    ("transformers", False): build_theirs,
    ("transformers", True): build_theirs_bare,
}
