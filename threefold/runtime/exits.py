"""Exit codes, interrupts, the end of a process, and garbage collection between steps only."""

import atexit
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from models.errors import UserError
from threefold.runtime.output import end_process, finish_output

FINISHED = 0  # every step is done and saved
REJECTED = 2  # nothing was started; the message names the setting to change
STOPPED = 3  # cannot continue by itself: bad numbers, diverged replicas, failed save, no memory
HUNG = 4  # no progress; the message names the rank that is behind
INTERRUPTED = 5  # asked to stop; saved, rerun the same command to resume
BUSY = 6  # nothing was started: another process holds the run folder or the port; rerun later
UNFIT = 7  # preflight found a broken node, or a slow one that launch.py replaces; it is named

# Time without progress before a process stops waiting for the reader of its output.
SECONDS_FOR_READER = 30.0  # of a finished run
SECONDS_FOR_READER_OF_FAILURE = 2.0

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The file in which the first rank that fails records its exit code and its host. srun ends the
# others some time later, and its own exit code is then that of the kill.
FIRST_FAILURE = "THREEFOLD_FIRST_FAILURE"
SECONDS_TO_RECORD = 2.0  # on a file server that may not answer

ECHO_SECONDS = 2.0  # launchers forward signals, so a signal within this time is not a second one

STEPS_BETWEEN_FULL_COLLECTIONS = 100  # the objects of W&B, which starts later, take 30 ms


class PortInUse(UserError):
    """Another process listens on the port at which the ranks meet."""


def exit_now(code: int) -> NoReturn:
    """Run the exit handlers and end this process, without tearing down the libraries' threads.

    Some threads of torch occasionally abort during teardown ("terminate called without an active
    exception"), and the launcher would then report a finished run as failed.
    """
    _record_failure(code)
    _keep_operators()
    atexit._run_exitfuncs()
    leave_handlers_out(code)


def end_rank(code: int) -> NoReturn:
    """End this rank at once, without exit handlers, for which its main thread may be needed."""
    _record_failure(code)
    end_process(code)


def _record_failure(code: int) -> None:
    """Write the exit code and the name of this host, unless another rank has failed before."""
    if code == FINISHED or FIRST_FAILURE not in os.environ:
        return

    def record() -> None:
        file = Path(os.environ[FIRST_FAILURE])
        with contextlib.suppress(OSError), file.open("x", encoding="utf-8") as stream:
            stream.write(f"{code} {socket.gethostname()}\n")

    recording = threading.Thread(target=record, daemon=True)
    recording.start()
    recording.join(SECONDS_TO_RECORD)


def _keep_operators() -> None:
    """Skip the exit handlers that unregister torch's operators one by one, which takes 0.1 s."""
    unregister = getattr(sys.modules.get("torch.library"), "_del_library", None)
    for finalizer in list(weakref.finalize._registry) if unregister else ():  # type: ignore[attr-defined]
        if (alive := finalizer.peek()) and alive[1] is unregister:
            finalizer.atexit = False


def leave_handlers_out(code: int) -> NoReturn:
    """Wait until the output of this process is read, then end it without further exit handlers."""
    finish_output(SECONDS_FOR_READER if code == FINISHED else SECONDS_FOR_READER_OF_FAILURE)
    end_process(code)


