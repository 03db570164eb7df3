"""Run test files in forked processes: `python -m tests.parallel [PATH ...] [OPTION OF PYTEST ...]`.

This process imports what most tests need, once, and forks processes that run pytest, each on one
file or several short ones. The tests of a file share fixtures and run in order. As many processes
run as there are cores, and more while a core is idle, because many tests wait. The longest files
come first, according to tests/durations.json, which `--record` writes.

pytest-xdist would import and collect everything in each of its processes.
"""

import argparse
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from pytest import ExitCode

REPOSITORY = Path(__file__).resolve().parents[1]
DURATIONS = REPOSITORY / "tests/durations.json"  # value of -m -> file -> seconds
MIN_SECONDS_RECORDED = 1.0
USUAL_SECONDS = 0.3  # of a file without a recorded time
SECONDS_TOGETHER = 6.0  # of short files that share a process
SECONDS_BETWEEN_STARTS = 1.0  # beyond one process per core, so that the previous one has begun
MAX_PROCESSES_PER_CORE = 3
MAX_BUSY_PERCENT = 75.0  # of all cores, for one process more
SECONDS_TO_END = 15.0  # of an interrupted process
FILES_SHOWN = 12  # those with the most core-seconds
PRELOADED_MODULES = ("wandb", "tests.commands")


def main() -> int:
    """Run the tests, print their outcomes, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write tests/durations.json")
    parser.add_argument("--processes", type=int, help="maximum number; default: 3 per core")
    parser.add_argument("-m", default="", dest="marker", help="marker of the tests, as for pytest")
    known, rest = parser.parse_known_args()
    paths = [each for each in rest if is_path(each)]
    options = [each for each in rest if each not in paths]
    if known.marker:
        options += ["-m", known.marker]
    if len(files := test_files(paths)) == 1 or any("::" in path for path in paths):
        return int(pytest.main([*options, *paths]))
    recorded = json.loads(DURATIONS.read_text(encoding="utf-8"))
    groups = grouped(files, recorded.get(known.marker))
    preload()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        suite = Suite(groups, options, Path(folder), known.processes)
        try:
            suite.run()
        except KeyboardInterrupt:
            suite.interrupt()
            print(f"interrupted: {len(suite.ended)} of {len(groups)} processes had ended")
            return 128 + signal.SIGINT
    if known.record:
        seconds = suite.seconds()
        recorded[known.marker] = {
            name: round(seconds[name], 1)
            for name in sorted(seconds)
            if seconds[name] >= MIN_SECONDS_RECORDED
        }
        DURATIONS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    return suite.summarize()


def is_path(word: str) -> bool:
    """Return True if an argument is a file, a folder or a test of tests/, not an expression."""
    path = Path(word.split("::")[0])
    return path.exists() and path.resolve().is_relative_to(REPOSITORY / "tests")


def test_files(paths: Sequence[str]) -> list[str]:
    """Return the test files at paths, by default all but those of the cluster."""
    found = []
    for path in [Path(path.split("::")[0]) for path in paths] or [REPOSITORY / "tests"]:
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return [os.path.relpath(path, REPOSITORY) for path in dict.fromkeys(found)]


def grouped(files: Sequence[str], seconds: dict[str, float] | None) -> list[list[str]]:
    """Return the files by process: the longest first, one by one, then the short ones together.

    seconds: recorded time of each longer file; None: nothing is known, and no file is short
    """
    if seconds is None:
        return [[file] for file in files]
    groups: list[list[str]] = []
    left = 0.0  # seconds of the last group that are free
    for file in sorted(files, key=lambda file: -seconds.get(file, USUAL_SECONDS)):
        expected = seconds.get(file, USUAL_SECONDS)
        if expected > left:
            groups.append([])
            left = max(SECONDS_TOGETHER, expected)
        groups[-1].append(file)
        left -= expected
    return groups


def preload() -> None:
    """Import what most tests need, and fork the fork server of all processes.

    The fork server is the child of this process, but the processes that use it cannot wait for it.
    """
    # Imported here, as torch is, since processes that tests spawn import this module.
    from tests.ranks import FORK_SERVER_MODULES
    from threefold.runtime.ranks import CPU_VARIABLES, environment

    resource_tracker.ensure_running()  # a process that is not forked
    with environment(CPU_VARIABLES), mock.patch.object(util, "spawnv_passfds", fork_server):
        for module in FORK_SERVER_MODULES:
            importlib.import_module(module)
        forkserver.ensure_running()
    # A rank would remove the temporary files of W&B's import at its end.
    for module in PRELOADED_MODULES:
        importlib.import_module(module)
    gc.freeze()
    forkserver.ForkServer.ensure_running = lambda _: None
    forkserver.ensure_running = lambda: None


def fork_server(_path: object, _words: object, descriptors: Sequence[int]) -> int:
    """Fork a fork server, which `spawnv_passfds` would let import everything again.

    descriptors: the open files that it keeps
    """
    if pid := os.fork():
        return pid
    try:
        for name in os.listdir("/proc/self/fd"):
            if (number := int(name)) > 2 and number not in descriptors:
                with contextlib.suppress(OSError):  # the listed folder itself
                    os.close(number)
        listening, alive = descriptors
        forkserver.main(listening, alive, [])
    except SystemExit:
        os._exit(0)  # the files of this process are removed by its parent
    finally:
        traceback.print_exc()
        os._exit(1)


class Outcomes:
    """A plugin that counts what the tests of a process result in, for its parent.

    Attributes:
        counts: number of tests, by outcome
        seconds: wall time, by file
        failed: names of the tests that failed
    """

    def __init__(self, file: Path):
        self.file = file
        self.counts, self.seconds = Counter[str](), Counter[str]()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a report of the set-up, the call or the tear-down of a test."""
        self.seconds[report.nodeid.split("::")[0]] += report.duration
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_unconfigure(self) -> None:
        """Write what was counted, with the core-seconds so far."""
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        core_seconds = sum(sum(resource.getrusage(each)[:2]) for each in whose)
        if ranks := sys.modules.get("tests.ranks"):  # the children of the fork server
            core_seconds += sum(ranks.core_seconds)
        facts = {"counts": self.counts, "seconds": self.seconds, "failed": self.failed}
        self.file.write_text(json.dumps(facts | {"core_seconds": core_seconds}), encoding="utf-8")


