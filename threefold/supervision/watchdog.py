"""The watchdog process of a rank. It kills the rank if the rank is stopped or Python is blocked.

A stopped process cannot notice that it is stopped. The watchdog counts its own ticks instead of
reading a clock, so that a whole job that is suspended and resumed (Ctrl-Z, fg) is left alone.

    python watchdog.py PID NAME      with a pipe from the rank as standard input

Each heartbeat of the rank is a line with the number of seconds for which the rank may then be
silent, or 0 for no limit.
"""

import os
import select
import signal
import sys
import threading
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root
    sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from threefold.runtime.launchers import Process
from threefold.runtime.output import line_label

SECONDS_OF_TICK = 1.0  # without a heartbeat, to count as a second of silence
SECONDS_TO_SPEAK = 5.0


def main() -> None:
    """Read the heartbeats of the rank, and kill the rank when they stop."""
    pid, name = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # these signals are meant for the rank
    try:
        rank = Process(pid)
    except OSError:
        return
    if os.getppid() != pid:  # the rank ended before its PID was looked up
        return
    patience = wait_for_silence()
    # Kill before printing, because a message may block if standard error has no reader.
    if patience and rank.kill():
        label = "" if os.isatty(2) else line_label(name.partition(" (")[0])
        say(f"{label}{name} has not answered for {patience} s and was killed\n")


def wait_for_silence() -> int:
    """Return the patience in seconds that the rank has exceeded, or 0 when the rank has ended."""
    patience = silent = 0
    unread = b""
    while not patience or silent < patience:
        ready, _, _ = select.select([0], [], [], SECONDS_OF_TICK)
        if not ready:
            silent += 1
            continue
        content = os.read(0, 4096)
        if not content:
            return 0
        silent = 0
        *beats, unread = (unread + content).split(b"\n")
        if beats:
            patience = int(beats[-1])
    return patience


def say(text: str) -> None:
    """Write a message to standard error, and give up after a while."""
    content = text.encode(errors="backslashreplace")
    thread = threading.Thread(target=os.write, args=(2, content), daemon=True)
    threading.excepthook = lambda problem: None  # a closed pipe, a full disk
    thread.start()
    thread.join(SECONDS_TO_SPEAK)


if __name__ == "__main__":
    main()
    os._exit(0)  # the message may still be waiting for a reader
