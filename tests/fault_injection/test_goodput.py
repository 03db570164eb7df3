"""The faults of goodput.py: a run that ends early, and a rank that has just ended."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fault_injection.goodput import Run, disturb


def run_with_code(folder: Path, code: int | None) -> Run:
    """Return a run that has finished its first step, whose launch.py has ended with a code."""
    (folder / "run").mkdir()
    (folder / "log").write_text("the end of the log")
    events = [{"event": "attempt", "time": 0.0}, {"event": "first_step", "time": 2e12}]
    (folder / "run" / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    process: Any = SimpleNamespace(poll=lambda: code)
    return Run(folder / "run", process)


def test_a_run_that_has_ended_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Run, "ranks", lambda _: [])
    with pytest.raises(RuntimeError, match="the end of the log"):
        disturb(run_with_code(tmp_path, 1), 1, mean_seconds=0.01, chance=random.Random(1))


def test_a_rank_that_has_just_ended_is_not_a_failure(tmp_path: Path, monkeypatch: Any) -> None:
    killed = []

    def kill(process: int, number: int) -> None:
        killed.append(process)
        if len(killed) == 1:
            raise ProcessLookupError

    monkeypatch.setattr(Run, "ranks", lambda _: [4_000_001, 4_000_002])
    monkeypatch.setattr(os, "kill", kill)
    run = run_with_code(tmp_path, None)
    times = disturb(run, 1, mean_seconds=0.01, chance=random.Random(1))
    assert len(times) == 1 and len(killed) == 2
