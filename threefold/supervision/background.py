"""Functions run in threads, for a caller that must not block."""

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

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
    found: list[T] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:  # no error here may hide the report of the hang
            print(f"{doing} failed: {error}", flush=True)

    thread = threading.Thread(target=run, name=doing, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
