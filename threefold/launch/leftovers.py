"""Processes that an earlier agent of a run has left on this node; only the standard library."""

import contextlib
import os
import signal
import time

SECONDS_FOR_LEFTOVERS = 10.0  # for killed processes to end
SCRIPTS = ("node_agent.py", "standby.py")


def kill_group(process: int) -> None:
    """Kill a process and the processes of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def end_leftovers(run: str) -> None:
    """Kill the agents and ranks of a run on this node, except this process, and wait for their end.

    Args:
        run: the first argument of agents, and the beginning of the value of --lease of ranks
    """
    left = leftovers(run)
    for process in left:
        kill_group(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + SECONDS_FOR_LEFTOVERS
    while leftovers(run) and time.monotonic() < deadline:
        time.sleep(0.05)


def leftovers(run: str) -> list[int]:
    """Return the processes of a run on this node, except this one."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as stream:
                words = stream.read().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        is_agent = len(words) > 2 and words[1].endswith(SCRIPTS) and words[2] == run
        lease = words[words.index("--lease") + 1] if "--lease" in words[:-1] else ""
        if is_agent or lease.startswith(f"{run}."):
            found.append(int(entry))
    return found
