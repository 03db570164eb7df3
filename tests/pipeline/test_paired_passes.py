"""Pairs of passes take turns in the engine, and train exactly as without pairs."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.experts.dispatch import Transfer
from models.experts.overlap import Turns
from tests.conftest import changed, quick_and_long, selected, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.pipeline.stage import replaced
from threefold.prove.training import held_weights, many_cases, start, train_step

EXPERTS = {
    "model__experts": {
        "count": 4, "per_token": 2, "ffn_hidden_size": 24, "shared": 1, "balance_loss": 0.1,
    },
    "model__layers": 4,
    "batch__micro_sequences": 1,
    "layout__pipeline": 2,
    "layout__expert": 2,
}  # fmt: skip
SCHEDULES = {
    "interleaved": {"layout__schedule": "interleaved"},
    "dualpipev": {"layout__schedule": "dualpipev"},
    "dualpipev, recomputed": {"layout__schedule": "dualpipev", "layout__recompute": "full"},
    "interleaved, zero-2": {
        "layout__schedule": "interleaved",
        "deepspeed": "ds_configs/zero2_fp32.json",
    },
}
QUICK = ("dualpipev, recomputed",)
Results = tuple[list[tuple[float, float]], dict[str, torch.Tensor], list[str]]


def paired_worker(corpus: str, schedules: list[str]) -> dict[tuple[str, bool], Results]:
    """Return losses, norms, weights and the order of the exchanges, without and with pairs."""
    world = join_world()
    found: dict[tuple[str, bool], Results] = {}
    with many_cases() as begin:
        for name in schedules:
            for paired in (False, True):
                begin()
                changes = EXPERTS | SCHEDULES[name] | {"layout__expert_overlap": paired}
                recipe = parse_recipe(changed(small_recipe(Path(corpus)), **changes), "test")
                engine, data = start(recipe, world)
                results = [train_step(engine, data, 1)]
                events: list[str] = []
                with noted_exchanges(events):
                    results.append(train_step(engine, data, 2))
                weights = {name: each.clone() for name, each in held_weights(engine).items()}
                steps = [(each.loss, each.grad_norm) for each in results]
                found[name, paired] = steps, weights, events
    dist.barrier()
    return found


def noted_exchanges(events: list[str]) -> Any:
    """Note which of two functions that take turns begins an exchange: helper or main."""
    begin: Callable[..., torch.Tensor] = Transfer.begin

    def noting(transfer: Transfer, x: torch.Tensor, **rest: Any) -> torch.Tensor:
        turns: Turns = transfer.axis.turns
        if turns.is_helper is not None and not turns._ended:
            events.append("forward" if turns.is_helper else "backward")
        return begin(transfer, x, **rest)

    return replaced(Transfer, "begin", noting)


@pytest.fixture(scope="module")
def found(corpus: Path, request: pytest.FixtureRequest) -> list[dict[tuple[str, bool], Results]]:
    schedules = selected(request, test_pairs_train_bit_for_bit_as_single_passes, "name")
    return run_ranks(4, paired_worker, str(corpus), schedules)


@pytest.mark.parametrize("name", quick_and_long(QUICK, SCHEDULES))
def test_pairs_train_bit_for_bit_as_single_passes(
    name: str, found: list[dict[tuple[str, bool], Results]]
) -> None:
    for of_rank in found:
        (steps, weights, _), (expected, expected_weights, _) = (
            of_rank[name, paired] for paired in (True, False)
        )
        assert steps == expected
        assert weights.keys() == expected_weights.keys() and weights
        assert all(torch.equal(weights[key], expected_weights[key]) for key in weights)


@pytest.mark.parametrize("name", quick_and_long(QUICK, SCHEDULES))
def test_the_exchanges_of_a_pair_alternate(
    name: str, found: list[dict[tuple[str, bool], Results]]
) -> None:
    """While one pass waits for an exchange, the other one computes and begins its own."""
    for of_rank in found:
        assert of_rank[name, False][2] == []
        events = of_rank[name, True][2]
        changes = sum(one != other for one, other in pairwise(events))
        assert len(events) >= 4 and changes > len(events) / 2, events
