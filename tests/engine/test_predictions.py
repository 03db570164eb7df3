"""Prediction of further tokens: the same losses, weights and routers in every layout."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import changed, quick_and_long, selected, small_recipe
from tests.ranks import fp16_on_cpu, run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.engine.engine import StepResult
from threefold.prove.training import gather, held_weights, many_cases, start, train_step

STEPS, AMOUNT = 2, 0.01
MODEL = {
    "model__prediction": {"depth": 2, "loss_weight": 0.5},
    "model__layers": 4,
    "model__initial_std": 0.1,
    "data__separate_documents": True,
    "batch__micro_sequences": 4,
}
EXPERTS = {
    "model__experts": {
        "count": 4, "per_token": 2, "ffn_hidden_size": 24, "dense_layers": 1, "router": "sigmoid",
        "balance_loss": 0.01, "bias_update": AMOUNT,
    },
}  # fmt: skip
TIED = {"model__tie_embeddings": True}
FP16 = {"deepspeed": "ds_configs/zero1_fp16.json"}
ZB_V = {"layout": {"pipeline": 2, "schedule": "zb-v", "recompute": "full"}}
FOLDED = {"layout": {"pipeline": 2, "schedule": "dualpipev"}, "batch__micro_sequences": 2}
# layout -> ranks, changes, the layout with the same result on one rank
LAYOUTS: dict[str, tuple[int, dict[str, Any], str]] = {
    "one rank": (1, {}, ""),
    "one rank, tied": (1, TIED, ""),
    "one rank, experts": (1, EXPERTS, ""),
    "one rank, fp16": (1, FP16, ""),
    "stages": (2, {"layout": {"pipeline": 2}}, "one rank"),
    "stages, tied": (2, TIED | {"layout": {"pipeline": 2}}, "one rank, tied"),
    "zb-v, experts": (2, EXPERTS | ZB_V, "one rank, experts"),
    "dualpipev, tied": (2, TIED | FOLDED, "one rank, tied"),
    "interleaved, zero-2": (
        2,
        {
            "layout": {"pipeline": 2, "schedule": "interleaved"},
            "deepspeed": "ds_configs/zero2_fp32.json",
        },
        "one rank",
    ),
    "zero-3, tied": (2, TIED | {"deepspeed": "ds_configs/zero3_fp32.json"}, "one rank, tied"),
    "context": (2, {"layout": {"context": 2}}, "one rank"),
    "sequence parallel": (2, {"layout": {"tensor": 2, "sequence_parallel": True}}, "one rank"),
    "expert ranks": (2, EXPERTS | {"layout": {"expert": 2}}, "one rank, experts"),
    "fp16, stages": (2, FP16 | {"layout": {"pipeline": 2}}, "one rank, fp16"),
}
QUICK = ("stages", "zb-v, experts", "dualpipev, tied", "sequence parallel")

Outcome = tuple[list[StepResult], dict[str, Tensor], list[float]]


def worker(corpus: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    """Return the results, the weights and the losses of the validation, on rank 0."""
    found = {}
    with fp16_on_cpu(), many_cases() as begin:
        for name, changes in layouts.items():
            begin()
            table = changed(small_recipe(Path(corpus)), **MODEL | changes)
            world = LaunchEnvironment.from_environment(os.environ)
            engine, data = start(parse_recipe(table, "test"), world)
            steps = [train_step(engine, data, step) for step in range(1, STEPS)]
            validation = engine.evaluate(data.evaluation())
            steps.append(train_step(engine, data, STEPS))
            found[name] = steps, gather(engine, held_weights(engine)), [validation]
    return found


@pytest.fixture(scope="module")
def outcomes(corpus: Path, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    names = set(selected(request, test_every_layout_trains_like_one_rank, "name"))
    names |= {"one rank", "one rank, experts"} | {LAYOUTS[name][2] for name in names}
    found: dict[str, Outcome] = {}
    for size in (1, 2):
        layouts = {
            name: LAYOUTS[name][1] for name in LAYOUTS if name in names and LAYOUTS[name][0] == size
        }
        if layouts:
            found |= run_ranks(size, worker, str(corpus), layouts, seconds=300)[0]
    return found


@pytest.mark.parametrize(
    "name", quick_and_long(QUICK, [name for name, (ranks, *_) in LAYOUTS.items() if ranks > 1])
)
def test_every_layout_trains_like_one_rank(name: str, outcomes: dict[str, Outcome]) -> None:
    steps, weights, validation = outcomes[name]
    expected, expected_weights, expected_validation = outcomes[LAYOUTS[name][2]]
    rel = 2e-3 if "fp16" in name else 2e-6
    for found, step in zip(steps, expected, strict=True):
        assert found.loss == pytest.approx(step.loss, rel)
        assert found.grad_norm == pytest.approx(step.grad_norm, max(rel, 1e-5))
        assert found.prediction_losses == pytest.approx(step.prediction_losses, rel)
        assert (found.experts is None) == (step.experts is None)
        if found.experts is not None and step.experts is not None:
            assert found.experts.counts == step.experts.counts
            assert len(found.experts.counts) == 5 and found.experts.dropped == 0
    assert validation == pytest.approx(expected_validation, rel)
    assert weights.keys() == expected_weights.keys()
    for weight, value in expected_weights.items():
        error = (weights[weight].float() - value.float()).norm() / value.float().norm().clamp(1e-9)
        assert error < (1e-2 if "fp16" in name else 1e-5), weight


def test_modules_learn_and_their_loss_is_not_reported(outcomes: dict[str, Outcome]) -> None:
    steps, weights, _ = outcomes["one rank"]
    assert all(step.prediction_losses and len(step.prediction_losses) == 2 for step in steps)
    first, last = steps[0].prediction_losses, steps[-1].prediction_losses
    assert first is not None and last is not None and first != last
    assert any(name.startswith("predictions.1.block.attention") for name in weights)
    assert abs(steps[0].loss - first[0]) < 1.0  # both are near the logarithm of the vocabulary


def test_biases_of_the_routers_of_modules_follow_their_counts(
    outcomes: dict[str, Outcome],
) -> None:
    steps, weights, _ = outcomes["one rank, experts"]
    for module in range(2):
        expected = torch.zeros(4, dtype=torch.float64)
        for step in steps:
            assert step.experts is not None
            tokens = torch.tensor(step.experts.counts[3 + module], dtype=torch.float64)
            sign = torch.sign(tokens.mean() - tokens)
            expected += AMOUNT * (sign - sign.mean())
        bias = weights[f"predictions.{module}.block.mlp.router.bias"]
        assert torch.allclose(bias.double(), expected, atol=1e-7)
