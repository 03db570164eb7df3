"""Seed small faults into the code, one at a time, and check that the tests notice each of them.

    python -m tests.mutants
    python -m tests.mutants --only threefold/checkpoint
    python -m tests.mutants --part 1/10 --jobs 4

`tests/mutants/mutants.toml` lists the mutants: a file, a text that it contains once, the text that
replaces it, the test that has to fail, and the reason. The tests run in temporary copies of the
files that git tracks; your own files are never changed. First, all of these tests must pass
without a fault.

A mutant is noticed if its test fails, and not noticed if the test passes or reaches the time limit.
It is broken if the test cannot be imported or run. Exit code 0: at least 95 % of the mutants are
noticed by tests of `make test`, and the others by tests of `make long`; 1: fewer, or the tests
fail without a fault; 2: wrong options.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from models.errors import UserError
from tests.mutants.server import PR_SET_PDEATHSIG
from threefold.config.loading import REPOSITORY
from threefold.runtime.ranks import killed_with_parent

MUTANTS = Path(__file__).with_name("mutants.toml")
SERVER = Path(__file__).with_name("server.py")
# Libraries that take seconds to import, but no modules of this repository, which mutants change.
PRELOADED = ("torch", "torch._dynamo", "deepspeed", "transformers")
REQUIRED_SHARE = 0.95  # of the mutants that tests of `make test` must notice
SECONDS_PER_MUTANT = 240.0  # of one test; the tests have limits of their own, which are shorter
SECONDS_UNBROKEN = 1800.0  # of all tests together
MAX_JOBS = 64
OUTPUT_CHARACTERS = 2000  # of pytest, in a message
FAST, LONG = "test", "long"  # make targets
NOTICED, SURVIVED, HUNG, BROKEN = "noticed", "survived", "hung", "broken"
# Errors of a mutant that is not a working program, rather than of a program with a fault.
BROKEN_ERRORS = (
    *("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError"),
    *("NameError", "UnboundLocalError"),
)
UNDEFINED_NAMES = "F821"  # ruff's rule


@dataclass(frozen=True)
class Mutant:
    """A seeded fault.

    Attributes:
        file: the changed file, relative to the repository
        text: occurs exactly once in the file
        replacement: replaces the text
        test: pytest's name of a test or of a test file, which must fail
        reason: the fault, in a few words
        suite: make target that runs the test, "test" or "long"
    """

    file: str
    text: str
    replacement: str
    test: str
    reason: str
    suite: str = FAST

    @property
    def package(self) -> str:
        """Folder of the changed file."""
        return str(Path(self.file).parent)

    def applied(self, repository: Path) -> str:
        """Return the content of the file with the fault.

        Raises:
            UserError: the text does not occur exactly once.
        """
        path = repository / self.file
        count = path.read_text().count(self.text) if path.is_file() else 0
        if count != 1:
            raise UserError(
                f"{MUTANTS.name}: {self.file} contains {self.text!r} {count} times instead of "
                f"once; change the mutant to match the code"
            )
        return path.read_text().replace(self.text, self.replacement)


@dataclass(frozen=True)
class Run:
    """The outcome of one run of pytest.

    Attributes:
        errors: test -> first words of its error, for tests that failed; None for a time limit
        passed: tests that passed
        core_seconds: of all processes of the run
        output: end of what pytest printed
    """

    errors: dict[str, str] | None
    passed: list[str] = field(default_factory=list)
    core_seconds: float = 0.0
    output: str = ""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a mutant.

    Attributes:
        status: NOTICED, SURVIVED, HUNG or BROKEN
        detail: first words of the error
    """

    mutant: Mutant
    status: str
    core_seconds: float
    seconds: float = 0.0
    detail: str = ""


def read_mutants(file: Path = MUTANTS) -> list[Mutant]:
    """Return the mutants of a file."""
    return [Mutant(**table) for table in tomllib.loads(file.read_text())["mutant"]]


