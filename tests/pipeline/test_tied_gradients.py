"""The first and the last stage add up the gradients of tied embeddings in every type."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import GPT_SWITCHES, changed, small_recipe
from tests.ranks import fp16_on_cpu, join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.prove.training import many_cases, start, train_step

STEPS = 6
PREDICTION: dict[str, Any] = {"model__prediction": {"depth": 1, "loss_weight": 0.3}}
# Precision of the weights -> types of the sums of gradients; None is the default.
SUMS: dict[str, tuple[str | None, ...]] = {
    "fp32": (None, "bf16"),
    "fp16": (None, "fp32"),
    "bf16": ("fp32", "bf16"),
}
Trained = tuple[list[float], list[str]]  # losses and gradient norms; replicas that diverged


def train_worker(corpus: str, zero: int, folder: str) -> dict[tuple[str, ...], Trained]:
    """Return the training of each model with each precision and type of the sums."""
    world, found = join_world(), {}
    with many_cases() as begin, fp16_on_cpu():
        for precision, sums in SUMS.items():
            for name, model in {"tied": GPT_SWITCHES, "prediction": PREDICTION}.items():
                for accumulated in sums:
                    shipped = Path(f"ds_configs/zero1_{precision}.json")
                    config = json.loads(shipped.read_text(encoding="utf-8"))
                    config["zero_optimization"] = {"stage": zero}
                    config["data_types"] = {"grad_accum_dtype": accumulated} if accumulated else {}
                    file = Path(folder) / f"{world.rank}.json"
                    file.write_text(json.dumps(config), encoding="utf-8")
                    table = changed(
                        small_recipe(Path(corpus)), **model, layout={"pipeline": 2},
                        deepspeed=str(file),
                    )  # fmt: skip
                    begin()
                    engine, data = start(parse_recipe(table, "test"), world)
                    results = [train_step(engine, data, step) for step in range(1, STEPS + 1)]
                    numbers = [number for r in results for number in (r.loss, r.grad_norm)]
                    found[precision, name, str(accumulated)] = numbers, engine.diverged_replicas()
    return found


@pytest.mark.parametrize(
    ("ranks", "zero"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.long)], ids=str
)
def test_tied_embeddings_stay_equal_whatever_the_type_of_the_sums(
    ranks: int, zero: int, corpus: Path, tmp_path: Path
) -> None:
    for trained in run_ranks(ranks, train_worker, str(corpus), zero, str(tmp_path)):
        assert {case: diverged for case, (_, diverged) in trained.items() if diverged} == {}
        for (precision, name, accumulated), (numbers, _) in trained.items():
            expected, _ = trained[precision, name, str(SUMS[precision][0])]
            rounding = 0 if accumulated == "fp32" else 4e-3
            assert numbers == pytest.approx(expected, rel=rounding), (precision, name, accumulated)
