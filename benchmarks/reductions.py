"""Measure how much of the data ranks' communication a pipeline hides, and compare the planner.

Two stages with two data ranks each train layers that sleep, over links that sleep
(`benchmarks/pipelines/sleeping_reductions.py`). `reduction` is the time of reducing all gradients
of a stage once, relative to a backward pass; gathering the weights takes as long. `all` is the time
of all reductions and the gathering of a step, if nothing were hidden. `predicted` and `measured`
are the time by which they lengthen the step. All three are shares of a step without communication.
Takes eight minutes.

    python benchmarks/reductions.py [--rounds 3] [--json]
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import argparse
import json

from benchmarks.pipelines.sleeping_reductions import Setting, compare
from threefold.runtime.command_line import count
from threefold.runtime.output import stdout_for_json


def main() -> None:
    """Measure and print a line for each schedule and link."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=count, default=3, help="measurements of each link")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args()
    with stdout_for_json(options.json):
        rows = compare(Setting(rounds=options.rounds))
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'':<42}{'reduction':>10}{'step, s':>9}{'all':>8}{'predicted':>11}{'measured':>10}")
    for row in rows:
        print(
            f"{row['way']:<42}{row['reduction']:10.1f}{row['step_seconds']:9.3f}"
            f"{row['all_over_step']:8.1%}{row['predicted_over_step']:11.1%}"
            f"{row['measured_over_step']:10.1%}"
        )


if __name__ == "__main__":
    main()