class Process:
    """A forked process that runs pytest on some files.

    Attributes:
        facts: what its `Outcomes` wrote; empty if it did not come to its end
    """

    def __init__(self, files: list[str], options: Sequence[str], folder: Path):
        self.files, self.folder = files, folder
        self.facts: dict[str, Any] = {}
        folder.mkdir()
        # No test is asynchronous, which anyio's plugin runs, or reads what was logged.
        without = ["-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:logging"]
        words = [*options, f"--basetemp={folder / 'temporary'}", *without, *files]
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=[words])
        self.process.start()

    def _run(self, words: list[str]) -> None:
        """Run pytest in the forked process."""
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.exit(pytest.main(words, plugins=[Outcomes(self.folder / "outcomes")]))

    def has_ended(self) -> bool:
        """Return True if the process has ended; its results are then known."""
        if self.process.is_alive():
            return False
        with contextlib.suppress(FileNotFoundError):
            self.facts = json.loads((self.folder / "outcomes").read_text(encoding="utf-8"))
        return True

    @property
    def has_failed(self) -> bool:
        """True if a test or the process itself has failed."""
        return self.process.exitcode not in (ExitCode.OK, ExitCode.NO_TESTS_COLLECTED)

    def core_seconds(self) -> float:
        """Return the processor time of the process and its children, without the ranks of prove.py.

        Zero if the process did not come to its end.
        """
        return self.facts.get("core_seconds", 0.0)

    @property
    def name(self) -> str:
        """The first file, and the number of the others."""
        first, *others = (file.removeprefix("tests/") for file in self.files)
        return f"{first} and {len(others)} more" if others else first

    def report(self) -> Iterator[str]:
        """Yield the sections that pytest printed, such as failures and warnings, and a summary."""
        text = (self.folder / "output").read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        sections = (number for number, line in enumerate(lines) if line.startswith("===="))
        first = 0 if self.has_failed else next(sections, len(lines))
        yield from lines[first:]
        if not self.facts:
            code = self.process.exitcode
            yield f"the process that ran {' '.join(self.files)} ended with exit code {code}"
        counts = ", ".join(f"{n} {outcome}" for outcome, n in self.facts.get("counts", {}).items())
        seconds = sum(self.facts.get("seconds", {}).values())
        yield f"{self.name}: {counts or 'no tests'} in {seconds:.1f} s"


