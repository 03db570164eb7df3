"""Supervision of a run: an orderly end after a signal, the death of a launcher or a hang.

In each rank, one thread listens for signals (a second signal ends the rank at once). Every second,
it checks that the launcher processes of the rank are alive (the death of one counts as a signal)
and that there is progress. At the end of each step, the ranks agree on requests to stop. If there
has been no progress for a while, hang_report.py names the rank that is behind, and all ranks end.
A thread cannot notice that its process has been stopped; the watchdog process (watchdog.py) does.

Nothing that may block runs in the thread itself. Separate threads read and write files, because the
file system may be the cause of the hang; the rank ends on time even if they do not finish. Messages
never wait for a reader (`runtime/output.py`).
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from threefold.run_folder.folder import RunFolder
from threefold.runtime.exits import HUNG, StopSignals, end_rank, interrupts_blocked
from threefold.runtime.launchers import Process, launchers_of
from threefold.supervision.hang_report import (
    Breadcrumb,
    HangReport,
    Launched,
    rank_status,
    read_dump,
)
from threefold.supervision.step_watch import Severity

# Functions run in threads, for a caller that must not block.

T = TypeVar("T")


class Background:
    """A thread that runs functions one after another, for a caller that cannot wait for them."""

    def __init__(self, name: str):
        self._name = name
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], object]) -> None:
        """Queue a function; an error that it raises is printed."""
        self._calls.put(function)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            function = self._calls.get()
            try:
                function()
            except Exception as problem:
                print(f"{self._name}: {problem!r}", file=sys.stderr, flush=True)


def within(
    seconds: float, function: Callable[[], T], *, doing: str = "reading the flight recorder"
) -> T | None:
    """Return the result of a function, or None if it fails or takes longer than `seconds`.

    For example, reading the flight recorder queries CUDA events, which can hang as well.
    """
    values: list[T] = []

    def run() -> None:
        try:
            values.append(function())
        except Exception as error:  # no error here may hide the report of the hang
            print(f"{doing} failed: {error}", flush=True)

    thread = threading.Thread(target=run, name=doing, daemon=True)
    thread.start()
    thread.join(seconds)
    return values[0] if values else None


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SECONDS_OF_TICK = 1.0  # between looks at the progress, each of which counts as a second
NO_SIGNAL = b"\0"  # wakes the thread without a signal
SECONDS_BEFORE_WATCHDOG = 8  # delay of the watchdog, because reports of ranks say more
RECORDER_SECONDS = 10  # at most, to read the flight recorder
SECONDS_TO_COUNT = 5  # at most, to count the ranks with a message
REPORT_SECONDS = 5  # for the report of a hang, before a rank ends without it
SECONDS_PER_REPORT = 0.005  # to read one rank's file; added to these two for each rank
WATCHDOG = Path(__file__).with_name("watchdog.py")


class Agreement(NamedTuple):
    """The values on which all ranks agree after a step.

    Attributes:
        stop: the reason to stop, or ""; that of the lowest rank that was asked
        severity: the worst severity of all ranks
        saving: True if a save of any rank is in flight
    """

    stop: str
    severity: Severity
    saving: bool


class Supervisor:
    """Supervision of this rank: hangs from `start` on, signals within its context.

    Args:
        folder: the run folder, for reports of a hang
        crumb: the rank's current activity, which the training loop records
        hang_seconds: time limit without progress after `expect_steps`; 0 for none
        startup_seconds: time limit without progress before `expect_steps`; 0 for none
    """

    def __init__(
        self, folder: RunFolder, crumb: Breadcrumb, *, hang_seconds: int, startup_seconds: int
    ):
        self.folder, self.crumb = folder, crumb
        self.hang_seconds, self.limit = hang_seconds, startup_seconds
        self.rank = dist.get_rank()
        self.hosts: Sequence[str] = ()
        self.names = [f"rank {rank}" for rank in range(dist.get_world_size())]
        self.names[self.rank] += f" ({socket.gethostname()})"
        self.asked = ""  # the reason for this rank to stop
        self._signals = StopSignals()
        self._before: dict[int, Any] = {}  # the handlers of signals
        self._leaving = threading.Event()
        self._seen = -1  # the crumb's count a second ago
        self._still = 0  # seconds since the crumb's count changed
        self._idle = 0  # likewise, without the seconds in which the rank waited for a disk
        self._reported = self._ending = False
        self._report = HangReport(folder.path / "hang-at-start", self.names)
        self._disk = Background("hang report")
        self._trouble = ""

    def start(self) -> "Supervisor":
        """Begin to watch the progress; collective."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._launchers = []
        for pid in launchers_of(os.getpid()):
            with contextlib.suppress(OSError):  # the process has just ended
                self._launchers.append(Process(pid))
        self._stopped: Counter[int] = Counter()  # seconds that launchers have been seen stopped
        self._watchdog = self._start_watchdog()
        self._beat()  # the process may be stopped within the first second
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()
        stamp = [time.strftime("%Y%m%dT%H%M%S")]
        dist.broadcast_object_list(stamp)  # a later hang gets another folder
        self._report.folder = self.folder.path / f"hang-{stamp[0]}"
        return self

    def name_hosts(self, hosts: Sequence[str]) -> None:
        """Use the host names of the ranks in messages; call this once the run folder is locked."""
        self.hosts = hosts
        self.names[:] = [f"rank {rank} ({host})" for rank, host in enumerate(hosts)]

    def expect_steps(self) -> None:
        """End the start-up, and apply the time limit of training."""
        self.crumb.note("starting to train")
        self.limit = self.hang_seconds
        self._beat()

    def __enter__(self) -> "Supervisor":
        # An ignored signal stays ignored: nohup relies on it.
        answered = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, _wake) for number in answered}
        # Python runs signal handlers only between bytecode instructions, and therefore never while
        # a collective waits. The file descriptor wakes the thread in any case.
        self._wakeup = signal.set_wakeup_fd(self._write)
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        with contextlib.suppress(BlockingIOError):  # full of signals, which wake the thread too
            os.write(self._write, NO_SIGNAL)
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
        if self._watchdog and self._watchdog.stdin:
            self._watchdog.stdin.close()
            try:
                self._watchdog.wait(SECONDS_BEFORE_WATCHDOG)
            except subprocess.TimeoutExpired:  # the process has been stopped
                self._watchdog.kill()

    def agree(self, severity: Severity, device: torch.device, *, saving: bool = False) -> Agreement:
        """Agree on requests to stop, bad numbers and saves in flight; collective."""
        worst = torch.tensor([self._encoded_request(), severity, saving], device=device)
        if dist.get_world_size() > 1:  # otherwise it costs half a millisecond
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        request, severity, is_saving = worst.tolist()
        return Agreement(self._decoded_request(request), Severity(severity), bool(is_saving))

    def _encoded_request(self) -> int:
        """Return this rank's request to stop as a number, the largest for rank 0; 0 for none."""
        asked = self.asked  # which another thread may set
        number = signal.Signals[asked] if asked in signal.Signals.__members__ else 0
        return (len(self.names) - self.rank) * signal.NSIG + number if asked else 0

    def _decoded_request(self, request: int) -> str:
        """Describe a request to stop, or return an empty string for none."""
        if not request:
            return ""
        ranks_from_end, number = divmod(request, signal.NSIG)
        rank = len(self.names) - ranks_from_end
        name = f"rank {rank} on {self.hosts[rank]}"
        if number:
            return f"{signal.Signals(number).name} to {name}"
        return f"the launcher of {name} has exited"

    def is_first_to_report(self, text: str) -> bool:
        """Return True on the first rank that asks about a text, or if the store does not answer."""
        store = dist.distributed_c10d._get_default_store()  # held by rank 0 or by torchrun
        ranks = within(SECONDS_TO_COUNT, lambda: store.add(text, 1), doing="counting the ranks")
        return ranks is None or ranks == 1

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while not self._leaving.is_set():
                if selector.select(timeout=SECONDS_OF_TICK):
                    for number in os.read(self._read, 64).replace(NO_SIGNAL, b""):
                        self._on_signal(number)
                    continue
                for look in (self._look_at_progress, self._beat, self._look_at_launchers):
                    try:
                        look()
                    except Exception:  # for example when /proc cannot be read; keep watching
                        self._tell_once(traceback.format_exc())

    def _tell_once(self, trouble: str) -> None:
        if trouble != self._trouble:  # print each problem once, not every second
            self._trouble = trouble
            print(trouble, file=sys.stderr, flush=True)

    def _on_signal(self, number: int) -> None:
        kind, name = self._signals.note(number), signal.Signals(number).name
        if kind == "first":
            self._ask(name, tells=self.rank == 0)
        elif kind == "other" and self.rank == 0:
            self._tell(f"received {name}; still stopping")
        elif kind == "repeated" and number in self._before:
            if self._is_first_of_node:
                self._tell(f"received {name} again; exiting at once")
            end_rank(128 + number)

    def _ask(self, reason: str, *, tells: bool) -> None:
        """Ask the run to stop after the step. The message at its end names one of the ranks asked.

        tells: print a message at once; of the ranks with the same reason, one is enough
        """
        if not self.asked:
            self.asked = reason
            if tells:
                self._tell(f"{reason}; stopping after this step")

    @property
    def _is_first_of_node(self) -> bool:
        """True for the lowest rank of a node, and for all ranks until their hosts are known."""
        return not self.hosts or self.hosts.index(self.hosts[self.rank]) == self.rank

    def _tell(self, text: str) -> None:
        print(f"{self.names[self.rank]}: {text}", file=sys.stderr)

    def _look_at_launchers(self) -> None:
        """Ask to stop if a launcher is gone; kill all launchers if one is stopped for too long.

        A stopped launcher would never notice the end of the run. The outermost launcher is killed
        first, because `deepspeed` exits with 0 when its child is killed.
        """
        for launcher in self._launchers:
            state = launcher.state()
            if not state:
                reason = f"its launcher (process {launcher.pid}) has exited"
                self._ask(reason, tells=self._is_first_of_node)
            self._stopped[launcher.pid] = self._stopped[launcher.pid] + 1 if state == "T" else 0
        if self.limit and max(self._stopped.values(), default=0) >= self.limit:
            for launcher in reversed(self._launchers):
                launcher.kill()

    def _look_at_progress(self) -> None:
        """Report this rank's activity after half of the time limit, and end after all of it.

        A rank that waits for a disk does not end, but reports its activity for the ranks that wait
        for it in a collective. It does so again after each half of the limit, because peers ignore
        old reports. If all ranks wait together for space on a full disk, none reports. Writing a
        report may block, so a rank ends soon after the limit in any case.
        """
        limit = self.limit  # read before the crumb, because `expect_steps` changes the crumb first
        moved, self._seen = self.crumb.count != self._seen, self.crumb.count
        moved = moved or self.crumb.waits_for_room
        self._still = 0 if moved else self._still + 1
        self._idle = 0 if moved or self.crumb.patient else self._idle + 1
        if not limit:
            return
        half = -(-limit // 2)
        if not self._still and self._reported:
            self._reported = False
            self._disk.run(lambda: self._report.take_back(self.rank))
        elif self._still == half or (self.crumb.patient and self._still and not self._still % half):
            self._reported = True
            self._report.fresh_seconds = limit
            self._disk.run(self._write_report)
        elif self._idle >= limit and not self._ending:  # after 2 s if the limit is 1 s
            self._ending = True
            Background("end of a hang").run(self._end)
        elif self._idle >= limit + REPORT_SECONDS + self._seconds_to_read:
            self._say_hung("the run folder does not answer")
            end_rank(HUNG)

    @property
    def _seconds_to_read(self) -> float:
        """The time in which a rank can read the reports of all ranks."""
        return len(self.names) * SECONDS_PER_REPORT

    def _write_report(self) -> None:
        """Write this rank's activity.

        The activity is written before the flight recorder is read, because reading it queries the
        device, which may never answer. If the query also holds the GIL, the watchdog process ends
        this rank.
        """
        about, stack = rank_status(self.rank, self.crumb)
        self._report.write((about, stack))
        launched = within(min(RECORDER_SECONDS, self.limit / 4), launched_collectives)
        if launched:
            self._report.write((replace(about, launched=launched), stack))

    def _end(self) -> None:
        """Print which rank is behind, and end this rank."""
        try:
            verdict, behind = self._report.verdict(rank_status(self.rank, self.crumb)[0])
        except Exception as problem:  # an unreadable report must not keep the rank alive
            self._say_hung(f"the ranks' reports cannot be read ({problem})")
        else:
            if verdict:
                self._say_hung("", verdict, behind)
            else:  # launchers end all ranks when the one that describes the hang exits
                time.sleep(2 + self._seconds_to_read)
        end_rank(HUNG)

    def _say_hung(self, problem: str, verdict: str = "", behind: Sequence[int] = ()) -> None:
        """Print the reason for the end of this rank, and then try to write it into the run folder.

        The event also lists the ranks that are behind, whose nodes launch.py blames.

        Until the hosts are known, the run folder may belong to another run, so nothing is written.
        """
        if problem:
            about, _ = rank_status(self.rank, self.crumb)
            verdict = f"{self.names[self.rank]}: {about}; {problem}"
        text = f"no progress for {self.limit} s: {verdict}"
        print(text, file=sys.stderr, flush=True)
        if not self.hosts:
            return
        step = self.crumb.step
        within(
            1,
            lambda: self.folder.event(
                "stop", step, reason=text, exit_code=HUNG, behind=list(behind)
            ),
            doing="writing events.jsonl",
        )

    def _start_watchdog(self) -> subprocess.Popen | None:
        if not (self.hang_seconds or self.limit):
            return None
        command = [sys.executable, "-I", "-S", str(WATCHDOG), str(os.getpid())]
        with interrupts_blocked():  # Ctrl-C is meant for the rank
            watchdog = subprocess.Popen(
                [*command, self.names[self.rank]], stdin=subprocess.PIPE, bufsize=0
            )
        assert watchdog.stdin
        os.set_blocking(watchdog.stdin.fileno(), False)  # it may have been stopped
        return watchdog

    def _beat(self) -> None:
        delay = SECONDS_BEFORE_WATCHDOG + int(self._seconds_to_read)
        patience = self.limit + delay if self.limit else 0
        if self._watchdog and self._watchdog.stdin:
            with contextlib.suppress(BrokenPipeError):  # the watchdog has been killed
                self._watchdog.stdin.write(b"%d\n" % patience)


def launched_collectives() -> list[Launched]:
    """Return the operations that this rank has launched, from torch's flight recorder."""
    recorder = torch._C._distributed_c10d
    backend = "nccl" if "nccl" in dist.get_backend() else "fr"  # fr: all other backends
    dump = json.loads(getattr(recorder, f"_dump_{backend}_trace_json")())
    world = dist.distributed_c10d._world
    members: dict[str, Sequence[int]] = {
        name: sorted(world.pg_group_ranks.get(group, ()))
        for group, name in list(world.pg_names.items())
    }
    return read_dump(dump, members)


def _wake(*_: object) -> None:
    """Do nothing, because the thread reads the signal's number."""
