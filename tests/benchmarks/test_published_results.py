"""The command that compares with published results and plain training loops."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import published_results
from benchmarks.published_results import Row, differences, plain, relative_difference

STEPS = 8


def rows_of(folder: Path) -> list[Row]:
    """Return the comparison of a few steps of a Llama."""
    settings = [
        f"training.steps={STEPS}",
        f"training.evaluate_every={STEPS}",
        "optimizer.schedule.warmup_steps=3",
    ]
    with (
        mock.patch.object(published_results, "PLAIN_STEPS", STEPS),
        mock.patch.object(published_results, "PLAIN_SETTINGS", settings),
    ):
        return list(plain("Llama", folder))


@pytest.mark.long
def test_a_run_equals_a_plain_loop_and_another_rate_does_not(tmp_path: Path) -> None:
    published_results.prepare()
    assert all(row.agrees for row in rows_of(tmp_path / "same"))
    cosine = mock.patch.object(math, "cos", lambda angle: 1.0)  # of the plain loop's schedule
    with cosine:
        assert not any(row.agrees for row in rows_of(tmp_path / "other"))


def test_differences_are_relative_and_leave_out_the_biases_of_keys() -> None:
    assert differences([{"loss": 2.02}, {"loss": 4.0}], [2.0, 4.0]) == [pytest.approx(0.01), 0.0]
    expected = torch.ones(12)
    ours = expected + torch.tensor([0.0] * 4 + [1.0] * 4 + [0.0] * 4)
    assert relative_difference("h.0.attn.c_attn.bias", expected, ours) == 0
    assert relative_difference("h.0.attn.c_proj.bias", expected, ours) == pytest.approx(
        12**-0.5 * 2
    )
