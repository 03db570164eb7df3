"""In bf16, ZeRO-2 differs from ZeRO-1 in the same layout only by the rounding of fp32 sums."""

from pathlib import Path

import pytest

from tests.conftest import GPT_SWITCHES, changed, each_in_turn, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.prove.layouts import SCHEDULES
from threefold.prove.training import many_cases, start, train_step

STAGES, MICRO_BATCHES, STEPS = 2, 8, 4
EVERY = (1, 2, MICRO_BATCHES)  # micro-batches per reduction; 0 is ZeRO-1
ROUNDING = 2e-4  # a twentieth of bf16's; a weight may be rounded the other way


def train_worker(corpus: str, schedule: str) -> dict[int, list[tuple[float, float]]]:
    """Return the losses and gradient norms of a schedule, with ZeRO-1 and 2."""
    world = join_world()
    found = {}
    with many_cases() as begin:
        for every in (0, *EVERY):
            table = changed(
                small_recipe(Path(corpus)),
                **GPT_SWITCHES,  # tied embeddings
                model__layers=6,
                layout={"pipeline": STAGES, "reduce_every": every, **SCHEDULES[schedule]},
                batch={"global_sequences": 2 * MICRO_BATCHES, "micro_sequences": 1},
                deepspeed=f"ds_configs/zero{2 if every else 1}_bf16.json",
            )
            begin()
            engine, data = start(parse_recipe(table, "test"), world)
            results = [train_step(engine, data, step) for step in range(1, STEPS + 1)]
            found[every] = [(each.loss, each.grad_norm) for each in results]
    return found


@pytest.mark.parametrize("name", each_in_turn(SCHEDULES))
def test_zero2_rounds_like_zero1(name: str, corpus: Path) -> None:
    """With one reduction per step they add the same numbers in the same order."""
    trained = run_ranks(2 * STAGES, train_worker, str(corpus), name)[0]
    assert trained[MICRO_BATCHES] == trained[0]
    for every in EVERY:
        for got, expected in zip(trained[every], trained[0], strict=True):
            assert got == pytest.approx(expected, rel=ROUNDING)
