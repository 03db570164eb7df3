"""Whatever ends a run before its last step, in order: signals, dead launchers, hangs.

In each rank one thread listens to signals (a second one ends the rank at once), to the processes
that have launched it (whose death counts as a signal) and to the run's own progress. Ranks agree at
the end of each step whether one of them has been asked to stop. When nothing has moved for a while,
every rank writes where it is and what it waits for into the run folder, one of them says who is
behind, and all end. What a thread cannot notice, its process having been stopped, the guard does.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from recipes.training.exit_codes import HUNG
from recipes.training.recipe import REPOSITORY
from recipes.training.run_folder import RunFolder

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed", "torch/distributed")
ECHO_SECONDS = 2.0  # launchers pass on what they get; later it is a second signal
GATHER_SECONDS = 3.0  # for the ranks to write where they are
GUARD_SECONDS = 8  # that the guard leaves to the other ranks, which know more
GUARD = Path(__file__).with_name("guard.py")
COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))


@dataclass
class Breadcrumb:
    """Where a rank is.

    count: how many places it has come through
    """

    step: int = 0
    doing: str = "starting"
    micro_batch: int | None = None
    count: int = 0

    def note(self, doing: str, *, micro_batch: int | None = None, step: int | None = None) -> None:
        """Come to another place."""
        self.doing, self.micro_batch = doing, micro_batch
        self.step = self.step if step is None else step
        self.count += 1

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"step {self.step}, {self.doing}{of}"


@dataclass(frozen=True)
class Sighting:
    """Where a rank was when nothing moved any more.

    waits_in: the collective that its main thread was in; empty: none
    at: the innermost line of this project or DeepSpeed
    """

    rank: int
    place: str
    count: int
    waits_in: str
    at: str

    def __str__(self) -> str:
        waiting = f"waits in {self.waits_in}" if self.waits_in else "waits in no collective"
        return f"{self.place}; it {waiting}, at {self.at}"


class Supervisor:
    """Of one rank.

    crumb: where the rank is; whoever gets somewhere notes it
    hosts: of all ranks, by rank
    hang_seconds: without progress; 0: wait for ever
    """

    def __init__(
        self, folder: RunFolder, crumb: Breadcrumb, hosts: Sequence[str], hang_seconds: int
    ):
        self.folder, self.crumb = folder, crumb
        self.hosts, self.hang_seconds = hosts, hang_seconds
        self.rank = dist.get_rank()
        self.asked: str | None = None  # why this rank should stop
        self._asked_at = 0.0
        self._leaving = threading.Event()

    def __enter__(self) -> "Supervisor":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = {number: signal.signal(number, _wake) for number in SIGNALS}
        # Python's own handlers run between its instructions, and never in a collective that waits.
        self._wakeup = signal.set_wakeup_fd(self._write)
        self._launchers = {os.pidfd_open(pid): pid for pid in launchers_of(os.getpid())}
        self._stopped = Counter[int]()  # ticks that launchers have been seen stopped
        self._guard = self._start_guard()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for descriptor in (self._read, self._write, *self._launchers):
            os.close(descriptor)
        if self._guard:
            self._guard.stdin.close()
            self._guard.wait()

    def stop_agreed(self, device: torch.device) -> str | None:
        """Why the run should stop, the same on all ranks; every rank asks at the end of a step."""
        asked = torch.tensor([self.asked is not None], dtype=torch.int32, device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return self.asked or "another rank was asked to stop" if int(asked) else None

    def _watch(self) -> None:
        idle, seen = 0, -1
        while not self._leaving.is_set():
            ready, _, _ = select.select([self._read, *self._launchers], [], [], 1.0)
            for descriptor in ready:
                if descriptor == self._read:
                    for number in os.read(self._read, 64):
                        self._ask(signal.Signals(number).name)
                else:
                    pid = self._launchers.pop(descriptor)
                    os.close(descriptor)
                    self._ask(f"its launcher, process {pid}, is gone")
            if ready:
                continue
            self._beat()
            self._end_stopped_launchers()
            idle, seen = (idle + 1, seen) if self.crumb.count == seen else (0, self.crumb.count)
            if self.hang_seconds and idle >= self.hang_seconds:
                self._report_hang()

    def _end_stopped_launchers(self) -> None:
        """End launchers of which one has been stopped for too long: it would never notice an end.

        The outermost first: `deepspeed` exits with 0 when what it has started is killed.
        """
        for pid in self._launchers.values():
            self._stopped[pid] = self._stopped[pid] + 1 if is_stopped(pid) else 0
        if self.hang_seconds and max(self._stopped.values(), default=0) >= self.hang_seconds:
            for pid in reversed(self._launchers.values()):
                with contextlib.suppress(ProcessLookupError):  # another rank was faster
                    os.kill(pid, signal.SIGKILL)

    def _ask(self, reason: str) -> None:
        now = time.monotonic()
        if self.asked is None:
            self.asked, self._asked_at = reason, now
            if self.rank == 0 or not reason.startswith("SIG"):
                text = f"{self._name(self.rank)}: {reason}: the run stops after this step"
                print(text, file=sys.stderr, flush=True)
        elif reason.startswith("SIG") and now - self._asked_at > ECHO_SECONDS:
            number = signal.Signals[reason]
            print(f"rank {self.rank}: {reason} again, ends at once", file=sys.stderr, flush=True)
            os._exit(128 + number)

    def _start_guard(self) -> subprocess.Popen | None:
        if not self.hang_seconds:
            return None
        patience = str(self.hang_seconds + GUARD_SECONDS)
        command = [sys.executable, "-I", "-S", str(GUARD), patience, self._name(self.rank)]
        return subprocess.Popen(command, stdin=subprocess.PIPE)

    def _beat(self) -> None:
        if self._guard:
            try:
                self._guard.stdin.write(b".")
                self._guard.stdin.flush()
            except BrokenPipeError:
                self._guard = None

    def _report_hang(self) -> None:
        """Write where this rank is; the first of those that do so says who is behind; end."""
        room = self.folder.path / f"hang-step-{self.crumb.step:07d}"
        room.mkdir(exist_ok=True)
        frame = sys._current_frames()[threading.main_thread().ident]
        sighting = Sighting(
            rank=self.rank,
            place=str(self.crumb),
            count=self.crumb.count,
            waits_in=collective_of(frame),
            at=innermost_line(frame),
        )
        stack = "".join(traceback.format_stack(frame))
        temporary = room / f"rank-{self.rank:05d}.writing"
        temporary.write_text(f"{json.dumps(asdict(sighting))}\n{stack}")
        os.rename(temporary, temporary.with_suffix(".txt"))
        time.sleep(GATHER_SECONDS)
        sightings = read_sightings(room)
        if self.rank == min(sightings):
            verdict = describe_hang(sightings, [self._name(r) for r in range(len(self.hosts))])
            text = f"no progress for {self.hang_seconds} s: {verdict}; stacks of all are in {room}"
            print(text, file=sys.stderr, flush=True)
            self.folder.event("stop", self.crumb.step, reason=text)
        time.sleep(1)  # launchers end all ranks when the first one exits
        os._exit(HUNG)

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})"


def read_sightings(room: Path) -> dict[int, Sighting]:
    """What ranks have written, by rank."""
    files = sorted(room.glob("rank-*.txt"))
    read = [Sighting(**json.loads(file.read_text().partition("\n")[0])) for file in files]
    return {sighting.rank: sighting for sighting in read}


def describe_hang(sightings: dict[int, Sighting], names: Sequence[str]) -> str:
    """Who is behind: ranks that are silent, or outside of collectives, or the least far ones."""
    silent = [name for rank, name in enumerate(names) if rank not in sightings]
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        reason = f"{', '.join(silent)} {verb} not answer: stopped, dead or cut off"
    else:
        busy = [s for s in sightings.values() if not s.waits_in]
        behind = min(busy or sightings.values(), key=lambda s: s.count)
        reason = f"{names[behind.rank]} is behind: {behind}"
    first = sightings[min(sightings)]
    return f"{reason}. {names[first.rank]}: {first}"


def collective_of(frame: FrameType | None) -> str:
    """The function of torch.distributed that a stack is in; empty: none."""
    name = ""
    while frame:
        if frame.f_code.co_filename.endswith(COLLECTIVES):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def innermost_line(frame: FrameType | None) -> str:
    """The innermost line of a stack that is this project's or DeepSpeed's."""
    while frame:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(REPOSITORY / "models") or file.is_relative_to(
            REPOSITORY / "recipes"
        ):
            return f"{file.relative_to(REPOSITORY)}:{frame.f_lineno} {frame.f_code.co_name}"
        if "deepspeed" in file.parts and "comm" not in file.parts:
            return f"deepspeed {file.name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def launchers_of(pid: int) -> list[int]:
    """The processes above this one that have launched it, as their command lines say."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace") if pid else ""
        if not any(name in command for name in LAUNCHERS):
            break
        found.append(pid)
    return found


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def _wake(*_: object) -> None:
    """The thread has read the signal's number."""
