"""The start of a run: what it does with unfinished saves, and the recipe that its messages use."""

import contextlib
import io
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from models.errors import UserError
from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.checkpoint.resume import ResumePoint, ResumeRequest, Start
from threefold.checkpoint.retention import RESERVED_DISK_BYTES, checkpoint_bytes
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.data import corpus as corpus_module
from threefold.data import token_file
from threefold.data.corpus import open_corpus
from threefold.data.dataset import TrainingData
from threefold.pretrain import setup
from threefold.pretrain.experiment import Experiment, check_phases
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress

Usage = namedtuple("Usage", ["free"])
LATE = {"name": "late", "start_step": 11, "optimizer": {"learning_rate": 1e-3}}


@pytest.fixture
def experiment(small: dict[str, Any]) -> Experiment:
    """Return an experiment of two phases, in its second one."""
    table = changed(small, checkpoint__every=20) | {"phase": [LATE]}
    plan = PhasePlan(parse_recipe(table, "small"))
    return check_phases(LaunchEnvironment(), plan, "small").at(11)


def begin(
    experiment: Experiment, folder: RunFolder, step: int, earlier: Recipe | None = None
) -> None:
    """Begin a run that has done some steps, with the recipe `earlier`."""
    found = mock.Mock(spec=ResumePoint, skipped={}, weights_only=False, in_memory=False)
    found.progress, found.changes.return_value = Progress(step), {}
    found.learning_rate_jump.return_value, found.earlier_recipe = "", earlier
    begun = mock.Mock(spec=Start, found=found, progress=found.progress, request=ResumeRequest())
    handle = SimpleNamespace(folder=folder, supervisor=SimpleNamespace(hosts=["a"]))
    data = mock.Mock(**{"context_imbalance.return_value": 1.0})
    with mock.patch.object(setup, "begin_branch"):
        setup.begin(experiment, handle, data, begun, mock.Mock())  # type: ignore[arg-type]


def test_unfinished_saves_are_deleted_before_the_disk_is_measured(
    experiment: Experiment, world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    debris = folder.checkpoints / "step-0000010.0a1b.incomplete"
    debris.mkdir(parents=True)
    size = checkpoint_bytes(experiment.recipe)
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda _: Usage(RESERVED_DISK_BYTES + (1 if debris.exists() else 9) * size),
    )
    begin(experiment, folder, 10)
    assert not debris.exists()
    assert not [line for line in folder.read_events() if line["event"] == "warning"]


