"""Boundaries between phases: rollbacks over them, and the lock that a replaced process keeps."""

import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.conftest import changed
from threefold.config.loading import parse_recipe
from threefold.config.phases import PhasePlan
from threefold.pretrain import setup
from threefold.pretrain.after_step import after_step, roll_back
from threefold.pretrain.run import RunEnd
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import LeftPart, Progress
from threefold.run_folder.lock import FolderInUse, FolderLock
from threefold.runtime.exits import INTERRUPTED, STOPPED
from threefold.supervision.step_watch import Severity
from threefold.supervision.supervisor import Agreement
from threefold.tracking.tracker import Tracker


@pytest.fixture
def plan(small: dict[str, Any]) -> PhasePlan:
    """Return the plan of a run whose step 9 needs another engine; 8, then 4 samples per step."""
    long = {
        "name": "long",
        "start_step": 9,
        "model": {"sequence_length": 64},
        "batch": {"global_sequences": 4},
    }
    table = changed(small, optimizer__schedule={"warmup_steps": 0, "decay": "linear"})
    return PhasePlan(parse_recipe(table | {"phase": [long]}, "test"))


def run_at(plan: PhasePlan, step: int, checkpoint: int) -> Any:
    """Return a run that has done a step, and whose newest checkpoint is of another step."""
    run = mock.MagicMock()
    run.phase_plan, run.recipe = plan, plan.at(step).recipe
    run.last_step, run.last_step_of_engine = 20, plan.last_step_of_engine(step)
    run.is_save_due = lambda step: step == run.last_step_of_engine
    run.data.progress_after = lambda step: Progress().after(step, plan)
    run.writer.wait.return_value = None
    run.find_start.return_value = SimpleNamespace(
        found=SimpleNamespace(
            path=Path("x"),
            weights_only=False,
            progress=Progress().after(checkpoint, plan),
            skipped={},
            reader=mock.Mock(),
        ),
        rollbacks=0,
    )
    return run


def test_a_rollback_to_an_earlier_phase_starts_the_ranks_again(plan: PhasePlan) -> None:
    run = run_at(plan, 11, checkpoint=6)
    outcome = roll_back(run, 11, "a loss spike")
    assert outcome.step == 6
    assert outcome.ending is not None and outcome.ending.restarts_for_phase
    run.engine.load.assert_not_called()
    ((_, target, _), _) = run.tracker.roll_back.call_args
    assert target == Progress(6, 8 * 8 + 3 * 4, ((0, 64), (1, 76)))
    # The first phase repeats its last two steps with other samples, then the second one continues.
    assert target.after(9, plan) == Progress(9, 76 + 2 * 8 + 4, ((0, 64), (1, 76), (0, 92)))


def test_a_rollback_within_a_phase_keeps_the_ranks(plan: PhasePlan) -> None:
    run = run_at(plan, 11, checkpoint=9)
    outcome = roll_back(run, 11, "a loss spike")
    assert outcome == (9, None)
    run.engine.load.assert_called_once()
    run.data.resume.assert_called_once_with(Progress(9, 76, ((0, 64),)))


@pytest.mark.parametrize(
    ("step", "asked", "boundary"), [(7, "", False), (8, "", True), (8, "SIGTERM", False)]
)
def test_the_steps_of_an_engine_end_before_the_next_phase(
    plan: PhasePlan, step: int, asked: str, boundary: bool
) -> None:
    run = run_at(plan, step, checkpoint=0)
    run.watch.judge.return_value = None
    run.supervisor.agree.return_value = (asked, Severity.GOOD, False)
    run.snapshots, run.writer.save.return_value = None, None
    run.engine.diverged_replicas.return_value = []
    outcome = after_step(run, step, {"loss": 1.0, "grad_norm": 1.0})
    assert bool(outcome.ending and outcome.ending.restarts_for_phase) == boundary
    assert run.writer.save.called == (step == 8)


@pytest.mark.parametrize(
    ("step", "asked", "ends"),
    [(6, "SIGTERM", True), (7, "SIGTERM", True), (6, "", False), (8, "", True), (20, "", True)],
)
def test_a_save_after_which_no_step_follows_may_fill_the_disk(
    plan: PhasePlan, step: int, asked: str, ends: bool
) -> None:
    run = run_at(plan, step, checkpoint=0)
    run.is_save_due = lambda step: step in (6, 8, 20)
    run.watch.judge.return_value = None
    run.supervisor.agree.return_value = (asked, Severity.GOOD, False)
    run.snapshots, run.writer.save.return_value = None, None
    run.engine.diverged_replicas.return_value = []
    ending = after_step(run, step, {"loss": 1.0, "grad_norm": 1.0}).ending
    if asked:
        reason = f"saved at step {step} (SIGTERM); rerun the same command to resume"
        assert ending == RunEnd(INTERRUPTED, reason)
    ((_, _), options) = run.writer.save.call_args
    assert options == {"ends_process": ends}


def test_diverged_replicas_are_not_saved_by_a_run_that_is_asked_to_stop(plan: PhasePlan) -> None:
    run = run_at(plan, 7, checkpoint=0)
    run.watch.judge.return_value, run.snapshots = None, None
    run.supervisor.agree.return_value = ("SIGTERM", Severity.GOOD, False)
    run.engine.diverged_replicas.return_value = ["up differs between data ranks"]
    ending = after_step(run, 7, {"loss": 1.0, "grad_norm": 1.0}).ending
    assert ending and ending.code == STOPPED and "up differs" in ending.reason
    assert not run.writer.save.called


