"""Messages of a run: at its beginning, and the advice for training longer."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w

from tests.commands import run_here
from tests.conftest import GPT_SWITCHES, changed, small_recipe
from threefold.commands import plan
from threefold.config.loading import DEFAULT_RECIPE, load_recipe, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment, ParallelDims
from threefold.config.phases import PhasePlan
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress
from threefold.tracking.messages import (
    announce,
    longer_training,
    summarize,
    tell_changes,
    thread_excess,
    warn_of_changes_after_the_end,
)
from threefold.tracking.tracker import Tracker

RAISE = "to train longer, raise training.steps above 20"
WSD = {"warmup_steps": 2, "decay": "wsd", "decay_steps": 5}
LATE = {"name": "late", "start_step": 11, "optimizer": {"learning_rate": 1e-3}}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "use --set training.steps=40 --set optimizer.schedule.steps=20; training.steps alone "
             "would raise it to 2.44e-03"),
        ({"optimizer__schedule": {"warmup_steps": 2, "decay": "constant"}}, RAISE),
        ({"optimizer__schedule__steps": 20}, RAISE),  # the rate stays at the minimum
        ({"optimizer__schedule__steps": 100}, RAISE),  # the schedule continues
        ({"optimizer__schedule__warmup_steps": 30}, RAISE),
        ({"optimizer__schedule__warmup_steps": 20}, RAISE),  # the schedule ends with its warm-up
        ({"optimizer__schedule__warmup_steps": 200}, RAISE),  # the run cuts the warm-up short
        ({"optimizer__schedule__minimum_learning_rate": 3e-3}, RAISE),
        ({"optimizer__schedule": WSD}, "[[phase]] with its own schedule; the current schedule has"),
        ({"optimizer__schedule": WSD | {"minimum_learning_rate": 1e-3}},
         "at the learning rate of 1.00e-03, use --set training.steps=40"),
        ({"phase": [LATE]}, "[[phase]] with its own schedule; training.steps alone would raise"),
    ],
)  # fmt: skip
def test_the_advice_for_training_longer_avoids_a_jump(
    changes: dict[str, Any], advice: str, small: dict[str, Any]
) -> None:
    told = longer_training(parse_recipe(changed(small, **changes), "test"))
    assert told == RAISE if advice == RAISE else advice in told


def test_a_run_that_follows_the_advice_continues_at_its_last_rate(small: dict[str, Any]) -> None:
    rate = PhasePlan(parse_recipe(small, "test")).at(20).learning_rate(20)
    longer = changed(small, training__steps=40, optimizer__schedule__steps=20)
    phases = PhasePlan(parse_recipe(longer, "test"))
    assert {phases.at(step).learning_rate(step) for step in range(20, 41)} == {rate}


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (["a", "a"], "  1 node, 2 ranks: a"),
        (["a"], "  1 node, 1 rank: a"),
        (["b", "b", "a", "a"], "  2 nodes, 4 ranks: b, a"),
        (list("abcdefghij"), "  10 nodes, 10 ranks: a, b, c, d, e, f, g, h and 2 more"),
    ],
)
def test_a_run_prints_its_nodes_and_ranks(
    hosts: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["layout.pipeline=1", "batch.global_sequences=40", "batch.micro_sequences=1"]
    recipe = load_recipe(DEFAULT_RECIPE, settings)
    dims = recipe.parallel_dims(LaunchEnvironment(size=len(hosts), local_size=len(hosts)))
    found = mock.Mock(progress=Progress(), weights_only=False)
    announce(recipe, dims, hosts, mock.Mock(path=tmp_path), found)
    assert line == capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        (GPT_SWITCHES, None),
        (GPT_SWITCHES | {"model__bias": False}, None),
        (
            GPT_SWITCHES | {"model__kv_heads": 2},
            "kv_heads = 2; use model.kv_heads = 4 (GPT2LMHeadModel)",
        ),
        (
            GPT_SWITCHES | {"model__qk_norm": True},
            "model.qk_norm = true; use model.qk_norm = false (GPT2LMHeadModel)",
        ),
        ({"model__bias": True}, None),
        ({"model__activation": "gelu"}, 'model.activation = "gelu"; use model.activation = "swi'),
        (
            {"model__experts": {"count": 4, "per_token": 2, "ffn_hidden_size": 48, "shared": 1}},
            'router = "softmax"; use model.experts.router = "sigmoid"',
        ),
    ],
)
def test_a_model_that_cannot_be_exported_is_named_at_the_start(
    changes: dict[str, Any],
    named: str | None,
    small: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = changed(small, **changes)
    found = mock.Mock(progress=Progress(), weights_only=False, path=None, in_memory=False)
    dims = ParallelDims(pipeline=1, data=1, tensor=1)
    announce(parse_recipe(table, "test"), dims, ["a"], mock.Mock(path=tmp_path), found)
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    printed = capsys.readouterr().out
    options = ("--nodes", 1, "--gpus-per-node", 1, "--gpu", "H100", "--top", 0)
    planned = run_here(plan.main, tmp_path / "recipe.toml", *options).stdout
    for text in (printed, planned):
        lines = [line for line in text.splitlines() if "convert.py to-hf cannot export" in line]
        assert len(lines) == (named is not None), text
        assert not named or named in lines[0]


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "named"),
    [
        (2, 2, 2, ""),
        (1, 2, 4, ""),
        (2, 4, 2, "2 ranks on this node run 4 threads on 2 cores, which slows them"),
        (1, 2, 1, "1 rank on this node runs 2 threads on 1 core, which slows it down"),
        (2, 4, 2, "set OMP_NUM_THREADS=1, or unset it"),
        (2, 16, 9, "set OMP_NUM_THREADS=4, or unset it"),
        (4, 4, 2, "slows them down; start 2 ranks per node"),
        (4, 8, 2, "start 2 ranks per node with OMP_NUM_THREADS=1"),
    ],
)
def test_threads_that_exceed_the_cores_are_named(
    ranks: int, threads: int, cores: int, named: str
) -> None:
    message = thread_excess(ranks, threads, cores)
    assert named in message and bool(message) == bool(named)


@pytest.mark.parametrize(
    ("rows", "tokens", "unused"),
    [
        (250, 250, ""),  # equal
        (50_304, 50_257, ""),  # GPT-2's, padded to a multiple of 128
        (1_024, 1, ""),
        (300, 297, ""),  # a multiple of 4
        (300, 296, "4 rows"),
        (251, 250, "1 row of"),
        (2_048, 1_024, "1,024 rows"),
        (151_936, 151_669, "267 rows"),
    ],
)
def test_a_vocabulary_with_unused_rows_has_a_note(
    rows: int, tokens: int, unused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A difference that padding explains is normal; pretrain.py and plan.py agree."""
    (tmp_path / "manifest.json").write_text(json.dumps({"vocab_size": tokens}))
    never = {"decay": 0.9, "start_step": 1000}
    table = changed(
        small_recipe(tmp_path), model__vocab_size=rows, optimizer__average=never,
        training__evaluate_every=1,
    )  # fmt: skip
    recipe = parse_recipe(table, "test")
    one = ParallelDims(pipeline=1, data=1, tensor=1)
    found = mock.Mock(progress=Progress(), weights_only=False, path=None, in_memory=False)
    announce(recipe, one, ["a"], mock.Mock(path=tmp_path), found)
    started = capsys.readouterr().out
    assert "manifest.json" not in started
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    command = (plan.main, tmp_path / "recipe.toml", "--nodes", 1, "--gpus-per-node", 1)
    options = ("--gpu", "H100", "--top", 0)
    planned = run_here(*command, *options).stdout
    assert "optimizer.average begins with update 1001" in planned
    assert "The time excludes validation, which adds up to" in planned
    for printed in (started, planned):
        assert printed.count("model.vocab_size = ") == 2 * bool(unused)
        assert unused in printed
        assert (f"model.vocab_size = {tokens} saves" in printed) == bool(unused)
    (tmp_path / "manifest.json").write_text("{")
    assert run_here(*command, *options).returncode == 0  # a plan needs no corpus
    (tmp_path / "manifest.json").unlink()
    announce(recipe, one, ["a"], mock.Mock(path=tmp_path), found)
    note = f"  no manifest.json next to {recipe.data.train[0].path}, "
    assert capsys.readouterr().out.count(note) == 1


