"""Print the number of communication kernels that a GPU must run at once, by pipeline schedule.

python benchmarks/communication_slots.py           # the table of docs/nccl-and-cuda.md
python benchmarks/communication_slots.py --json
"""

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.nccl_rules.slots import (
    LaunchRule,
    StepProgram,
    pass_seconds,
    smallest_slots,
    step_seconds,
    sufficient_slots,
)
from threefold.pipeline.schedules import Pipeline, min_micro_batches, schedule_name
from threefold.runtime.output import stdout_for_json

SCHEDULES = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipev", 2),
    ("gpipe", 1),
)
STAGES = (2, 4, 8)
PROPORTIONS = (16, 17, 15)  # of forward, backward and weight passes of a Llama block
UNLIMITED = 99


def measure(schedule: str, virtual_stages: int) -> dict[str, object]:
    """Simulate a schedule on 2, 4 and 8 stages with one, two and four micro-batches per stage."""
    found = dict.fromkeys(("posting_order", "free_communicator", "any_order", "one_queue"), 0)
    slower = {"two": 0.0, "three": 0.0, "one_queue": 0.0}
    for stages in STAGES:
        for factor in (1, 2, 4):
            micro_batches = max(factor * stages, min_micro_batches(schedule, stages))
            pipeline = Pipeline(
                stages=stages,
                micro_batches=micro_batches,
                virtual_stages=virtual_stages,
                schedule=schedule,
                proportions=PROPORTIONS,
            )
            for training in (True, False):
                _measure_step(StepProgram(pipeline, training=training), found, slower)
    percent = {name: round(100 * value, 1) for name, value in slower.items()}
    return {
        "schedule": schedule_name(schedule, virtual_stages),
        "slots": found,
        "slower_percent": percent,
    }


def _measure_step(steps: StepProgram, found: dict[str, int], slower: dict[str, float]) -> None:
    """Simulate one step; raise the figures in `found` and `slower` to those of this step."""
    seconds = pass_seconds(steps.pipeline)
    in_order, free = LaunchRule.POSTING_ORDER, LaunchRule.FREE_COMMUNICATOR
    for name, slots in (
        ("posting_order", smallest_slots(steps, rule=in_order, seconds=seconds)),
        ("free_communicator", smallest_slots(steps, rule=free, seconds=seconds)),
        ("any_order", sufficient_slots(steps)),
        ("one_queue", smallest_slots(steps, rule=in_order, seconds=seconds, one_queue=True)),
    ):
        found[name] = max(found[name], slots)
    best = step_seconds(steps, UNLIMITED, rule=free, seconds=seconds)
    assert best is not None  # without a limit, no schedule hangs
    for name, slots, one_queue in (("two", 2, False), ("three", 3, False), ("one_queue", 3, True)):
        taken = step_seconds(steps, slots, rule=in_order, seconds=seconds, one_queue=one_queue)
        assert taken is not None, f"{name} hangs"
        slower[name] = max(slower[name], taken / best - 1)


def table(rows: list[dict]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| schedule | in posting order | free communicator | any order | one hardware queue "
        "| slower with 2 | with 3 | with one queue |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        slots, slower = row["slots"], row["slower_percent"]
        cells = [row["schedule"], *map(str, slots.values()), *(f"{x} %" for x in slower.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with stdout_for_json(options.json):
        rows = [measure(*each) for each in SCHEDULES]
    print(json.dumps({"rows": rows}) if options.json else table(rows))


if __name__ == "__main__":
    main()
