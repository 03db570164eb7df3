"""The launchers of a rank: its ancestor processes, their ages and states, and ports for ranks."""

import contextlib
import os
import random
import signal
import socket
import time
from pathlib import Path

LAUNCHER_MODULES = {
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.run",
}
NODE_AGENT = "node_agent.py"  # of launch.py
LAUNCHER_NAMES = {"deepspeed", "torchrun", NODE_AGENT}
STATE, PARENT, START = 0, 1, 19  # fields of /proc/PID/stat after the name, see proc_pid_stat(5)


class Process:
    """A process, distinguished by its start time from a later process with the same PID.

    Raises:
        OSError: the process does not exist.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self._started = _stat(pid)[START]

    def state(self) -> str:
        """Return the process's state, "T" if a signal has stopped it, or "" if it is gone."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return ""
        return "" if fields[STATE] in "ZX" or fields[START] != self._started else fields[STATE]

    def kill(self) -> bool:
        """End the process with SIGKILL; return False if it was gone before.

        A pidfd (Linux 5.3) always refers to the same process, so the signal goes to the process
        that was found alive. Without pidfds, there is a small chance that the PID is reused between
        the check and the signal.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        except (AttributeError, OSError):  # an older kernel, or a container that forbids it
            descriptor = None
        try:
            if not self.state():
                return False
            if descriptor is None:
                os.kill(self.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return True


def launchers_of(pid: int) -> list[int]:
    """Return the PIDs of the launchers among a process's ancestors, nearest first."""
    launchers = []
    with contextlib.suppress(OSError):  # an ancestor has just ended
        while pid > 1:
            pid = int(_stat(pid)[PARENT])
            if not is_launcher(Path(f"/proc/{pid}/cmdline")):
                break
            launchers.append(pid)
    return launchers


def is_launcher(command_line: Path) -> bool:
    """Return True if a process is `deepspeed`, `torchrun`, or the launcher of one node.

    Args:
        command_line: the file /proc/PID/cmdline of the process
    """
    words = _words(command_line)
    return bool(LAUNCHER_MODULES.intersection(words)) or any(
        Path(word).name in LAUNCHER_NAMES for word in words[:2]
    )


def is_node_agent(pid: int) -> bool:
    """Return True if a process is the agent of launch.py on this node."""
    return any(Path(word).name == NODE_AGENT for word in _words(Path(f"/proc/{pid}/cmdline"))[:2])


def _words(command_line: Path) -> list[str]:
    """Return the first words of a command line; its options follow."""
    if not command_line.exists():
        return []
    return command_line.read_bytes().decode(errors="replace").split("\0")[:8]


def age_seconds(pid: int) -> float:
    """Return the age of a process, to a hundredth of a second.

    Raises:
        OSError: the process has ended.
    """
    started = int(_stat(pid)[START]) / os.sysconf("SC_CLK_TCK")  # after the machine's boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended."""
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return None if fields[STATE] in "ZX" else int(fields[START])


def free_port() -> int:
    """Return an unused TCP port of this machine."""
    while True:
        port = random_port()
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port


def random_port() -> int:
    """Return a random TCP port, which may be in use.

    It is below the range from which the system assigns ports to connections, because such a port
    may be taken a moment later on a busy machine.
    """
    return random.SystemRandom().randrange(10_000, 32_000)


def _stat(pid: int) -> list[str]:
    return (
        Path(f"/proc/{pid}/stat")
        .read_text(encoding="utf-8", errors="replace")
        .rpartition(")")[2]
        .split()
    )