class Suite:
    """The files that wait for a process, and the processes."""

    def __init__(
        self,
        groups: Sequence[list[str]],
        options: Sequence[str],
        folder: Path,
        max_processes: int | None = None,
    ):
        self.groups, self.options, self.folder = list(groups), options, folder
        self.cores = len(os.sched_getaffinity(0))
        self.max_processes = max_processes or MAX_PROCESSES_PER_CORE * self.cores
        self.running: list[Process] = []
        self.ended: list[Process] = []
        self.next_start = 0.0

    def run(self) -> None:
        """Run all files, and print a line about each process that ends."""
        total = len(self.groups)
        while self.groups or self.running:
            if self.groups and self.has_room():
                folder = self.folder / str(len(self.groups))
                self.running.append(Process(self.groups.pop(0), self.options, folder))
                self.next_start = time.monotonic() + SECONDS_BETWEEN_STARTS
                psutil.cpu_percent()
            time.sleep(0.02)
            for process in [process for process in self.running if process.has_ended()]:
                self.running.remove(process)
                self.ended.append(process)
                *sections, line = process.report()
                print(*sections, f"[{len(self.ended)}/{total}] {line}", sep="\n", flush=True)
                shutil.rmtree(process.folder, ignore_errors=True)

    def has_room(self) -> bool:
        """Return True if another process may start: fewer than cores, or a core is idle."""
        if len(self.running) < self.cores:
            return True
        if len(self.running) >= self.max_processes or time.monotonic() < self.next_start:
            return False
        self.next_start = time.monotonic() + SECONDS_BETWEEN_STARTS
        return psutil.cpu_percent() < MAX_BUSY_PERCENT  # since the previous call

    def seconds(self) -> Counter[str]:
        """Return the wall time of each file."""
        total: Counter[str] = Counter()
        for process in self.ended:
            total.update(process.facts.get("seconds", {}))
        return total

    def summarize(self) -> int:
        """Print the dearest files, the failures and the outcomes; return the exit code."""
        print("most core-seconds, without the ranks of prove.py:")
        for process in sorted(self.ended, key=Process.core_seconds, reverse=True)[:FILES_SHOWN]:
            print(f"{process.core_seconds():6.1f}  {process.name}")
        failures = [name for process in self.ended for name in process.facts.get("failed", ())]
        failed = [process for process in self.ended if process.has_failed]
        print(*(f"FAILED {name}" for name in failures), sep="\n", end="\n" if failures else "")
        counts = Counter[str]()
        for process in self.ended:
            counts.update(process.facts.get("counts", {}))
        print(", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
        return int(bool(failed))

    def interrupt(self) -> None:
        """Interrupt the processes, and kill those that do not end."""
        for process in self.running:
            assert process.process.pid
            os.kill(process.process.pid, signal.SIGINT)
        deadline = time.monotonic() + SECONDS_TO_END
        while self.running and time.monotonic() < deadline:
            time.sleep(0.05)
            self.running = [process for process in self.running if not process.has_ended()]
        for process in self.running:
            process.process.kill()


if __name__ == "__main__":
    sys.exit(main())