def end_at_interrupt() -> None:
    """Let Ctrl-C end this process with one line while a command imports its modules.

    An exception would end in a long traceback of the import system, or in none: some libraries
    catch every exception of an optional import, and would then continue without it. An ignored
    signal stays ignored: nohup relies on it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that a command can clean up.

    If the command does not catch it, Python prints one line in place of the traceback. In both
    cases the process ends by the signal, as without these functions: shells report exit code 130.
    """
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.excepthook = _print_uncaught


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach, because this process ends them.

    The signal goes to all processes of a terminal. They would print tracebacks, of their imports if
    they have just been started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopSignals:
    """The signals that have asked a process to stop."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}  # the time at which each signal came first

    def note(self, number: int) -> Literal["first", "echo", "other", "repeated"]:
        """Note a signal, and return what it is.

        "repeated" means to stop at once: the same signal has come more than ECHO_SECONDS ago, or
        any signal if this is Ctrl-C. "other" is another signal while the process is stopping, such
        as the SIGTERM that Slurm sends after the signal of `--signal`.
        """
        now, before = time.monotonic(), dict(self._first)
        self._first.setdefault(number, now)
        if not before:
            return "first"
        if number == signal.SIGINT:
            return "repeated" if now - min(before.values()) > ECHO_SECONDS else "echo"
        if number in before:
            return "repeated" if now - before[number] > ECHO_SECONDS else "echo"
        return "other" if now - max(before.values()) > ECHO_SECONDS else "echo"


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT or SIGTERM, and at a later SIGINT.

    At Ctrl-C, the launcher `deepspeed` also sends SIGTERM to its processes, which must not end them
    before they have handled the interrupt. An ignored signal stays ignored.
    """
    first: list[float] = []

    def interrupt(number: int, frame: object) -> None:
        now = time.monotonic()
        if not first or (number == signal.SIGINT and now - first[0] > ECHO_SECONDS):
            first.append(now)
            raise KeyboardInterrupt

    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def exit_at_signals(*numbers: int) -> None:
    """Let signals raise SystemExit(128 + number), so that a command cleans up.

    Signals within ECHO_SECONDS do not raise it again, which would interrupt the cleanup: a user may
    press Ctrl-C twice. An ignored signal stays ignored: nohup relies on it. Call
    `ignore_ending_signals` before the exit handlers run.

    Args:
        numbers: default: SIGINT, SIGTERM and SIGHUP
    """
    signals = StopSignals()

    def leave(number: int, frame: object) -> None:
        if signals.note(number) != "echo":
            sys.exit(128 + number)

    for number in numbers or ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def ignore_ending_signals() -> None:
    """Let the signals of `exit_at_signals` have no effect: the work of this process is done."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def interrupt_advice() -> str:
    """Return what a user does to interrupt this process.

    It is "press Ctrl-C", unless the terminal would send that to other processes, because the
    launcher has ended and the shell has the terminal again, or because this process runs in the
    background. Without a terminal, the launcher of another machine may forward Ctrl-C.
    """
    with contextlib.suppress(OSError):  # no terminal
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            if os.tcgetpgrp(terminal) != os.getpgrp():
                return f'run "kill -INT {os.getpid()}"'
        finally:
            os.close(terminal)
    return "press Ctrl-C"


def _end_at_once(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # also for a second signal, if the reader has stalled
    with contextlib.suppress(OSError):
        os.write(2, f"{_interrupted()}; nothing has been started or written\n".encode())
    os.kill(os.getpid(), number)


def _print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print(_interrupted(), file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _interrupted() -> str:
    return f"{Path(sys.argv[0]).name}: interrupted"


# Garbage collection between steps only, not during imports or within a step.
#
# Within a step, Python would start a collection at a different point on each rank, and every rank
# would wait for each of these collections.


def pause_collection() -> None:
    """Turn the collector off during imports.

    Imports create hundreds of thousands of objects to scan, but hardly any garbage.
    """
    gc.disable()


def resume_collection() -> None:
    """Turn the collector on again, and exempt all existing objects from it."""
    gc.freeze()
    gc.enable()


def hold_garbage() -> None:
    """Exempt all existing objects from collection, and collect only on request."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect_garbage(step: int) -> None:
    """Collect garbage among the objects created since the last call.

    Every STEPS_BETWEEN_FULL_COLLECTIONS steps, collect it among all objects since `hold_garbage`.
    """
    gc.collect(0 if step % STEPS_BETWEEN_FULL_COLLECTIONS else 2)
