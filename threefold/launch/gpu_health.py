"""Errors of a node's GPUs, from the output of nvidia-smi and the lines of the kernel log.

Only pure functions and the standard library; gpu_watch.py runs the commands. The Xid numbers follow
the column "Immediate Action" of NVIDIA's Xid catalog for A100 and later GPUs,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
"""

import re
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
