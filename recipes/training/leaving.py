"""The end of a process: its exit handlers, the readers of its output, and its exit code."""

import atexit
from typing import NoReturn

from recipes.training.exit_codes import FINISHED
from recipes.training.streams import end_process, finish_output

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