def tracked_files(repository: Path) -> list[str]:
    """Return the files of a repository that git tracks or would track, without deleted ones."""
    command = ["git", "-C", str(repository), "ls-files", "-z"]
    done = subprocess.run(
        [*command, "--cached", "--others", "--exclude-standard"], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise UserError(
            f"{repository} is not a git repository, which tells the files to copy "
            f"({done.stderr.strip()}); clone it with git clone"
        )
    names = sorted(set(filter(None, done.stdout.split("\0"))))
    return [name for name in names if (repository / name).is_file()]


class Copy:
    """A temporary copy of a repository, and a process that runs pytest in it."""

    def __init__(self, repository: Path, folder: Path, names: Sequence[str]):
        self.root, self.temporary = folder / "repository", folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._tried = 0
        for name in names:
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, target)
        environment = repository / ".venv"
        if environment.exists():
            (self.root / ".venv").symlink_to(environment.resolve())
        with (self.temporary / "server").open("wb") as errors:
            self._server = subprocess.Popen(
                killed_with_parent([sys.executable, str(SERVER), *PRELOADED]),
                cwd=self.root,
                env=os.environ | {"TMPDIR": str(self.temporary)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                text=True,
            )

    def pytest(self, tests: Sequence[str], suite: str, *options: str, seconds: float) -> Run:
        """Run tests of a suite, and end all processes that they leave behind."""
        report, log = self.temporary / "report.xml", self.temporary / "log"
        report.unlink(missing_ok=True)
        arguments = ["-p", "no:cacheprovider", f"--junit-xml={report}", *options]
        if suite == LONG:
            arguments += ["-m", LONG]
        request = {"arguments": [*arguments, *tests], "log": str(log), "seconds": seconds}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{json.dumps(request)}\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline() or "null")
        if answer is None:
            raise RuntimeError(
                "the process that runs pytest has ended: "
                + (self.temporary / "server").read_text(errors="replace")[-OUTPUT_CHARACTERS:]
            )
        in_time = answer["in_time"]
        text = log.read_text(errors="replace")[-OUTPUT_CHARACTERS:]
        errors, passed = _read_report(report) if in_time and report.exists() else ({}, [])
        return Run(errors if in_time else None, passed, answer["core_seconds"], text)

    def try_mutant(self, mutant: Mutant) -> Outcome:
        """Run the test of a mutant with the fault, and restore the file."""
        started = time.monotonic()
        path, broken = self.root / mutant.file, mutant.applied(self.root)
        if path.suffix == ".py" and (problem := invalid_program(broken, mutant.file)):
            return Outcome(mutant, BROKEN, 0.0, detail=problem)
        content, stat = path.read_bytes(), path.stat()
        try:
            path.write_text(broken)
            # Python reuses bytecode if size and modification time, in whole seconds, are equal.
            self._tried += 1
            os.utime(path, (stat.st_atime, stat.st_mtime + 2 * self._tried))
            run = self.pytest([mutant.test], mutant.suite, "-x", seconds=SECONDS_PER_MUTANT)
        finally:
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        status, detail = judge(run)
        return Outcome(mutant, status, run.core_seconds, time.monotonic() - started, detail)


def judge(run: Run) -> tuple[str, str]:
    """Return the status of a mutant from the run of its test, and the first words of the error."""
    if run.errors is None:
        return HUNG, "the test did not end within the time limit"
    if not run.errors:
        return (SURVIVED, "") if run.passed else (BROKEN, f"no test ran: {run.output.strip()}")
    test, error = next(iter(run.errors.items()))
    is_broken = not test or error.startswith(BROKEN_ERRORS)
    return BROKEN if is_broken else NOTICED, f"{test}: {error}"


