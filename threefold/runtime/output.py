"""Standard output and error that never make a run wait for their readers.

A terminal that is halted with Ctrl-S, a pager that is not scrolled or a full disk must neither stop
the training nor delay its end. `use_nonblocking_output` replaces both streams: writing puts text
into a bounded buffer, and a thread writes the buffer to the file. This applies to everything that
Python prints, including tracebacks and warnings. C++ libraries such as NCCL write to the descriptor
directly.

A pipe whose reader has stalled is enlarged up to the kernel's limit. It then has room for the
messages of this process, which remain readable after the process ends, and for the messages of the
launchers, which print to the same pipe before they end the ranks.
"""

import atexit
import contextlib
import ctypes
import fcntl
import io
import logging
import math
import os
import select
import stat
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, TextIO

MAX_UNREAD_BYTES = 4 * 2**20  # per stream; older text is dropped
CHUNK_BYTES = select.PIPE_BUF  # the largest atomic write to a pipe
RESERVE_BYTES = 16 * 2**10  # space in a pipe that is reserved for the launchers
SECONDS_AT_EXIT = 2.0  # without progress, before an exiting process drops unread text
SECONDS_BETWEEN_LOOKS = 1.0  # between checks for space in a pipe, while idle
SECONDS_BETWEEN_LINES = 10.0  # of the progress of a command


@contextlib.contextmanager
def progress_lines(
    describe: Callable[[], str], *, seconds_between_lines: float = SECONDS_BETWEEN_LINES
) -> Iterator[None]:
    """Print what the command is doing every ten seconds, until the block ends.

    A library call that takes minutes must not look like a hang.

    Args:
        describe: returns what the command is doing at this moment, for example "reading train.bin"
    """
    ended, started = threading.Event(), time.monotonic()

    def run() -> None:
        while not ended.wait(seconds_between_lines):
            print(f"  {describe()}, {time.monotonic() - started:.0f} s so far", flush=True)

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def printer(json: bool) -> Callable[[str], None]:
    """Return the function that prints a line at once: on stderr if stdout is for JSON."""
    return partial(print, file=sys.stderr if json else sys.stdout, flush=True)


@contextlib.contextmanager
def stdout_for_json(wanted: bool) -> Iterator[None]:
    """Send what this process and its children write to standard output to standard error instead.

    A command with --json measures inside and prints its object afterwards, so that standard output
    receives nothing else. DeepSpeed's logger, for example, writes to standard output; if DeepSpeed
    is imported inside, the logger keeps writing to standard error.

    Args:
        wanted: False changes nothing, for a command without --json
    """
    if not wanted:
        yield
        return
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C libraries have buffered belongs to standard error
        os.dup2(own, 1)
        os.close(own)


class OutputThread:
    """A thread that writes text to a file descriptor, for callers that cannot wait for a reader."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        self._process = os.getpid()
        self._changed = threading.Condition()  # reentrant: a destructor may print during `put`
        self._waiting: deque[bytes] = deque()
        self._unread = 0  # bytes that are waiting or being written
        self._left_out = 0  # bytes
        self._written = 0  # chunks
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def put(self, content: bytes) -> None:
        """Take some text and return at once; when the buffer is full, drop the oldest text."""
        if os.getpid() != self._process:  # a forked process does not have this thread
            _write_whole(self.descriptor, content)
            return
        with self._changed:
            self._waiting.append(content)
            self._unread += len(content)
            while self._unread > MAX_UNREAD_BYTES and len(self._waiting) > 1:
                oldest = len(self._waiting.popleft())
                self._unread -= oldest
                self._left_out += oldest
            self._changed.notify_all()

    def finish(self, seconds: float, *, at_most: float = math.inf) -> bool:
        """Wait until all text is written.

        Args:
            seconds: time without progress after which to stop waiting for the reader
            at_most: limit of the total time, in seconds

        Returns:
            True if all text is written.
        """
        end = time.monotonic() + at_most
        with self._changed:
            while self._unread:
                before = self._written
                patience = min(seconds, end - time.monotonic())
                if not self._changed.wait_for(lambda: self._written != before, patience):  # noqa: B023
                    return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting, SECONDS_BETWEEN_LOOKS):
                    content, taken = b"", 0
                else:
                    content, taken = self._take()
            if self._is_pipe and not content:
                self._has_room()
            self._write(content)
            with self._changed:
                self._unread -= taken
                self._written += bool(taken)
                self._changed.notify_all()

    def _take(self) -> tuple[bytes, int]:
        """Return a chunk of text, preceded by a note if text was dropped, and the text's length."""
        parts = [self._waiting.popleft()]
        while self._waiting and sum(map(len, parts)) + len(self._waiting[0]) <= CHUNK_BYTES:
            parts.append(self._waiting.popleft())
        content, note = b"".join(parts), b""
        if self._left_out:
            note = f"\n[{self._left_out} bytes of output were dropped: not read in time]\n".encode()
            self._left_out = 0
        return note + content, len(content)

    def _write(self, content: bytes) -> None:
        for first in range(0, len(content), CHUNK_BYTES):
            while self._is_pipe and not self._has_room():
                time.sleep(0.02)
            _write_whole(self.descriptor, content[first : first + CHUNK_BYTES])

    def _has_room(self) -> bool:
        """Return True if writing a chunk will not block; enlarge a full pipe."""
        try:
            poll = select.poll()
            poll.register(self.descriptor, select.POLLOUT)
            events = dict(poll.poll(0)).get(self.descriptor, 0)
            if events & ~select.POLLOUT:
                return True  # the reader is gone, so that writing fails at once
            size = fcntl.fcntl(self.descriptor, fcntl.F_GETPIPE_SZ)
            (unread,) = struct.unpack(
                "i", fcntl.ioctl(self.descriptor, termios.FIONREAD, struct.pack("i", 0))
            )
            needed = min(RESERVE_BYTES + CHUNK_BYTES, size)  # a pipe of one page has no reserve
            if events and size - unread >= needed:
                return True
            with contextlib.suppress(OSError):  # the limit of /proc/sys/fs/pipe-max-size
                fcntl.fcntl(self.descriptor, fcntl.F_SETPIPE_SZ, 2 * size)
        except OSError:
            return True
        return False


