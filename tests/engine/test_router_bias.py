"""Biases of a sigmoid router after some steps: by hand from the counts, in several layouts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.conftest import changed, quick_and_long, selected, small_recipe
from tests.ranks import run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.engine import engine as engine_module
from threefold.engine.experts import update_biases
from threefold.prove.training import gather, held_state, held_weights, many_cases, start, train_step

STEPS, AMOUNT = 2, 0.01
EXPERTS = {
    "count": 4, "per_token": 2, "ffn_hidden_size": 24, "dense_layers": 1, "router": "sigmoid",
    "bias_update": AMOUNT,
}  # fmt: skip
MODEL = {
    "model__experts": EXPERTS,
    "model__layers": 3,
    "model__initial_std": 0.1,
    "batch__micro_sequences": 4,
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one rank": {},
        "bf16": {"deepspeed": "ds_configs/zero1_bf16.json"},
        "ZeRO-2": {"deepspeed": "ds_configs/zero2_fp32.json"},
    },
    2: {
        "expert": {"layout": {"expert": 2}},
        "expert, bf16": {"layout": {"expert": 2}, "deepspeed": "ds_configs/zero1_bf16.json"},
        "tensor": {"layout": {"tensor": 2, "sequence_parallel": True}},
        "stages": {"layout": {"pipeline": 2}},
        "ZeRO-2": {"deepspeed": "ds_configs/zero2_fp32.json"},
        "ZeRO-3": {"deepspeed": "ds_configs/zero3_fp32.json"},
    },
}
QUICK = [(1, "one rank"), (2, "expert, bf16"), (2, "tensor"), (2, "stages"), (2, "ZeRO-3")]
CASES = [(size, name) for size, layouts in LAYOUTS.items() for name in layouts]
FAULTS: dict[str, Callable[..., None]] = {
    "reversed": lambda *given, amount, **rest: update_biases(*given, amount=-amount, **rest),
    "never": lambda *given, **rest: None,
    "counts of the layer before": lambda state, counts, **rest: update_biases(
        state, counts[-1:] + counts[:-1], **rest
    ),
    "twice": lambda *given, amount, **rest: update_biases(*given, amount=2 * amount, **rest),
}

Outcome = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def train(table: dict[str, Any]) -> Outcome:
    """Return the biases by hand, in the optimizer, and in the model; on rank 0."""
    world = LaunchEnvironment.from_environment(os.environ)
    engine, data = start(parse_recipe(table, "test"), world)
    expected: dict[str, Tensor] = {}
    for step in range(1, STEPS + 1):
        report = train_step(engine, data, step).experts
        assert report is not None
        for layer, counts in enumerate(report.counts, start=1):  # the first layer is dense
            tokens = torch.tensor(counts, dtype=torch.float64)
            sign = torch.sign(tokens.mean() - tokens)
            change = AMOUNT * (sign - sign.mean())
            name = f"blocks.{layer}.mlp.router.bias"
            expected[name] = expected.get(name, torch.zeros(4)) + change.float()
    found = [gather(engine, held) for held in (held_state(engine, "fp32"), held_weights(engine))]
    assert not any(moment.any() for moment in moments_of_biases(engine).values())
    masters, model = ({n: each[n] for n in expected if n in each} for each in found)
    return expected, masters, model


def moments_of_biases(engine: Any) -> dict[str, Tensor]:
    held = held_state(engine, "exp_avg")
    return {name: moment for name, moment in held.items() if name.endswith("router.bias")}


def worker(corpus: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    small, found = small_recipe(Path(corpus)), {}
    with many_cases() as begin:
        for name, changes in layouts.items():
            begin()
            found[name] = train(changed(small, **MODEL | changes))
        for fault, replacement in FAULTS.items() if "one rank" in layouts else ():
            begin()
            with mock.patch.object(engine_module, "update_biases", replacement):
                found[fault] = train(changed(small, **MODEL))
    return found


@pytest.fixture(scope="module")
def outcomes(corpus: Path, request: pytest.FixtureRequest) -> dict[int, dict[str, Outcome]]:
    """Return the outcomes of rank 0 by the size of the world."""
    cases = selected(request, test_biases_follow_the_counts_in_every_layout, "case")
    found = {}
    for size, layouts in LAYOUTS.items():
        chosen = {name: changes for name, changes in layouts.items() if (size, name) in cases}
        if chosen:
            found[size] = run_ranks(size, worker, str(corpus), chosen)[0]
    return found


def is_right(outcome: Outcome) -> bool:
    expected, masters, _ = outcome
    assert len(expected) == len(masters) == 2
    assert any(bias.any() for bias in expected.values())
    return all(torch.allclose(masters[name], expected[name], atol=1e-7) for name in expected)


@pytest.mark.parametrize("case", quick_and_long(QUICK, CASES), ids=str)
def test_biases_follow_the_counts_in_every_layout(
    case: tuple[int, str], outcomes: dict[int, dict[str, Outcome]]
) -> None:
    size, name = case
    outcome = outcomes[size][name]
    assert is_right(outcome)
    _, masters, model = outcome
    for bias in masters:  # the model has the biases in its own precision
        assert torch.equal(model[bias], masters[bias].to(model[bias].dtype))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_noticed(fault: str, outcomes: dict[int, dict[str, Outcome]]) -> None:
    assert not is_right(outcomes[1][fault])