def test_a_run_that_ends_within_its_warm_up_has_a_note(tmp_path: Path) -> None:
    """The steps of each schedule count from its own first step."""

    def note(
        *late: dict[str, Any], steps: int = 40, warmup: int = 40, counts: str = "steps"
    ) -> str:
        table = changed(small_recipe(tmp_path), training__steps=steps, training__evaluate_every=0)
        table["optimizer"]["schedule"] = {
            "warmup_steps": warmup, "counts": counts, "decay": "constant",
        }  # fmt: skip
        return "; ".join(PhasePlan(parse_recipe(table | {"phase": list(late)}, "test")).notes)

    assert "warmup_steps = 40, in steps 1 to 40; use for example warmup_steps = 4" in note()
    assert note(steps=41) == note(counts="sequences") == note(counts="sequences", warmup=319) == ""
    assert "warmup_steps = 320 sequences" in note(
        counts="sequences", warmup=320
    )  # 8 in each of 40 steps
    late = {"name": "late", "start_step": 31}
    schedules = {n: {"warmup_steps": n, "decay": "constant"} for n in (9, 10)}
    late_note = note(late | {"optimizer": {"schedule": schedules[10]}}, warmup=2)
    assert "warmup_steps = 10, in steps 31 to 40" in late_note
    assert note(late | {"optimizer": {"schedule": schedules[9]}}, warmup=30) == ""
    cut_short = note(late | {"optimizer": {"schedule": schedules[9]}}, warmup=31)
    assert 'still rises when phase "late" begins' in cut_short and "in steps 1 to 30" in cut_short


