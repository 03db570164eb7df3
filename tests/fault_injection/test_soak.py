"""A short soak, and that it sees what it is for."""

from pathlib import Path

import pytest

from tests.fault_injection.soak import FAULTS, soak


def test_nothing_is_lost_under_kills(tmp_path: Path) -> None:
    # That some kills hit a save is seen by the faults below: "publish early" shows in no other way.
    report = soak(tmp_path, kills=5, seed=1, resumes=2)
    assert not report.wrong, str(report)
    assert report.kills.total() >= 5 and report.resumes >= 2


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    report = soak(tmp_path, kills=30, seed=2, fault=fault)
    wrong = "\n".join(report.wrong)
    # Noticed for what it is, and not because the fault itself has crashed the run.
    assert ("manifest.json is missing" if fault == "publish early" else " instead of {") in wrong
    assert "Traceback" not in wrong
