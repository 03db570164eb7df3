"""Splits in results, tables, summaries, --json and repeated sweeps."""

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.conftest import changed, small_recipe
from tests.sweep.sweeps import Sweep
from tests.sweep.test_table import trial_of
from threefold.plan.calibration.runs_table import read_table
from threefold.plan.time.step import TIME_PARTS
from threefold.sweep import report
from threefold.sweep.choice import Choice, TrialRequest, choose
from threefold.sweep.folder import SweepFolder, row_of_result, row_of_trial, table_text
from threefold.sweep.trial import PARTS, Result, Split, Trial, split_of_slowest

SECONDS = dict(zip(PARTS, [0.3, 0.2, 0.02, 0.03, 0.01, 0.1, 0.05, 0.04, 0.007], strict=True))


def split_of(step_seconds: float = 0.3) -> Split:
    return split_of_slowest([SECONDS], step_seconds)


def result_of(**changes: Any) -> Result:
    return Result(**{"outcome": "ok", "step_seconds": [0.3], "split": split_of()} | changes)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps(small_recipe(Path("absent"))))
    return path


def test_the_parts_add_up_to_the_measured_step() -> None:
    split = split_of(1.414)
    assert tuple(split.parts) == PARTS
    assert sum(split.parts.values()) == pytest.approx(1.414)
    assert split.tensor / split.compute == pytest.approx(2 / 3)
    assert split.instrumented_seconds == pytest.approx(sum(SECONDS.values()))


def test_the_split_is_that_of_the_busiest_rank() -> None:
    waiting = SECONDS | {"bubble": 9.0, "compute": 0.2}
    busiest = SECONDS | {"compute": 0.4}
    split = split_of_slowest([SECONDS, waiting, busiest, SECONDS], 1.0)
    assert split.rank == 2
    assert split.parts == pytest.approx(
        {part: busiest[part] / sum(busiest.values()) for part in PARTS}
    )


def test_results_keep_the_split_and_older_ones_have_none() -> None:
    result = result_of()
    table = json.loads(json.dumps(result.as_json()))
    assert Result.from_json(table) == result
    del table["split"]
    older = Result.from_json(table)
    assert older.split is None and older.stepping_seconds == pytest.approx(0.3)
    assert result.stepping_seconds == pytest.approx(0.3 + 3 * sum(SECONDS.values()))


def test_the_row_has_the_measured_and_the_planned_parts() -> None:
    trial, result = trial_of(), result_of()
    row = row_of_trial(trial) | row_of_result(trial, result)
    parts = sum(row[f"{part}_s"] for part in PARTS)
    assert parts == pytest.approx(row["step_time_s"], rel=1e-4)
    planned = sum(row[f"planned_{part}_s"] for part in TIME_PARTS)
    assert planned == pytest.approx(row["planned_step_s"], rel=1e-4)
    assert row["instrumented_step_s"] == pytest.approx(sum(SECONDS.values()), rel=1e-4)
    plain = row_of_trial(trial) | row_of_result(trial, replace(result, split=None))
    assert set(row) - set(plain) == {
        "instrumented_step_s",
        *(f"{part}_s" for part in PARTS),
        *(f"planned_{part}_s" for part in TIME_PARTS),
    }


def test_the_columns_do_not_disturb_the_planner(tmp_path: Path) -> None:
    trial = trial_of()
    read = []
    for number, result in enumerate((result_of(), result_of(split=None))):
        row = row_of_trial(trial) | row_of_result(trial, result) | {"framework": "Megatron-Core"}
        file = tmp_path / f"{number}.csv"
        file.write_text(table_text([row]))
        read += read_table(file)
    assert read[0].job is not None and read[0] == read[1]


def lines_of(*results: tuple[Trial, Result]) -> list[str]:
    return list(report.summary_lines(results, Choice([trial for trial, _ in results])))


def test_the_summary_splits_the_fastest_layout_only() -> None:
    slow, fast = trial_of(), trial_of(layout__recompute="full")
    split = split_of(0.2)
    results = [
        (slow, result_of(step_seconds=[0.9])),
        (fast, result_of(step_seconds=[0.2], split=split)),
    ]
    lines = lines_of(*results)
    titles, measured, planned = (line.split() for line in lines[3:6])
    names = titles[3:]
    every = {*PARTS, *TIME_PARTS, "total"}
    assert titles[:3] == ["layout", "1,", "s"] and set(names) == every - {"context", "expert"}
    cells = dict(zip(names, measured[1:], strict=True))
    assert measured[0] == "measured" and cells.pop("waiting") == "-"
    shown = {name: seconds for name, seconds in split.parts.items() if name in names}
    assert {name: float(cell) for name, cell in cells.items()} == pytest.approx(
        shown | {"total": 0.2}, abs=1e-4
    )
    assert planned[0] == "planned"
    assert float(planned[-1]) == pytest.approx(fast.planned_seconds, abs=1e-4)
    assert len(lines) == 7
    with_experts = trial_of(
        layout__context=2, model__experts={"count": 4, "per_token": 2, "ffn_hidden_size": 32}
    )
    columns = lines_of((with_experts, result_of(step_seconds=[0.2], split=split)))[2].split()[3:]
    assert set(columns) == every
    without = [(trial, replace(result, split=None)) for trial, result in results]
    assert not [line for line in lines_of(*without) if "layout 1," in line]


