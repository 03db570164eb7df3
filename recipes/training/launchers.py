"""The processes above a rank: which of them have launched it, since when, and how they are."""

import os
import time
from pathlib import Path

LAUNCHER_MODULES = {
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.run",
}
LAUNCHER_NAMES = {"deepspeed", "torchrun"}
STATE, PARENT, START = 0, 1, 19  # fields of /proc/PID/stat after the name, see proc_pid_stat(5)


def launchers_of(pid: int) -> list[int]:
    """The processes above this one that have launched it, the nearest first."""
    found = []
    while pid > 1:
        pid = int(_stat(pid)[PARENT])
        if not is_launcher(Path(f"/proc/{pid}/cmdline")):
            break
        found.append(pid)
    return found


def is_launcher(command_line: Path) -> bool:
    """Whether a process is `deepspeed`, `torchrun`, or what they start on each node."""
    if not command_line.exists():
        return False
    words = command_line.read_bytes().decode(errors="replace").split("\0")[:8]  # options follow
    return bool(LAUNCHER_MODULES.intersection(words)) or any(
        Path(word).name in LAUNCHER_NAMES for word in words[:2]
    )


def state_of(pid: int) -> str:
    """A process's state, "T" if it was stopped by a signal; empty if it is gone."""
    try:
        state = _stat(pid)[STATE]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if state in "ZX" else state


def age_seconds(pid: int) -> float:
    """How long a process has been there, to a hundredth of a second.

    Raises:
        OSError: it is gone.
    """
    started = int(_stat(pid)[START]) / os.sysconf("SC_CLK_TCK")  # after the machine's boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
