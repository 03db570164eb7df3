"""Two functions that take turns, so that each runs while the other one waits for a collective.

All ranks switch at the same places. The order of their operations, and with it that of their
collectives, is therefore the same on all of them.
"""

import threading
from collections.abc import Callable


class StoppedError(Exception):
    """Ends a function because the other one has failed."""


class Turns:
    """The turns of two functions, of which one runs at a time.

    Autograd may call `switch` from a thread of its own, so only the helper's thread is known.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._helper: threading.Thread | None = None  # None: no functions take turns
        self._helpers_turn = False
        self._ended = 0  # number of functions that have ended
        self._problem: BaseException | None = None

    def take(self, helper: Callable[[], None], main: Callable[[], None]) -> None:
        """Run both functions until they end; `main` begins, in this thread.

        If one of them fails, `switch` ends the other one, and the error is raised here.
        """
        self._helpers_turn, self._ended, self._problem = False, 0, None
        self._helper = threading.Thread(target=self._run, args=(helper,), daemon=True)
        self._helper.start()
        try:
            main()
        except StoppedError:
            pass
        except BaseException as problem:
            self._problem = problem
        self._end(helpers_turn=True)
        self._helper.join()
        self._helper = None
        if self._problem is not None:
            raise self._problem

    def switch(self) -> None:
        """Let the other function run until it switches back or ends."""
        if self._helper is None or self._ended:
            return
        is_helper = threading.current_thread() is self._helper
        with self._changed:
            self._helpers_turn = not is_helper
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._helpers_turn == is_helper)
        if self._problem is not None:
            raise StoppedError

    def _run(self, helper: Callable[[], None]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._helpers_turn)
        try:
            if self._problem is None:
                helper()
        except StoppedError:
            pass
        except BaseException as problem:
            self._problem = problem
        self._end(helpers_turn=False)

    def _end(self, *, helpers_turn: bool) -> None:
        with self._changed:
            self._ended += 1
            self._helpers_turn = helpers_turn
            self._changed.notify_all()
