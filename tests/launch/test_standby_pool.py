"""The standby processes of a node."""

import sys
import time
from pathlib import Path

import pytest

from threefold.launch import node_agent
from threefold.launch.node_agent import StandbyPool

READY = "import os, sys; os.write(1, b'ready\\n'); sys.stdin.read()"


@pytest.fixture
def pool(tmp_path: Path) -> StandbyPool:
    """Return a pool of one process that imports nothing."""
    said: list[str] = []
    made = StandbyPool(1, run="run", say=said.append)
    made.command = [sys.executable, "-c", READY]
    made.variables = {}
    return made


def wait_until_ready(pool: StandbyPool) -> None:
    deadline = time.monotonic() + 30
    while not pool.ready and time.monotonic() < deadline:
        pool.keep()
        time.sleep(0.02)
    assert len(pool.ready) == 1


def test_a_ready_process_that_dies_is_replaced(pool: StandbyPool) -> None:
    wait_until_ready(pool)
    (first,) = pool.ready
    first.kill()
    first.wait()
    pool.keep()
    wait_until_ready(pool)
    assert pool.ready != [first]
    pool.kill()


def test_a_process_that_cannot_be_started_is_tried_again_later(
    pool: StandbyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    pool.say = said.append

    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(node_agent.subprocess, "Popen", fail)
        pool.keep()
        pool.keep()  # not at once
    assert said == ["no standby process can be started: Resource temporarily unavailable"]
    monkeypatch.setattr(node_agent.time, "monotonic", lambda: pool._next_start)
    pool.keep()
    assert pool._starting is not None
    pool.kill()
