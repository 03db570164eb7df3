"""The benchmark of memory over steps: its slope, and a run that does not grow."""

import sys
from unittest import mock

import pytest

from benchmarks import memory_growth
from benchmarks.memory_growth import MAX_GROWTH, Sample, growth, table_cell, train
from models.errors import UserError
from tests.conftest import long_in_turn


def samples_of(slope: float, *, steps: int = 1000, start: float = 400.0) -> list[Sample]:
    """Return samples that grow by `slope` MB per 1,000 steps between the start and the save."""
    grown = [Sample(step, 100.0 + step) for step in range(10, 301, 10)]
    settled = [Sample(step, start + slope * step / 1000) for step in range(310, steps, 10)]
    return [*grown, *settled, Sample(steps, 9999.0)]


@pytest.mark.parametrize("slope", [0.0, 4.0, 130.0])
def test_growth_is_the_slope_after_the_first_steps(slope: float) -> None:
    assert growth(samples_of(slope)) == pytest.approx(slope, abs=1e-6)


def test_too_few_samples_are_rejected() -> None:
    with pytest.raises(UserError, match="after step 300; use more --steps"):
        growth(samples_of(1.0, steps=350))


def test_too_few_steps_end_the_benchmark_with_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_growth, "train", lambda *_: [samples_of(1.0, steps=350)])
    monkeypatch.setattr(sys, "argv", ["memory_growth.py", "--steps", "350", "--only", "1 rank"])
    with pytest.raises(SystemExit) as ended:
        memory_growth.main()
    assert ended.value.code == 2
    assert "--steps 350, 1 rank: only 4 samples" in capsys.readouterr().err


def test_an_interrupted_benchmark_leaves_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = mock.Mock(running={})
    monkeypatch.setattr(memory_growth, "start_interpreters", lambda *_, **__: ranks)
    monkeypatch.setattr(memory_growth, "write_corpus", mock.Mock())
    monkeypatch.setattr(memory_growth, "watch", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train("2 ranks, data-parallel", 350)
    ranks.stop.assert_called_once()


def test_the_table_shows_the_first_and_the_last_sample() -> None:
    cell = table_cell(samples_of(1000.0, start=0.0))
    assert cell.startswith("310: 310, ") and cell.endswith(", 990: 990")


@long_in_turn(0)
def test_the_memory_of_a_pipeline_does_not_grow() -> None:
    """With torch's flight recorder it grows by far more than the limit."""
    ranks = train("2 ranks, pipeline", steps=300)
    assert max(growth(samples, settled=100) for samples in ranks) < MAX_GROWTH
