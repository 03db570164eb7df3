"""Output that may go nowhere: a run outlives the terminal or the pipe that showed it."""

import contextlib
import sys
from typing import Any, TextIO


class EnduringStream:
    """A stream that swallows what nobody takes any more."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if there is somebody."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, likewise."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_output() -> None:
    """Let standard output and error be such streams from here on."""
    sys.stdout, sys.stderr = EnduringStream(sys.stdout), EnduringStream(sys.stderr)
