"""Run a command; report the processor time of all its descendants and what they leave behind.

A shell's `time` counts only processes that a parent has waited for. The ranks of the tests are
forked by a fork server, for which no process waits, so their time would be missing.

    python -m tests.core_seconds [--budget 500] COMMAND [ARGUMENT ...]

The command gets a temporary folder of its own. Files that it leaves there and in /dev/shm are
counted. Processes that it leaves behind are named. Such a process, or more core-seconds than the
budget, makes the exit code 1.
"""

import argparse
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
SECONDS_TO_END = 10.0  # of processes that outlive the command
SHOWN = 20  # names of files
KEPT = ("pytest-of-", "torchinductor_")  # prefixes of files that pytest and torch keep
SHARED_MEMORY = Path("/dev/shm")


def main() -> int:
    """Run the command; return its exit code, or 1 if it left processes or exceeded the budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, help="maximum number of core-seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("name a command, such as: python -m tests.core_seconds pytest")
    adopt_orphans()
    shared = set(SHARED_MEMORY.iterdir())
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        code, processes = run(options.command, os.environ | {"TMPDIR": name})
        files = [path for path in folder.iterdir() if not path.name.startswith(KEPT)]
    files += set(SHARED_MEMORY.iterdir()) - shared
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(
        f"{seconds:.0f} core-seconds in {time.monotonic() - started:.0f} s: {used.ru_utime:.0f} of "
        f"the programs and {used.ru_stime:.0f} of the kernel"
    )
    if files:
        names = ", ".join(str(path) for path in sorted(files)[:SHOWN])
        print(f"left behind: {len(files)} temporary files, such as {names}")
    for process in processes:
        print(f"left behind: process {process}")
    too_many = options.budget is not None and seconds > options.budget
    if too_many:
        print(f"more than the budget of {options.budget:g} core-seconds")
    return code or int(bool(processes) or too_many)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has ended, so it can wait."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def run(command: list[str], variables: dict[str, str]) -> tuple[int, list[str]]:
    """Run a command and wait for all its descendants.

    Returns its exit code and the command lines of the processes that did not end by themselves.
    """
    process = subprocess.Popen(command, env=variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command too
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    code = None
    while code is None:  # not process.wait(), so that adopted orphans do not stay zombies
        ended, status = os.waitpid(-1, 0)
        if ended == process.pid:
            code = process.returncode = os.waitstatus_to_exitcode(status)
    deadline, left = time.monotonic() + SECONDS_TO_END, []
    while children():
        if os.waitpid(-1, os.WNOHANG)[0]:
            continue
        if time.monotonic() > deadline:
            for child in children():
                left.append(f"{child.pid}: {command_line(child)}")
                child.kill()
            deadline += SECONDS_TO_END
        time.sleep(0.05)
    return code if code >= 0 else 128 - code, left


def children() -> list[psutil.Process]:
    """Return the children of this process, adopted and ended ones included."""
    return psutil.Process().children()


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process, shortened."""
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "ended"


if __name__ == "__main__":
    sys.exit(main())
