"""Check this machine's GPUs: losses, resuming, export, speed.

Runs for at most eight minutes; repeat with --missing until no part is missing.

    make gpu                              # with .venv, or: make gpu PYTHON=python3
    python -m tests.gpu --list
    python -m tests.gpu --only losses --only step-4x4
    python -m tests.gpu --all --missing --minutes 4   # repeat until no part is missing
    python -m tests.gpu --report          # from the results so far
    python -m tests.gpu --write           # the report into BENCHMARKS.md; runs nothing

Each part runs in a process of its own. A part that exceeds its time limit is killed, and the next
part starts. Results are in results.json as soon as they are known, and the report contains the
results of all invocations. --results names another folder for these two files, and for the
planner's file, for example one that outlives the machine. To continue on another machine, copy
results.json there first.
The exit code of `python -m tests.gpu` is 0 if all parts that ran passed or were skipped, 1 if one
failed, and 2 without a GPU or a package. `make gpu` returns 2, not 1: make does so when any command
fails.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import UserError
from tests.gpu.packages import NEEDED, OPTIONAL, how_to_bring, missing

if TYPE_CHECKING:  # at run time, packages are checked before anything else is imported
    from tests.gpu.setting import Setting

FAILED_CODE, UNUSABLE_CODE = 1, 2
REPOSITORY = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and write the report; return the exit code."""
    options = build_parser().parse_args(arguments)
    if lacking := missing(NEEDED):
        print(f"make gpu: {how_to_bring(lacking)}", file=sys.stderr)
        return UNUSABLE_CODE
    from tests.gpu.parts import BY_NAME, PARTS  # imports the packages that were just checked

    if options.list:
        for part in PARTS:
            note = "" if part.usual else ", with --all"
            print(f"{part.name:<14} {part.title} ({part.seconds:g} s at most{note})")
        return 0
    if unknown := [name for name in options.only or () if name not in BY_NAME]:
        print(f"make gpu: --only {unknown[0]}: use one of {', '.join(BY_NAME)}", file=sys.stderr)
        return UNUSABLE_CODE
    if options.ranks < 1:
        print(
            f"make gpu: invalid --ranks {options.ranks}: expected 1 or more, for example 2",
            file=sys.stderr,
        )
        return UNUSABLE_CODE
    if options.write and not (options.only or options.all or options.missing):
        options.report = True
    gpus = 0 if options.report else count_gpus(options)
    if not gpus and not options.report:
        return UNUSABLE_CODE
    if lacking := missing(OPTIONAL):
        print(f"{', '.join(lacking)} not installed: the parts that need it will be skipped")
    return check(options, gpus)


def count_gpus(options: argparse.Namespace) -> int:
    """Return the number of GPUs, or of ranks on a CPU; print a message and return 0 if unusable."""
    import torch

    from threefold.runtime.processes import check_gpus

    if options.device == "cpu":
        return options.ranks
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        print(
            f"make gpu: torch {torch.__version__} finds no GPU on this machine. It needs an NVIDIA "
            f"GPU, its driver (see nvidia-smi) and a torch built for CUDA; the checks themselves "
            f"run on a CPU with --device cpu --small",
            file=sys.stderr,
        )
        return 0
    try:
        for local_rank in range(gpus):
            check_gpus(None, on_gpu=True, cpu_is_chosen=False, local_rank=local_rank)
    except UserError as problem:
        print(f"make gpu: {problem}", file=sys.stderr)
        return 0
    return gpus


def check(options: argparse.Namespace, gpus: int) -> int:
    """Run the requested parts, and write their results and the report; return the exit code."""
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    from tests.gpu.environment import facts
    from tests.gpu.parts import ALL_MINUTES, BY_NAME, MINUTES, PARTS
    from tests.gpu.runner import outcomes_in, run_parts
    from tests.gpu.setting import FAILED, PASSED, Setting

    output = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    folder = options.results.absolute() if options.results else output
    folder.mkdir(parents=True, exist_ok=True)
    about = () if options.report else tuple(facts(options.device, small=options.small))
    setting = Setting(
        device=options.device,
        gpus=gpus,
        output=output,
        results_folder=folder,
        small=options.small,
        about=about,
    )
    outcomes = outcomes_in(setting, PARTS)
    devices = {outcome.device for outcome in outcomes} | {value for _, value in about[:1]}
    if len(devices) != 1:
        problem = (
            f"would mix results of {', '.join(sorted(devices))}" if devices else "has no results"
        )
        print(
            f"make gpu: {setting.results} {problem}; use another folder, for example "
            f"--output runs/gpu-2",
            file=sys.stderr,
        )
        return UNUSABLE_CODE
    (device,) = devices
    parts = [part for part in PARTS if options.all or part.usual]
    parts = [BY_NAME[name] for name in dict.fromkeys(options.only)] if options.only else parts
    if options.missing:
        done = {outcome.part for outcome in outcomes if outcome.status == PASSED}
        parts = [part for part in parts if part not in done]
    minutes = options.minutes or (ALL_MINUTES if options.all or options.only else MINUTES)
    failed = False
    if not options.report:
        for outcome in run_parts(parts, setting, minutes=minutes, tell=partial(print, flush=True)):
            failed |= outcome.status == FAILED
            write_report(setting, device)
    text = write_report(setting, device)
    print(f"report: {folder / 'report.md'}")
    if options.write:
        publish(folder, text, device=device, repository=REPOSITORY)
        print("written into BENCHMARKS.md and threefold/gpus/datasheets")
    return FAILED_CODE if failed else 0


def write_report(setting: "Setting", device: str) -> str:
    """Write the report of all results so far, and return it."""
    from tests.gpu.parts import PARTS
    from tests.gpu.report import section
    from tests.gpu.runner import outcomes_in

    outcomes = outcomes_in(setting, PARTS)
    ran = {outcome.part for outcome in outcomes}
    missing = [part for part in PARTS if part not in ran]
    text = section(outcomes, missing=missing, device=device)
    new = setting.results.with_name("report.new")
    new.write_text(text, encoding="utf-8")
    new.replace(setting.results.with_name("report.md"))
    return text


def publish(output: Path, text: str, *, device: str, repository: Path) -> None:
    """Insert the report into BENCHMARKS.md, and copy the planner's files if any were written."""
    from tests.gpu.report import write

    write(repository / "BENCHMARKS.md", text, device=device)
    for file in (output / "gpus").glob("*.toml"):
        shutil.copy(file, repository / "threefold" / "gpus" / "datasheets")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="list the parts and their time limits")
    parser.add_argument("--only", action="append", metavar="PART", help="run this part; repeatable")
    parser.add_argument("--all", action="store_true", help="run the parts that take longer, too")
    parser.add_argument(
        "--missing", action="store_true", help="run only parts that have not passed yet"
    )
    parser.add_argument("--report", action="store_true", help="run nothing, write the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--ranks", type=int, default=1, help="ranks with --device cpu; default: 1")
    parser.add_argument("--small", action="store_true", help="run in seconds, for tests on a CPU")
    parser.add_argument(
        "--minutes", type=float, help="limit for all parts; default: 8, with --all or --only 20"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu"), help="working folder; default: runs/gpu"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="insert the report into BENCHMARKS.md, and copy the planner's file; runs parts only "
        "with --only, --all or --missing",
    )
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="for the results; default: that of --output"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
