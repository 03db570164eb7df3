"""The report about experts: counts, losses, load, entropy, and the metrics made of them."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import changed, small_recipe
from tests.ranks import run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.engine.experts import ExpertReport
from threefold.prove.training import many_cases, start, train_step
from threefold.tracking.tracker import expert_metrics
from threefold.tracking.weights_and_biases import PIXELS, with_heat_map

EXPERTS = {
    "count": 4, "per_token": 2, "ffn_hidden_size": 24, "dense_layers": 1, "balance_loss": 0.1,
    "z_loss": 0.01,
}  # fmt: skip
MODEL = {
    "model__experts": EXPERTS,
    "model__layers": 3,
    "model__initial_std": 0.1,
    "batch__micro_sequences": 4,
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "reference": {},
        "small micro-batches, recomputed": {
            "layout": {"recompute": "full"},
            "batch__micro_sequences": 2,
        },
    },
    2: {
        "expert": {"layout": {"expert": 2}},
        "context": {"layout": {"context": 2}},
        "tensor": {"layout": {"tensor": 2, "sequence_parallel": True}},
        "columns": {"layout": {"tensor": 2, "expert_tensor_parallel": True}},
        "stages": {"layout": {"pipeline": 2}},
    },
}


def report_worker(corpus: str, layouts: dict[str, dict[str, Any]]) -> dict[str, ExpertReport]:
    """Return the report of the second step in each layout."""
    world, found = LaunchEnvironment.from_environment(os.environ), {}
    with many_cases() as begin:
        for name, changes in layouts.items():
            begin()
            recipe = parse_recipe(changed(small_recipe(Path(corpus)), **MODEL | changes), "test")
            engine, data = start(recipe, world)
            train_step(engine, data, 1)
            report = train_step(engine, data, 2).experts
            assert report is not None
            found[name] = report
    return found


@pytest.fixture(scope="module")
def reports(corpus: Path) -> dict[str, ExpertReport]:
    found: dict[str, ExpertReport] = {}
    for size, layouts in LAYOUTS.items():
        of_ranks = run_ranks(size, report_worker, str(corpus), layouts)
        assert all(each == of_ranks[0] for each in of_ranks)
        found |= of_ranks[0]
    return found


@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in layouts])
def test_the_report_is_the_same_in_every_layout(
    name: str, reports: dict[str, ExpertReport], small: dict[str, Any]
) -> None:
    report, expected = reports[name], reports["reference"]
    batch, length = small["batch"]["global_sequences"], small["model"]["sequence_length"]
    assert report.counts == expected.counts
    assert [sum(of_layer) for of_layer in report.counts] == [2 * batch * length] * 2
    assert report.dropped == 0
    assert report.balance_loss == pytest.approx(expected.balance_loss, rel=1e-6)
    assert report.z_loss == pytest.approx(expected.z_loss, rel=1e-6)
    assert 1.0 < report.balance_loss < 2.0  # 1 if all experts are used equally


def test_load_and_entropy() -> None:
    equal = ExpertReport(counts=[[8, 8, 8, 8]], balance_loss=1.0, z_loss=0.5, dropped=0)
    assert (equal.largest_load, equal.entropy) == (1.0, 1.0)
    one = ExpertReport(counts=[[8, 8, 8, 8], [32, 0, 0, 0]], balance_loss=2, z_loss=0, dropped=1)
    assert (one.largest_load, one.entropy) == (4.0, 0.5)
    two = ExpertReport(counts=[[16, 16, 0, 0]], balance_loss=1, z_loss=0, dropped=0)
    assert two.entropy == pytest.approx(math.log(2) / math.log(4))
    assert expert_metrics(one) == {
        "balance_loss": 2, "z_loss": 0, "expert_largest_load": 4.0, "expert_entropy": 0.5,
        "expert_dropped": 1,
    }  # fmt: skip


def test_weights_and_biases_shows_the_loads_as_a_picture() -> None:
    metrics = {"step": 3, "expert_counts": [[10, 10, 0, 20], [40, 0, 0, 0]]}
    shown = with_heat_map(metrics)
    assert shown.keys() == {"step", "expert_load"}
    picture = shown["expert_load"].image
    assert picture.size == (4 * PIXELS, 2 * PIXELS)
    middle = PIXELS // 2
    shades = [
        [picture.getpixel((middle + PIXELS * column, middle + PIXELS * row)) for column in range(4)]
        for row in range(2)
    ]
    assert shades == [[128, 128, 0, 255], [255, 0, 0, 0]]
    assert with_heat_map({"step": 4}) == {"step": 4}
