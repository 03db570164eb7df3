"""Training in fp16 in every layout, on the CPU, with DeepSpeed's check for fp16 bypassed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from models.parallel import cross_entropy
from tests.conftest import GPT_SWITCHES, changed, quick_and_long, selected, small_recipe
from tests.ranks import fp16_on_cpu, join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.prove.training import gather, held_state, many_cases, start, train_step

STEPS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # name -> ZeRO stage, changes of the recipe
    "zero-1": (1, {}),
    "zero-2": (2, {}),
    "zero-3": (3, {}),
    "stages": (1, {"layout__pipeline": 2}),
    "zero bubble": (1, {"layout": {"pipeline": 2, "schedule": "zb-h1"}}),
    "tensor, sequence parallel": (1, {"layout": {"tensor": 2, "sequence_parallel": True}}),
    "gpt, tensor": (1, {"layout__tensor": 2, **GPT_SWITCHES}),
    "gpt, zero-3": (3, GPT_SWITCHES),
}
QUICK = ("zero-3",)
SCALES = {  # loss scales, by DeepSpeed's keys
    "constant": {"initial_scale_power": 10, "loss_scale_window": 1000},
    "growing": {"initial_scale_power": 10, "loss_scale_window": 1},
    "too large": {"initial_scale_power": 28, "loss_scale_window": 1000, "hysteresis": 1},
}


@dataclass(frozen=True)
class Run:
    """The record of a training of a few steps.

    scales: loss scale of each step
    factors: factors by which backward passes corrected the gradients of the forward pass
    moments: running means of the gradients, on rank 0
    """

    losses: list[float]
    norms: list[float]
    scales: list[float]
    factors: set[float]
    moments: dict[str, Tensor]


def train(table: dict[str, Any], config: Path) -> Run:
    world = join_world()
    engine, data = start(parse_recipe(changed(table, deepspeed=str(config)), "test"), world)
    results, scales, factors = [], [], set()
    backward = cross_entropy._VocabParallelLoss.backward

    def noted(ctx, grad):
        factors.add(float(grad) / ctx.scale)
        return backward(ctx, grad)

    with mock.patch.object(cross_entropy._VocabParallelLoss, "backward", staticmethod(noted)):
        for step in range(1, STEPS + 1):
            scales.append(float(getattr(engine.wrapped.optimizer, "loss_scale", 1)))
            results.append(train_step(engine, data, step))
    moments = gather(engine, held_state(engine, "exp_avg")) if scales[-1] < 2**20 else {}
    losses, norms = ([getattr(r, key) for r in results] for key in ("loss", "grad_norm"))
    return Run(losses, norms, scales, factors, moments)


def train_all(corpus: str, folder: str, layouts: list[str]) -> dict[tuple[str, str], Run]:
    join_world()
    runs = {}
    with many_cases() as begin, fp16_on_cpu():
        for layout in layouts:
            stage, changes = LAYOUTS[layout]
            table = changed(small_recipe(Path(corpus)), batch__micro_sequences=4, **changes)
            for name in ("fp32", *SCALES):
                begin()
                config = Path(folder) / f"zero{stage}_{name.replace(' ', '_')}.json"
                runs[layout, name] = train(table, config)
    return runs


def write_configs(folder: Path) -> None:
    for stage in (1, 2, 3):
        common = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000},
        }
        precisions = {"fp32": {}} | {
            name: {"fp16": {"enabled": True, **scale}} for name, scale in SCALES.items()
        }
        for name, precision in precisions.items():
            path = folder / f"zero{stage}_{name.replace(' ', '_')}.json"
            path.write_text(json.dumps(common | precision))


@pytest.fixture(scope="module")
def ranks(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> list[dict[tuple[str, str], Run]]:
    folder = tmp_path_factory.mktemp("configs")
    write_configs(folder)
    layouts = selected(request, test_losses_and_norms_are_near_those_of_fp32, "layout")
    return run_ranks(2, train_all, str(corpus), str(folder), layouts)


@pytest.mark.parametrize("layout", quick_and_long(QUICK, LAYOUTS))
def test_losses_and_norms_are_near_those_of_fp32(layout: str, ranks: list[dict]) -> None:
    exact, found = (ranks[0][layout, name] for name in ("fp32", "constant"))
    assert found.losses == pytest.approx(exact.losses, abs=3e-3)
    assert found.norms == pytest.approx(exact.norms, rel=1e-2)
    assert exact.losses[0] - exact.losses[-1] > 0.02
    assert largest_difference(found.moments, exact.moments) < 0.03


@pytest.mark.parametrize("layout", quick_and_long(QUICK, LAYOUTS))
def test_a_growing_loss_scale_leaves_the_update_as_it_is(layout: str, ranks: list[dict]) -> None:
    constant, growing = (ranks[0][layout, name] for name in ("constant", "growing"))
    assert constant.scales == [2**10] * STEPS
    assert growing.scales[0] == 2**10 and growing.scales[-1] == 2**11
    assert growing.norms == pytest.approx(constant.norms, rel=1e-3)
    assert largest_difference(growing.moments, constant.moments) < 3e-3


@pytest.mark.parametrize("layout", quick_and_long(QUICK, LAYOUTS))
def test_an_overflow_skips_the_step(layout: str, ranks: list[dict]) -> None:
    found = ranks[0][layout, "too large"]
    assert found.scales == [2.0**power for power in range(28, 28 - STEPS, -1)]
    assert all(norm == float("inf") for norm in found.norms)
    # No weight has changed: the losses are those of fp32's first weights on the same tokens.
    assert found.losses[0] == pytest.approx(ranks[0][layout, "constant"].losses[0], abs=1e-6)
    assert found.losses[-1] > ranks[0][layout, "constant"].losses[-1] + 0.01


@pytest.mark.parametrize("name", ["constant", "growing"])
@pytest.mark.parametrize("layout", quick_and_long(QUICK, LAYOUTS))
def test_the_loss_knows_the_gradient_of_the_backward_pass(
    layout: str, name: str, ranks: list[dict]
) -> None:
    assert set().union(*(rank[layout, name].factors for rank in ranks)) == {1.0}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest norm of a difference, relative to the norm of the tensor."""
    assert one.keys() == other.keys() and one
    return max(
        float(torch.linalg.vector_norm(one[name] - other[name]) / other[name].norm().clamp(1e-12))
        for name in one
        if "attention.qkv.bias" not in name  # a key's bias has no gradient but rounding
    )
