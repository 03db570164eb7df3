"""How close the pipeline's schedules come to what they could be.

Sleeping layers take the cores out of the measurement: each schedule, and DeepSpeed's own two beside
them, over its length in theory and over the one that is simulated from the durations of its passes.

    python tests/benchmarks/schedules.py [--json]
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not this folder, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import argparse
import json

from tests.benchmarks.sleeping_stages import Setting, time_all

FORWARD = 0.08  # seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="of each schedule; the best counts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = {}
    for name, stages, micro_batches in (("schedules", 4, 16), ("schedules_of_8_stages", 8, 8)):
        setting = Setting(
            stages=stages, micro_batches=micro_batches, forward=FORWARD, steps=options.steps
        )
        found = time_all(setting)
        result[name] = {name: each.ratios(setting) for name, each in found.items()}
        if not options.json:
            print(f"{stages} stages, {micro_batches} micro-batches, forward {1000 * FORWARD:g} ms")
            print_table(result[name])
            sys.stdout.flush()
    if options.json:
        print(json.dumps(result))


def print_table(rows: dict[str, dict[str, float]]) -> None:
    """A line for each contestant."""
    print(f"{'':<24}{'s':>8}{'/ theory':>10}{'/ simulated':>13}{'step / theory':>15}")
    for name, row in rows.items():
        print(
            f"{name:<24}{row['makespan_seconds']:8.3f}{row['over_theory']:10.3f}"
            f"{row['over_simulated']:13.3f}{row['step_over_theory']:15.3f}"
        )


if __name__ == "__main__":
    main()
