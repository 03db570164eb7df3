"""`--resume CHECKPOINT` and `--resume never`, killed at every point of start-up."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.errors import SharedError, UserError
from tests.checkpoint.test_manifest import write_checkpoint
from tests.conftest import each_in_turn
from tests.ranks import join_world, run_ranks
from threefold.checkpoint import resume
from threefold.checkpoint.resume import ResumeRequest, Start, begin_branch, find_start
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import published, set_aside, step_of
from threefold.run_folder.json_lines import LineFile

STEPS = (8, 16, 24, 32)
MAX_INSTANTS = 200  # more than any request has


class KilledError(BaseException):
    """A simulated SIGKILL: no exception handler in the tested code catches it."""


class Killer:
    """Ends the process at the n-th instant, before or after an operation that changes the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.left = -1  # negative: never dies
        for name in ("rename", "fsync"):
            monkeypatch.setattr(os, name, self._mortal(getattr(os, name)))
        write = LineFile._write

        def torn(lines: LineFile, content: bytes) -> None:
            if self._dies():
                write(lines, content[: len(content) // 2])
                raise KilledError
            write(lines, content)

        monkeypatch.setattr(LineFile, "_write", torn)

    def _mortal(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if self._dies():
                raise KilledError
            result = operation(*arguments)
            if self._dies():
                raise KilledError
            return result

        return run

    def _dies(self) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.fixture
def recipe(small, world: None, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setattr(resume, "check_same_run", lambda *_: None)
    return parse_recipe(small, "test")


def write_run(path: Path) -> None:
    """Write a run of 33 steps with checkpoints, metrics, events and an abandoned checkpoint."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    folder.event("start", 0)
    for step in range(1, 34):
        folder.metric({"step": step, "tokens": 8 * 32 * step, "run": path.name})
    for step in (*STEPS, 40):
        write_checkpoint(folder.checkpoints, step)
        folder.event("save", step)
    set_aside(folder.checkpoints / "step-0000040", "earlier")
    copy = LineFile(path / "metrics.earlier.jsonl", keys={"step": (int,)})
    for step in range(1, 42):
        copy.append({"step": step, "tokens": 8 * 32 * step, "run": "earlier"})


def start_again(path: Path, request: ResumeRequest, recipe: Recipe) -> Start:
    """Run the part of a process that precedes the engine."""
    folder = RunFolder(path)
    folder.hold()
    try:
        start = find_start(folder, request, recipe, {})
        begin_branch(folder, start)
        folder.prepare(recipe, start.progress)
    finally:
        folder._lock.release()  # the kernel does this when a process ends
    return start


def kept(home: Path) -> tuple[set[str], set[tuple[str, int]]]:
    """Return all checkpoints and all metrics in any folder below `home`."""
    checkpoints = {str(file.read_bytes()) for file in home.rglob("manifest.json")}
    lines = [line for file in home.rglob("metrics*.jsonl") for line in lines_of(file)]
    return checkpoints, {(line["run"], line["step"]) for line in lines}


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of metrics with the names of their runs, which are not metrics."""
    return LineFile(metrics, keys={"step": (int,)}).read()


REQUESTS = {
    "an earlier one": ("run/checkpoints/step-0000016", 16, "run"),
    "the newest": ("run/checkpoints/step-0000032", 32, "run"),
    "an abandoned one": ("run/checkpoints/abandoned-earlier-step-0000040", 40, "earlier"),
    "one of another run": ("other/checkpoints/step-0000008", 8, "other"),
    "never": ("never", 0, ""),
}


@pytest.mark.parametrize("name", each_in_turn(REQUESTS, ["an earlier one", "never"]))
def test_a_request_survives_a_kill_at_any_instant(
    name: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, step, metrics_of = REQUESTS[name]
    for run in ("run", "other"):
        write_run(tmp_path / "template" / run)
    killer, obeyed, instant, alive = Killer(monkeypatch), [], 0, True
    while alive:
        instant += 1
        home = tmp_path / str(instant)
        for run in ("run", "other"):
            shutil.copytree(tmp_path / "template" / run, home / run)
        before = kept(home)
        if step == STEPS[-1]:
            before[1].discard(("run", 33))  # without the request, the step is repeated identically
        request = ResumeRequest(str(home / where) if "/" in where else where)
        killer.left = instant
        try:
            start_again(home / "run", request, recipe)
            alive = False
        except KilledError:
            pass
        killer.left = -1
        found = start_again(home / "run", ResumeRequest(), recipe)  # requeued
        obeyed.append(found.progress.step == step)
        if not obeyed[-1]:  # killed before the request was on the disk, so it has no effect
            assert found.progress.step == STEPS[-1] and instant < 6
            continue
        again = start_again(home / "run", ResumeRequest(), recipe)  # killed while loading
        assert again.found.path == found.found.path and again.progress.step == step
        folder = RunFolder(home / "run")
        assert {step_of(path) for path in published(folder.checkpoints)} <= {
            each for each in STEPS if each <= step and metrics_of == "run"
        }
        lines = lines_of(folder.metrics)
        assert [(line["run"], line["step"]) for line in lines] == [
            (metrics_of, each) for each in range(1, step + 1) if each <= 33 or step == 40
        ]
        assert all(part <= whole for part, whole in zip(before, kept(home), strict=True))
        folder.event("resume", step, samples=8 * step)
        write_checkpoint(folder.checkpoints, step + 8)
        assert start_again(home / "run", ResumeRequest(), recipe).progress.step == step + 8
    assert obeyed[-1] and instant < MAX_INSTANTS
    assert obeyed == sorted(obeyed) and (obeyed.count(True) > 5 or name == "never")


def test_a_request_is_carried_out_once(recipe: Recipe, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    request = ResumeRequest(str(tmp_path / "run/checkpoints/step-0000008"), once="job-7")
    assert start_again(tmp_path / "run", request, recipe).progress.step == 8
    folder = RunFolder(tmp_path / "run")
    folder.event("resume", 8, samples=64)
    write_checkpoint(folder.checkpoints, 16)
    assert start_again(tmp_path / "run", request, recipe).progress.step == 16  # requeued
    other = ResumeRequest(request.resume, once="job-8")
    assert start_again(tmp_path / "run", other, recipe).progress.step == 8


def test_rollbacks_of_an_abandoned_branch_do_not_count(recipe: Recipe, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.event("rollback", 34, to=32, samples=272)
    start = start_again(tmp_path / "run", ResumeRequest(), recipe)
    assert start.progress.samples == 272 and start.rollbacks == 1
    request = ResumeRequest(str(folder.checkpoints / "step-0000016"))
    start = start_again(tmp_path / "run", request, recipe)
    assert start.progress.samples == 128 and start.rollbacks == 0
    folder.event("resume", 16, samples=128)
    for step in (24, 32):
        write_checkpoint(folder.checkpoints, step)  # killed before the event of the save
    start = start_again(tmp_path / "run", ResumeRequest(), recipe)
    assert start.progress.step == 32 and start.progress.samples == 256 and start.rollbacks == 0


def test_a_torn_event_is_skipped(recipe: Recipe, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    for file in (tmp_path / "run/events.jsonl", tmp_path / "run/metrics.jsonl"):
        with file.open("ab") as stream:
            stream.write(b'{"step": 34, "ev' + b"\0" * 100)
    assert start_again(tmp_path / "run", ResumeRequest(), recipe).progress.step == 32
    assert [line["step"] for line in RunFolder(tmp_path / "run").read_metrics()][-1] == 32


@pytest.mark.parametrize("name", ["an abandoned one", "one of another run"])
def test_metrics_are_found_if_checkpoints_are_on_another_disk(
    name: str, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint folders of both runs are links; the requeued start uses the same path."""
    where, step, metrics_of = REQUESTS[name]
    for run in ("run", "other"):
        write_run(tmp_path / run)
        (tmp_path / run / "checkpoints").rename(tmp_path / f"scratch {run}")
        (tmp_path / run / "checkpoints").symlink_to(tmp_path / f"scratch {run}")
    for request in (ResumeRequest(str(tmp_path / where)), ResumeRequest()):
        start = start_again(tmp_path / "run", request, recipe)
        assert start.progress.step == step
        lines = lines_of(RunFolder(tmp_path / "run").metrics)
        assert {line["run"] for line in lines} == {metrics_of} and lines[-1]["step"] == step
    assert "warning" not in capsys.readouterr().err


def test_missing_metrics_of_a_checkpoint_are_a_warning(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("run", "other"):
        write_run(tmp_path / run)
    (tmp_path / "other" / "metrics.jsonl").unlink()
    request = ResumeRequest(str(tmp_path / "other/checkpoints/step-0000008"))
    start_again(tmp_path / "run", request, recipe)
    said = capsys.readouterr().err
    assert f"warning: {tmp_path / 'other' / 'metrics.jsonl'} does not exist" in said
    assert RunFolder(tmp_path / "run").read_metrics()[-1]["step"] == 8


@pytest.mark.parametrize("weights", [False, True])
def test_lost_checkpoints_are_not_replaced_by_a_new_run(
    weights: bool, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    write_run(path)
    shutil.rmtree(path / "checkpoints")
    before = {file: file.read_bytes() for file in path.glob("*.jsonl")}
    if weights:
        initial = resume.ResumePoint(None, weights_only=True)
        monkeypatch.setattr(resume, "find_initial_weights", lambda *_, **__: initial)
    with pytest.raises(UserError, match=r"has no checkpoint, but .* step 40 was saved there"):
        start_again(path, ResumeRequest(), recipe)
    assert {file: file.read_bytes() for file in path.glob("*.jsonl")} == before
    assert start_again(path, ResumeRequest("never"), recipe).progress.step == 0
    assert (
        start_again(path, ResumeRequest(), recipe).progress.step == 0
    )  # this run has saved nothing


@pytest.mark.parametrize("pending", [False, True])
def test_a_branch_whose_first_checkpoint_has_gone_is_described(
    pending: bool, recipe: Recipe, tmp_path: Path
) -> None:
    write_run(tmp_path / "other")
    begin = tmp_path / "other/checkpoints/step-0000008"
    folder = RunFolder(tmp_path / "new")
    start_again(folder.path, ResumeRequest(str(begin)), recipe)
    if not pending:
        folder.event("resume", 8)

    def said() -> str:
        with pytest.raises(UserError) as raised:
            start_again(folder.path, ResumeRequest(), recipe)
        return str(raised.value)

    shutil.rmtree(begin)  # by the retention of the other run
    never = "start again with --resume never (this run folder is kept under another name)"
    problem = f"the current branch of this run begins at {begin}, which"
    another = "put that checkpoint back, use --resume with another one"
    newest = f"{another}, for example {begin.parent}/step-0000032, or {never}"
    assert said() == f"{problem} does not exist any more; {newest}"
    begin.mkdir()
    assert said() == f"{problem} is damaged (manifest.json is missing); {newest}"
    shutil.rmtree(tmp_path / "other")
    assert said() == f"{problem} does not exist any more; {another}, or {never}"
    write_checkpoint(folder.checkpoints, 12)
    if pending:  # of an earlier branch
        example = f", for example {folder.checkpoints}/step-0000012"
        assert said() == f"{problem} does not exist any more; {another}{example}, or {never}"
    else:
        (folder.checkpoints / "step-0000012/manifest.sha256").unlink()
        own = f"all checkpoints in {folder.checkpoints} are damaged (step-0000012: manifest.sha256"
        assert said().startswith(f"{own} is missing), and {problem} does not exist any more; ")


def test_checkpoints_that_were_saved_before_a_branch_do_not_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (8, 16, 24):
        folder.event("save", step)
    assert folder.history().saved == {8, 16, 24}
    folder.event("rollback", 30, to=16, samples=300)
    assert folder.history().saved == {8, 16}
    folder.event("branch", 8, checkpoint="step-0000008", stamp="a", samples=64)
    assert folder.history().saved == {8}
    folder.event("save", 12)
    folder.event("branch", 0, checkpoint="", stamp="b")
    assert folder.history().saved == set()


def test_listings_that_differ_for_a_moment_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    of_another_rank = [["step-0000008"], ["step-0000008", "step-0000016"]]
    monkeypatch.setattr(resume, "SECONDS_BETWEEN_TRIES", 0.0)
    monkeypatch.setattr(resume, "gathered", lambda own: [own, of_another_rank.pop(0)])
    both = [Path("step-0000008"), Path("step-0000016")]
    assert resume._agreed(lambda: both) == both
    monkeypatch.setattr(resume, "gathered", lambda own: [own, []])
    with pytest.raises(UserError, match="the ranks see different checkpoints"):
        resume._agreed(lambda: both)


def see_folders(cases: list[list[Path]]) -> list[str]:
    """Lock the folder that rank 0 sees, and return the rejections of pairs of folders."""
    resume.SECONDS_BETWEEN_TRIES = 0.001
    rank, problems = join_world().rank, []
    for folders in cases:
        own = RunFolder(folders[rank])
        assert not resume.lock_run_folder(own, wait_seconds=0)
        try:
            resume.check_folder_is_shared(own.path, ["rank 0 (a)", "rank 1 (b)"])
        except SharedError as problem:
            problems.append(str(problem))
        own.release()
    return problems


def test_a_run_folder_that_a_node_does_not_share_is_rejected(tmp_path: Path) -> None:
    one, other, absent = (tmp_path / name for name in ("one", "other", "absent"))
    RunFolder(other).hold()  # a run of its own
    outcomes = run_ranks(2, see_folders, [[one, one], [one, other], [one, absent]])
    said = "is not the folder that rank 0 (a) has locked; use a --run-dir on storage that all nodes"
    assert [len(problems) for problems in outcomes] == [2, 2]
    assert all(f" on rank 1 (b) {said}" in problem for problem in [*outcomes[0], *outcomes[1]])
