"""The coordinate check: its verdict, and the activations that it measures in a real engine."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.data.dataset import TrainingData
from threefold.engine.engine import Engine, StepResult
from threefold.prove.shrink import write_corpus
from threefold.prove.training import save, start, train_step
from threefold.run_folder.folder import RunFolder
from threefold.sweep.ranks.worker import checked_recipe
from threefold.sweep.trial import Result
from threefold.sweep.width_transfer import measure as measure_module
from threefold.sweep.width_transfer.check import check_training
from threefold.sweep.width_transfer.coordinates import (
    Check,
    CoordinateCheck,
    Sizes,
    sizes_over_widths,
)
from threefold.sweep.width_transfer.measure import activation_sizes
from threefold.sweep.width_transfer.models import Curve, at_width, coordinate_trials, loss_trials
from threefold.sweep.width_transfer.report import check_line, coordinate_lines

MUP = {"model__parametrization": "mup", "model__base_hidden_size": 64}
WIDTHS = (64, 128, 256)
PLACES = {
    "embedding", "blocks.0.attention", "blocks.0.mlp", "blocks.0",
    "blocks.1.attention", "blocks.1.mlp", "blocks.1", "logits",
}  # fmt: skip


def measured(start: float, end: float, change: float, *, loss: float = 0.5) -> Result:
    """Return the result of a trial with one place and the logits."""
    sizes = {"blocks.0": [start, end], "logits": [3 * start, 5 * end]}
    changes = {"blocks.0": [change], "logits": [change]}
    table = {"sizes": sizes, "changes": changes, "losses": [2.0, 2.0 - loss]}
    return Result(outcome="ok", training=table)


def check(results: dict[int, list[Result]]) -> CoordinateCheck:
    return CoordinateCheck("", list(sizes_over_widths(results)), [])


def test_sizes_within_ten_percent_pass() -> None:
    found = check({64: [measured(1, 2, 0.1)], 128: [measured(1.09, 1.9, 0.3)]})
    assert {(each.place, each.moment): each.spread for each in found.judged} == {
        ("blocks.0", "start"): pytest.approx(1.09),
        ("blocks.0", "end"): pytest.approx(2 / 1.9),
        ("loss", "change"): 1.0,
    }
    assert found.passes and check_line(found).startswith("pass  3 of 3")


@pytest.mark.parametrize(
    ("other", "worst"),
    [
        (measured(1.2, 2, 0.1), "1.200 (blocks.0, start; flat: at most 1.1)"),
        (measured(1, 1.7, 0.1), "1.176 (blocks.0, end; flat: at most 1.1)"),
        (measured(1, 2, 0.1, loss=0.39), "1.282 (loss, change; flat: at most 1.25)"),
        (measured(1, 2, 0.1, loss=-0.1), "inf (loss, change; flat: at most 1.25)"),
        (measured(1, math.nan, 0.1), "inf (blocks.0, end; flat: at most 1.1)"),
    ],
)
def test_each_judged_size_can_fail(other: Result, worst: str) -> None:
    found = check({64: [measured(1, 2, 0.1)], 128: [other]})
    assert not found.passes
    assert check_line(found).startswith("FAIL  2 of 3") and worst in check_line(found)


def test_the_decrease_of_the_loss_may_differ_more() -> None:
    assert check({64: [measured(1, 2, 1, loss=0.5)], 128: [measured(1, 2, 1, loss=0.41)]}).passes


def test_the_verdict_names_a_size_that_is_not_flat() -> None:
    """The decrease of the loss has the largest ratio, 1.22, but stays within its own limit."""
    found = check({64: [measured(1, 2, 1, loss=0.5)], 128: [measured(1.2, 2, 1, loss=0.41)]})
    assert check_line(found).startswith("FAIL  2 of 3") and "(blocks.0, start" in check_line(found)


def test_seeds_are_averaged() -> None:
    found = check({64: [measured(1, 1, 1), measured(3, 1, 1)], 128: [measured(2, 1, 1)]})
    assert found.sizes[0] == Sizes("blocks.0", "start", {64: 2.0, 128: 2.0})


def test_a_missing_width_fails() -> None:
    curves = curves_on(Path("absent"), (64, 128))
    (trial,) = coordinate_trials(curves[0], 1, 1)
    (found,) = Check(curves, 1, 1).outcomes({trial.key: measured(1, 1, 1)}.get)
    assert not found.passes
    lines = list(coordinate_lines(found))
    assert lines[-1].startswith("FAIL") and "rerun with --retry" in lines[-1]
    assert "width 128, seed 1234: not measured" in lines[-2]


def curves_on(corpus: Path, widths: tuple[int, ...], **changes: Any) -> list[Curve]:
    table = changed(small_recipe(corpus), model__kv_heads=4, model__initial_std=0.1, **changes)
    table["optimizer"]["learning_rate"] = 1e-3
    table["optimizer"]["schedule"] = {"warmup_steps": 0, "decay": "constant"}
    table["cluster"] = {"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"}
    recipe = parse_recipe(table, "small")
    return [Curve("small.toml", "", at_width(recipe, width, name="x")) for width in widths]


def measure(folder: str, changes: dict[str, Any], widths: tuple[int, ...]) -> dict[str, Result]:
    """Measure the activations of a small model in this process; return results by trial."""
    world = join_world()
    write_corpus(Path(folder) / "data", 250)
    found = {}
    for curve in curves_on(Path(folder) / "data", widths, **changes):
        (trial,) = coordinate_trials(curve, 3, 1)
        engine, data = start(trial.recipe, world)
        table = activation_sizes(engine, data)
        found[trial.key] = Result(outcome="ok", training=table)
    return found


@pytest.mark.parametrize("changes", [{}, {"model__tie_embeddings": True}])
def test_all_places_are_measured(tmp_path: Path, changes: dict[str, Any]) -> None:
    (results,) = run_ranks(1, measure, str(tmp_path), changes, (64,))
    (table,) = [result.training for result in results.values()]
    assert table["sizes"].keys() == table["changes"].keys() == PLACES
    assert all(len(sizes) == 4 for sizes in table["sizes"].values())
    assert all(len(sizes) == 3 for sizes in table["changes"].values())
    assert table["sizes"]["embedding"][0] == pytest.approx(0.1, rel=0.05)
    # The residual stream after a block is the sum of its input and of the outputs of both parts.
    parts = [table["sizes"][f"blocks.0.{part}"][0] for part in ("attention", "mlp")]
    total = (table["sizes"]["embedding"][0] ** 2 + sum(part**2 for part in parts)) ** 0.5
    assert table["sizes"]["blocks.0"][0] == pytest.approx(total, rel=0.1)
    assert table["losses"][-1] < table["losses"][0]


def test_sizes_and_changes_are_root_mean_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    values = iter([torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]), torch.zeros(2)])
    monkeypatch.setattr(measure_module, "activations", lambda *_: ({"x": next(values)}, 2.0))
    monkeypatch.setattr(measure_module, "train_step", lambda *_: None)
    engine: Any = SimpleNamespace(recipe=SimpleNamespace(training=SimpleNamespace(steps=2)))
    data: Any = None
    measured = activation_sizes(engine, data)
    assert measured["sizes"] == {"x": pytest.approx([12.5**0.5, 17.0**0.5, 0.0])}
    assert measured["changes"] == {"x": pytest.approx([0.5**0.5, 12.5**0.5])}
    assert measured["losses"] == [2.0, 2.0, 2.0]


def logits_twice(folder: str) -> tuple[float, float]:
    """Return the loss of the measured samples from the measured logits, and of the engine."""
    import torch

    world = join_world()
    write_corpus(Path(folder) / "data", 250)
    (curve,) = curves_on(Path(folder) / "data", (64,))
    (trial,) = coordinate_trials(curve, 1, 1)
    engine, data = start(trial.recipe, world)
    found, loss = measure_module.activations(engine, data)
    labels = torch.cat([each.labels for each in data.micro_batches(1)])  # [b, s]
    logits = found["logits"].transpose(0, 1).flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, labels.flatten())), loss


def test_the_measured_logits_are_those_of_the_loss(tmp_path: Path) -> None:
    ((mine, theirs),) = run_ranks(1, logits_twice, str(tmp_path))
    assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("changes", "passes"), [(MUP, True), ({}, False)])
def test_mup_passes_where_the_standard_parametrization_fails(
    tmp_path: Path, changes: dict[str, Any], passes: bool
) -> None:
    changes = changes | {"batch": {"global_sequences": 32, "micro_sequences": 8}}
    (results,) = run_ranks(1, measure, str(tmp_path), changes, WIDTHS)
    curves = curves_on(tmp_path / "data", WIDTHS, **changes)
    (found,) = Check(curves, 3, 1).outcomes(results.get)
    assert found.passes is passes
    if not passes:  # by a wide margin
        assert min(each.spread for each in found.judged if each.place != "embedding") > 1.5


def train(folder: str, diverging_step: int | None) -> dict[str, Any]:
    """Train a small model, whose loss is NaN at one step; return its losses."""
    world = join_world()
    honest = measure_module.train_step

    def train_step(engine: Engine, data: TrainingData, step: int) -> StepResult:
        result = honest(engine, data, step)
        return replace(result, loss=math.nan) if step == diverging_step else result

    measure_module.train_step = train_step
    write_corpus(Path(folder) / "data", 250)
    (curve,) = curves_on(Path(folder) / "data", (64,), training={"steps": 6, "evaluate_every": 4})
    (trial,) = loss_trials(curve, [1e-3], 1)
    engine, data = start(trial.recipe, world)
    found, seconds = measure_module.losses(engine, data)
    assert len(seconds) == (found["diverged"] or 6)
    return found


def test_a_training_is_validated_at_the_end_too(tmp_path: Path) -> None:
    (found,) = run_ranks(1, train, str(tmp_path), None)
    assert [step for step, _ in found["validation"]] == [4, 6]
    assert len(found["losses"]) == 6 and found["diverged"] is None


def train_again(folder: str) -> list[list[float]]:
    """Train a model, and train it again from new weights and from its last ones."""
    world, home = join_world(), Path(folder)
    write_corpus(home / "data", 250)
    run = {"steps": 10, "evaluate_every": 0}
    (curve,) = curves_on(home / "data", (64,), training=run)
    engine, data = start(curve.recipe, world)
    found = [[train_step(engine, data, step).loss for step in range(1, 11)]]
    save(engine, data, RunFolder(home / "run"), step=10)
    weights = str(home / "run/checkpoints/step-0000010")
    for changes in ({}, {"initial_weights": weights}):
        (curve,) = curves_on(home / "data", (64,), training=run | {"steps": 2} | changes)
        (trial,) = loss_trials(curve, [1e-9], 1)
        check_training(trial.recipe)
        request = trial.request(lambda *_: home / "data")
        recipe = checked_recipe(request, world)
        result = measure_module.measure_training(request["kind"], recipe, world)
        assert result.training is not None
        found.append(result.training["losses"])
    return found


def test_a_sweep_starts_from_the_initial_weights_of_its_recipe(tmp_path: Path) -> None:
    (found,) = run_ranks(1, train_again, str(tmp_path))
    first, random, tuned = found
    assert random[0] == pytest.approx(first[0], rel=1e-6)
    assert max(tuned) < min(random) - 0.5 * (first[0] - first[-1])


def test_a_diverged_training_is_a_result(tmp_path: Path) -> None:
    (found,) = run_ranks(1, train, str(tmp_path), 5)
    assert found["diverged"] == 5 and len(found["losses"]) == 4
    assert [step for step, _ in found["validation"]] == [4]
