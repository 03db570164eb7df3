import os
import signal
import subprocess
import sys
import time

import pytest

from recipes.training import supervisor
from recipes.training.supervisor import GUARD, Breadcrumb, Sighting, collective_of, describe_hang

NAMES = [f"rank {rank} (node{1 + rank // 2})" for rank in range(4)]


def sighting(rank: int, *, count: int = 10, waits_in: str = "recv") -> Sighting:
    return Sighting(
        rank, f"step 7, RecvGrad of micro-batch {rank}", count, waits_in, "p2p.py:81 recv"
    )


@pytest.mark.parametrize(
    ("sightings", "said"),
    [
        ([sighting(0), sighting(1)],
         "rank 2 (node2), rank 3 (node2) do not answer: stopped, dead or cut off. rank 0 (node1): "
         "step 7, RecvGrad of micro-batch 0; it waits in recv, at p2p.py:81 recv"),
        ([sighting(0), sighting(1, waits_in=""), sighting(2, count=9), sighting(3)],
         "rank 1 (node1) is behind: step 7, RecvGrad of micro-batch 1; it waits in no collective"),
        ([sighting(0), sighting(1), sighting(2, count=9), sighting(3)], "rank 2 (node2) is behind"),
    ],
)  # fmt: skip
def test_who_is_behind(sightings: list[Sighting], said: str) -> None:
    assert describe_hang({each.rank: each for each in sightings}, NAMES).startswith(said)


def test_a_crumb_says_where() -> None:
    crumb = Breadcrumb()
    assert str(crumb) == "step 0, starting"
    crumb.note("waiting for data", step=3)
    crumb.note("ForwardPass", micro_batch=2)
    assert str(crumb) == "step 3, ForwardPass of micro-batch 2" and crumb.count == 2


def test_a_stack_tells_its_collective() -> None:
    code = compile("def all_reduce():\n    return inner()\n", supervisor.COLLECTIVES, "exec")
    space = {"inner": lambda: sys._getframe()}
    exec(code, space)
    assert collective_of(space["all_reduce"]()) == "all_reduce"
    assert collective_of(sys._getframe()) == ""


@pytest.fixture
def guarded() -> subprocess.Popen:
    """A process that has a guard of two seconds, and beats as long as it runs."""
    script = (
        "import subprocess, sys, time\n"
        f"guard = subprocess.Popen([sys.executable, {str(GUARD)!r}, '2', 'rank 5 (node1)'],"
        " stdin=subprocess.PIPE)\n"
        "print(guard.pid, flush=True)\n"
        "while True:\n    guard.stdin.write(b'.'); guard.stdin.flush(); time.sleep(0.3)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_a_guard_ends_what_is_stopped_and_nothing_else(guarded: subprocess.Popen) -> None:
    assert guarded.stdout.readline()
    time.sleep(3)
    assert guarded.poll() is None  # it beats
    os.killpg(guarded.pid, signal.SIGSTOP)  # all of the job, guard included, as Ctrl-Z does
    time.sleep(3)
    os.killpg(guarded.pid, signal.SIGCONT)
    time.sleep(1)
    assert guarded.poll() is None
    os.kill(guarded.pid, signal.SIGSTOP)
    assert guarded.wait(timeout=10) == -signal.SIGKILL
    words = guarded.communicate(timeout=10)[1]  # comes when the guard has ended, too
    assert "rank 5 (node1) has not answered for 2 s and is ended" in words


def test_a_guard_ends_with_its_rank(guarded: subprocess.Popen) -> None:
    assert guarded.stdout.readline()
    guarded.kill()
    assert guarded.communicate(timeout=10)[1] == ""  # comes when the guard has ended, too
