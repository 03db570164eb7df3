"""The command recipes/sweep.py: measurements of layouts, settings, links and widths."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from models.errors import UserError
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe
from threefold.runtime.command_line import (
    Options,
    Subcommand,
    add_cluster_options,
    add_json,
    add_overrides,
    count,
    counts,
    file_path,
    number,
    parse_subcommand,
    seconds,
)
from threefold.runtime.exits import exit_at_signals, exit_now, ignore_ending_signals
from threefold.runtime.output import printer, stdout_for_json, use_nonblocking_output
from threefold.sweep import report
from threefold.sweep.choice import TrialRequest, choose
from threefold.sweep.folder import SweepFolder, SweepStopped
from threefold.sweep.links.measure_cluster import ClusterMeasurement, report_lines, report_table
from threefold.sweep.ranks.controller import (
    DeepSpeedLauncher,
    LocalLauncher,
    SlurmLauncher,
    WorkerLauncher,
    check_workers,
)
from threefold.sweep.ranks.rank import run_rank
from threefold.sweep.report import check_wandb, publish
from threefold.sweep.scheduler import (
    FIRST_HALVING_STEPS,
    Scheduler,
    halve,
    repeat,
    rounds_of,
    rounds_of_groups,
)
from threefold.sweep.trial import FAULTS, Result, Trial, preference
from threefold.sweep.width_transfer.check import check_coordinates, check_learning_rates

MAX_NAMES = 3  # recipes in the name of a sweep folder


def main(description: str | None = None) -> None:
    """Run the command, or one rank of it."""
    options = parse_subcommand("sweep.py", description or "", COMMANDS, MOVED_FLAGS)
    if getattr(options, "rank_of", None):
        run_rank(options.rank_of)
    use_nonblocking_output()
    exit_at_signals()
    try:
        code = options.command(options)
    except SystemExit as end:  # raised by the signal handler above
        code = int(end.code or 0)
    except UserError as problem:
        print(f"sweep.py: {problem}", file=sys.stderr)
        code = 2
    except SweepStopped as problem:
        print(f"sweep.py: {problem}", file=sys.stderr)
        code = 1
    ignore_ending_signals()  # during the exit handlers
    exit_now(code)


def compare_learning_rates(options: argparse.Namespace) -> int:
    """Train each recipe in its own layout at several learning rates, and compare the best ones.

    Exit code 1 also if a trial ran out of memory or was rejected, if a model has no final loss, or
    if a comparison over widths failed or is undecided.
    """
    return check_learning_rates(options, launcher_of(options), transfer_folder(options))


def compare_coordinates(options: argparse.Namespace) -> int:
    """Measure the sizes of activations over widths, at the start and after a few steps.

    This is the coordinate check. It trains on synthetic data. Exit code 1 also if a trial ran out
    of memory or was rejected, or if a size depends on the width.
    """
    return check_coordinates(options, launcher_of(options), transfer_folder(options))


def transfer_folder(options: argparse.Namespace) -> Path:
    """Return the folder of the results of both comparisons."""
    if options.sweep_dir:
        return options.sweep_dir
    folder = default_folder(options.recipes)
    return folder.with_name(f"{folder.name}-transfer")


def sweep(options: argparse.Namespace) -> int:
    """Choose the trials, measure those without a result, and print a summary.

    Raises:
        UserError: a recipe or an option is invalid.
        SweepStopped: the disk is full, or no ranks can be started.
    """
    # 1. Trials: reject combinations that cannot run before any process starts.
    rounds, most_rounds = options.rounds
    if options.halving and most_rounds > 1:
        raise UserError("--halving and --rounds exclude each other; leave out one of them")
    launcher = launcher_of(options)
    choice = choose(request_of(options))
    for kind in {trial.workers for trial in choice.trials}:
        check_workers(kind, launcher)
    if options.wandb:
        check_wandb(choice.trials)

    # 2. Folder: it keeps the results, so a rerun of the same command measures only the rest.
    settings = {"warm_up": options.warm_up}
    settings |= {"halving": True} if options.halving else {"steps": options.steps}
    folder = SweepFolder(options.sweep_dir or default_folder(options.recipes), settings)
    say = printer(options.json)
    try:
        if options.retry:
            folder.retry_failures()
        for rejection in choice.rejections:
            folder.add_rejection(rejection)
        repeated = [trial.in_round(n + 1) for n in range(rounds) for trial in choice.trials]
        measured = sum(1 for trial in repeated if folder.result_of(trial))
        for line in report.choice_lines(choice, measured, rounds):
            say(line)

        # 3. Measure: consecutive trials reuse the same ranks, which are replaced after a failure.
        scheduler = Scheduler(folder, launcher, options.seconds_per_trial)
        progress = report.SweepProgress()
        measure = halve if options.halving else partial(repeat, rounds=rounds, most=most_rounds)
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
    if not options.halving:
        for line in report.round_lines(rounds_of_groups(folder, choice.trials)):
            say(line)
    if progress.done:
        say(report.overhead_line(progress, scheduler.measured_seconds))
    say(f"wrote {folder.path / 'sweep.csv'}")
    if options.json:
        print(json.dumps(report.as_json(results, choice, str(folder.path))))
    return int(any(result.outcome in FAULTS for _, result in results))


def measure_links(options: argparse.Namespace) -> int:
    """Measure the matmul rate of each GPU and the links, and write a datasheet for the planner.

    The datasheet NAME keeps the values of --gpu that are not measured.
    """
    measurement = ClusterMeasurement.of(
        options.name, nodes=options.nodes, gpus_per_node=options.gpus_per_node, gpu=options.gpu,
        seconds=options.seconds_per_trial,
    )  # fmt: skip
    try:
        with stdout_for_json(options.json):
            measured, gpu = measurement.run(launcher_of(options))
    except SystemExit:  # raised by the signal handler of `main`
        print("sweep.py: interrupted; no datasheet has been written", file=sys.stderr)
        raise
    if options.json:
        print(json.dumps(report_table(measured, gpu, measurement.kind, measurement.file)))
    else:
        for line in report_lines(measured, gpu, measurement.kind, measurement.file):
            print(line, flush=True)
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

    def order(pair: tuple[Trial, Result]) -> tuple[bool, bool, float]:
        result = pair[1]
        has_split = result.split is not None
        return preference(outcome=result.outcome, split=has_split, seconds=result.median_seconds)

    return max(rounds_of(folder, trial), key=order)


def number_of_rounds(text: str) -> tuple[int, int]:
    """Parse a number of rounds, or the smallest and the largest one: "3" or "3-8".

    Raises:
        ArgumentTypeError: the text has another form.
    """
    least, separator, most = text.partition("-")
    rounds = count(least, most=MAX_ROUNDS)
    if not separator:
        return rounds, rounds
    largest = count(most, most=MAX_ROUNDS)
    if not 2 <= rounds <= largest:
        raise argparse.ArgumentTypeError(
            f"invalid {text}: noise needs two rounds, and the second number is the larger one; for "
            f"example 3-8"
        )
    return rounds, largest


def request_of(options: argparse.Namespace) -> TrialRequest:
    """Return the request that the options describe."""
    return TrialRequest(
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


def launcher_of(options: argparse.Namespace) -> WorkerLauncher:
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


# The command-line options of sweep.py.

MAX_ROUNDS = 100


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sweep of layouts and settings."""
    add_recipes(parser)
    trials = parser.add_argument_group("trials")
    trials.add_argument(
        "--top", type=count, default=10,
        help="number of layouts that the planner chooses for each recipe and size (default: 10)",
    )  # fmt: skip
    trials.add_argument(
        "--layouts", choices=("best", "all", "own"),
        help="the planner's best layouts, all that fit, or the recipe's own (default: best; own if "
        "a --set has several values)",
    )  # fmt: skip
    add_trial_options(parser, trials, several=True)
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--steps", type=count, default=5, help="measured steps (default: 5)")
    measuring.add_argument(
        "--warm-up", type=count, default=2, help="steps before the measured ones (default: 2)"
    )
    measuring.add_argument(
        "--rounds", type=number_of_rounds, default=(1, 1), metavar="N[-M]",
        help="measure every trial N times, in rounds over all trials; the fastest round counts. "
        "Then measure those that may be the fastest up to M times, until one is faster by more "
        "than the noise. Useful on shared machines (default: 1)",
    )  # fmt: skip
    measuring.add_argument(
        "--halving", action="store_true",
        help="measure all trials for 2 steps, the faster half for 4, and so on, instead of --steps",
    )  # fmt: skip
    measuring.add_argument(
        "--split", action="store_true",
        help="also measure the parts of a step: compute, communication, waiting and optimizer",
    )  # fmt: skip
    measuring.add_argument(
        "--wandb", action="store_true",
        help="at the end, write each trial to Weights & Biases as a run of one group",
    )  # fmt: skip
    add_folder_options(measuring, "hung, crashed or were rejected")
    add_launcher_options(measuring)
    parser.add_argument("--rank-of", type=file_path, help=argparse.SUPPRESS)  # set by our launchers
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it


