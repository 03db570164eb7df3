"""The command that runs test files in forked processes."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests import parallel
from tests.parallel import Suite, grouped

FILES = {
    "test_passes.py": """
import os, pytest

@pytest.mark.parametrize("number", range(3))
def test_prints(number, tmp_path):
    print("not shown")
""",
    "test_fails.py": """
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError("after the test")

def test_fails():
    print("shown with the failure")
    assert 1 == 2

def test_ends_badly(broken): pass
""",
    "test_dies.py": """
import os

def test_before(): pass
def test_dies(): os._exit(7)
""",
    # Each of the two files needs the other one, which runs at the same time.
    "test_waits_1.py": """
from pathlib import Path
import time

def test_the_other_begins():
    Path(__file__).with_suffix(".begun").touch()
    other = Path(__file__).with_name("test_waits_2.begun")
    for _ in range(3000):
        if other.exists():
            return
        time.sleep(0.01)
    assert False
""",
}
FILES["test_waits_2.py"] = FILES["test_waits_1.py"].replace("waits_2", "waits_1")
OPTIONS = ["-c", "/dev/null", "--rootdir"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "runs").mkdir()
    for name, text in FILES.items():
        (tmp_path / "tests" / name).write_text(text)
    return tmp_path


def suite_of(folder: Path, *names: str) -> Suite:
    """Return the suite that runs some of the files, each in a process of its own."""
    groups = [[str(folder / "tests" / name)] for name in names]
    return Suite(groups, [*OPTIONS, str(folder / "tests")], folder / "runs", max_processes=2)


def test_failures_and_dead_processes_are_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parallel, "REPOSITORY", folder)
    suite = suite_of(folder, "test_fails.py", "test_dies.py", "test_passes.py")
    suite.run()
    printed = capfd.readouterr().out
    assert "shown with the failure" in printed and "not shown" not in printed
    assert "test_dies.py ended with exit code 7" in printed
    assert "test_passes.py: 3 passed in" in printed
    assert suite.summarize() == 1
    *_, first, second, counts = capfd.readouterr().out.splitlines()
    assert first.startswith("FAILED") and first.endswith("test_fails.py::test_fails")
    assert second.endswith("test_fails.py::test_ends_badly")
    assert sorted(counts.split(", ")) == ["2 failed", "4 passed"]
    assert list((folder / "runs").iterdir()) == []


def test_a_suite_that_passes_has_exit_code_0(folder: Path) -> None:
    suite = suite_of(folder, "test_passes.py")
    suite.run()
    assert suite.summarize() == 0
    (name,) = suite.seconds()
    assert name.endswith("test_passes.py")


def test_files_run_at_the_same_time(folder: Path) -> None:
    suite = suite_of(folder, "test_waits_1.py", "test_waits_2.py")
    suite.run()
    assert suite.summarize() == 0


def test_an_interrupted_suite_leaves_no_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = suite_of(folder, "test_waits_1.py")  # waits for a file that does not run
    sleep = parallel.time.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if (folder / "tests/test_waits_1.begun").exists():
            monkeypatch.setattr(parallel.time, "sleep", sleep)
            raise KeyboardInterrupt

    monkeypatch.setattr(parallel.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        suite.run()
    (process,) = suite.running
    suite.interrupt()
    assert suite.running == [] and process.has_failed
    assert process.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(process.process.pid, 0)


def test_long_files_come_first_and_short_ones_share_a_process() -> None:
    seconds: dict[str, Any] = {"a": 2.0, "b": 30.0, "c": 5.0, "d": 0.5}
    assert grouped(["a", "b"], None) == [["a"], ["b"]]
    assert grouped(["a", "b", "c", "d", "new"], seconds) == [["b"], ["c"], ["a", "d", "new"]]
