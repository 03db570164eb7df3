"""Measure the speed and the memory of a recipe in many layouts.

    python recipes/sweep.py recipes/tiny.toml
    python recipes/sweep.py recipes/tiny.toml --layouts all --halving
    python recipes/sweep.py recipes/tiny.toml --layouts all --rounds 3
    python recipes/sweep.py recipes/mine.toml --set batch.micro_sequences=1,2,4
    python recipes/sweep.py recipes/llama/7b.toml --nodes 1,2,4 --top 5 --hostfile hosts
    sbatch --nodes=4 slurm/sweep.slurm recipes/llama/7b.toml
    python recipes/sweep.py recipes/tiny.toml --learning-rate auto --widths 96,192,384
    python recipes/sweep.py recipes/tiny.toml --coordinate-check 4 --widths 96,192,384
    python recipes/sweep.py --links my-node
    python recipes/sweep.py --links my-cluster --nodes 2 --gpus-per-node 8 --gpu H100 \\
        --hostfile hosts

By default, the ten layouts that the planner predicts to be the fastest are measured, each for five
steps after two steps of warm-up, on synthetic data. Every trial ends as ok, out_of_memory, hung,
crashed, rejected or too_large, and is a row of sweep.csv in the sweep folder. Rerun the same
command to continue an interrupted sweep; several commands may share a folder.

With --learning-rate, each recipe is trained at several learning rates. With --coordinate-check, the
sizes of its activations are measured in the first steps. Both compare widths of a model.

With --links, no recipe is measured. Instead, the command measures the matmul rate of each GPU and
the bandwidth and latency of the links, and writes a datasheet of this cluster for the planner.

Exit code 0: every trial was measured, ran out of memory or was rejected; 1: a trial or --links hung
or crashed, or the command stopped; 2: a recipe or an option is invalid. With --learning-rate or
--coordinate-check, the exit code is also 1 if a trial ran out of memory or was rejected, if a model
has no final loss, or if a comparison over widths failed or is undecided.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

import argparse
import itertools
import json
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from models.errors import UserError
from threefold.commands.sweep_options import parse_command_line
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.runtime.exits import leave
from threefold.runtime.output import outlive_output, stdout_for_json
from threefold.sweep import report
from threefold.sweep.choice import Request, choose
from threefold.sweep.folder import SweepFolder, SweepStopped
from threefold.sweep.links.measure_cluster import Preflight, report_lines, report_table
from threefold.sweep.ranks.launchers import (
    DeepSpeedLauncher,
    Launcher,
    LocalLauncher,
    SlurmLauncher,
)
from threefold.sweep.ranks.rank import run_rank
from threefold.sweep.report import check_wandb, publish
from threefold.sweep.scheduler import FIRST_HALVING_STEPS, Scheduler, halve, repeat
from threefold.sweep.trial import Result, Trial, preference
from threefold.sweep.width_transfer.check import check_transfer

MAX_NAMES = 3  # recipes in the name of a sweep folder


def main() -> None:
    """Run the command, or one rank of it."""
    options = parse_command_line(__doc__ or "")
    if options.rank_of:
        run_rank(options.rank_of)
    outlive_output()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        code = command_of(options)(options)
    except SystemExit as end:  # raised by the signal handler above
        code = int(end.code or 0)
    except UserError as problem:
        print(f"sweep.py: {problem}", file=sys.stderr)
        code = 2
    except SweepStopped as problem:
        print(f"sweep.py: {problem}", file=sys.stderr)
        code = 1
    leave(code)


def command_of(options: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """Return the function that does what the options ask for."""
    if options.links is not None:
        return measure_links
    if options.learning_rate is not None or options.coordinate_check is not None:
        return compare_trainings
    return sweep


def compare_trainings(options: argparse.Namespace) -> int:
    """Sweep learning rates, check the sizes of activations, and compare both over widths."""
    folder = default_folder(options.recipes)
    folder = options.sweep_dir or folder.with_name(f"{folder.name}-transfer")
    say = print_to_stderr if options.json else print_line
    return check_transfer(options, launcher_of(options), folder, say)


def sweep(options: argparse.Namespace) -> int:
    """Choose the trials, measure those without a result, and print a summary.

    Raises:
        UserError: a recipe or an option is invalid.
        SweepStopped: the disk is full, or no ranks can be started.
    """
    # 1. Trials: reject combinations that cannot run before any process starts.
    launcher = launcher_of(options)
    choice = choose(request_of(options))
    for kind in {trial.world for trial in choice.trials}:
        launcher.check(kind)
    if options.wandb:
        check_wandb(choice.trials)

    # 2. Folder: it keeps the results, so a rerun of the same command measures only the rest.
    settings = {"warm_up": options.warm_up}
    settings |= {"halving": True} if options.halving else {"steps": options.steps}
    folder = SweepFolder(options.sweep_dir or default_folder(options.recipes), settings)
    say = print_to_stderr if options.json else print_line
    try:
        if options.retry:
            folder.retry_failures()
        for rejection in choice.rejections:
            folder.add_rejection(rejection)
        rounds = [trial.in_round(n + 1) for n in range(options.rounds) for trial in choice.trials]
        measured = sum(1 for trial in rounds if folder.answer(trial))
        for line in report.choice_lines(choice, measured, options.rounds):
            say(line)

        # 3. Measure: consecutive trials reuse the same ranks, which are replaced after a failure.
        scheduler = Scheduler(folder, launcher, options.seconds_per_trial)
        progress = report.Progress()
        measure = halve if options.halving else partial(repeat, rounds=options.rounds)
        try:
            with stdout_for_json(options.json):
                for trial, result in measure(scheduler, choice.trials, progress.begin_round):
                    say(progress.finish(trial, result))
        except SystemExit:
            say(f"interrupted; rerun the same command to continue the sweep in {folder.path}")
            raise
        finally:
            scheduler.stop()
        folder.write_table()
        results = [
            longest_round(folder, trial) if options.halving
            else decisive_round(folder, trial)
            for trial in choice.trials
        ]  # fmt: skip
        if options.wandb:
            count, status = publish(folder, results, tell=lambda status: say(f"W&B: {status}"))
            say(f"wrote {count} runs of the W&B group {folder.path.name}")
            if status:
                say(f"W&B: {status}")
    finally:
        folder.close()

    # 4. Summary
    for line in report.summary_lines(results, choice):
        say(line)
    agreement = report.agreement_line(seconds_of_rounds(folder, choice.trials, options.rounds))
    if agreement:
        say(agreement)
    if progress.done:
        say(report.overhead_line(progress, scheduler.measured_seconds))
    say(f"wrote {folder.path / 'sweep.csv'}")
    if options.json:
        print(json.dumps(report.as_json(results, choice, str(folder.path))))
    return 1 if report.has_faults(results) else 0


def measure_links(options: argparse.Namespace) -> int:
    """Measure matmuls and links, write a datasheet, and print the measurements.

    Raises:
        UserError: an option is invalid.
        SweepStopped: the ranks have failed, or the datasheet cannot be written.
    """
    preflight = Preflight.of(
        options.links, nodes=options.nodes, gpus_per_node=options.gpus_per_node, gpu=options.gpu,
        seconds=options.seconds_per_trial,
    )  # fmt: skip
    with stdout_for_json(options.json):
        measured, gpu = preflight.run(launcher_of(options))
    if options.json:
        print(json.dumps(report_table(measured, gpu, preflight.kind, preflight.file)))
    else:
        for line in report_lines(measured, gpu, preflight.kind, preflight.file):
            print_line(line)
    return 0


def longest_round(folder: SweepFolder, trial: Trial) -> tuple[Trial, Result]:
    """Return a trial and its result in its longest round of successive halving."""
    result = folder.result(trial.key)
    assert result is not None
    while True:
        longer = trial.with_steps(2 * trial.steps)
        if (next_result := folder.result(longer.key)) is None:
            return trial, result
        trial, result = longer, next_result


def decisive_round(folder: SweepFolder, trial: Trial) -> tuple[Trial, Result]:
    """Return a trial and its result in the round that represents it in sweep.csv, too."""
    found = []
    for number in itertools.count(1):
        each = trial.in_round(number)
        if (result := folder.result(each.key)) is None:
            break
        found.append((each, result))
    return max(found, key=order_of_rounds)


def seconds_of_rounds(
    folder: SweepFolder, trials: Sequence[Trial], rounds: int
) -> list[list[list[float]]]:
    """Return the seconds of a step of competing trials that were measured in every round.

    Returns:
        for each recipe and number of ranks: the seconds by round and trial
    """
    groups: dict[tuple[str, int], list[list[float]]] = {}
    for trial in trials:
        results = [folder.result(trial.in_round(n).key) for n in range(1, rounds + 1)]
        seconds = [
            result.median_seconds
            for result in results
            if result is not None and result.median_seconds is not None
        ]
        if len(seconds) == rounds:
            groups.setdefault((trial.source, trial.world.size), []).append(seconds)
    return [[list(each) for each in zip(*group, strict=True)] for group in groups.values()]


def order_of_rounds(pair: tuple[Trial, Result]) -> tuple[bool, bool, float]:
    """Return the `preference` of a trial's round."""
    _, result = pair
    return preference(
        outcome=result.outcome,
        split=result.split is not None,
        seconds=result.median_seconds,
    )