def test_json_has_the_split() -> None:
    trial = trial_of()
    both = [(trial, result_of()), (trial, result_of(split=None))]
    table = report.as_json(both, Choice([trial], ruled_out=Counter()), "a")
    first, second = json.loads(json.dumps(table))["trials"]
    assert Split(**first["split"]) == split_of()
    assert sum(first["planned_split"].values()) == pytest.approx(trial.planned_seconds)
    assert second["split"] is None and second["planned_split"] is None


def test_the_option_and_the_timeline_of_a_recipe_ask_for_the_split(recipe: Path) -> None:
    (plain,) = choose(TrialRequest(recipes=[recipe], layouts="own")).trials
    (asked,) = choose(TrialRequest(recipes=[recipe], layouts="own", split=True)).trials
    assert not plain.split and asked.split
    settings = ["tracking.timeline_step=3", "deepspeed=ds_configs/zero3_fp32.json"]
    (timed,) = choose(TrialRequest(recipes=[recipe], layouts="own", settings=settings)).trials
    assert timed.split and timed.recipe.tracking.timeline_step == 0
    assert plain.key == asked.key and asked.with_steps(4).split


def test_only_a_measured_result_without_a_split_is_no_answer(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "sweep", {})
    plain = trial_of()
    asked = replace(plain, split=True)
    assert folder.result_of(plain) is None
    folder.add(plain)
    answers = []
    for result in (result_of(split=None), result_of(), Result(outcome="hung")):
        folder.record(plain, result)
        answers.append((folder.result_of(plain) == result, folder.result_of(asked) == result))
        assert folder.result(plain.key) == result
    folder.close()
    assert answers == [(True, False), (True, True), (True, True)]


def test_another_command_sees_the_new_row(tmp_path: Path) -> None:
    first, second = (SweepFolder(tmp_path / "sweep", {}) for _ in range(2))
    trial = trial_of()
    first.add(trial)
    first.record(trial, result_of(split=None))
    second.record(trial, result_of())
    first.write_table()
    with (tmp_path / "sweep" / "sweep.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["compute_s"]) == pytest.approx(split_of().compute, rel=1e-4)
    first.close()
    second.close()


def test_a_sweep_measures_again_to_get_the_split(recipe: Path, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, recipe, "--top", "3", "--seconds-per-trial", "5")
    assert sweep.run_here().returncode == 0
    keys = sorted(sweep.finished())
    assert len(keys) == 3 and all(row["compute_s"] == "" for row in sweep.rows())
    done = sweep.run_here("--split")
    assert done.returncode == 0 and "already measured" not in done.stdout
    assert sorted(sweep.finished()) == sorted(2 * keys)
    assert all(float(row["compute_s"]) > 0 for row in sweep.rows())
    assert "layout 1, s" in done.stdout
    for options in (["--split"], []):
        again = sweep.run_here(*options)
        assert again.returncode == 0 and "3 are already measured" in again.stdout
        assert sorted(sweep.finished()) == sorted(2 * keys)
        assert all(float(row["compute_s"]) > 0 for row in sweep.rows())


def test_halving_measures_the_split_in_every_round(recipe: Path, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, recipe, "--top", "4", "--halving", "--split")
    assert sweep.run_here().returncode == 0
    rows = sweep.rows()
    assert {row["steps"] for row in rows} == {"2", "4"}
    assert all(float(row["compute_s"]) > 0 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("pipeline", [1, 2])
def test_real_ranks_measure_the_split(pipeline: int, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(tomli_w.dumps(changed(small_recipe(Path("absent")), name="real")))
    layout = ["--layouts", "own", "--set", f"layout.pipeline={pipeline}"]
    sweep = Sweep(tmp_path, recipe, *layout, "--split", fake=False)
    done = sweep.run_here("--steps", "3", "--warm-up", "1")
    assert done.returncode == 0, done.stdout
    (row,) = sweep.rows()
    parts = [float(row[f"{part}_s"]) for part in PARTS]
    assert sum(parts) == pytest.approx(float(row["step_time_s"]), rel=1e-3)
    assert float(row["compute_s"]) > 0 and float(row["optimizer_s"]) > 0
    assert float(row["tensor_s"]) == 0
    assert (float(row["data_s"]) > 0) == (pipeline == 1)
    assert (float(row["bubble_s"]) > 0) == (pipeline == 2)
