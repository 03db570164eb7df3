"""Watches the GPUs of a node for errors, for the node's agent.

nvidia-smi and the kernel log are read in a child process, because nvidia-smi may hang if the driver
hangs. Only the standard library is imported.

    python threefold/launch/gpu_watch.py        prints the state of the GPUs, one line of JSON
"""

import os
import sys

if __name__ == "__main__":  # import from the repository's root, not from threefold/launch/
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import contextlib
import json
import signal
import subprocess
import time
from typing import Any

from threefold.launch.gpu_health import GpuError, health, new_errors

SECONDS_FOR_NVIDIA_SMI = 20.0  # without persistence mode, it takes seconds for each GPU
SECONDS_FOR_LOG = 5.0
SECONDS_FOR_CHILD = 60.0
SECONDS_BETWEEN_LOOKS = 60.0
SECONDS_AFTER_NO_ANSWER = 600.0  # a process that hangs in the driver cannot be killed
MAX_XIDS = 200  # the newest ones
NVIDIA_SMI = "nvidia-smi"
ECC_QUERY = "--query-gpu=pci.bus_id,ecc.errors.uncorrected.volatile.total"
ROWS_QUERY = "--query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure"
FORMAT = "--format=csv,noheader,nounits"
LOGS = (  # the first one that may be read
    ("dmesg",),
    ("journalctl", "--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet"),
)


class GpuWatch:
    """Looks at the GPUs of this node from time to time, and when it is asked to.

    Attributes:
        present: False on a node without nvidia-smi, whose GPUs are not watched
    """

    def __init__(self) -> None:
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        self.present = any(os.access(os.path.join(path, NVIDIA_SMI), os.X_OK) for path in folders)
        self._state: dict[str, Any] | None = None  # of the last look
        self._child: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._next_look = 0.0
        self._asked = False  # for a look that has not started
        self._answers = False  # the look that runs is the answer to a request

    def ask(self) -> None:
        """Look at the GPUs as soon as possible."""
        self._asked = True

    def poll(self, *, training: bool) -> tuple[bool, list[GpuError]] | None:
        """Start a look if one is due, and return the result of one that has ended.

        Args:
            training: True if this node has ranks; without ranks, only the first look and those that
                are asked for take place

        Returns:
            Whether the result is the answer to a request, and the new errors. None if no look has
            ended.
        """
        if not self.present:
            asked, self._asked = self._asked, False
            return (True, []) if asked else None
        if self._child is None:
            due = time.monotonic() >= self._next_look and (training or self._state is None)
            if self._asked or due:
                self._start()
            return None
        late = time.monotonic() - self._started_at > SECONDS_FOR_CHILD
        if self._child.poll() is None and not late:
            return None
        return self._answers, self._end()

    def stop(self) -> None:
        """Kill the process that looks at the GPUs."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._next_look = self._started_at + SECONDS_BETWEEN_LOOKS
        try:
            self._child = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # too many processes or too little memory; a request is tried again
            return
        self._answers, self._asked = self._asked, False

    def _end(self) -> list[GpuError]:
        """Return the new errors that the child process has found."""
        assert self._child and self._child.stdout
        self.stop()
        with self._child.stdout as stream:
            os.set_blocking(stream.fileno(), False)
            text = stream.read() or b""
        self._child = None
        try:
            state = json.loads(text)
        except (ValueError, RecursionError):  # the process was killed
            state = health(None, (), ())
        errors = new_errors(self._state, state)
        if not state["answers"]:
            self._next_look = time.monotonic() + SECONDS_AFTER_NO_ANSWER
            if self._state is not None:  # keep the counters for the next comparison
                state = self._state | {"xids": state["xids"] or self._state["xids"]}
        self._state = state
        return errors


def run(command: tuple[str, ...], seconds: float) -> list[str] | None:
    """Return the output of a command, also if it fails; None if it does not end in time.

    A process that hangs in a driver cannot be killed, so it is not waited for.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError:  # there is no such program
        return []
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return output.splitlines()


def kernel_log() -> list[str]:
    """Return the lines of the kernel log about Xid errors; none if this user may not read it."""
    for command in LOGS:
        lines = run(command, SECONDS_FOR_LOG) or []
        if any(line.startswith("[") for line in lines):
            return [line for line in lines if "NVRM: Xid" in line][-MAX_XIDS:]
    return []


def look() -> dict[str, Any]:
    """Return the state of the GPUs of this node."""
    log = kernel_log()
    queries = run((NVIDIA_SMI, ECC_QUERY, FORMAT), SECONDS_FOR_NVIDIA_SMI)
    rows = run((NVIDIA_SMI, ROWS_QUERY, FORMAT), SECONDS_FOR_NVIDIA_SMI) if queries else []
    return health(queries if rows is not None else None, rows or [], log)


if __name__ == "__main__":
    os.write(1, json.dumps(look()).encode() + b"\n")
    os._exit(0)  # do not wait for a process that hangs
