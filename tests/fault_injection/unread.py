"""Standard output that no one reads: a full pipe, a closed pipe and /dev/full."""

import contextlib
import os
import termios
import threading
import time

UNREAD = ("full pipe", "closed pipe", "/dev/full")
FILLING = b"." * 1023 + b"\n"


class Output:
    """A file descriptor for the output of a process; a thread reads it until it is spoiled.

    kind: "pipe", which is always read; one of UNREAD; or "halted terminal", after Ctrl-S.
        /dev/full is full from the beginning
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._parts: list[bytes] = []
        self._reading = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Output":
        if self.kind == "/dev/full":
            self._read, self.descriptor = -1, os.open("/dev/full", os.O_WRONLY)
        else:
            halts = self.kind == "halted terminal"
            self._read, self.descriptor = os.openpty() if halts else os.pipe()
            os.set_blocking(self._read, False)
            self.resume_reading()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_reading()
        for descriptor in (self._read, self.descriptor):
            if descriptor >= 0:
                os.close(descriptor)

    def spoil(self) -> None:
        """Switch the output to the failure mode named by `kind`."""
        if self.kind in ("full pipe", "closed pipe"):
            self.stop_reading()
        if self.kind == "full pipe":
            self.fill()
        elif self.kind == "halted terminal":
            termios.tcflow(self.descriptor, termios.TCOOFF)
        elif self.kind == "closed pipe":
            os.close(self._read)
            self._read = -1

    def text(self) -> str:
        """Return all that has been written, as far as it can still be read."""
        self.stop_reading()
        self._take()
        return b"".join(self._parts).replace(FILLING, b"").decode(errors="replace")

    def stop_reading(self) -> None:
        """Stop the thread; later output stays in the pipe."""
        self._reading.clear()
        if self._thread:
            self._thread.join()
            self._thread = None

    def resume_reading(self) -> None:
        """Read the output in a thread, until `stop_reading`."""
        self._reading.set()
        self._thread = threading.Thread(target=self._keep_reading, daemon=True)
        self._thread.start()

    def fill(self) -> None:
        """Write until the pipe is full to the last byte."""
        own = os.open(f"/proc/self/fd/{self.descriptor}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, FILLING)
        os.close(own)

    def _keep_reading(self) -> None:
        while self._reading.is_set():
            self._take()
            time.sleep(0.02)

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._read >= 0:
                part = os.read(self._read, 2**16)
                if not part:
                    return
                self._parts.append(part)
