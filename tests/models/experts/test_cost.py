"""Parameters and FLOPs of models with experts: published, by hand, and as built; seeded faults."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from models import cost
from models.attention import ModelAxes
from models.config import Experts, ModelConfig, Window
from models.cost import (
    active_parameter_count,
    block_parameters,
    flops_per_token,
    parameter_count,
    recomputed_flops_per_token,
)
from models.experts.routing import ExpertAxis
from models.layer_specs import SequentialModel, layer_specs, logical_parameters, logical_shapes
from models.parallel.collectives import TensorAxis
from threefold.config.loading import REPOSITORY, load_recipe

PUBLISHED = {  # recipe -> parameters, parameters that compute a token
    "mixtral/8x7b": (46_702_792_704, 12_879_925_248),
    "qwen3/30b-a3b": (30_532_122_624, 3_353_032_704),
    "dots/llm1": (142_774_381_696, 14_016_588_928),  # 142 B, 14 B (arXiv 2506.05767)
    "olmoe/1b-7b": (6_919_161_856 - 61_440, 1_281_955_840),  # norms of whole heads are larger
}
EXPERTS = Experts(count=4, per_token=2, ffn_hidden_size=6, shared=1, dense_layers=1)
SMALL = ModelConfig(
    layers=3,
    hidden_size=8,
    heads=2,
    kv_heads=1,
    ffn_hidden_size=12,
    vocab_size=20,
    sequence_length=10,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
    experts=EXPERTS,
)
EXPERT = 3 * 8 * 6  # gate, up, down
ATTENTION = 8 * (8 + 4 + 4) + 8 * 8  # q|k|v, output
DENSE_MLP, ROUTER, NORM, VOCABULARY = 3 * 8 * 12, 8 * 4, 8, 8 * 20
SHAPES = {
    "small": SMALL,
    "without shared experts": replace(SMALL, experts=replace(EXPERTS, shared=0)),
    "without dense layers": replace(SMALL, experts=replace(EXPERTS, dense_layers=0)),
    "three shared experts": replace(SMALL, experts=replace(EXPERTS, shared=3)),
    "tied, qk_norm": replace(SMALL, tie_embeddings=True, qk_norm=True, head_size=16),
    "gelu, layernorm": replace(
        SMALL, activation="gelu", norm="layernorm", positions="learned", tie_embeddings=True
    ),
    "router with biases": replace(SMALL, experts=replace(EXPERTS, router="sigmoid")),
    "no experts": replace(SMALL, experts=None),
    "experts with biases": replace(SMALL, bias=True, activation="clamped_swiglu"),
    "biases without shared experts": replace(
        SMALL, bias=True, activation="squared_relu", experts=replace(EXPERTS, shared=0)
    ),
    "biases of queries": replace(SMALL, qkv_bias=True, activation="geglu"),
    "windows and sinks": replace(
        SMALL,
        attention_pattern=("window", "nope", "full"),
        window=Window(size=4),
        attention_sinks=True,
        partial_rotary_factor=0.5,
    ),
    "bias of attention": replace(SMALL, attention_output_bias=True, norm_placement="after"),
    "all norms": replace(
        SMALL, norm_placement="both", qk_norm=True, qk_norm_over="projection", head_size=16
    ),
}


def model_of(recipe: str) -> ModelConfig:
    return load_recipe(REPOSITORY / "recipes" / f"{recipe}.toml").model


def counts_by_hand_agree() -> bool:
    """Return True if parameters and FLOPs of SMALL are those computed by hand."""
    layers = 3 * (ATTENTION + 2 * NORM) + DENSE_MLP + 2 * (ROUTER + EXPERT + 4 * EXPERT)
    scores = 2 * 10 * 8  # of a token with all tokens of its sequence, and its weighted values
    blocks = 3 * (ATTENTION + scores) + DENSE_MLP + 2 * (ROUTER + EXPERT + 2 * EXPERT)
    return (
        parameter_count(SMALL) == layers + NORM + 2 * VOCABULARY
        and active_parameter_count(SMALL) == parameter_count(SMALL) - 2 * 2 * EXPERT
        and flops_per_token(SMALL) == 3 * 2 * (blocks + VOCABULARY)
        and recomputed_flops_per_token(SMALL, "full") == 2 * blocks
        and recomputed_flops_per_token(SMALL, "selective") == 2 * 3 * scores
    )


def test_the_numbers_by_hand() -> None:
    assert (parameter_count(SMALL), active_parameter_count(SMALL)) == (2744, 2168)
    assert flops_per_token(SMALL) == 14_592
    assert counts_by_hand_agree()


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_parameter_counts_are_the_published_ones(recipe: str) -> None:
    model = model_of(recipe)
    assert (parameter_count(model), active_parameter_count(model)) == PUBLISHED[recipe]


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    shapes = logical_shapes(SHAPES[name])
    assert parameter_count(SHAPES[name]) == sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_parameters_of_a_recipe_are_those_of_its_model(recipe: str) -> None:
    model = model_of(recipe)
    assert parameter_count(model) == sum(map(math.prod, logical_shapes(model).values()))


def test_without_experts_all_parameters_compute_a_token() -> None:
    dense = SHAPES["no experts"]
    assert active_parameter_count(dense) == parameter_count(dense)
    everyone = replace(SMALL, experts=replace(EXPERTS, per_token=4))
    assert active_parameter_count(everyone) == parameter_count(everyone)


def parameters_of_a_rank(
    config: ModelConfig, tensor: int, expert: int, *, columns: bool = False
) -> list[int]:
    """Return the parameters of each block on one of `tensor` x `expert` ranks.

    columns: tensor ranks divide the columns of each expert
    """
    axis = TensorAxis(size=tensor)
    experts = ExpertAxis(size=tensor * expert, tensor=TensorAxis(size=tensor))
    if columns:
        experts = ExpertAxis(size=expert, tensor=TensorAxis(size=tensor), columns=axis)
    with torch.device("meta"):
        model = SequentialModel(layer_specs(config, ModelAxes(tensor=axis, expert=experts)))
    totals = [0] * config.layers
    for name, parameter in logical_parameters(model, config):
        if name.startswith("blocks."):
            totals[int(name.split(".")[1])] += parameter.numel()
    return totals


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", SHAPES)
def test_parameters_of_a_block_are_those_that_a_rank_holds(
    name: str, tensor: int, expert: int
) -> None:
    config = replace(SHAPES[name], kv_heads=2)
    expected = [block_parameters(kind, tensor, expert) for kind in config.uniform_models]
    assert parameters_of_a_rank(config, tensor, expert) == expected
    assert parameters_of_a_rank(config, tensor, expert, columns=True) == expected


@pytest.mark.parametrize(
    "fault",
    [
        {"target": "models.cost.expert_parameters", "new": lambda config: 2 * 8 * 6},
        {"target": "models.cost.routed_parameters", "new": lambda config, *ranks: 2 * EXPERT},
        {"target": "models.cost._common_parameters", "new": lambda config, tensor: ATTENTION},
        {"target": "models.config.ModelConfig.expert_layers", "new": property(lambda self: 3)},
        {"target": "models.config.ModelConfig.mlp_size", "new": property(lambda self: 12)},
    ],
    ids=["no gate", "two experts", "no shared expert", "no dense layer", "shared as dense"],
)
def test_a_wrong_count_is_noticed(fault: dict[str, Any]) -> None:
    with mock.patch(**fault):
        assert not counts_by_hand_agree()


def test_a_rank_that_holds_all_experts_is_noticed() -> None:
    routed = cost.routed_parameters
    with mock.patch.object(cost, "routed_parameters", lambda config, *ranks: routed(config)):
        assert block_parameters(SMALL, 1, 2) != parameters_of_a_rank(SMALL, 1, 2)[-1]
