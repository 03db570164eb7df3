"""The engine of a trial: its recipe, checked on this machine, and its end."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo

from threefold.config.deepspeed_json import precision, read_deepspeed_json
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.engine.engine import Engine, is_partitioned
from threefold.runtime.processes import check_machine, quiet


def checked_recipe(request: dict[str, Any], world: LaunchEnvironment) -> Recipe:
    """Return the recipe of a request.

    Raises:
        UserError: this machine cannot run the recipe.
    """
    recipe = parse_recipe(request["recipe"], request["recipe"]["name"])
    assert recipe.cluster is not None
    check_machine(
        world,
        precision=precision(read_deepspeed_json(recipe.deepspeed)),
        compile=recipe.training.compile,
        deterministic=recipe.training.deterministic,
        gpu=recipe.cluster.gpu,
    )
    return recipe


def release(engine: Engine) -> None:
    """Remove the hooks and the compiled code of an engine, so that the collector can free it.

    C++ objects, which the collector cannot see, refer to gradient hooks, which refer to the engine.
    """
    if engine.compiled:  # otherwise torch stops compiling after several shapes
        torch._dynamo.reset()
    with quiet():
        engine.wrapped.destroy()
    for _, parameter in engine.parameters():
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
            if hooks:
                hooks.clear()
    if any(is_partitioned(parameter) for _, parameter in engine.parameters()):
        # References to ZeRO-3's optimizer remain, so at least free the memory of its tensors.
        shards = [vars(parameter)["ds_tensor"] for _, parameter in engine.parameters()]
        optimizer = engine.wrapped.optimizer
        for tensor in tensors_in([vars(optimizer), dict(optimizer.optimizer.state), shards], set()):
            with contextlib.suppress(RuntimeError):  # memory that torch has not allocated
                tensor.untyped_storage().resize_(0)


def tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dictionaries, lists and tuples.

    Args:
        value: a tensor, a container or anything else
        seen: ids of the containers that were already visited
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from tensors_in(item, seen)
