"""The forked processes that run test files."""

import subprocess
import sys
from pathlib import Path

import pytest

from threefold.config.loading import REPOSITORY

CONFTEST = """
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from tests import workers

workers.TESTS, workers.WAITING_FILES = Path(__file__).parent, ("test_waits.py",)

def pytest_configure(config):
    times = SimpleNamespace(core_seconds=Counter(), wall_seconds=Counter(), update=lambda *_: 0)
    config.pluginmanager.register(times, workers.TIMES)
"""
FILES = {
    "test_passes.py": """
import os, pytest, warnings

@pytest.fixture(scope="module")
def process():
    yield os.getpid()
    print("the fixture ends")

@pytest.mark.parametrize("number", range(3))
def test_shares_a_process(process, number, tmp_path):
    assert os.getpid() == process != os.getppid() and "worker-" in str(tmp_path)

def test_prints_and_fails(process):
    print("printed before the failure")
    warnings.warn("a warning of a test")
    assert process == 0
""",
    "test_dies.py": """
import os

def test_before(): pass
def test_dies(): os._exit(7)
def test_after(): pass
""",
    # The file that computes needs this one, which runs at the same time only if it waits.
    "test_computes.py": """
from pathlib import Path
import time

def test_overlaps():
    for _ in range(1000):
        if Path(__file__).with_name("begun").exists():
            return
        time.sleep(0.01)
    assert False
""",
    "test_waits.py": """
from pathlib import Path

def test_begins(): Path(__file__).with_name("begun").touch()
""",
}


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Run pytest on the files of a folder with one process that computes and one that waits."""
    words = ["-p", "tests.workers", "--workers", "1", "-p", "no:cacheprovider", "-q", *options]
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), *words, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"conftest.py": CONFTEST, "pytest.ini": "[pytest]\n", **FILES}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_reports_output_warnings_and_deaths_reach_the_main_process(folder: Path) -> None:
    code, output = run(folder)
    assert code == 1 and "7 passed" in output and "2 failed" in output, output
    assert "printed before the failure" in output and "the fixture ends" in output
    assert "UserWarning: a warning of a test" in output
    assert "test_dies" in output and "ended with exit code 7" in output


def test_the_first_failure_can_stop_all_processes(folder: Path) -> None:
    code, output = run(folder, "-x", "--deselect", "test_dies.py")
    assert code == 1 and "stopping after 1 failures" in output, output
    assert "1 failed" in output
