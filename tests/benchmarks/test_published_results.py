"""The command that compares with published results and plain training loops."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import published_results
from benchmarks.published_results import differences, plain, relative_difference
from tests.commands import run_here
from tests.conftest import long_in_turn
from threefold.commands import convert
from threefold.run_folder.folder import RunFolder

STEPS = 8


def convert_here(_: str, *words: str) -> str:
    """Run convert.py in this process, which has loaded its imports."""
    return run_here(convert.main, *words).stdout


@long_in_turn(2)
def test_a_run_equals_a_plain_loop_and_another_rate_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_results.prepare()
    settings = [
        f"training.steps={STEPS}",
        f"training.evaluate_every={STEPS}",
        "optimizer.schedule.warmup_steps=3",
    ]
    monkeypatch.setattr(published_results, "PLAIN_STEPS", STEPS)
    monkeypatch.setattr(published_results, "PLAIN_SETTINGS", settings)
    monkeypatch.setattr(published_results, "python", convert_here)
    assert all(row.agrees for row in plain("Llama", tmp_path / "same"))
    lines = RunFolder(tmp_path / "same" / "run").read_metrics()

    def copy(folder: Path, *_: object) -> tuple[list[dict[str, Any]], float]:
        shutil.copytree(tmp_path / "same" / "run", folder)
        return lines, 1.0

    monkeypatch.setattr(published_results, "train", copy)
    monkeypatch.setattr(math, "cos", lambda angle: 1.0)  # of the plain loop's schedule
    assert not any(row.agrees for row in plain("Llama", tmp_path / "other"))


def test_differences_are_relative_and_leave_out_the_biases_of_keys() -> None:
    assert differences([{"loss": 2.02}, {"loss": 4.0}], [2.0, 4.0]) == [pytest.approx(0.01), 0.0]
    expected = torch.ones(12)
    ours = expected + torch.tensor([0.0] * 4 + [1.0] * 4 + [0.0] * 4)
    assert relative_difference("h.0.attn.c_attn.bias", expected, ours) == 0
    assert relative_difference("h.0.attn.c_proj.bias", expected, ours) == pytest.approx(
        12**-0.5 * 2
    )