def test_the_disk_is_compared_with_the_saves_of_all_phases(
    experiment: Experiment, world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the first phase and that of the run are saved, so two checkpoints must fit."""
    size = checkpoint_bytes(experiment.recipe)
    free = RESERVED_DISK_BYTES + size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free))
    folder = RunFolder(tmp_path)
    begin(experiment, folder, 5)
    (warning,) = (line for line in folder.read_events() if line["event"] == "warning")
    assert "the run saves up to 2 more; free" in warning["message"]


def test_an_earlier_attempt_without_a_checkpoint_is_mentioned(
    experiment: Experiment, world: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    for event, step in [("start", 0), ("warning", 70), ("branch", 0), ("start", 0)]:
        folder.event(event, step, checkpoint="", stamp="20260101T000000")
    begin(experiment, folder, 0)
    assert "earlier attempt" not in capsys.readouterr().out  # the branch has no steps yet
    for step in range(1, 5):
        folder.metric({"step": step, "tokens": 0})
    begin(experiment, folder, 0)
    said = "  an earlier attempt reached step {} and saved no checkpoint; the run starts again at"
    assert said.format(4) in capsys.readouterr().out
    folder.event("warning", 6, message="the disk is full")
    begin(experiment, folder, 0)
    assert said.format(6) in capsys.readouterr().out
    begin(experiment, folder, 5)
    assert "earlier attempt" not in capsys.readouterr().out
    folder.event("save", 5)
    begin(experiment, folder, 0)
    assert "earlier attempt" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("also_at", "named"),
    [
        ([1, 10, 20], ""),
        ([1, 21], "at step 21, because the run ends at training.steps = 20"),
        ([30, 2, 40], "at steps 30, 40, because the run ends at training.steps = 20"),
    ],
)
def test_saves_after_the_last_step_are_a_warning(
    also_at: list[int], named: str, small: dict[str, Any], world: None, tmp_path: Path
) -> None:
    recipe = parse_recipe(changed(small, checkpoint__also_at=also_at), "small")
    folder = RunFolder(tmp_path)
    begin(check_phases(LaunchEnvironment(), PhasePlan(recipe), "small"), folder, 0)
    warnings = [line["message"] for line in folder.read_events() if line["event"] == "warning"]
    expected = [f"checkpoint.also_at: no checkpoint is saved {named}"] if named else []
    assert warnings == expected


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a finished run raise SystemExit instead of ending the process."""
    monkeypatch.setattr(setup, "exit_now", mock.Mock(side_effect=SystemExit))
    monkeypatch.setattr(setup, "leave_processes", lambda finish: finish())


def test_the_summary_of_a_finished_run_knows_its_phases(
    experiment: Experiment,
    world: None,
    tmp_path: Path,
    leaves: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        begin(experiment, RunFolder(tmp_path), 20)
    assert "add a [[phase]] with its own schedule; training.steps alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        (
            {"training__steps": 25},
            "at the learning rate of 4.00e-04, use --set training.steps=50 --set optimizer.sch",
        ),
        (
            {
                "training__steps": 25,
                "optimizer__schedule": {"warmup_steps": 2, "decay": "constant"},
            },
            "to train longer, set training.steps above 25; to start over",
        ),
        (
            {"training__steps": 25, "optimizer__learning_rate": 1e-3},
            "to train longer, set training.steps above 25; to start over",
        ),
        (
            {"training__steps": 40},
            "to continue the run, use training.steps = 40 as before; to start over",
        ),
        (None, "to train longer, set training.steps above 25; to start over"),
    ],
)
def test_a_run_beyond_the_requested_steps_is_not_called_finished(
    changes: dict[str, Any] | None,
    advice: str,
    small: dict[str, Any],
    world: None,
    tmp_path: Path,
    leaves: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """25 steps are done and 20 are requested; the advice follows the recipe of the checkpoint.

    It quotes no learning rate if the command has another schedule.
    """
    earlier = parse_recipe(changed(small, **changes), "small") if changes else None
    plan = PhasePlan(parse_recipe(small, "small"))
    with pytest.raises(SystemExit):
        begin(check_phases(LaunchEnvironment(), plan, "small"), RunFolder(tmp_path), 25, earlier)
    output = capsys.readouterr().out
    title = "tiny is at step 25, beyond the requested training.steps = 20; nothing is left to train"
    assert output.splitlines()[0] == title and advice in output
    assert "finished" not in output


def test_the_other_ranks_wait_for_the_summary_of_a_finished_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm would kill rank 0 half a minute after the first rank has ended."""
    calls = mock.Mock()
    monkeypatch.setattr(setup, "dist", calls)
    monkeypatch.setattr(setup, "ignore_ending_signals", calls.ignore_ending_signals)
    calls.summarize.side_effect = UserError("unreadable")
    with pytest.raises(UserError, match="unreadable"):
        setup.leave_processes(calls.summarize)
    names = [call[0] for call in calls.mock_calls]
    assert names == ["ignore_ending_signals", "summarize", "barrier"]


def compare_files(cases: list[tuple[list[Recipe], str, str]]) -> list[tuple[str, str]]:
    """Compare what two ranks have read; return rejections and what this rank has printed.

    Args:
        cases: recipes, hashes of corpora, and hashes of the code, of both ranks
    """
    rank, outcomes = join_world().rank, []
    world = replace(LaunchEnvironment.from_environment(os.environ), local_size=1, local_rank=0)
    for recipes, corpora, code in cases:
        experiment = check_phases(world, PhasePlan(recipes[rank]), "small")
        data = TrainingData(experiment.whole_recipe, experiment.dims, rank)
        printed, problem = io.StringIO(), ""
        with (
            mock.patch.object(corpus_module, "_content", return_value=corpora[rank]),
            mock.patch.object(setup, "code_of_node", return_value={"models/a.py": code[rank]}),
            contextlib.redirect_stderr(printed),
        ):
            try:
                setup.check_files(experiment, data, ["rank 0 (a)", "rank 1 (b)"])
            except UserError as rejected:
                problem = str(rejected)
        outcomes.append((problem, printed.getvalue()))
    return outcomes


def test_nodes_whose_files_differ_are_named(corpus: Path) -> None:
    """Nodes may have files of their own under the same path."""
    table = small_recipe(corpus)
    first = parse_recipe(table, "small")
    other = parse_recipe(changed(table, optimizer__learning_rate=0.5), "small")
    cases = [([first, first], "aa", "cc"), ([first, other], "aa", "cc"),
             ([first, first], "ab", "cc"), ([first, first], "aa", "cd")]  # fmt: skip
    same, rate, tokens, code = zip(*run_ranks(2, compare_files, cases), strict=True)
    assert same == (("", ""), ("", ""))
    assert rate[0] == rate[1] and tokens[0] == tokens[1] and not rate[0][1] and not tokens[0][1]
    learning_rate = "optimizer.learning_rate is 0.004 on rank 0 (a), but 0.5 on rank 1 (b); use"
    assert rate[0][0].startswith(learning_rate)
    assert 'train" has other content on rank 1 (b) than on rank 0 (a); copy' in tokens[0][0]
    warning = "warning: models/a.py differs between rank 0 (a) and rank 1 (b); use the same commit"
    assert code[1] == ("", "") and not code[0][0] and code[0][1].startswith(warning)


def test_equal_tables_have_the_same_text() -> None:
    text = setup.canonical({"a": 5e8, "b": {"x": 1, "y": [0.5]}})
    assert text == setup.canonical({"b": {"y": [0.5], "x": 1.0}, "a": 500_000_000})
    assert text != setup.canonical({"b": {"y": [0.25], "x": 1}, "a": 500_000_000})


def test_a_damage_that_one_rank_has_found_ends_all_of_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks divide the check of a large index. A launcher must not blame that rank's node."""
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    index = copy / "train.idx"
    content = bytearray(index.read_bytes())
    content[token_file.HEADER.size + 4 * 5] ^= 2  # the length of a document in the second block
    index.write_bytes(content)
    recipe = parse_recipe(small_recipe(copy), "small")
    monkeypatch.setattr(token_file, "ENTRIES_PER_CHECK", 3)
    with pytest.raises(UserError, match="is damaged"):
        open_corpus(str(copy / "train"), recipe, rank=0, ranks=2)
    monkeypatch.setattr(token_file, "MIN_BLOCKS_PER_RANK", 1)
    assert open_corpus(str(copy / "train"), recipe, rank=0, ranks=2).damage is None
    found = open_corpus(str(copy / "train"), recipe, rank=1, ranks=2).damage
    assert "is damaged" in str(found)
    data = mock.Mock(spec=TrainingData, _opened={0: mock.Mock(**{"file.damage": found})})
    with pytest.raises(UserError, match="is damaged"):
        TrainingData.check_index(data)
