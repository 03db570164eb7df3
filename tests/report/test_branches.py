"""The kept steps and the abandoned branches of a run."""

import math
from pathlib import Path
from typing import Any

from tests.report.synthetic import line_of, recipe_of, write_run
from threefold.report.run_record import abandoned_branches, divide, read_run
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress


def line(step: int, branch: str = "a", loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "branch": branch, "step_seconds": ord(branch[0])}


def shown(lines: list[dict[str, Any]]) -> str:
    return " ".join(f"{each['step']}{each['branch']}" for each in lines)


def test_the_later_line_of_a_step_counts() -> None:
    lines = [line(1), line(2), line(3), line(2, "b"), line(3, "b"), line(4, "b"), line(3, "c")]
    kept, branches = divide(lines)
    assert shown(kept) == "1a 2b 3c"
    assert [shown(branch) for branch in branches] == ["1a 2a 3a", "2b 3b 4b"]
    assert divide([line(2), line(1, "b")]) == ([line(1, "b")], [[line(2)]])


def test_a_copy_contributes_only_what_was_not_kept() -> None:
    kept = [line(1), line(2), line(3, "c"), line(4, "c")]
    first = [line(1), line(2), line(3), line(4)]
    second = [line(1), line(2), line(3, "b"), line(4, "b")]
    found = abandoned_branches(kept, [first, second, second])
    assert [shown(branch) for branch in found] == ["2a 3a 4a", "2a 3b 4b"]
    assert abandoned_branches(kept, [kept]) == []


def test_two_losses_that_are_not_numbers_are_equal() -> None:
    lines = [line(1), line(2, loss=math.nan), line(3)]
    copy = [dict(each) for each in lines]
    copy[1]["loss"] = float("nan")
    assert abandoned_branches(lines, [copy]) == []


def test_a_rollback_and_a_plain_resume_of_a_real_folder(tmp_path: Path) -> None:
    recipe = recipe_of()
    folder = RunFolder(write_run(tmp_path / "run", range(1, 61), recipe=recipe))
    folder.event("rollback", 60, to=40, samples=60 * 32, reason="the loss is 9")
    folder.prepare(recipe, Progress(40, 60 * 32), branching=True)
    for step in range(41, 81):
        folder.metric(line_of(recipe, step, tokens=(step + 20) * recipe.tokens_per_step))
    folder.prepare(recipe, Progress(70, 90 * 32))  # after a kill: the lost steps are not copied
    for step in range(71, 91):
        folder.metric(line_of(recipe, step, tokens=(step + 20) * recipe.tokens_per_step))
    found = read_run(folder.path, "run")
    assert found.problems == []
    assert found.steps.step.tolist() == list(range(1, 91))
    assert [branch.step.tolist() for branch in found.abandoned] == [list(range(40, 61))]
    assert found.steps.column("tokens")[40] == 61 * recipe.tokens_per_step
    assert found.abandoned[0].column("tokens")[1] == 41 * recipe.tokens_per_step


def test_steps_stay_increasing_if_the_file_could_not_be_rewritten(tmp_path: Path) -> None:
    steps = [*range(1, 61), *range(41, 71)]
    found = read_run(write_run(tmp_path / "run", steps), "run")
    assert found.steps.step.tolist() == list(range(1, 71))
    assert [branch.step.tolist() for branch in found.abandoned] == [list(range(40, 61))]
