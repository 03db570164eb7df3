"""Ranks on this machine: messages, failures, time limits, and the end of all of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from threefold.config.sections import REPOSITORY
from threefold.runtime.ranks import RankFailed, log_tails, start_interpreters


def end_of_rank_1(end: str) -> int:
    """Let rank 1 end as told, while rank 0 waits for it."""
    if os.environ["RANK"] == "0":
        signal.pause()
    if end == "raise":
        raise ValueError("a lost tensor")
    os.kill(os.getpid(), signal.SIGKILL if end == "kill" else signal.SIGSTOP)
    return 0


@pytest.mark.parametrize(
    ("end", "reason"),
    [("raise", "rank 1 exited with code 1\n(.|\n)*rank1:\n(.|\n)*ValueError: a lost tensor"),
     ("kill", "rank 1 exited with code -9"), ("stop", r"ranks \[0, 1\] sent nothing within 0.3")],
)  # fmt: skip
def test_a_rank_that_fails_or_hangs_ends_all_ranks(end: str, reason: str) -> None:
    with pytest.raises(RankFailed, match=reason):
        run_ranks(2, end_of_rank_1, end, seconds=0.3 if end == "stop" else 60)


RANK_0_WAITS = """
import os, signal, sys
if os.environ["RANK"] == "1":
    sys.exit("no data")
signal.alarm(20)
signal.pause()
"""


def test_a_rank_that_fails_ends_the_wait_for_the_others(tmp_path: Path) -> None:
    ranks = start_interpreters(2, ["-c", RANK_0_WAITS], logs=tmp_path, variables={})
    ranks.wait(until_failure=True)
    assert ranks.ended() == {"rank 1": 1}
    ranks.stop()
    assert ranks.ended() == {"rank 0": -signal.SIGKILL, "rank 1": 1}
    assert log_tails(sorted(tmp_path.iterdir())) == "rank1:\nno data"


INTERRUPTED = """
import sys
from pathlib import Path
from threefold.runtime.ranks import ForkedRanks
folder = sys.argv[1]
ForkedRanks(1, print, logs=Path(folder), preload=["slow"], variables={"PYTHONPATH": folder})
"""
SLOW_IMPORT = """
import os, signal, time
os.kill(os.getppid(), signal.SIGINT)
time.sleep(300)
"""


def test_the_fork_server_of_an_interrupted_command_ends_during_its_imports(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_IMPORT)
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    # This returns once no process holds the pipe of the output.
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.stderr.endswith("KeyboardInterrupt\n")