def request_of(options: argparse.Namespace) -> Request:
    """Return the request that the options describe."""
    return Request(
        recipes=options.recipes,
        settings=options.set,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        gpu=options.gpu,
        layouts=options.layouts,
        top=options.top,
        warm_up=options.warm_up,
        steps=FIRST_HALVING_STEPS if options.halving else options.steps,
        split=options.split,
    )


def launcher_of(options: argparse.Namespace) -> Launcher:
    """Return the launcher that the options name, or else the one that suits the environment."""
    program = Path(sys.argv[0]).resolve()  # ranks run the same script
    name = options.launcher
    if name is None:
        in_job = "SLURM_JOB_ID" in os.environ
        name = "deepspeed" if options.hostfile else "srun" if in_job else "local"
    if name == "deepspeed":
        if options.hostfile is None:
            raise UserError("--launcher deepspeed needs the hosts; use --hostfile FILE")
        return DeepSpeedLauncher(program, options.hostfile)
    return SlurmLauncher(program) if name == "srun" else LocalLauncher(program)


def default_folder(recipes: Sequence[Path]) -> Path:
    """Return the default sweep folder, named after the recipes."""
    names = dict.fromkeys(load_recipe(path).name for path in recipes)
    return REPOSITORY / "runs" / "sweeps" / "-".join(list(names)[:MAX_NAMES])


def print_line(line: str) -> None:
    """Print a line and flush it, so that a pipe also receives it at once."""
    print(line, flush=True)


def print_to_stderr(line: str) -> None:
    """Print a line on stderr, because stdout is for JSON."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