class EnduringStream:
    """A text stream in front of an OutputThread; text that cannot be written is dropped.

    Attributes:
        source: name of this process in the label of each line; empty for lines without a label
    """

    def __init__(self, stream: TextIO, thread: OutputThread):
        self._stream, self._thread = stream, thread
        self._lock = threading.RLock()
        self._line = ""
        self.source = ""
        self._starts_line = True

    def write(self, text: str) -> int:
        """Take text, and hand it on when a line is complete."""
        with self._lock:
            self._line += self._labelled(text)
            if "\n" in text or "\r" in text or len(self._line) > CHUNK_BYTES:
                self.flush()
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Take several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on an incomplete line; does not wait until the line is written."""
        with self._lock:
            line, self._line = self._line, ""
            if line:
                self._thread.put(line.encode(self._stream.encoding or "utf-8", "backslashreplace"))

    def finish(self, seconds: float, *, at_most: float = math.inf) -> bool:
        """Wait until all text is written; see OutputThread.finish."""
        self.flush()
        return self._thread.finish(seconds, at_most=at_most)

    def _labelled(self, text: str) -> str:
        """Return text with a label at the beginning of each line that is not empty."""
        lines = text.splitlines(keepends=True)
        labelled = []
        for line in lines:
            if self.source and self._starts_line and line.strip():
                labelled.append(line_label(self.source))
            labelled.append(line)
            self._starts_line = line.endswith(("\n", "\r"))
        return "".join(labelled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def line_label(source: str) -> str:
    """Return the beginning of a line of a log, such as "[2026-01-31T23:59:59 rank 3] "."""
    return f"[{time.strftime('%Y-%m-%dT%H:%M:%S')} {source}] "


def label_lines(rank: int) -> None:
    """Begin each line of output with the time and the rank, except on a terminal.

    The labels show the order and the rank of the lines in a job's log. Call
    `use_nonblocking_output` before; other streams are not changed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, EnduringStream) and not stream.isatty():
            stream.source = f"rank {rank}"


def escape_output() -> None:
    """Print characters that the locale's encoding lacks as escapes, such as \\xe9.

    By default, Python raises an exception for them on standard output. They occur in texts of
    users, and in paths that are not UTF-8. `use_nonblocking_output` does the same.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def report_unwritable(script: str, problem: OSError) -> None:
    """Print why standard output could not be written, and drop the text that waits for it.

    Otherwise Python would try again at the end of the process, and print a second message. If the
    reader of a pipe has ended, nothing is printed.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(problem, BrokenPipeError):
        place = problem.filename or "standard output"
        print(f"{script}: {place} cannot be written ({problem.strerror})", file=sys.stderr)


def silence_libraries() -> None:
    """Silence the device messages of transformers and DeepSpeed in a command that needs no device.

    Call it before these libraries are imported. Variables that the user has set are not changed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger().setLevel(logging.ERROR)


def use_nonblocking_output() -> None:
    """Replace standard output and error by streams that never make this process wait.

    If both streams are the same file, they share one thread, which preserves the order of the
    output. A closed descriptor is opened as /dev/null; otherwise the next file opened would receive
    the output. A process that exits without `end_process` also waits for its readers.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, this one
    threads = [OutputThread(1)]
    threads.append(threads[0] if os.path.sameopenfile(1, 2) else OutputThread(2))
    for name, descriptor, thread in zip(("stdout", "stderr"), (1, 2), threads, strict=True):
        stream = getattr(sys, name) or open(  # noqa: SIM115
            descriptor, "w", encoding="utf-8", closefd=False
        )
        with contextlib.suppress(OSError):
            stream.flush()
        setattr(sys, name, EnduringStream(stream, thread))
    atexit.register(finish_output, SECONDS_AT_EXIT)


def finish_output(seconds: float, *, at_most: float = math.inf) -> None:
    """Wait until the output of this process is written; see OutputThread.finish."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, EnduringStream):
            stream.finish(seconds, at_most=at_most)


def end_process(code: int, *, seconds: float = 2.0) -> NoReturn:
    """End this process at once, after at most `seconds` for the readers of its output."""
    try:
        finish_output(seconds, at_most=seconds)
    finally:
        os._exit(code)


def _write_whole(descriptor: int, content: bytes) -> None:
    """Write to a file, and drop the rest of the content if the file is full or has no reader."""
    left = memoryview(content)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # another process has made the file non-blocking
            select.select([], [descriptor], [], 1.0)
        except OSError:
            return
