"""Run a command of recipes/ in the process of the tests, where most imports are already loaded."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from unittest import mock


def run_here(main: Callable[[], None], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the `main` of a command; return its exit code and what it printed.

    A new interpreter would need seconds for the imports. The output of child processes is not
    captured.

    Args:
        main: function that reads sys.argv
        arguments: command-line arguments, without the name of the command
    """
    words = [f"{main.__module__.rpartition('.')[2]}.py", *map(str, arguments)]
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", words),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())
