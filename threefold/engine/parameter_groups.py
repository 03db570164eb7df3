"""Division of the parameters into optimizer groups, each with one rule for its update."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from models.config import ModelConfig
from models.initialization import (
    Algorithm,
    epsilon_factor,
    learning_rate_factor,
    weight_decay_factor,
)
from models.sharding import place_of, sharding_of
from threefold.config.optimization import Optimizer
from threefold.engine.experts import EXPERTS, is_marked
from threefold.pipeline.gradients import (
    deferring_parameters,
    divide_into_buckets,
    units_of_experts,
)
from threefold.pipeline.stage import Stage


@dataclass(frozen=True)
class UpdateRule:
    """Settings of the optimizer for a parameter.

    Attributes:
        algorithm: "muon" for hidden matrices if the recipe chooses it, otherwise "adamw"
        learning_rate_factor: learning rate relative to that of the step
        weight_decay: decoupled weight decay, multiplied by the learning rate of the parameter
        epsilon: the term in AdamW's denominator
    """

    algorithm: Algorithm
    learning_rate_factor: float
    weight_decay: float
    epsilon: float


def rule_of(
    name: str, parameter: nn.Parameter, model: ModelConfig, settings: Optimizer
) -> UpdateRule:
    """Return the rule of a parameter, scaled as the model's parametrization requires.

    Args:
        name: logical name
        parameter: the parameter, whose declaration has its role
    """
    place = place_of(name, sharding_of(parameter).role)
    algorithm: Algorithm = "muon" if place.role == "hidden" and settings.kind == "muon" else "adamw"
    decay = settings.weight_decay * weight_decay_factor(model, place, algorithm)
    return UpdateRule(
        algorithm=algorithm,
        learning_rate_factor=learning_rate_factor(model, place, algorithm),
        weight_decay=0.0 if place.role == "vector" else decay,
        epsilon=settings.epsilon * epsilon_factor(model, place),
    )


def rules_of(
    parameters: Iterable[tuple[str, nn.Parameter]], model: ModelConfig, settings: Optimizer
) -> dict[nn.Parameter, UpdateRule]:
    """Return the rule of each parameter."""
    return {weight: rule_of(name, weight, model, settings) for name, weight in parameters}


def parameter_groups(
    model: nn.Module, rules: Mapping[nn.Parameter, UpdateRule], *, bucket: int
) -> list[dict[str, Any]]:
    """Divide the parameters into groups, each with one rule, in the form of torch's optimizers.

    With expert parallelism, only some data ranks hold the same experts. These experts are in groups
    of their own, which ZeRO divides among those ranks only. In a stage of a pipeline, each group is
    a bucket of gradients.

    Args:
        model: a stage of a pipeline, or a model with all layers
        bucket: maximum number of elements of a bucket
    """
    if isinstance(model, Stage):
        groups = buckets_of_stage(model, rules, elements=bucket)
    else:
        parameters = list(model.parameters())
        kinds = _kinds_of(parameters, rules, set())
        groups = divide_into_buckets([parameters], elements=sys.maxsize, kinds=kinds, units={})
    return [_group(parameters, rules[parameters[0]]) for parameters in groups]


def _group(parameters: list[nn.Parameter], rule: UpdateRule) -> dict[str, Any]:
    """Return a group; `moe` and `name` are keys of DeepSpeed."""
    group = {
        "params": parameters,
        "algorithm": rule.algorithm,
        "learning_rate_factor": rule.learning_rate_factor,
        "weight_decay": rule.weight_decay,
        "eps": rule.epsilon,
    }
    return group | ({"moe": True, "name": EXPERTS} if is_marked(parameters[0]) else {})


def buckets_of_stage(
    stage: Stage, rules: Mapping[nn.Parameter, UpdateRule], *, elements: int
) -> list[list[nn.Parameter]]:
    """Divide the parameters of a stage into buckets; tied ones are in the last buckets."""
    chunks = [list(stage.parameters_of_chunk(n)) for n in range(stage.pipeline.virtual_stages)]
    untied = {parameter for chunk in chunks for parameter in chunk}
    tied = [parameter for parameter in stage.parameters() if parameter not in untied]
    deferred = deferring_parameters(stage) if stage.pipeline.splits else set()
    kinds = _kinds_of(stage.parameters(), rules, deferred)
    return divide_into_buckets(
        [*chunks, tied], elements=elements, kinds=kinds, units=units_of_experts(stage)
    )


def _kinds_of(
    parameters: Iterable[nn.Parameter],
    rules: Mapping[nn.Parameter, UpdateRule],
    deferred: set[nn.Parameter],
) -> dict[nn.Parameter, tuple[UpdateRule, bool, bool]]:
    """Return what separates the groups: rule, experts of few ranks, deferred weight gradients."""
    return {weight: (rules[weight], is_marked(weight), weight in deferred) for weight in parameters}
