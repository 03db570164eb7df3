"""The command: trainings in ranks that answer without training, resuming, faults and mistakes."""

import io
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w

from models.errors import UserError
from tests.conftest import changed, long_in_turn, small_recipe
from tests.sweep.faulty_sweep import FAKE_BEST_RATE
from tests.sweep.sweeps import Sweep

AUTO = ("--rates", "auto")
GIVEN = ("--rates", "0.008,0.016,0.032,0.064,1.28")


def transfer(
    folder: Path,
    corpus: Path,
    *options: str,
    command: str = "learning-rates",
    fake: bool = True,
    **changes: Any,
) -> Sweep:
    recipe = folder / "small.toml"
    recipe.write_text(tomli_w.dumps(changed(small_recipe(corpus), **changes)))
    return Sweep(folder, recipe, "--seconds-per-trial", "60", *options, command=command, fake=fake)


def rows(sweep: Sweep) -> list[dict[str, Any]]:
    lines = (sweep.folder / "trials.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_widths_are_compared_at_the_same_rates(tmp_path: Path, corpus: Path) -> None:
    sweep = transfer(tmp_path, corpus, *GIVEN, "--widths", "64,128", "--seeds", "2")
    done = sweep.run_here()
    assert done.returncode == 0, done.stdout
    assert len(rows(sweep)) == len(sweep.finished()) == 2 * 2 * 5
    assert f"pass  best learning rate {FAKE_BEST_RATE} at width 64 and" in done.stdout
    assert "diverged at step 2 width 64, learning rate 1.28" in done.stdout
    assert (sweep.folder / "learning_rates.svg").stat().st_size > 10_000
    by_rate = {row["learning_rate"]: row for row in rows(sweep) if row["seed"] == 1235}
    assert by_rate[0.016]["final_loss"] == pytest.approx(2 + 1.235 + 0.1)
    assert by_rate[1.28]["final_loss"] is None and by_rate[1.28]["diverged"] == 2


def test_results_are_printed_even_if_the_picture_cannot_be_written(
    tmp_path: Path, corpus: Path
) -> None:
    sweep, output = transfer(tmp_path, corpus, *GIVEN, "--json"), io.StringIO()
    with (
        mock.patch("threefold.pipeline.picture.save_figure", side_effect=UserError("no space")),
        mock.patch.object(io, "StringIO", return_value=output),
        pytest.raises(UserError, match="no space"),
    ):
        sweep.run_here()
    assert json.loads(output.getvalue().splitlines()[-1])["folder"] == str(sweep.folder)


def test_a_rerun_measures_only_what_is_left(tmp_path: Path, corpus: Path) -> None:
    sweep = transfer(tmp_path, corpus, *GIVEN)
    process = sweep.start()
    while len(sweep.finished()) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    sweep.kill(process)
    early = sweep.finished()
    done = sweep.run_here()
    assert done.returncode == 0, done.stdout
    assert len(set(sweep.finished())) == 5 == len(rows(sweep))
    assert len(sweep.finished()) <= 6 and set(early) <= set(sweep.finished())
    again = sweep.run_here("--json")
    assert len(sweep.finished()) <= 6
    table = json.loads(again.stdout.splitlines()[-1])
    (curve,) = table["curves"]
    assert curve["best_learning_rate"] == FAKE_BEST_RATE
    more = sweep.run_here("--widths", "64,128")  # one curve has its results
    assert more.returncode == 0 and len(rows(sweep)) == 10


def test_an_automatic_grid_reaches_the_best_rate(tmp_path: Path, corpus: Path) -> None:
    sweep = transfer(tmp_path, corpus, *AUTO)  # from 4e-3
    done = sweep.run_here()
    assert done.returncode == 0, done.stdout
    rates = sorted(row["learning_rate"] for row in rows(sweep))
    assert rates == pytest.approx([1e-3 * 2**n for n in range(7)])
    assert "is at the end of the grid" not in done.stdout


def test_a_failed_trial_has_no_loss_until_it_is_retried(tmp_path: Path, corpus: Path) -> None:
    sweep = transfer(tmp_path, corpus, *GIVEN)
    sweep.run_here()
    key_of_rate = {row["learning_rate"]: row["trial"] for row in rows(sweep)}
    faults = {key_of_rate[0.032]: "crash", key_of_rate[0.064]: "out_of_memory"}
    for key in faults:
        (sweep.folder / "results" / f"{key}.json").unlink()
    sweep.inject(faults)
    done = sweep.run_here()
    assert done.returncode == 1 and "failed" in done.stdout
    outcomes = {row["learning_rate"]: row["outcome"] for row in rows(sweep)}
    failed = {0.032: "crashed", 0.064: "out_of_memory"}
    assert outcomes == dict.fromkeys(key_of_rate, "ok") | failed
    again = sweep.run_here()
    assert again.returncode == 1, "a failed trial that is not repeated still fails"
    for rate, outcome in failed.items():
        assert f"learning rate {rate}: {outcome}" in again.stdout
    sweep.inject({})
    repeated = sweep.run_here("--retry")
    assert repeated.returncode == 0, repeated.stdout
    assert sorted(row["outcome"] for row in rows(sweep)) == ["ok"] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("learning-rates", "--widths", "100"), "--widths 100: "),
        (("learning-rates", "--set", "optimizer.learning_rate=1"), "set the same key"),
        (("learning-rates", "--nodes", "1,2"), "invalid number 1,2: expected 1 to 1000000"),
        (("learning-rates", "--set", "data.validation=x/y"), "/x does not exist; use a corpus"),
        (("learning-rates", "--set", "layout.tensor=4"), "tensor"),
        (
            ("learning-rates", "--set", "data.tokenizer=x"),
            'tokenizer = "x" does not exist',
        ),
        (("learning-rates", "--set", "model.vocab_size=99"), "and model.vocab_size is 99"),
        (("learning-rates", "--set", "training.initial_weights=x"), "does not exist"),
        (("learning-rates", "--steps", "4"), "the training has 4 steps; use --steps 25"),
        (("learning-rates", "--rates", "0"), "0 is not a learning rate; use auto, or for example"),
        (("learning-rates", "--rates", "1e-3,1e-3"), "1e-3 is given twice"),
        (("learning-rates", "--gpu", "H100"), "unset DS_ACCELERATOR, or use --gpu cpu"),
        (("learning-rates", "--halving"), "unrecognized arguments: --halving"),
        (("coordinates", "--steps", "3"), "use --widths 64,128,256"),
        (("", "--widths", "64"), "unrecognized arguments: --widths 64"),
        (("", "--learning-rate", "auto", "--coordinate-check=4"), "coordinates"),
    ],
)
def test_mistakes_are_found_before_any_process(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    command, *others = options
    sweep = transfer(tmp_path, corpus, *others, command=command)
    assert message in sweep.rejection()
    assert not (sweep.folder / "results").exists()


def test_a_folder_of_a_layout_sweep_is_rejected(tmp_path: Path, corpus: Path) -> None:
    sweep = transfer(tmp_path, corpus, command="")
    assert sweep.run_here("--top", "1").returncode == 0
    sweep.command = "learning-rates"
    with pytest.raises(UserError, match="or another --sweep-dir"):
        sweep.run_here(*GIVEN)


@long_in_turn(2)
def test_real_ranks_train_and_measure_activations(tmp_path: Path, corpus: Path) -> None:
    options = ("--widths", "32,64", "--set", "optimizer.kind=adamw,muon", "--json")
    sweep = transfer(tmp_path, corpus, *options, fake=False)
    done = sweep.run("--rates", "1e-3,1e3", "--steps", "8", seconds=500)
    table = json.loads(done.stdout.splitlines()[-1])
    sweep.command = "coordinates"
    done = sweep.run("--steps", "2", seconds=500)
    table |= json.loads(done.stdout.splitlines()[-1])
    assert len(rows(sweep)) == 2 * 2 * 2 + 2 * 2
    assert {row["outcome"] for row in rows(sweep)} == {"ok"}
    assert [each["best_learning_rate"] for each in table["curves"]] == [1e-3] * 4
    assert all(each["final_losses"][1][1] > 5 for each in table["curves"])
    assert len(table["comparisons"]) == len(table["coordinate_checks"]) == 2
    for name in ("learning_rates.svg", "coordinates.svg"):
        assert (sweep.folder / name).stat().st_size > 10_000
    assert not sweep.processes()
