"""Exit codes of a run, for launchers and scripts."""

FINISHED = 0  # every step is done and saved
REFUSED = 2  # nothing was started: the message says what to change
STOPPED = 3  # it cannot continue by itself: bad numbers, replicas that diverged, a failed save
HUNG = 4  # no progress; the message names the rank that is behind
INTERRUPTED = 5  # asked to stop; saved, rerun the same command to resume
BUSY = 6  # nothing was started: another process holds the run folder; may be started again later
