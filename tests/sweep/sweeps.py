"""Start sweeps with injected faults, for tests."""

import contextlib
import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from models.errors import UserError
from threefold.commands import sweep
from threefold.config.loading import REPOSITORY
from threefold.runtime.command_line import parse_subcommand
from threefold.sweep.choice import TrialRequest, choose
from threefold.sweep.trial import Trial

PROGRAM = Path(__file__).with_name("faulty_sweep.py")
SECONDS_FOR_RANKS_TO_END = 15
TIMED = ("step_time_s", "mem_gb", "mfu_pct", "tokens_s_gpu")


def processes_with(folder: Path) -> list[str]:
    """Return the command lines of all processes that name a path in a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.startswith(str(folder)) for word in words):
            found.append(" ".join(words))
    return found


def copy_of_code(folder: Path) -> Path:
    """Copy the repository's code, for commands that write datasheets; return the folder."""
    for name in ("recipes", "models", "threefold", "ds_configs", "tests/sweep"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    return folder


def run_command() -> int:
    """Run the command of sys.argv without the signal handlers of sweep.py; return its exit code."""
    commands, moved = sweep.COMMANDS, sweep.MOVED_FLAGS
    options = parse_subcommand("sweep.py", "", commands, moved)
    return options.command(options)


def rejection_of(*words: str) -> str:
    """Return the error message of a command line that is rejected before a process starts."""
    errors = io.StringIO()
    try:
        with (
            mock.patch.object(sys, "argv", list(words)),
            mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a process")),
            contextlib.redirect_stderr(errors),
        ):
            run_command()
    except (UserError, SystemExit) as problem:
        return f"{errors.getvalue()}{problem}"
    raise AssertionError(f"{words} are not rejected")


class Sweep:
    """A sweep folder, the faults of its trials, and the commands that work on it."""

    def __init__(
        self, folder: Path, recipe: Path, *options: str, command: str = "", fake: bool = True
    ):
        self.command = command
        self.folder, self.recipe, self.options = folder / "sweep", recipe, list(options)
        self.faults, self.done, self.fake = folder / "faults.json", folder / "done", fake
        self.inject({})

    def trials(self, **request: Any) -> list[Trial]:
        """Return the trials of a request, in the order in which they run."""
        return choose(TrialRequest(recipes=[self.recipe], **request)).trials

    def inject(self, faults: dict[str, str]) -> None:
        self.faults.write_text(json.dumps(faults))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a command and its ranks."""
        variables = {
            "FAULTS": str(self.faults),
            "DONE": str(self.done),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        return os.environ | variables | ({"FAKE_RANKS": "1"} if self.fake else {})

    def words(self, *options: str) -> list[str]:
        """Return the words of a command line, from the program on."""
        program = [str(PROGRAM), *([self.command] if self.command else [])]
        folder = ["--sweep-dir", str(self.folder)]
        return [*program, str(self.recipe), *folder, *self.options, *options]

    def start(self, *options: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *self.words(*options)],
            cwd=REPOSITORY,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *options: str, seconds: float = 600) -> subprocess.CompletedProcess[str]:
        process = self.start(*options)
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def run_here(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run the command in this process, which saves its imports. Its ranks are processes."""
        words, output = self.words(*options), io.StringIO()
        with (
            mock.patch.object(sys, "argv", words),
            mock.patch.dict(os.environ, self.environment),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            code = run_command()
        return subprocess.CompletedProcess(words, code, output.getvalue())

    def rejection(self, *options: str) -> str:
        """Return the error message of a command line that is rejected before a process starts."""
        return rejection_of(*self.words(*options))

    def kill(self, process: subprocess.Popen) -> None:
        """Kill a scheduler, and check that its ranks end."""
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert self.end_of_processes(), self.processes()

    def rows(self) -> list[dict[str, str]]:
        with (self.folder / "sweep.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def untimed_rows(self) -> list[dict[str, str]]:
        """Return the rows without measured values, in the order of their keys."""
        rows = [{k: v for k, v in row.items() if k not in TIMED} for row in self.rows()]
        return sorted(rows, key=lambda row: row["trial"])

    def finished(self) -> list[str]:
        """Return the keys of trials that ranks have finished, once for each time."""
        return self.done.read_text().split() if self.done.exists() else []

    def processes(self) -> list[str]:
        """Return the command lines of all processes of this sweep."""
        return processes_with(self.folder)

    def end_of_processes(self) -> bool:
        """Return True as soon as no process of this sweep is left; False if one stays."""
        deadline = time.monotonic() + SECONDS_FOR_RANKS_TO_END
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True
