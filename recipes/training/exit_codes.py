"""How a run says, to launchers and scripts, how it has ended."""

FINISHED = 0  # every step is done and saved
REFUSED = 2  # nothing was started: the message says what to change
STOPPED = 3  # it cannot go on by itself: bad numbers, copies that differ, a save that failed
HUNG = 4  # no progress; the message names the rank that is behind
INTERRUPTED = 5  # asked to stop; saved, the same command goes on