def test_a_failed_save_at_a_boundary_stops_the_run(plan: PhasePlan) -> None:
    run = run_at(plan, 8, checkpoint=0)
    run.writer.wait.return_value = "step 8 is not saved: the disk is full"
    run.writer.remedy.return_value = "the newest checkpoint is step 6"
    expected = RunEnd(STOPPED, f"{run.writer.wait()}; the newest checkpoint is step 6")
    assert setup.close_run(run, RunEnd(0, step=8)) == expected
    earlier = f"step 7 is not saved; {run.writer.wait()}"  # a save has failed before the last one
    assert (
        setup.close_run(run, RunEnd(STOPPED, earlier)).reason == f"{earlier}; {run.writer.remedy()}"
    )
    assert setup.close_run(run, RunEnd(STOPPED, "step 8: bad")).reason == "step 8: bad"


def test_a_request_during_the_save_at_a_boundary_stops_the_run(plan: PhasePlan) -> None:
    run = run_at(plan, 8, checkpoint=8)
    for request, expected in {
        "SIGTERM": RunEnd(
            INTERRUPTED, "saved at step 8 (SIGTERM); rerun the same command to resume"
        ),
        "": RunEnd(0, step=8),
    }.items():
        run.supervisor.agree.return_value = Agreement(request, Severity.GOOD, False)
        assert setup.close_run(run, RunEnd(0, step=8)) == expected


def test_a_save_that_has_failed_before_a_rollback_stops_the_run(plan: PhasePlan) -> None:
    run = run_at(plan, 11, checkpoint=9)
    run.writer.wait.return_value = "step 10 is not saved: the disk is full"
    assert roll_back(run, 11, "a loss spike").ending is None
    table = run.recipe.checkpoint.model_copy(update={"on_failure": "stop"})
    run.recipe = run.recipe.model_copy(update={"checkpoint": table})
    assert roll_back(run, 11, "a loss spike").ending == RunEnd(STOPPED, run.writer.wait())


def test_an_event_keeps_the_parts_of_the_data(plan: PhasePlan, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    target = Progress(6, 76, (LeftPart(0, 64), LeftPart(1, 76)))
    folder.event("start", 0)
    tracker = Tracker(plan.at(11).recipe, folder)
    tracker.roll_back(11, target, "a loss spike", parts=[{"phase": "long"}])
    history = folder.history()
    assert history.data_parts == {(6, 76): [{"phase": "long"}]}
    assert history.progress_at(6, history.rolled_back[6]) == target
    assert history.progress_at(6, 48) == Progress(6, 48)
    lines = folder.events.read_text()
    folder.events.write_text(lines.replace('"phase"', '"stage"'))  # as earlier versions wrote it
    assert lines != folder.events.read_text() and folder.history() == history


def test_a_new_process_inherits_the_lock_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited: dict[int, bool] = {}
    monkeypatch.setattr(
        setup,
        "_set_inheritable",
        lambda descriptor, *, inheritable: inherited.update({descriptor: inheritable}),
    )
    monkeypatch.setattr(setup, "finish_output", lambda seconds: None)
    monkeypatch.setattr(setup, "dist", mock.Mock(get_world_size=lambda: 1))
    execute = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(setup.os, "execve", execute)
    with (tmp_path / "lock").open("w") as lock, (tmp_path / "other").open("w") as other:
        folder: Any = SimpleNamespace(lock_descriptor=lock.fileno())
        number_of_other = other.fileno()
        with pytest.raises(InterruptedError):
            setup.replace_process(folder, {setup.AGENT_STORE: "True"})
    assert [number for number, kept in inherited.items() if kept] == [folder.lock_descriptor]
    assert number_of_other in inherited
    assert execute.call_args.args[2] == {setup.AGENT_STORE: "False"}


def test_a_new_process_resumes_automatically() -> None:
    command = setup.command_of(
        [
            "tiny.toml", "--resume", "never", "--set", "training.steps=9", "--resume-once=a",
            "--continued-at=1.5", "--lock", "7", "--run-dir=x",
        ],
        2.5,
        lock=8,
    )  # fmt: skip
    kept = ["tiny.toml", "--set", "training.steps=9", "--run-dir=x"]
    assert command[2:] == [*kept, "--continued-at=2.5", "--lock=8"]
    assert "--lock=8" not in setup.command_of([], 2.5, lock=None)


def test_a_replaced_process_keeps_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    lock.acquire()
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path).acquire()
    again = FolderLock(tmp_path, inherited=os.dup(lock.descriptor))
    again.acquire()
    lock.release()  # the descriptor of the earlier program is closed
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path).acquire()
    again.release()
    FolderLock(tmp_path, inherited=99).acquire()  # a descriptor that does not exist


def test_a_replaced_process_keeps_the_lock_without_flock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    first = FolderLock(tmp_path)
    first.acquire()
    first._released.set()  # its thread is gone
    with pytest.raises(FolderInUse):
        FolderLock(tmp_path).acquire()
    again = FolderLock(tmp_path, inherited=first.descriptor)
    again.acquire()
    assert again._holds(again.exclusive)
    again.release()
