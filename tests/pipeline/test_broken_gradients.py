"""Every rank sees a gradient that is not finite on one rank, whichever weight it belongs to."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import GPT_SWITCHES, changed, small_recipe
from tests.ranks import run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.engine.engine import Engine, StageEngine
from threefold.prove.training import many_cases, start, train_step

REPLICATED, TIED = "blocks.1.mlp_norm.weight", "embedding.weight"
TENSOR = {"layout": {"pipeline": 1, "tensor": 2}}
STAGES = GPT_SWITCHES | {"layout": {"pipeline": 2, "tensor": 1}}
# Ranks, the JSON, the other changes, and the weight that has a broken gradient on the last rank.
CASES = {
    "fp32, ZeRO-1": (2, "zero1_fp32", TENSOR, REPLICATED),
    "bf16, ZeRO-1": (2, "zero1_bf16", TENSOR, REPLICATED),
    "fp32, ZeRO-3": (2, "zero3_fp32", TENSOR, REPLICATED),
    "bf16, ZeRO-3": (2, "zero3_bf16", TENSOR, REPLICATED),
    "bf16, ZeRO-2": (4, "zero2_bf16", TENSOR, REPLICATED),
    "tied, fp32": (2, "zero1_fp32", STAGES, TIED),
    "tied, bf16": (2, "zero1_bf16", STAGES, TIED),
}
Outcome = tuple[float, float, bool]


def worker(corpus: str, cases: dict) -> dict[str, Outcome]:
    """Return the norms of a sound and a broken step, and whether the weights stayed the same."""
    world, found = LaunchEnvironment.from_environment(os.environ), {}
    with many_cases() as begin:
        for name, (_, config, changes, weight) in cases.items():
            begin()
            table = changed(small_recipe(Path(corpus)), **changes)
            table = changed(table, deepspeed=f"ds_configs/{config}.json", batch__micro_sequences=4)
            engine, data = start(parse_recipe(table, "test"), world)
            sound = train_step(engine, data, 1).grad_norm
            before = [flat.clone() for flat in engine.state.weights]
            if world.rank == world.size - 1:
                break_gradient(engine, dict(engine.parameters())[weight])
            broken = train_step(engine, data, 2).grad_norm
            after = engine.state.weights
            same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            found[name] = (sound, broken, same)
    return found


def break_gradient(engine: Engine, weight: nn.Parameter) -> None:
    """Set one value of a weight's gradient to NaN on this rank, after sums over the stages."""
    if not isinstance(engine, StageEngine) or engine.wrapped.gradients.sharded:
        weight.register_hook(lambda gradient: gradient * math.nan)
        return
    gradients = engine.wrapped.gradients
    hand_over = gradients._hand_over

    def break_and_hand_over(shards: list[torch.Tensor]) -> None:
        gradients.sum_of(weight)[0] = math.nan
        hand_over(shards)

    gradients._hand_over = break_and_hand_over


@pytest.fixture(scope="module")
def found(corpus: Path) -> dict[str, list[Outcome]]:
    """Return the outcomes of each case on all ranks."""
    found: dict[str, list[Outcome]] = {}
    for world_size in (2, 4):
        cases = {name: case for name, case in CASES.items() if case[0] == world_size}
        ranks = run_ranks(world_size, worker, str(corpus), cases, seconds=120)
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sees_a_broken_gradient_and_keeps_its_weights(
    name: str, found: dict[str, list[Outcome]]
) -> None:
    for sound, broken, same in found[name]:
        assert math.isfinite(sound) and sound > 0
        assert not math.isfinite(broken)
        assert same
