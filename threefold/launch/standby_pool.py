"""The standby processes of a node, which have already imported what a rank needs (standby.py).

Only the standard library is imported.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from threefold.launch.leftovers import kill_group

SECONDS_BEFORE_STANDBY = 30.0  # after a start or a failure, so that imports do not slow the ranks
STANDBY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standby.py")


class StandbyPool:
    """Standby processes, started one at a time.

    Args:
        size: number of standby processes to keep
        run: name of the run, for the command lines of the processes
        say: prints a message

    Attributes:
        variables: environment of the processes; None until launch.py has sent it
        ready: the processes that have imported everything
    """

    def __init__(self, size: int, *, run: str, say: Callable[[str], None]):
        self.size, self.say = size, say
        self.command = [sys.executable, STANDBY, run]
        self.variables: Mapping[str, str] | None = None
        self.ready: list[subprocess.Popen[bytes]] = []
        self._starting: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0

    def pause(self) -> None:
        """Start no process for a while."""
        self._next_start = time.monotonic() + SECONDS_BEFORE_STANDBY

    def keep(self) -> None:
        """Start a process if one is missing and no other one is being started."""
        self.ready = [process for process in self.ready if process.poll() is None]
        if self._starting is not None:
            self._check_start(self._starting)
        elif (
            len(self.ready) < self.size
            and self.variables is not None
            and time.monotonic() >= self._next_start
        ):
            try:
                self._starting = subprocess.Popen(
                    self.command,
                    env=os.environ | dict(self.variables),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:  # too many processes, or too little memory
                self.say(f"no standby process can be started: {error.strerror}")
                self.pause()

    def _check_start(self, process: "subprocess.Popen[bytes]") -> None:
        """Note whether the process that is being started has become ready or has failed."""
        assert process.stdout
        if not select.select([process.stdout], [], [], 0)[0]:
            return
        if process.stdout.readline() == b"ready\n":
            self.ready.append(process)
        else:  # it has failed, and printed why
            self.pause()
        self._starting = None

    def wake(
        self, command: Sequence[str], variables: Mapping[str, str]
    ) -> "subprocess.Popen[bytes] | None":
        """Turn a standby process into a rank; return None if there is none.

        Args:
            command: the command of the rank
            variables: its environment variables
        """
        while self.ready:
            process = self.ready.pop()
            assert process.stdin and process.stdout
            script = next(place for place, word in enumerate(command) if word.endswith(".py"))
            line = json.dumps({"words": list(command[script:]), "variables": dict(variables)})
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(line.encode() + b"\n")
                process.stdin.close()
                process.stdout.close()
                return process
        return None

    def kill(self) -> None:
        """Kill all standby processes."""
        for process in [*self.ready, *([self._starting] if self._starting else [])]:
            kill_group(process.pid)
