"""Training of a trial in the ranks of a world: its losses, or the sizes of its activations."""

import gc
import math
import time
from statistics import mean
from typing import Any

from threefold.checkpoint.resume import find_initial_weights
from threefold.config.parallel_dims import World
from threefold.data.dataset import TrainingData
from threefold.engine.engine import Engine
from threefold.pretrain.evaluation import Evaluator
from threefold.prove.training import start, train_step
from threefold.run_folder.json_lines import validation_losses
from threefold.sweep.ranks.engines import checked_recipe, release
from threefold.sweep.trial import Result
from threefold.sweep.width_transfer.activations import activation_sizes


def measure_training(request: dict[str, Any], world: World) -> Result:
    """Build the engine of a recipe, train it, and return what the request asks for; collective.

    Args:
        request: the table of the recipe, and the kind of measurement
        world: this rank and the number of ranks
    """
    recipe = checked_recipe(request, world)
    engine, data = start(recipe, world)
    weights = find_initial_weights(recipe)
    if weights.checkpoint is not None:
        engine.load(weights.checkpoint, weights_only=True)
    seconds: list[float] = []
    if request["kind"] == "coordinates":
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
    found: dict[str, Any] = {"losses": [], "validation": [], "diverged": None}
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
            found["diverged"] = step
            break
        found["losses"].append(loss)
        if validation is not None:
            found["validation"].append([step, validation])
    return found, seconds


def mean_validation_loss(evaluator: Evaluator) -> float:
    """Return the validation loss in nats per token, the mean of all validation sets; collective."""
    return mean(validation_losses(evaluator.validate()).values())
