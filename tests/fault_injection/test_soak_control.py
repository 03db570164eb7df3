"""A short soak of starts, kills, rollbacks and requests, and of faults that it must detect."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import each_in_turn
from tests.fault_injection.soak_control import left_over, soak
from tests.fault_injection.soak_faults import FAULTS
from threefold.supervision.supervisor import WATCHDOG


@pytest.mark.long
def test_the_run_stays_on_the_requested_branch(tmp_path: Path) -> None:
    report = soak(tmp_path, rounds=10, seed=1)
    print(report)
    assert not report.wrong, str(report)
    assert report.rounds.total() == 10


def test_a_watchdog_that_outlives_its_rank_is_reported() -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(WATCHDOG)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)  # fmt: skip
    with rank:
        rank.stdout.readline()
        (left,) = left_over([rank.pid], seconds=0)
        assert "watchdog.py" in left and str(rank.pid) in left
        assert left_over([rank.pid + 1], seconds=0) == []
        rank.stdin.close()
    assert left_over([rank.pid]) == []


RANK = """
import os, subprocess, sys
command = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "rank 0"]
watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
while not open(f"/proc/{watchdog.pid}/cmdline").read():  # the kernel fills it in after exec
    pass
print("started", flush=True)
sys.stdin.read()
"""
NOTICED = {
    "stale rollbacks": r"instead of \{",
    "late abandonment": r"instead of \{|is saved",
    "rollbacks for ever": "after 1 rollbacks without a checkpoint in between",
}


@pytest.mark.parametrize("fault", each_in_turn(FAULTS))
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    # It ends when the fault shows, which depends on the instants of the kills.
    report = soak(tmp_path, rounds=150, seed=2, fault=fault)
    assert re.search(NOTICED[fault], "\n".join(report.wrong))