@pytest.mark.parametrize(
    ("average", "note"),
    [
        ({"start_step": 19}, ""),
        ({"start_step": 20}, "begins with update 21, after the last step; use a smaller "
                             "optimizer.average.start_step"),
        ({"every": 20}, ""),
        ({"every": 21}, "begins with update 21, after the last step; use a smaller "
                        "optimizer.average.every"),
        ({"start_step": 5, "every": 18}, ""),
    ],
)  # fmt: skip
def test_an_average_that_never_begins_has_a_note(
    average: dict[str, Any], note: str, small: dict[str, Any]
) -> None:
    table = changed(small, optimizer__average={"decay": 0.9} | average)
    notes = PhasePlan(parse_recipe(table, "test")).notes
    assert (note in notes[0]) if note else not notes


def test_a_run_that_ends_within_its_ramp_has_a_note(small: dict[str, Any]) -> None:
    """The batch grows from 4 to 8 after half of the samples of the ramp."""

    def plan_of(samples: int) -> PhasePlan:
        ramp = {"start_sequences": 4, "increment": 4, "samples": samples}
        table = changed(small, batch__ramp=ramp, batch__micro_sequences=4, training__steps=20)
        return PhasePlan(parse_recipe(table, "test"))

    assert plan_of(76).notes == []  # step 20 is the only one with 8 sequences
    (note,) = plan_of(77).notes
    assert "ends within batch.ramp, at 4 of batch.global_sequences = 8;" in note
    planned = plan_of(77).recipe_of("first").batch
    assert (planned.global_sequences, planned.ramp) == (8, None)


def test_a_phase_that_changes_the_learning_rate_abruptly_says_so(small: dict[str, Any]) -> None:
    """Without a schedule of its own, a phase with another learning rate warms up again."""

    def said(**optimizer: Any) -> str:
        late = {"name": "late", "start_step": 11, "optimizer": optimizer}
        schedule = {"warmup_steps": 4, "decay": "constant"}
        table = changed(small, optimizer__schedule=schedule, phase=[late])
        plan = PhasePlan(parse_recipe(table, "test"))
        tracker = mock.Mock(phase_plan=plan)
        Tracker.begin_phase(tracker, *plan.segments)
        (text,), _ = tracker.display.say.call_args
        return text.partition(": ")[2]

    assert said(learning_rate=1e-3) == (
        "optimizer.learning_rate = 0.001; the learning rate changes from 4.00e-03 to 2.50e-04, "
        "the start of a warm-up over 4 steps"
    )
    at_once = {"warmup_steps": 0, "decay": "constant"}
    assert "from 4.00e-03 to 1.00e-03" in said(learning_rate=1e-3, schedule=at_once)
    assert said(weight_decay=0.2) == "optimizer.weight_decay = 0.2"


def test_a_finished_run_names_the_changes_that_it_is_not_trained_with(
    small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = parse_recipe(small, "test")
    without_effect = {"layout.tensor": [1, 2], "tracking.mode": ["offline", "online"]}
    changed_keys = {"optimizer.learning_rate": [4e-3, 1e-3]} | without_effect
    found = mock.Mock(changes=lambda _: changed_keys)
    warn_of_changes_after_the_end(found, recipe)
    said = capsys.readouterr().err
    assert "these changes have no effect: optimizer.learning_rate: 0.004 -> 0.001; to" in said
    found.changes = lambda _: without_effect
    warn_of_changes_after_the_end(found, recipe)
    assert capsys.readouterr().err == ""


def test_changed_values_are_printed_as_text(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "tracking.tags": [["été"], ["夏", "ab"]],
        "data.train": [None, "corpora/größe"],
        "tracking.group": ["\ud83d", "a\nb"],  # half of a surrogate pair
        "training.initial_weights": [None, "weights"],
    }
    found = mock.Mock(
        changes=lambda _: changes, learning_rate_jump=lambda _: "", change_of_average=lambda _: ""
    )
    tell_changes(RunFolder(tmp_path), found, parse_recipe(small, "test"))
    *lines, without_effect = capsys.readouterr().out.splitlines()
    assert lines == [
        '  tracking.tags: ["été"] -> ["夏", "ab"]',
        '  data.train: unset -> "corpora/größe"',
        '  tracking.group: "\\ud83d" -> "a\\nb"',
    ]
    assert 'unset -> "weights", which has no effect, because the run resumes' in without_effect


def test_the_summary_names_the_steps_of_its_validations(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"tokens": 1, "tokens_per_second": 1.0, "step_seconds": 1.0, "loss": 2.0}
    folder = RunFolder(tmp_path)
    folder.metric(line | {"step": 18, "validation_loss": 3.25, "tasks/cloze/accuracy": 0.5})
    folder.metric(line | {"step": 19, "validation/code/loss": 1.5})
    folder.metric(line | {"step": 20})
    recipe = parse_recipe(small, "test")
    summarize(recipe, folder, LaunchEnvironment(rank=0, local_rank=0, size=1, local_size=1))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {
        "validation 3.2500 at step 18",
        "validation code 1.5000 at step 19",
        "task cloze 50.0% at step 18",
    } <= set(lines)
