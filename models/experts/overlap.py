"""Two functions that run alternately, so that each computes while the other waits for a collective.

Both functions switch at the same points on every rank, so collectives are issued in the same order.
"""

import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import FrameType
from weakref import finalize

HELPER_NAME = "paired forward pass"


class StoppedError(Exception):
    """Ends a function because the other one has failed."""


class Turns:
    """Runs two functions alternately, in two threads, never both at once.

    `switch` may be called from any thread: the helper's thread counts as the helper, and every
    other one as main, because autograd runs the backward pass of a GPU in a thread of its own. The
    helper must not call autograd's engine, whose thread may be waiting in `switch`.

    The helper's thread stays, because libraries keep handles and workspaces for each thread. It
    does not inherit modes of the other thread, such as autocast.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._active = False
        self._helpers_turn = False
        self._ended = 0  # number of functions that have ended
        self._problem: BaseException | None = None
        finalize(self, self._tasks.put, None)

    @property
    def is_helper(self) -> bool | None:
        """True in the helper's thread, False in others, and None while nothing alternates."""
        return threading.current_thread() is self._thread if self._active else None

    def take(self, helper: Callable[[], None], main: Callable[[], None]) -> None:
        """Run both functions until they end; `main` begins, in this thread.

        If one of them fails, `switch` ends the other one, and the first error is raised here.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._tasks,), name=HELPER_NAME, daemon=True
            )
            self._thread.start()
        self._helpers_turn, self._ended, self._problem = False, 0, None
        self._active = True
        self._tasks.put(partial(self._run, helper))
        self._run_one(main)
        self._end(helpers_turn=True)
        with self._changed:
            self._changed.wait_for(lambda: self._ended == 2)
        self._active = False
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def switch(self) -> None:
        """Let the other function run until it switches back or ends."""
        is_helper = self.is_helper
        if is_helper is None:
            return
        if not self._ended:
            with self._changed:
                self._helpers_turn = not is_helper
                self._changed.notify_all()
            self._await_turn(is_helper)
        if self._problem is not None:
            raise StoppedError

    def _run(self, helper: Callable[[], None]) -> None:
        self._await_turn(True)
        if self._problem is None:
            self._run_one(helper)
        self._end(helpers_turn=False)

    def _run_one(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as problem:
            self._problem = self._problem or problem

    def _await_turn(self, is_helper: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._helpers_turn == is_helper)

    def _end(self, *, helpers_turn: bool) -> None:
        with self._changed:
            self._ended += 1
            self._helpers_turn = helpers_turn
            self._changed.notify_all()


def _serve(tasks: SimpleQueue) -> None:
    """Run tasks until one is None."""
    while (task := tasks.get()) is not None:
        task()
        del task  # which holds the model


def running_helper() -> FrameType | None:
    """Return the innermost frame of a helper whose turn it is; None if there is none."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0) if thread.name == HELPER_NAME else None
        names, outer = set[str](), frame
        while outer is not None:
            if outer.f_code.co_filename == __file__:
                names.add(outer.f_code.co_name)
            outer = outer.f_back
        if Turns._run.__name__ in names and Turns._await_turn.__name__ not in names:
            return frame
    return None