def add_learning_rate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sweep of learning rates."""
    add_recipes(parser)
    add_trial_options(parser, parser)
    parser.add_argument(
        "--rates", type=learning_rates, default="auto", metavar="auto|RATE[,RATE...]",
        help="learning rates; auto: factors of two around the recipe's, and more while the best "
        "one is at an end (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=count, help="steps of each training (default: the recipe's)"
    )
    add_width_options(parser)


def add_coordinate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the coordinate check."""
    add_recipes(parser)
    add_trial_options(parser, parser)
    parser.add_argument(
        "--steps", type=count, default=4,
        help="steps after which the sizes are compared (default: 4)",
    )  # fmt: skip
    add_width_options(parser)


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the measurement of links."""
    parser.add_argument("name", metavar="NAME", help="name of the datasheet to write")
    add_cluster_options(parser)
    add_launcher_options(parser)


def add_recipes(parser: argparse.ArgumentParser) -> None:
    """Add the recipes."""
    parser.add_argument(
        "recipes", nargs="*", type=file_path, default=[DEFAULT_RECIPE], metavar="recipe",
        help="recipes to measure (default: recipes/tiny.toml)",
    )  # fmt: skip


def add_trial_options(
    parser: argparse.ArgumentParser, group: Options, *, several: bool = False
) -> None:
    """Add --set and the cluster on which the trials run."""
    add_overrides(
        group,
        "change a key of the recipe; several values separated by commas, and several options, make "
        "a grid. The planner leaves these keys as they are",
    )
    cluster = parser.add_argument_group("cluster (default: the recipe's [cluster], or 1 x 2 x cpu)")
    add_cluster_options(cluster, several=several)


def add_width_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both comparisons over widths."""
    parser.add_argument(
        "--widths", type=counts, metavar="WIDTH[,WIDTH...]",
        help="hidden sizes to which each recipe is scaled, such as 64,128,256 (default: its own)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=count, default=1,
        help="train each model with this many seeds, and average the results (default: 1)",
    )  # fmt: skip
    failures = "hung, crashed, ran out of memory or were rejected"
    add_folder_options(parser, failures, folder="NAME-transfer")
    add_launcher_options(parser)


