"""Measure the pipeline schedules relative to their theoretical step time.

Sleeping layers make the measurement independent of the cores: each schedule, and DeepSpeed's own
two, relative to its length in theory and to a simulation with the measured durations of its passes.
Real layers, on two stages with a core each: the speed-up over one process relative to its bound,
DeepSpeed's engine and torch.distributed.pipelining. Takes about a quarter of an hour.

    python benchmarks/schedules.py [--json]
    python benchmarks/schedules.py --only sleeping --picture docs/images/schedules.svg
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import argparse
import json
from typing import Any

from benchmarks.pipelines import real_contestants, real_layers
from benchmarks.pipelines.sleeping_stages import Setting, time_all
from benchmarks.schedules_picture import draw
from threefold.runtime.output import stdout_for_json

FORWARD = 0.08  # seconds
SHAPES = {"schedules": (4, 16), "schedules_of_8_stages": (8, 8)}  # stages, micro-batches


def main() -> None:
    """Measure the schedules and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="of each sleeping pipeline")
    parser.add_argument("--only", choices=("sleeping", "real"), help="this part")
    parser.add_argument("--picture", type=Path, help="of the sleeping stages")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.only != "real":
        for name, (stages, micro_batches) in SHAPES.items():
            setting = Setting(
                stages=stages, micro_batches=micro_batches, forward=FORWARD, steps=options.steps
            )
            with stdout_for_json(options.json):
                found = time_all(setting)
            result[name] = {each: steps.ratios(setting) for each, steps in found.items()}
            if options.picture and name == "schedules":
                draw(setting, found, options.picture)
            if not options.json:
                print_sleeping(result[name], setting)
    if options.only != "sleeping":
        with stdout_for_json(options.json):
            result["real_layers"] = real_layers.compare(real_contestants.Setting())
        if not options.json:
            print_real(result["real_layers"])
    if options.json:
        print(json.dumps(result))


def print_sleeping(rows: dict[str, dict[str, float]], setting: Setting) -> None:
    """Print a line for each contestant, with its best step."""
    print(
        f"{setting.stages} stages, {setting.micro_batches} micro-batches, "
        f"forward {1000 * setting.forward:g} ms"
    )
    print(f"{'':<24}{'s':>8}{'/ theory':>10}{'/ simulated':>13}{'step / theory':>15}")
    for name, row in rows.items():
        print(
            f"{name:<24}{row['makespan_seconds']:8.3f}{row['over_theory']:10.3f}"
            f"{row['over_simulated']:13.3f}{row['step_over_theory']:15.3f}"
        )
    print(flush=True)


def print_real(found: dict[str, Any]) -> None:
    """Print a line for each of our schedules and its rivals, with their best rounds."""
    print(f"real layers, {real_contestants.STAGES} stages")
    print(f"{'':<24}{'s':>8}{'speed-up':>10}{'bound':>8}{'of bound':>10}{'over ours':>11}")
    for name, match in found["matches"].items():
        for each, seconds in match["seconds"].items():
            line = f"{each:<24}{seconds:8.3f}{match['speed_up'][each]:10.3f}"
            if each == name:
                line += f"{match['speed_up_bound']:8.3f}{match['of_bound']:10.3f}"
            elif each in match["over"]:
                line += f"{match['over'][each]:29.3f}"
            print(line)
        print()
    print(
        f"{found['best']}: {found['of_bound']:.3f} of the bound, {found['over_stock']:.3f} times "
        f"DeepSpeed's 1f1b; {found['over_torch_pipelining']:.3f} times torch's pipelining until "
        f"the gradients are there, the lesser of both schedules"
    )


if __name__ == "__main__":
    main()
