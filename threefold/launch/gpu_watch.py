"""Errors of a node's GPUs, and the watch that looks for them, for the node's agent.

nvidia-smi and the kernel log are read in a child process, because nvidia-smi may hang if the driver
hangs. Only the standard library is imported. The Xid numbers follow the column "Immediate Action"
of NVIDIA's Xid catalog for A100 and later GPUs,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.

    python threefold/launch/gpu_watch.py        prints the state of the GPUs, one line of JSON
"""

import os
import sys

if __name__ == "__main__":  # import from the repository's root, not from threefold/launch/
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

NO_ANSWER = "nvidia-smi does not answer"
LEAVE_OUT = {  # the catalog's action is RESET_GPU, RESTART_BM or WORKFLOW_XID_48
    46: "GPU stopped processing",
    48: "uncorrectable ECC error",
    62: "internal microcontroller halt",
    64: "failure of a row remapping",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
}
COUNT = {  # errors of the hardware after which the GPU may still work
    54: "auxiliary power is not connected",
    74: "NVLink error",
    94: "contained memory error",
    144: "NVLink error",
    145: "NVLink error",
    146: "NVLink error",
    149: "NVLink error",
    150: "NVLink error",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}
# All others are ignored. 13, 31, 32, 43, 45 and 69, for example, are usually errors of the
# application or the consequence of another error; 63 and 92 report a repair and corrected errors.
RECOVERY_ACTION = 154  # its text names what the driver wants
RECOVERY = re.compile(r"(Reset|Reboot) Required|Drain and Reset", re.IGNORECASE)

XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<gpu>[0-9a-fA-F:.]+)\): (?P<number>\d+)(?P<text>.*)")
KMSG_TIME = re.compile(r"\d+,\d+,(\d+),")  # of a record of /dev/kmsg, in microseconds
TIME = re.compile(r"\[\s*(\d+\.\d+)\]")  # of a line of dmesg or `journalctl -o short-monotonic`
LOST = re.compile(
    r"GPU is lost|fallen off the bus|Unable to determine the device handle|requires? (a )?reset",
    re.IGNORECASE,
)
YES = ("1", "yes")
MAX_XID_CHARACTERS = 160


class GpuError(NamedTuple):
    """An error of a GPU of this node.

    Attributes:
        severe: True if the GPU needs a reset, a reboot or a replacement
    """

    text: str
    severe: bool


def health(
    queries: Iterable[str] | None, rows: Iterable[str], log: Iterable[str]
) -> dict[str, Any]:
    """Return the state of the GPUs, as an object that JSON can represent.

    Args:
        queries: lines of `nvidia-smi --query-gpu=pci.bus_id,ecc.errors.uncorrected.volatile.total`
            without header and units; None if nvidia-smi did not answer in time
        rows: lines of `nvidia-smi
            --query-remapped-rows=gpu_bus_id,remapped_rows.pending,remapped_rows.failure`
        log: lines of the kernel log, oldest first
    """
    errors: dict[str, int] = {}
    lost = []
    for line in queries or ():
        if LOST.search(line):
            lost.append(line.strip())
        elif fields := _fields(line, 2):
            errors[fields[0]] = int(fields[1]) if fields[1].isdigit() else 0
    remapped = [fields for line in rows if (fields := _fields(line, 3))]
    return {
        "answers": queries is not None,
        "uncorrected": errors,
        "lost": lost,
        "pending": [gpu for gpu, pending, _ in remapped if pending.lower() in YES],
        "failed": [gpu for gpu, _, failure in remapped if failure.lower() in YES],
        "xids": xids(log),
    }


def xids(log: Iterable[str]) -> list[list[Any]]:
    """Return the Xid errors of a kernel log as [seconds since boot, GPU, number, text]."""
    errors = []
    for line in log:
        match = XID.search(line)
        if match is None:
            continue
        kmsg, time = KMSG_TIME.match(line), TIME.match(line)
        seconds = int(kmsg[1]) / 1e6 if kmsg else float(time[1]) if time else 0.0
        text = match["text"].strip(" ,")[:MAX_XID_CHARACTERS]
        errors.append([seconds, bus(match["gpu"]), int(match["number"]), text])
    return errors


def new_errors(before: dict[str, Any] | None, now: dict[str, Any]) -> list[GpuError]:
    """Return the errors that have occurred between two states.

    The times of the kernel log are only compared with each other, because its clock drifts.

    Args:
        before: the earlier state; None for the first state of an agent, whose counters and lines of
            the log may be from an earlier run
    """
    errors = [] if now["answers"] else [GpuError(NO_ANSWER, severe=False)]
    errors += [GpuError(line, severe=True) for line in now["lost"]]
    if before is None:
        return errors
    known = before["uncorrected"]
    if now["answers"] and not now["lost"]:
        gone = [gpu for gpu in known if gpu not in now["uncorrected"]]
        if gone and not now["uncorrected"]:  # of the driver; it may have been upgraded, for example
            errors.append(GpuError("nvidia-smi no longer lists any GPU", severe=False))
        else:
            errors += [GpuError(f"nvidia-smi no longer lists GPU {gpu}", True) for gpu in gone]
    newest = max((seconds for seconds, *_ in before["xids"]), default=-1.0)
    for seconds, gpu, number, text in now["xids"]:
        is_ours = not known or gpu in known  # the log also shows GPUs of other jobs
        if seconds > newest and is_ours and (error := judge(number, gpu, text)):
            errors.append(error)
    for gpu, count in now["uncorrected"].items():
        if count > known.get(gpu, count):
            more = count - known[gpu]
            errors.append(GpuError(f"{more} new uncorrectable ECC errors on GPU {gpu}", False))
    for gpu in now["failed"]:
        if gpu not in before["failed"]:
            errors.append(GpuError(f"row remapping failed on GPU {gpu}", severe=True))
    for gpu in now["pending"]:
        if gpu not in before["pending"]:
            errors.append(GpuError(f"row remapping is pending on GPU {gpu}", severe=False))
    return list(dict.fromkeys(errors))


def judge(number: int, gpu: str, text: str) -> GpuError | None:
    """Return the hardware error that an Xid reports; None if it may be the application's error.

    Args:
        number: the Xid
        text: the rest of the line
    """
    if number == RECOVERY_ACTION:
        severe = RECOVERY.search(text) is not None
        return GpuError(f"Xid 154 on GPU {gpu}: {text}", severe) if severe else None
    meaning = LEAVE_OUT.get(number) or COUNT.get(number)
    if meaning is None:
        return None
    return GpuError(f"Xid {number} on GPU {gpu}: {meaning}", severe=number in LEAVE_OUT)


def bus(address: str) -> str:
    """Return a PCI address as "0000:3b:00", whatever program has printed it."""
    parts = address.lower().partition(".")[0].split(":")
    domain = int(parts[-3], 16) if len(parts) > 2 else 0
    return f"{domain:04x}:{':'.join(parts[-2:])}"


def _fields(line: str, count: int) -> list[str] | None:
    """Return the fields of a line of nvidia-smi that begins with a GPU; None for other lines."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != count or not re.fullmatch(r"[0-9a-fA-F]+:[0-9a-fA-F:.]+", fields[0]):
        return None
    return [bus(fields[0]), *fields[1:]]


# The watch, which runs the commands and passes their output to the functions above.

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
