"""A standby process: imports what a rank needs, and becomes one when the node's agent says so.

Importing torch and DeepSpeed takes most of the time of a restart. The agent therefore starts one
standby process per GPU during training. The process does not use the GPU until it becomes a rank.

    python threefold/launch/standby.py RUN

It writes a line to its standard output when it is ready. It then reads one line of JSON, with the
command line and the environment variables of the rank, and runs recipes/pretrain.py with them.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from threefold/launch/
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
import os
import runpy
import time

from threefold.config.sections import REPOSITORY
from threefold.runtime.exits import pause_collection

PRETRAIN = REPOSITORY / "recipes" / "pretrain.py"


def main() -> None:
    """Get ready, wait for the rank's command, and run it."""
    report = os.dup(1)
    os.dup2(2, 1)  # libraries may print during their import
    pause_collection()
    # pretrain.py imports these packages after it has checked the recipe.
    from threefold.engine import build  # noqa: F401
    from threefold.pretrain import setup  # noqa: F401

    pretrain = runpy.run_path(str(PRETRAIN))
    os.write(report, b"ready\n")
    os.close(report)
    line = sys.stdin.buffer.readline()
    if not line:  # the agent has ended
        return
    rank = json.loads(line)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.update(rank["variables"])
    sys.argv = rank["words"]
    pretrain["main"](started=time.monotonic())


if __name__ == "__main__":
    main()
