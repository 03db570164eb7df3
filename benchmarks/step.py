"""Measure the training step on one device, relative to transformers' Llama under DeepSpeed.

Runs on a GPU if DeepSpeed finds one, otherwise on one core and one thread per process. Contestants
have separate processes and take turns; ratios are medians over the rounds.

    python benchmarks/step.py                                  # everything, on this device
    python benchmarks/step.py --only rows --shape 512x8-4k --precision bf16 --profile 12
    python benchmarks/step.py --only rows --contestants all    # bare loops, both ways to bf16
    python benchmarks/step.py --only overhead --steps 15 --json
    python benchmarks/step.py --calibrate-device cpu           # the planner's file

On a GPU, Llama 1B at sequences of 4096 in bf16, two contestants in its memory at a time:

    python benchmarks/step.py --only rows --steps 10 --profile 15
    python benchmarks/step.py --calibrate-device H100
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Contestants are killed at the end, and the system frees their resources.
os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")

import argparse
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from threefold.runtime.output import stdout_for_json

with stdout_for_json(True):  # DeepSpeed logs to standard output while it is imported
    from benchmarks.device import device_file, rates
    from benchmarks.one_step import overhead, rows, step_report, two_ranks
    from benchmarks.one_step.shapes import (
        CONTEXT_SHAPE,
        CPU_MEMORY_SHAPES,
        CPU_SHAPES,
        EXPERT_SHAPE,
        GPU_SHAPES,
        OVERHEAD_SHAPE,
        PRECISIONS,
        SHAPES,
        TENSOR_SHAPE,
        Shape,
        with_batch,
    )
    from benchmarks.taking_turns import Player, cores_at_hand, players
    from models.errors import UserError
    from threefold.gpus.datasheet import FOLDER
    from threefold.runtime.processes import on_gpu

PARTS = ("rows", "memory", "overhead", "tensor_parallel", "context_parallel", "expert_parallel")
TWO_RANKS = {
    "tensor_parallel": (TENSOR_SHAPE, two_ranks.TENSOR),
    "context_parallel": (CONTEXT_SHAPE, two_ranks.CONTEXT),
    "expert_parallel": (EXPERT_SHAPE, two_ranks.EXPERT),
}
MEMORY_ROUNDS = 2  # the first round already reaches the peak
OVERHEAD_ROUNDS = 3  # factor of the rounds, because the difference is small


def main() -> None:
    """Run the selected measurements and print them."""
    parser = build_parser()
    options = parser.parse_args()
    cores = () if on_gpu() else tuple(cores_at_hand())
    setting = rows.Setting(
        rounds=options.steps,
        zero_stage=options.zero,
        who=options.contestants,
        cores=cores,
        kernels=options.profile,
        memory_kept_by=options.memory_kept_by,
    )
    if options.calibrate_device:
        try:
            with stdout_for_json(options.json):
                calibrated = device_file.calibrate(
                    options.calibrate_device, options.like, setting, FOLDER
                )
        except UserError as problem:
            parser.error(str(problem))
        print(json.dumps(calibrated)) if options.json else step_report.print_file(calibrated)
        return
    result: dict[str, Any] = {"rows": [], **{f"{part}_2": None for part in TWO_RANKS}}
    with stdout_for_json(options.json):
        for part in options.only or PARTS:
            for found in MEASURE[part](options, setting):
                if part in TWO_RANKS:
                    result[f"{part}_2"] = (result[f"{part}_2"] or {}) | found
                else:
                    result["rows"].append(found)
                if not options.json:
                    step_report.PRINT[part](found)
    if options.json:
        print(json.dumps(result))


def measure_rows(options: argparse.Namespace, setting: rows.Setting) -> Iterable[dict[str, Any]]:
    """Yield a row for each shape and precision."""
    usual = CPU_SHAPES if setting.cores else GPU_SHAPES
    for name in options.shape or usual:
        for precision in options.precision or (PRECISIONS if setting.cores else ("bf16",)):
            yield rows.compare(
                setting, shape(options, SHAPES[name]), precision, matmul(setting.cores, precision)
            )


def measure_memory(options: argparse.Namespace, setting: rows.Setting) -> Iterable[dict[str, Any]]:
    """Yield rows of shapes whose memory is mostly logits; a GPU's usual shape is one of them."""
    few = replace(setting, rounds=min(setting.rounds, MEMORY_ROUNDS), warm_up=1, kernels=0)
    shapes = CPU_MEMORY_SHAPES if setting.cores else {}
    for name in options.shape or shapes:
        for precision in options.precision or PRECISIONS:
            yield rows.compare(
                few, shape(options, SHAPES[name]), precision, matmul(setting.cores, precision)
            )


