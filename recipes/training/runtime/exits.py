"""Exit codes of a run, for launchers and scripts, and the orderly end of a process."""

import atexit
from typing import NoReturn

from recipes.training.runtime.streams import end_process, finish_output

FINISHED = 0  # every step is done and saved
REFUSED = 2  # nothing was started: the message says what to change
STOPPED = 3  # it cannot continue by itself: bad numbers, replicas that diverged, a failed save
HUNG = 4  # no progress; the message names the rank that is behind
INTERRUPTED = 5  # asked to stop; saved, rerun the same command to resume
BUSY = 6  # nothing was started: another process holds the run folder; may be started again later

SECONDS_FOR_READER = 30.0  # without progress, until the output of a finished run is read
SECONDS_FOR_READER_OF_FAILURE = 2.0


def leave(code: int) -> NoReturn:
    """End this process after its exit handlers, without the teardown of libraries' threads.

    Some threads of torch abort now and then during teardown ("terminate called without an active
    exception"), and the launcher would take a finished run for a failed one.
    """
    atexit._run_exitfuncs()
    leave_handlers_out(code)


def leave_handlers_out(code: int) -> NoReturn:
    """End this process without further exit handlers, when its output is read."""
    finish_output(SECONDS_FOR_READER if code == FINISHED else SECONDS_FOR_READER_OF_FAILURE)
    end_process(code)
