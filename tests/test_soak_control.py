"""A short soak of starts, kills, rollbacks and requests, and of faults that it has to detect."""

import re
from pathlib import Path

import pytest

from tests.soak_control import FAULTS, soak


def test_the_run_stays_in_the_branch_that_was_asked_for(tmp_path: Path) -> None:
    report = soak(tmp_path, rounds=10, seed=1)
    print(report)
    assert not report.wrong, str(report)
    assert report.rounds.total() == 10


NOTICED = {
    "stale rollbacks": r"instead of \{",
    "late abandonment": r"instead of \{|is saved",
    "rollbacks for ever": "after 1 rollbacks without a checkpoint in between",
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    report = soak(tmp_path, rounds=60, seed=2, fault=fault)
    assert re.search(NOTICED[fault], "\n".join(report.wrong))
