"""Parametrizations: base sizes, factors, initial weights, updates, and the standard model."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.errors import UserError
from models.initialization import (
    initialize,
    output_multiplier,
    query_multiplier,
    residual_multiplier,
)
from models.kernels import norms
from models.kernels.compile import as_written
from models.kernels.norms import ResidualBranch
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.parallel.micro_batch_info import MicroBatchInfo
from tests.conftest import changed, small_recipe
from tests.models.experts.test_hugging_face import DOTS
from tests.models.test_transformer import (
    DROPPING,
    PLAIN,
    SHAPES,
    WITH_DROPOUT,
    largest_difference,
    run_model,
)
from threefold.config.loading import parse_recipe
from threefold.engine.optimizer import UpdateRule, rule_of

LLAMA, GPT2 = (replace(SHAPES[name], layers=3) for name in ("llama", "gpt2"))
# Width ratio 4, depth ratio 3, head size 16 with base head size 4.
COMPLETEP = {
    "parametrization": "completep",
    "base_hidden_size": 12,
    "base_layers": 1,
    "base_head_size": 4,
}
MUP = {"parametrization": "mup", "base_hidden_size": 12, "base_head_size": 4}
EVERY_PART = replace(
    LLAMA, qk_norm=True, head_size=16, experts=replace(DOTS, dense_layers=1), initial_std=0.2
)


def parameters_of(config: ModelConfig) -> dict[str, torch.nn.Parameter]:
    return dict(logical_parameters(SequentialModel(layer_specs(config)), config))


def rules(config: ModelConfig, kind: str) -> dict[str, UpdateRule]:
    """Return the rules of all parameters for weight decay 0.5 and epsilon 1e-6."""
    table = changed(
        small_recipe(Path("corpus")), optimizer__weight_decay=0.5, optimizer__epsilon=1e-6
    )
    settings = parse_recipe(table, "small").optimizer.model_copy(update={"kind": kind})
    return {
        name: rule_of(name, each, config, settings) for name, each in parameters_of(config).items()
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parametrization": "mup"}, 'is missing and required with parametrization = "mup"; use '),
        ({"parametrization": "completep", "base_hidden_size": 48}, "such as base_layers = 3"),
        ({"base_hidden_size": 48}, 'use parametrization = "mup" or "completep"'),
        ({**MUP, "base_layers": 2}, 'leave it out, or use parametrization = "completep"'),
        ({"base_head_size": 8}, 'base_head_size = 8 has no effect with parametrization = "stand'),
        ({**COMPLETEP, "base_layers": 0}, "base_layers = 0 is not in 1"),
    ],
)
def test_base_sizes_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as rejected:
        replace(LLAMA, **changes)
    assert message in str(rejected.value)


def test_the_proposed_base_sizes_work() -> None:
    sizes = {"base_hidden_size": 48, "base_layers": 3}
    assert replace(LLAMA, parametrization="completep", **sizes).base_layers == 3


@pytest.mark.parametrize(
    ("config", "info"),
    [(EVERY_PART, PLAIN), (SHAPES["gpt2"], PLAIN), (WITH_DROPOUT, DROPPING)],
)
@pytest.mark.parametrize("parametrization", ["mup", "completep"])
def test_at_the_base_sizes_every_parametrization_is_the_standard_bit_for_bit(
    parametrization: str, config: ModelConfig, info: MicroBatchInfo
) -> None:
    base: dict[str, Any] = {"base_hidden_size": config.hidden_size}
    if parametrization == "completep":
        base["base_layers"] = config.layers
    same = replace(config, parametrization=parametrization, **base)
    assert largest_difference(run_model(config, info=info), run_model(same, info=info)) == 0
    for kind in ("adamw", "muon"):
        assert rules(same, kind) == rules(config, kind)


SQRT3 = math.sqrt(3)
FACTORS = {  # name -> factors of initial std, learning rate of AdamW and of Muon, epsilon times 12
    "embedding.weight": (1, 1, 1, 3),
    "head.weight": (1, 1, 1, 3),
    "final_norm.weight": (None, 1, 1, 3),
    "blocks.0.attention_norm.weight": (None, 1, 1, 1),
    "blocks.0.attention.q_norm.weight": (None, 1, 1, 1),
    "blocks.0.attention.qkv.weight": (1 / 2, 1 / 4, 1 / 2, 1),
    "blocks.0.attention.output.weight": (SQRT3 / 2, 1 / 4, 1 / 2, 1),
    "blocks.0.mlp.up.weight": (1 / 2, 1 / 4, 1 / 2, 1),
    "blocks.0.mlp.down.weight": (SQRT3 / 2, 1 / 4, 1 / 2, 1),
    "blocks.1.mlp.router.weight": (1 / 4, 1 / 4, 1 / 4, 4),
    "blocks.1.mlp.router.bias": (None, 1, 1, 1),
    "blocks.1.mlp.experts.up_3": (1 / 2, 1 / 4, 1 / 2, 1),
    "blocks.1.mlp.experts.down_3": (SQRT3 / 2, 1 / 4, 1 / 2, 1),
    "blocks.2.mlp.shared.down.weight": (SQRT3 / 2, 1 / 4, 1 / 2, 1),
}
FACTORS_OF_BIASES = {
    "positions.weight": (1, 1, 1, 3),
    "final_norm.bias": (None, 1, 1, 3),
    "blocks.0.mlp.down.bias": (None, 1, 1, 1),
    "blocks.0.attention.qkv.bias": (None, 1, 1, 1),
}


@pytest.mark.parametrize(
    ("standard", "expected"), [(EVERY_PART, FACTORS), (GPT2, FACTORS_OF_BIASES)]
)
def test_the_factors_are_those_of_the_papers(
    standard: ModelConfig, expected: dict[str, tuple[float | None, ...]]
) -> None:
    for changes in (MUP, COMPLETEP):
        config, depth = replace(standard, **changes), 3 if changes is COMPLETEP else 1
        first, scaled = drawn(standard), drawn(config)
        by_kind = {kind: rules(config, kind) for kind in ("adamw", "muon")}
        for name, (std, adamw, muon, epsilon) in expected.items():
            if std is None:
                assert torch.equal(scaled[name], first[name])
            else:
                std = std / SQRT3 * math.sqrt(depth) if std == SQRT3 / 2 else std
                torch.testing.assert_close(scaled[name], std * first[name])
            for kind, rate in (("adamw", adamw), ("muon", muon)):
                rule = by_kind[kind][name]
                assert rule.learning_rate_factor == rate, name
                decays = first[name].dim() == 2
                assert rule.weight_decay == (0.5 / rate if decays else 0), name
                in_block = name.startswith("blocks.")
                share = epsilon / 12 * (3 / depth if in_block else 1)
                assert rule.epsilon == pytest.approx(1e-6 * share), name
                hidden = rate == muon != adamw
                assert rule.algorithm == ("muon" if kind == "muon" and hidden else "adamw"), name


def drawn(config: ModelConfig) -> dict[str, Tensor]:
    """Return the initial values of all parameters."""
    parameters = parameters_of(config)
    initialize(parameters.items(), config, seed=1)
    return {name: each.detach() for name, each in parameters.items()}


def test_the_multipliers_are_those_of_the_papers() -> None:
    config = replace(EVERY_PART, **COMPLETEP)
    assert residual_multiplier(config) == 1 / 3
    assert output_multiplier(config) == 1 / 4
    assert query_multiplier(config) / 16**0.5 == pytest.approx(4**0.5 / 16)
    config = replace(EVERY_PART, **MUP)
    assert (residual_multiplier(config), output_multiplier(config)) == (1, 1 / 4)
    assert query_multiplier(replace(config, base_head_size=None)) == 1


def test_a_branch_without_a_multiplier_costs_no_operation() -> None:
    """The gradient of the branch is that of the sum itself, not a product with 1."""
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    total, normed = norms.add_and_norm(
        x, ResidualBranch(y), torch.ones(3), None, epsilon=1e-5, fuse=as_written
    )
    kept = []
    x.register_hook(kept.append)
    y.register_hook(kept.append)
    (total + normed).sum().backward()
    assert kept[0].data_ptr() == kept[1].data_ptr()
