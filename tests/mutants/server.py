"""Run pytest in forks of a process that has imported large libraries once.

    python server.py MODULE ...

Each line of the input is a request: {"arguments": pytest's, "log": file, "seconds": limit}. Each
line of the output answers one: {"in_time": false after the limit, "core_seconds": of all processes
of the run}. After each run, all processes that the run has left behind are killed.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
POLL_SECONDS = 0.02


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print when they are imported
    sys.path[0] = os.getcwd()  # as in `python -m pytest`
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopts the orphans of the tests
    for name in ("pytest", *sys.argv[1:]):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        before = core_seconds()
        in_time = run(request["arguments"], request["log"], request["seconds"])
        answer = {"in_time": in_time, "core_seconds": core_seconds() - before}
        print(json.dumps(answer), file=answers, flush=True)


def run(arguments: Sequence[str], log: str, seconds: float) -> bool:
    """Run pytest and end all processes that it leaves behind; return False after the limit."""
    server = os.getpid()
    process = os.fork()
    if process == 0:
        try:
            run_pytest(arguments, log, server)
        except BaseException:  # the child must never read the next request
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    end = time.monotonic() + seconds
    ended = False
    while not ended and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        ended = os.waitpid(process, os.WNOHANG)[0] == process
    end_children()
    return ended


def run_pytest(arguments: Sequence[str], log: str, server: int) -> None:
    """Run pytest in this process, which ends with the server."""
    import pytest

    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it ended before the call of prctl
        return
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.argv = ["pytest", *arguments]
    pytest.main([*arguments])


def end_children() -> None:
    """Kill all descendants of this process, and wait for them."""
    import psutil  # not above: processes that the tests spawn import this module again

    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(children, timeout=10)


def core_seconds() -> float:
    """Return the CPU time of all descendants that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