def add_folder_options(group: Options, failures: str, folder: str = "NAME") -> None:
    """Add the folder of the results and --retry, which repeats these failures."""
    group.add_argument(
        "--sweep-dir", type=file_path,
        help=f"folder of the results (default: runs/sweeps/{folder})",
    )  # fmt: skip
    group.add_argument(
        "--retry", action="store_true",
        help=f"measure the trials again that {failures} in an earlier command",
    )  # fmt: skip


def add_launcher_options(group: Options) -> None:
    """Add the options that start ranks and print the results."""
    group.add_argument(
        "--seconds-per-trial", type=seconds, metavar="SECONDS",
        help="time limit of a trial (default: derived from the plan), or of links (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--launcher", choices=("local", "deepspeed", "srun"),
        help="default: deepspeed with --hostfile, srun in a Slurm allocation, otherwise local",
    )  # fmt: skip
    group.add_argument("--hostfile", type=file_path, help="hosts for deepspeed: node1 slots=8 ...")
    add_json(group)


def learning_rates(text: str) -> list[float]:
    """Parse learning rates separated by commas; the list is empty for "auto".

    Raises:
        ArgumentTypeError: a rate is not a number above 0 and up to 1,000, or is given twice.
    """
    if text == "auto":
        return []
    example = "use auto, or for example 1e-3,2e-3,4e-3"
    rates = []
    for part in text.split(","):
        rate = number(part)
        if not 0 < rate <= 1000:
            raise argparse.ArgumentTypeError(f"{part} is not a learning rate; {example}")
        if rate in rates:
            raise argparse.ArgumentTypeError(f"{part} is given twice; {example}")
        rates.append(rate)
    return rates


COMMANDS = {
    "": Subcommand(sweep, add_sweep_options),
    "learning-rates": Subcommand(compare_learning_rates, add_learning_rate_options),
    "coordinates": Subcommand(compare_coordinates, add_coordinate_options),
    "links": Subcommand(measure_links, add_link_options),
}
MOVED_FLAGS = {
    "--learning-rate": "learning-rates --rates RATES",
    "--coordinate-check": "coordinates --steps STEPS",
    "--links": "links NAME",
}
