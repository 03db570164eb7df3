"""What a run folder says, also if it is damaged, incomplete or being written."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.cost import flops_per_token
from models.errors import UserError
from tests.report.synthetic import BEGAN, event, recipe_of, write_run
from threefold.config.loading import parse_recipe
from threefold.config.phases import PhasePlan
from threefold.data.sample_order import choose_sources
from threefold.report.page import mixtures, state, stops, summary, wall_time_parts
from threefold.report.run_record import names_of, read_run
from threefold.report.summaries import shares_read
from threefold.run_folder.lock import FolderLock


def test_a_line_that_is_being_written_is_left_out_silently(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(1, 11))
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 11, "loss": 3.')
    found = read_run(run, "run")
    assert found.steps.step.tolist() == list(range(1, 11))
    assert found.problems == []
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('1, "tokens": 5}\n')
    assert read_run(run, "run").steps.step[-1] == 11


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(1, 11))
    damage = b'{"step": 4, "lo\n\0\0\0\n[1]\n{"step": "x"}\n{"step": -3}\n\xff\xfe\n{"step": 11}\n'
    (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + damage)
    found = read_run(run, "run")
    assert found.steps.step.tolist() == list(range(1, 12))
    assert any("5 of 16 lines are damaged" in problem for problem in found.problems)


def test_values_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    def change(line: dict) -> None:
        line |= {"loss": "high", "memory_gb": [1], "extra": 10**400, "flag": True}
        line["grad_norm"] = float("nan") if line["step"] == 3 else 1

    steps = read_run(write_run(tmp_path / "run", change=change), "run").steps
    assert "loss" not in steps.values and "memory_gb" not in steps.values
    assert "extra" not in steps.values and "flag" not in steps.values
    assert "mfu" not in steps.values  # null in every line
    assert np.isnan(steps.column("grad_norm")[2]) and steps.column("grad_norm")[3] == 1
    assert steps.last("loss") is None


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "recipe.toml"])
@pytest.mark.parametrize("damage", ["missing", "empty", "binary", "folder"])
def test_a_damaged_file_is_a_problem_in_words(tmp_path: Path, name: str, damage: str) -> None:
    run = write_run(tmp_path / "run")
    file = run / name
    file.unlink()
    if damage == "empty":
        file.write_bytes(b"")
    elif damage == "binary":
        file.write_bytes(bytes(range(256)) * 20 + b"\n")
    elif damage == "folder":
        file.mkdir()
    found = read_run(run, "run")
    summary([found]), wall_time_parts(found), stops(found), mixtures(found), state(found)
    if not (damage == "empty" and name == "events.jsonl"):
        assert any(name in problem or "no plan" in problem for problem in found.problems)


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; name a run folder"):
        read_run(tmp_path / "missing", "missing")
    with pytest.raises(UserError, match="is not a run folder: it has no"):
        read_run(tmp_path, "empty")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, not a folder"):
        read_run(tmp_path / "file", "file")


def test_runs_have_different_names(tmp_path: Path) -> None:
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert names_of([tmp_path / "x/a", tmp_path / "y/a"]) == ["x/a", "y/a"]
    with pytest.raises(UserError, match="is given twice"):
        names_of([tmp_path / "a", tmp_path / "." / "a"])


def test_the_state_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert state(read_run(run, "run")) == "interrupted"
    lock = FolderLock(run)
    lock.acquire()
    assert state(read_run(run, "run")) == "running"
    lock.release()
    # The record of this process is still in the file, but the process has released the folder.
    (run / "lock").write_text(json.dumps({"process": 2**22, "machine": "x", "started": 1}))
    assert state(read_run(run, "run")) == "running"  # on another machine, touched just now
    os.utime(run / "lock", (time.time() - 300, time.time() - 300))
    assert state(read_run(run, "run")) == "interrupted"
    write_run(run, events=[event("end", 100)])
    assert state(read_run(run, "run")) == "finished"
    write_run(run, events=[event("stop", 100, reason="SIGTERM", exit_code=5)])
    assert state(read_run(run, "run")) == "stopped"


def test_the_number_of_ranks_follows_from_the_metrics(tmp_path: Path) -> None:
    recipe = recipe_of()
    found = read_run(write_run(tmp_path / "run", recipe=recipe), "run")
    flops = found.flops_per_token
    assert flops is not None

    def change(line: dict) -> None:
        line["tflops_per_gpu"] = flops * recipe.tokens_per_step / 24 / line["step_seconds"] / 1e12

    found = read_run(write_run(tmp_path / "run", recipe=recipe, change=change), "run")
    assert found.world_size == 24


def test_wall_time_and_interruptions(tmp_path: Path) -> None:
    events = [
        event("first_step", 1, 10, seconds={"imports": 8.0, "first step": 2.0}),
        event("stop", 50, 40, reason="a signal", exit_code=5),
        event("repeat", 45, 50, steps=5, seconds=2.5),
        event("resume", 45, 51),
        event("repeat", 90, 60, steps=3, seconds=1.5),
        event("end", 100, 200.0),
    ]
    found = read_run(write_run(tmp_path / "run", events=events), "run")
    shares = {part["name"]: part["share"] for part in wall_time_parts(found)}
    assert sum(shares.values()) == pytest.approx(100)
    assert shares["starts"] == pytest.approx(100 * 8 / 208)
    assert shares["repeated steps"] == pytest.approx(100 * 4 / 208)
    assert stops(found) == [
        ("50", "a signal", "5 steps, 2.5 s"),
        ("90", "resumed after an interruption", "3 steps, 1.5 s"),
    ]
    assert found.hours == pytest.approx(208 / 3600)  # with the start-up before the first event
    assert found.events[0]["time"] == BEGAN


def test_a_run_with_phases(tmp_path: Path) -> None:
    table = recipe_of().model_dump(mode="json", exclude_none=True)
    books = [{"path": "data/books/train", "weight": 1.0}]
    length = table["model"]["sequence_length"]
    table["phase"] = [
        {"name": "books", "start_step": 41, "data": {"train": books}},
        {"name": "long", "start_step": 61, "model": {"sequence_length": 2 * length}},
    ]
    plan = PhasePlan(parse_recipe(table, "test"))

    def count_tokens(line: dict[str, Any]) -> None:
        line["tokens"] = plan.tokens_before(line["step"] + 1)

    folder = write_run(tmp_path / "run", range(1, 81), recipe=plan.recipe, change=count_tokens)
    run = read_run(folder, "run")
    batch = table["batch"]["global_sequences"]
    found = {
        phases: {each.path: each.samples for each in shares} for phases, shares in mixtures(run)
    }
    first = {"data/stdlib/train": 30 * batch, "data/books/train": 10 * batch}
    later = {"data/books/train": 20 * batch}
    assert found == {"first": first, "books": later, "long": later}

    short, long = (flops_per_token(plan.at(step).recipe.model) for step in (1, 80))
    assert run.flops_per_token == long > short
    tokens = np.array([plan.tokens_before(step + 1) for step in (40, 60, 80)])
    before = short * tokens[1]
    expected = [short * tokens[0], before, before + long * (tokens[2] - tokens[1])]
    assert run.flops(tokens) == pytest.approx(expected)
    assert np.isnan(run.flops(np.array([np.nan]))).all()


def test_the_mixture_counts_the_samples_of_the_kept_steps(tmp_path: Path) -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    ends = [(1, 7), (2, 14), (3, 30), (4, 37)]  # the samples 14 .. 22 were skipped
    found = shares_read(weights, ends, {2: 23}, batch=7)
    read = np.array([*range(14), *range(23, 37)])
    sources, _ = choose_sources(read, list(weights.values()))
    assert [each.samples for each in found] == np.bincount(sources, minlength=3).tolist()
    assert sum(each.share for each in found) == pytest.approx(1)
    assert [each.wanted for each in found] == pytest.approx([0.5, 0.3, 0.2])

    run = read_run(write_run(tmp_path / "run", range(1, 101)), "run")
    ((phases, shares),) = mixtures(run)
    assert phases == "first"
    assert [(each.path, each.samples) for each in shares] == [
        ("data/stdlib/train", 2400),
        ("data/books/train", 800),
    ]
