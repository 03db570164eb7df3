"""Training of a trial in the workers of a sweep: its losses, or the sizes of its activations."""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from models.layer_specs import VocabularyTable, layer_names
from models.transformer import Block
from threefold.checkpoint.resume import find_initial_weights
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.data.dataset import TrainingData
from threefold.engine.build import release
from threefold.engine.engine import Engine
from threefold.pretrain.evaluation import Evaluator
from threefold.prove.training import start, train_step
from threefold.run_folder.json_lines import validation_losses
from threefold.sweep.trial import Result

# Sizes of a model's activations at the start and after each step, for the coordinate check.
#
# The size of a tensor is the root mean square of its elements. The check runs in one process:
# layouts do not change activations, and a single process holds all of them. The same samples,
# those of the first step, are measured each time, without dropout.
#
# s sequence, b micro-batch, h hidden, v vocabulary.

Activations = dict[str, Tensor]


def activation_sizes(engine: Engine, data: TrainingData) -> dict[str, Any]:
    """Train all steps of a recipe and return the sizes of its activations.

    Returns:
        `sizes`: place -> sizes at the start and after each step; `changes`: place -> sizes of the
        difference from the start after each step. A place is "embedding", "blocks.0.attention",
        "blocks.0.mlp", "blocks.0" (the residual stream after the block), ..., or "logits". `losses`
        are those of the measured samples, at the start and after each step.
    """
    first, loss = activations(engine, data)
    sizes = {place: [size(value)] for place, value in first.items()}
    changes: dict[str, list[float]] = {place: [] for place in first}
    losses = [loss]
    for step in range(1, engine.recipe.training.steps + 1):
        train_step(engine, data, step)
        found, loss = activations(engine, data)
        losses.append(loss)
        for place, value in found.items():
            sizes[place].append(size(value))
            changes[place].append(size(value - first[place]))
    return {"sizes": sizes, "changes": changes, "losses": losses}


def size(value: Tensor) -> float:
    """Return the root mean square of a tensor."""
    return float(value.double().square().mean().sqrt())


def activations(engine: Engine, data: TrainingData) -> tuple[Activations, float]:
    """Return the activations of the samples of the first step by place, and their mean loss."""
    found: dict[str, list[Tensor]] = {}

    def record(place: str, value: Tensor) -> None:
        found.setdefault(place, []).append(value.detach().float().cpu())

    with recorded(engine, record):
        loss = engine.evaluate(data.micro_batches(1))
    return {place: torch.cat(values, dim=1) for place, values in found.items()}, loss


@contextlib.contextmanager
def recorded(engine: Engine, record: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `record` with the output [s, b, h] of each place, and with the logits [s, b, v].

    The last layer returns only the loss, so the logits are computed from its input.
    """
    module, config = engine.wrapped.module, engine.recipe.model
    tables = [table for table in module.modules() if isinstance(table, VocabularyTable)]
    vocab_size = config.vocab_size

    def output(place: str, _module: nn.Module, _inputs: Any, value: Tensor) -> None:
        record(place, value)

    def head_input(_module: nn.Module, _inputs: Any, value: Tensor) -> None:
        with torch.no_grad():
            record("logits", tables[-1].predict(value)[..., :vocab_size])

    handles = []
    for name, layer in layers_by_name(module, layer_names(config)).items():
        if name == "final_norm":
            handles.append(layer.register_forward_hook(head_input))
        elif name != "head":
            handles.append(layer.register_forward_hook(partial(output, name)))
        if isinstance(layer, Block):
            for half in ("attention", "mlp"):
                hook = partial(output, f"{name}.{half}")
                handles.append(getattr(layer, half).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layers_by_name(module: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """Return the layers of a PipelineModule or SequentialModel by their logical names.

    Tied embeddings are one module, which is listed as the embedding.
    """
    children = dict(module.named_children())
    modules = {name: children[str(n)] for n, name in enumerate(names) if str(n) in children}
    if "embedding" not in modules:
        tied = children["tied_modules"]
        modules["embedding"] = next(iter(tied.children()))
    return modules


def measure_training(kind: str, recipe: Recipe, world: LaunchEnvironment) -> Result:
    """Build the engine of a recipe, train it, and return what was measured; collective.

    Args:
        kind: "coordinates" for the sizes of activations, otherwise losses are measured
    """
    engine, data = start(recipe, world)
    weights = find_initial_weights(recipe)
    if weights.checkpoint is not None:
        engine.load(weights.checkpoint, weights_only=True)
    seconds: list[float] = []
    if kind == "coordinates":
        training = activation_sizes(engine, data)
    else:
        training, seconds = losses(engine, data)
    device = engine.device_name
    release(engine)
    del engine
    gc.collect()  # an engine has reference cycles
    return Result(outcome="ok", step_seconds=seconds, device=device, training=training)


def losses(engine: Engine, data: TrainingData) -> tuple[dict[str, Any], list[float]]:
    """Train until the last step, or until the loss is infinite or NaN; collective.

    The model is validated every `training.evaluate_every` steps and after the last one.

    Returns:
        A table, and the duration of each step. The table has `losses`, the loss of each step;
        `validation`, pairs of a step and the loss after it; and `diverged`, the step whose loss is
        not finite, or None.
    """
    steps, every = engine.recipe.training.steps, engine.recipe.training.evaluate_every
    evaluator = Evaluator(engine, data)
    training: dict[str, Any] = {"losses": [], "validation": [], "diverged": None}
    seconds = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        loss = train_step(engine, data, step).loss
        seconds.append(time.perf_counter() - began)
        is_last = step == steps
        validation = None
        if math.isfinite(loss) and (is_last or (every and step % every == 0)):
            validation = mean_validation_loss(evaluator)
        if not math.isfinite(loss) or not math.isfinite(validation or 0.0):
            training["diverged"] = step
            break
        training["losses"].append(loss)
        if validation is not None:
            training["validation"].append([step, validation])
    return training, seconds


def mean_validation_loss(evaluator: Evaluator) -> float:
    """Return the validation loss in nats per token, the mean of all validation sets; collective."""
    return mean(validation_losses(evaluator.validate()).values())
