"""A short soak, and faults that it must detect."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import each_in_turn
from tests.fault_injection.soak import FAULTS, soak


@pytest.mark.parametrize(
    "variants",
    each_in_turn([(), ("experts",), ("experts", "latent"), ("muon",), ("average",)]),
    ids=lambda variants: "-".join(variants) or "dense",
)
def test_nothing_is_lost_under_kills(variants: Sequence[str], tmp_path: Path) -> None:
    # The faults below show that some kills hit a save: "publish early" is detected in no other way.
    report = soak(tmp_path, kills=5, seed=1, resumes=2, variants=variants)
    assert not report.wrong, str(report)
    assert report.kills.total() >= 5 and report.resumes >= 2


@pytest.mark.parametrize("fault", each_in_turn(FAULTS))
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    report = soak(tmp_path, kills=30, seed=2, fault=fault)
    wrong = "\n".join(report.wrong)
    # The fault is detected by its effect, and not because it has crashed the run.
    assert ("manifest.json is missing" if fault == "publish early" else " instead of {") in wrong
    assert "Traceback" not in wrong