def measure_overhead(
    options: argparse.Namespace, setting: rows.Setting
) -> Iterable[dict[str, Any]]:
    """Yield rows of the overhead of engine, tracking and data loading together."""
    more = replace(setting, rounds=OVERHEAD_ROUNDS * setting.rounds)
    for precision in options.precision or PRECISIONS:
        yield from overhead.compare(more, shape(options, OVERHEAD_SHAPE), precision)


def measure_two_ranks(
    options: argparse.Namespace, setting: rows.Setting, *, part: str
) -> Iterable[dict[str, Any]]:
    """Yield the speed-up of two ranks for each precision; nothing on a single device."""
    if len(setting.cores) < 2:
        return
    usual, layouts = TWO_RANKS[part]
    for precision in options.precision or PRECISIONS:
        found = two_ranks.compare(setting, shape(options, usual), precision, layouts)
        yield {precision: found}


MEASURE: dict[str, Callable[..., Iterable[dict[str, Any]]]] = {
    "rows": measure_rows,
    "memory": measure_memory,
    "overhead": measure_overhead,
    **{part: partial(measure_two_ranks, part=part) for part in TWO_RANKS},
}


def shape(options: argparse.Namespace, usual: Shape) -> Shape:
    """Return a shape with the batch given by the options."""
    return with_batch(usual, options.micro_sequences, options.micro_batches)


@cache
def matmul(cores: tuple[int, ...], precision: str) -> dict[str, float]:
    """Return the device's measured TFLOP/s of large matmuls by library."""
    with players({"": lambda: Player(rates.play, cores=cores)}) as playing:
        playing[""].settle()
        (by_library,) = playing[""].ask("large_matmul", precision)
    return by_library


def positive(text: str) -> int:
    """Return a whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive; use 1 or more")
    return number


def device_name(text: str) -> str:
    """Return a name that is valid as a file in the planner's folder, for argparse."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 _-]*", text):
        raise argparse.ArgumentTypeError(f'"{text}" is not a valid name; use one such as H100')
    return text


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="run only this part; repeatable"
    )
    parser.add_argument(
        "--steps",
        type=positive,
        default=5,
        help="timed steps; three times as many for overheads",
    )
    parser.add_argument(
        "--shape", action="append", choices=SHAPES, help="shape of rows and memory; repeatable"
    )
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="repeatable")
    parser.add_argument("--micro-sequences", type=positive, help="sequences per micro-batch")
    parser.add_argument("--micro-batches", type=positive, help="micro-batches per step")
    parser.add_argument("--zero", type=int, choices=(1, 2), default=1, help="all rows' ZeRO stage")
    parser.add_argument(
        "--contestants", choices=("main", "bare", "all"), default="main",
        help="main: under DeepSpeed; bare: loops without it too; all: both ways to bf16 too",
    )  # fmt: skip
    parser.add_argument(
        "--memory-kept-by", choices=("ours", "all"), default="ours",
        help="on a CPU our runs tell malloc to reuse memory; all: transformers' processes too",
    )  # fmt: skip
    parser.add_argument("--profile", type=int, default=0, metavar="K", help="list K kernels each")
    parser.add_argument(
        "--calibrate-device", metavar="NAME", type=device_name,
        help="write threefold/gpus/datasheets/NAME.toml instead, from what is measured here",
    )  # fmt: skip
    parser.add_argument(
        "--like", metavar="NAME", help="copy the datasheet of this GPU for a new device"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    return parser


if __name__ == "__main__":
    main()
