"""A process beside a rank: ends it when it has been stopped or no longer runs Python.

Nothing inside a stopped process can notice that. Its own time is counted in ticks that it has seen,
so that a whole job that is suspended and goes on (Ctrl-Z, fg) is left alone.

    python guard.py SECONDS PID NAME      with a pipe from the rank as standard input
"""

import os
import select
import signal
import sys


def main() -> None:
    """Read the rank's beats; kill it when they have failed to come."""
    patience, rank, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank's to answer
    silent = 0
    while silent < patience:
        ready, _, _ = select.select([0], [], [], 1)
        if not ready:
            silent += 1
        elif os.read(0, 4096):
            silent = 0
        else:
            return  # the rank has ended
    print(f"{name} has not answered for {patience} s and is ended", file=sys.stderr, flush=True)
    os.kill(rank, signal.SIGKILL)


if __name__ == "__main__":
    main()
