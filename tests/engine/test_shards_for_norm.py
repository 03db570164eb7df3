"""Norm, clipping and update read only the shard of the gradients that a rank owns."""

import math
import os
from pathlib import Path

import pytest

from tests.conftest import changed, small_recipe
from tests.ranks import fp16_on_cpu, run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.pipeline.gradients import FlatGradients
from threefold.prove.training import many_cases, start, train_step

PRECISIONS = ("fp32", "bf16", "fp16")
STEPS = 4
Steps = list[tuple[float, float]]


def worker(corpus: str) -> dict[tuple[str, bool], Steps]:
    """Return losses and norms in each precision, without and with NaN in other ranks' shards."""
    found = {}
    with fp16_on_cpu(), many_cases() as begin:
        for precision in PRECISIONS:
            for poisoned in (False, True):
                begin()
                config = f"ds_configs/zero1_{precision}.json"
                table = changed(small_recipe(Path(corpus)), deepspeed=config)
                table = changed(table, optimizer__gradient_clipping=0.5)
                world = LaunchEnvironment.from_environment(os.environ)
                engine, data = start(parse_recipe(table, "test"), world)
                if poisoned:
                    poison(engine.wrapped.gradients)
                steps = [train_step(engine, data, step) for step in range(1, STEPS + 1)]
                found[precision, poisoned] = [(each.loss, each.grad_norm) for each in steps]
    return found


def poison(gradients: FlatGradients) -> None:
    """Fill the shards of other ranks with NaN before the optimizer gets that of this rank."""
    reduction, hand_over = gradients.reduction, gradients._hand_over

    def poison_and_hand_over(shards: list) -> None:
        for bucket, flat in gradients.tensors.items():
            for number, part in enumerate(flat.chunk(reduction.sizes[bucket])):
                if number != reduction.own_ranks[bucket]:
                    part.fill_(math.nan)
        hand_over(shards)

    gradients._hand_over = poison_and_hand_over


@pytest.fixture(scope="module")
def found(corpus: Path) -> dict[tuple[str, bool], Steps]:
    return run_ranks(2, worker, str(corpus), seconds=120)[0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_ranks_shards_are_not_read(
    precision: str, found: dict[tuple[str, bool], Steps]
) -> None:
    assert found[precision, True] == found[precision, False]
    assert max(norm for _, norm in found[precision, False]) > 0.5  # something is clipped


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_16_bit_weights_have_the_gradients_of_fp32(
    precision: str, tolerance: float, found: dict[tuple[str, bool], Steps]
) -> None:
    for ours, exact in zip(found[precision, False], found["fp32", False], strict=True):
        assert ours == pytest.approx(exact, rel=tolerance)
