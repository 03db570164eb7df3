"""Supervision of a run: orderly ends after signals, dead launchers and hangs.

In each rank one thread listens to signals (a second signal ends the rank at once). Every second it
checks that the launcher processes of the rank are alive (the death of one counts as a signal) and
that there is progress. At the end of each step the ranks agree whether one of them has been asked
to stop. When there has been no progress for a while, hang.py reports which rank is behind, and all
ranks end. A thread cannot notice that its process has been stopped; the watchdog process (guard.py)
does.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from recipes.training.exit_codes import HUNG
from recipes.training.flight_recorder import Launched, read_dump, within
from recipes.training.hang import HangReport, take_sighting
from recipes.training.launchers import launchers_of, state_of
from recipes.training.run_folder import RunFolder

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ECHO_SECONDS = 2.0  # launchers pass on what they get; later it is a second signal
GUARD_SECONDS = 8  # that the guard leaves to the other ranks, which know more
RECORDER_SECONDS = 10  # at most, to read the flight recorder
GUARD = Path(__file__).with_name("guard.py")


@dataclass
class Breadcrumb:
    """Where a rank is.

    count: how many places it has come through
    patient: whether it waits for a disk, which may take its time
    """

    step: int = 0
    doing: str = "starting"
    micro_batch: int | None = None
    count: int = 0
    patient: bool = False

    def note(self, doing: str, *, micro_batch: int | None = None, step: int | None = None) -> None:
        """Come to another place."""
        self.doing, self.micro_batch = doing, micro_batch
        self.step = self.step if step is None else step
        self.count += 1

    @contextlib.contextmanager
    def waiting_for_disk(self, doing: str) -> Iterator[None]:
        """What is inside is no hang, however long it takes."""
        self.note(doing)
        self.patient = True
        yield
        self.patient = False
        self.note(doing)

    def __str__(self) -> str:
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"step {self.step}, {self.doing}{of}"


class Supervisor:
    """Listens and looks, in each rank, for as long as it is entered.

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
        self.names = [f"rank {rank} ({host})" for rank, host in enumerate(hosts)]
        self.asked = ""  # why this rank should stop
        self._signalled_at: float | None = None
        self._leaving = threading.Event()
        stamp = [time.strftime("%Y%m%dT%H%M%S")]
        dist.broadcast_object_list(stamp)  # not to be mixed up with a hang before
        self._report = HangReport(folder.path / f"hang-{stamp[0]}", self.names)

    def __enter__(self) -> "Supervisor":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # One that is ignored stays so: nohup means it.
        answered = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, _wake) for number in answered}
        # Python's own handlers run between its instructions, and never in a collective that waits.
        self._wakeup = signal.set_wakeup_fd(self._write)
        self._launchers = launchers_of(os.getpid())
        self._stopped: Counter[int] = Counter()  # seconds that launchers have been seen stopped
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
        os.close(self._read)
        os.close(self._write)
        if self._guard:
            self._guard.stdin.close()
            self._guard.wait()

    def agree(self, severity: int, device: torch.device) -> tuple[str, int]:
        """Why the run should stop, or nothing, and the worst severity; the same on all ranks.

        Every rank asks once, at the end of a step.
        """
        asked = self.rank + 1 if self.asked else 0
        worst = torch.tensor([asked, severity], dtype=torch.int32, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        asked, severity = worst.tolist()
        if not asked:
            return "", severity
        return f"{self.names[asked - 1]}: {self.asked or 'was asked to stop'}", severity

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            idle, seen = 0, -1
            while not self._leaving.is_set():
                if selector.select(timeout=1.0):
                    for number in os.read(self._read, 64):
                        self._on_signal(number)
                    continue
                try:
                    self._beat()
                    self._look_at_launchers()
                    moved = self.crumb.patient or self.crumb.count != seen
                    idle, seen = (0 if moved else idle + 1), self.crumb.count
                    self._look_at_progress(idle)
                except Exception:  # of a disk, of /proc: no reason to stop beating
                    traceback.print_exc()

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        name = signal.Signals(number).name
        if self._signalled_at is None:
            self._signalled_at = now
            self._ask(name)
        elif number in self._before and now - self._signalled_at > ECHO_SECONDS:
            print(f"{self.names[self.rank]}: {name} again, ends at once", file=sys.stderr)
            os._exit(128 + number)

    def _ask(self, reason: str) -> None:
        if not self.asked:
            self.asked = reason
            print(f"{self.names[self.rank]}: {reason}: stops after this step", file=sys.stderr)

    def _look_at_launchers(self) -> None:
        """Ask to stop if one is gone; end them if one has been stopped for too long.

        A stopped one would never notice the run's end. The outermost first: `deepspeed` exits
        with 0 when what it has started is killed.
        """
        for pid in self._launchers:
            state = state_of(pid)
            if not state:
                self._ask(f"its launcher, process {pid}, is gone")
            self._stopped[pid] = self._stopped[pid] + 1 if state == "T" else 0
        if self.hang_seconds and max(self._stopped.values(), default=0) >= self.hang_seconds:
            for pid in reversed(self._launchers):
                with contextlib.suppress(ProcessLookupError):  # another rank was faster
                    os.kill(pid, signal.SIGKILL)

    def _look_at_progress(self, idle: int) -> None:
        """Write this rank's place after half of the time limit; report and end after all of it.

        The place is written before the flight recorder is read, because reading it queries the
        device, which may never answer. If the query also holds the GIL, the watchdog process ends
        this rank.
        """
        if not self.hang_seconds:
            return
        if idle == 0:
            self._report.take_back(self.rank)
        elif idle == -(-self.hang_seconds // 2):
            about, stack = take_sighting(self.rank, self.crumb)
            self._report.write((about, stack))
            launched = within(min(RECORDER_SECONDS, self.hang_seconds / 4), launched_collectives)
            if launched:
                self._report.write((replace(about, launched=launched), stack))
        elif idle >= self.hang_seconds:
            verdict = self._report.verdict(self.rank)
            if verdict:
                text = f"no progress for {self.hang_seconds} s: {verdict}"
                print(text, file=sys.stderr, flush=True)
                self.folder.event("stop", self.crumb.step, reason=text, exit_code=HUNG)
            else:
                time.sleep(2)  # launchers end all ranks when the first one exits
            os._exit(HUNG)

    def _start_guard(self) -> subprocess.Popen | None:
        if not self.hang_seconds:
            return None
        patience, name = str(self.hang_seconds + GUARD_SECONDS), self.names[self.rank]
        command = [sys.executable, "-I", "-S", str(GUARD), patience, str(os.getpid()), name]
        return subprocess.Popen(command, stdin=subprocess.PIPE)

    def _beat(self) -> None:
        if self._guard:
            try:
                self._guard.stdin.write(b".")
                self._guard.stdin.flush()
            except BrokenPipeError:
                self._guard = None


def launched_collectives() -> list[Launched]:
    """Return the operations that this rank has launched, from torch's flight recorder."""
    recorder = torch._C._distributed_c10d
    backend = "nccl" if "nccl" in dist.get_backend() else "fr"  # fr: all other backends
    dump = json.loads(getattr(recorder, f"_dump_{backend}_trace_json")())
    world = dist.distributed_c10d._world
    members = {
        name: sorted(world.pg_group_ranks.get(group, ()))
        for group, name in list(world.pg_names.items())
    }
    return read_dump(dump, members)


def _wake(*_: object) -> None:
    """The thread has read the signal's number."""