def invalid_program(source: str, name: str) -> str:
    """Return why a source is not a Python program; empty if it is one."""
    try:
        compile(source, name, "exec")
    except SyntaxError as error:
        return f"{error.msg} in line {error.lineno}"
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", UNDEFINED_NAMES]
    ruff += ["--output-format", "concise", "--quiet", "--stdin-filename", name, "-"]
    done = subprocess.run(ruff, input=source, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.strip()


def _read_report(file: Path) -> tuple[dict[str, str], list[str]]:
    """Return the errors of failed tests, and the tests that passed, of a JUnit report.

    A file that cannot be collected has the error of a test without a name.
    """
    errors: dict[str, str] = {}
    passed = []
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        problems = [*case.iter("failure"), *case.iter("error")]
        if problems:
            message = problems[0].get("message", "")
            if message == "collection failure":
                name, message = "", (problems[0].text or "").strip().splitlines()[-1]
            if message.startswith("failed on "):  # failed on setup with "AssertionError: ..."
                message = message.partition('"')[2]
            errors[name] = next(iter(message.splitlines()), "no message")
        elif case.find("skipped") is None:
            passed.append(name)
    return errors, passed


_copy: Copy  # of a worker process


def _start_worker(repository: Path, folder: Path, names: Sequence[str]) -> None:
    global _copy
    signal.signal(signal.SIGINT, lambda *_: None)  # the main process ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _copy = Copy(repository, folder / str(os.getpid()), names)


def _run_unbroken(tests: Sequence[str], suite: str) -> Run:
    return _copy.pytest(tests, suite, seconds=SECONDS_UNBROKEN)


def _try_mutant(mutant: Mutant) -> Outcome:
    return _copy.try_mutant(mutant)


class Workers:
    """Processes that each have a copy of the repository."""

    def __init__(self, repository: Path, jobs: int):
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
        self._pool = ProcessPoolExecutor(
            jobs,
            initializer=_start_worker,
            initargs=(repository, Path(self._folder.name), tracked_files(repository)),
        )
        self.jobs = jobs

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, whose running tests the kernel then kills."""
        workers = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                children = psutil.Process(worker.pid).children(recursive=True)
                worker.kill()
                for child in children:
                    if child.is_running():
                        child.kill()
            worker.join()
        self._folder.cleanup()

    def unbroken(self, mutants: Sequence[Mutant]) -> tuple[list[str], float]:
        """Run the tests of all mutants without a fault.

        Returns:
            A line for each test that does not pass, and the core-seconds.
        """
        tests = sorted({(mutant.suite, mutant.test) for mutant in mutants})
        files = sorted({(suite, test.partition("::")[0]) for suite, test in tests})
        futures: list[Future[Run]] = []
        wanted: list[list[str]] = []
        for job in range(self.jobs):
            for suite in (FAST, LONG):
                mine = {file for kind, file in files[job :: self.jobs] if kind == suite}
                names = [t for kind, t in tests if kind == suite and t.partition("::")[0] in mine]
                if names:
                    wanted.append(names)
                    futures.append(self._pool.submit(_run_unbroken, names, suite))
        problems, core_seconds = [], 0.0
        for names, future in zip(wanted, futures, strict=True):
            run = future.result()
            core_seconds += run.core_seconds
            errors = run.errors or {}
            problems += [f"{test or 'a test file'}: {error}" for test, error in errors.items()]
            ran = [*run.passed, *errors]
            missing = [name for name in names if not any(_covers(name, test) for test in ran)]
            problems += [f"{name} did not run" for name in missing]
            if missing and not errors:
                problems.append(run.output)
        return problems, core_seconds

    def outcomes(self, mutants: Sequence[Mutant]) -> Iterator[Outcome]:
        """Yield the outcome of each mutant as soon as it is known."""
        for future in as_completed(self._pool.submit(_try_mutant, mutant) for mutant in mutants):
            yield future.result()


def _covers(name: str, test: str) -> bool:
    """Return True if a test belongs to a name such as `file.py` or `file.py::test`."""
    return test == name or test.startswith((f"{name}::", f"{name}["))


def describe(outcome: Outcome) -> str:
    """Return a line about a mutant, and the details of one that was not noticed."""
    mutant = outcome.mutant
    line = f"{outcome.status:8} {outcome.seconds:6.1f} s  {mutant.file}: {mutant.reason}"
    if outcome.status == NOTICED:
        return line
    detail = f"\n    {outcome.detail}" if outcome.detail else ""
    change = f"{mutant.text!r} -> {mutant.replacement!r}"
    return f"{line}\n    {change}\n    {mutant.test}{detail}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of packages: mutants, noticed by make test and make long, survived."""

    def row(name: str, some: Sequence[Outcome]) -> str:
        noticed = [outcome.mutant.suite for outcome in some if outcome.status == NOTICED]
        fast, long = noticed.count(FAST), noticed.count(LONG)
        return f"{name:50}{len(some):8}{fast:11}{long:11}{len(some) - fast - long:10}"

    packages = sorted({outcome.mutant.package for outcome in outcomes})
    return "\n".join(
        [
            f"{'package':50}{'mutants':>8}{'make test':>11}{'make long':>11}{'survived':>10}",
            *(row(name, [o for o in outcomes if o.mutant.package == name]) for name in packages),
            row("total", outcomes),
        ]
    )


def suffices(outcomes: Sequence[Outcome]) -> bool:
    """Return True if every mutant is noticed, and enough of them by tests of `make test`."""
    noticed = [outcome for outcome in outcomes if outcome.status == NOTICED]
    fast = sum(outcome.mutant.suite == FAST for outcome in noticed)
    return len(noticed) == len(outcomes) and fast >= REQUIRED_SHARE * len(outcomes)


def run(mutants: Sequence[Mutant], *, repository: Path = REPOSITORY, jobs: int) -> int:
    """Try mutants and print their outcomes; return the exit code."""
    started = time.monotonic()
    for mutant in mutants:
        mutant.applied(repository)
    with Workers(repository, jobs) as workers:
        problems, core_seconds = workers.unbroken(mutants)
        if problems:
            print("these tests fail without a fault:", *problems, sep="\n")
            return 1
        count = len({mutant.test for mutant in mutants})
        print(
            f"{count} tests pass without a fault ({time.monotonic() - started:.0f} s)", flush=True
        )
        outcomes = []
        for outcome in workers.outcomes(mutants):
            outcomes.append(outcome)
            print(describe(outcome), flush=True)
    core_seconds += sum(outcome.core_seconds for outcome in outcomes)
    print(table(outcomes))
    print(f"{core_seconds:.0f} core-seconds in {time.monotonic() - started:.0f} s")
    return int(not suffices(outcomes))


def chosen(mutants: Sequence[Mutant], only: str | None, part: tuple[int, int]) -> list[Mutant]:
    """Return the mutants that the options select.

    Args:
        mutants: all of them
        only: a folder or a file of the repository; None selects all
        part: (n, count) selects every count-th mutant, from the n-th on
    """
    name = (only or "").rstrip("/")
    some = [m for m in mutants if not name or m.file == name or m.file.startswith(f"{name}/")]
    if not some:
        raise UserError(f"--only {only}: no mutant changes a file there; use {mutants[0].package}")
    number, count = part
    if not (some := some[number - 1 :: count]):
        raise UserError(
            f"--part {number}/{count}: this part has no mutants; use a smaller number of parts"
        )
    return some


def parse_part(text: str) -> tuple[int, int]:
    """Return (1, 10) for `1/10`."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/10")
    return int(number), int(count)


def parse_jobs(text: str) -> int:
    """Return a number of jobs."""
    if not (text.isdecimal() and 1 <= int(text) <= MAX_JOBS):
        raise argparse.ArgumentTypeError(f"{text!r} is not in 1 .. {MAX_JOBS}; use 2")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="PACKAGE", help="only mutants of this folder or file")
    parser.add_argument(
        "--jobs", type=parse_jobs, default=2, help="tests at a time; default: %(default)s"
    )
    parser.add_argument(
        "--part", type=parse_part, default=(1, 1), metavar="N/COUNT", help="for example 1/10"
    )
    options = parser.parse_args(arguments)
    try:
        some = chosen(read_mutants(), options.only, options.part)
        return run(some, jobs=options.jobs)
    except UserError as error:
        print(f"python -m tests.mutants: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # end the tests, delete the copies
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
