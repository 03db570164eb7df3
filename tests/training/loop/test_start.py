"""The start of a run: what it does with unfinished saves, and the recipe that its messages use."""

import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from recipes.training.checkpoint.resume import Request, Start
from recipes.training.checkpoint.resume_point import ResumePoint
from recipes.training.checkpoint.retention import RESERVED_DISK_BYTES, checkpoint_bytes
from recipes.training.loop import start
from recipes.training.loop.experiment import Experiment, check_stages
from recipes.training.recipe.loading import parse_recipe
from recipes.training.recipe.stages.plan import StagePlan
from recipes.training.recipe.topology import World
from recipes.training.run_folder.folder import RunFolder
from recipes.training.run_folder.progress import Progress
from tests.conftest import changed

Usage = namedtuple("Usage", ["free"])
LATE = {"name": "late", "start_step": 11, "optimizer": {"learning_rate": 1e-3}}


@pytest.fixture
def experiment(small: dict[str, Any]) -> Experiment:
    """Return an experiment of two stages, in its second one."""
    table = changed(small, checkpoint__every=20) | {"stage": [LATE]}
    plan = StagePlan(parse_recipe(table, "small"))
    return check_stages(World(), plan, "small").at(11)


def begin(experiment: Experiment, folder: RunFolder, step: int) -> None:
    """Begin a run that has done some steps."""
    found = mock.Mock(spec=ResumePoint, skipped={}, weights_only=False, in_memory=False)
    found.progress, found.changes.return_value = Progress(step), {}
    found.learning_rate_jump.return_value = ""
    begun = mock.Mock(spec=Start, found=found, progress=found.progress, request=Request())
    claim = SimpleNamespace(folder=folder, supervisor=SimpleNamespace(hosts=["a"]))
    data = mock.Mock(**{"context_imbalance.return_value": 1.0})
    with mock.patch.object(start, "begin_branch"):
        start.begin(experiment, claim, data, begun, mock.Mock())  # type: ignore[arg-type]


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


def test_the_disk_is_compared_with_the_saves_of_all_stages(
    experiment: Experiment, world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the first stage and that of the run are saved, so two checkpoints must fit."""
    size = checkpoint_bytes(experiment.recipe)
    free = RESERVED_DISK_BYTES + size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free))
    folder = RunFolder(tmp_path)
    begin(experiment, folder, 5)
    (warning,) = (line for line in folder.read_events() if line["event"] == "warning")
    assert "needs room for 2 (" in warning["message"]


def test_the_summary_of_a_finished_run_knows_its_stages(
    experiment: Experiment,
    world: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(start, "leave", mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        begin(experiment, RunFolder(tmp_path), 20)
    assert "add a [[stage]] with its own schedule; training.steps alone" in capsys.readouterr().out
