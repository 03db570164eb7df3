"""Measure the speed and the memory of a recipe in many layouts.

    python recipes/sweep.py recipes/tiny.toml
    python recipes/sweep.py recipes/tiny.toml --layouts all --halving
    python recipes/sweep.py recipes/mine.toml --set batch.micro_sequences=1,2,4
    python recipes/sweep.py recipes/llama/7b.toml --nodes 1,2,4 --top 5 --hostfile hosts
    sbatch --nodes=4 slurm/sweep.slurm recipes/llama/7b.toml

By default, the ten layouts that the planner predicts to be the fastest are measured, each for five
steps after two steps of warm-up, on synthetic data. Every trial ends as ok, out_of_memory, hung,
crashed, rejected or too_large, and is a row of sweep.csv in the sweep folder. Rerun the same
command to continue an interrupted sweep; several commands may share a folder. Exit code 0: every
trial was measured, ran out of memory or was rejected; 1: a trial hung or crashed, or the sweep
stopped; 2: a recipe or an option is invalid.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
import signal
from collections.abc import Sequence

from models.errors import UserError
from recipes.planning.inputs.option_types import count, counts, seconds
from recipes.sweeping import report
from recipes.sweeping.choice import Request, choose
from recipes.sweeping.scheduler import FIRST_HALVING_STEPS, Scheduler, halve, measure_all
from recipes.sweeping.sweep_folder import SweepFolder, SweepStopped
from recipes.sweeping.trial import Result, Trial
from recipes.sweeping.wandb_runs import check_wandb, publish
from recipes.sweeping.worlds.launchers import (
    DeepSpeedLauncher,
    Launcher,
    LocalLauncher,
    SlurmLauncher,
)
from recipes.sweeping.worlds.rank import run_rank
from recipes.training.recipe.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe
from recipes.training.runtime.exits import leave
from recipes.training.runtime.streams import outlive_output

MAX_NAMES = 3  # recipes in the name of a sweep folder


def main() -> None:
    """Run the command, or one rank of it."""
    options = parse_command_line()
    if options.rank_of:
        run_rank(options.rank_of)
    outlive_output()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        code = sweep(options)
    except SystemExit as end:  # raised by the signal handler above
        code = int(end.code or 0)
    except UserError as problem:
        print(f"sweep.py: {problem}", file=sys.stderr)
        code = 2
    except SweepStopped as problem:
        print(f"sweep.py: {problem}", file=sys.stderr)
        code = 1
    leave(code)


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
        for rejection in choice.rejections:
            folder.add_rejection(rejection)
        measured = sum(1 for trial in choice.trials if folder.answer(trial))
        for line in report.choice_lines(choice, measured):
            say(line)

        # 3. Measure: consecutive trials reuse the same ranks, which are replaced after a failure.
        scheduler = Scheduler(folder, launcher, options.seconds_per_trial)
        progress = report.Progress()
        measure = halve if options.halving else measure_all
        try:
            for trial, result in measure(scheduler, choice.trials, progress.begin_round):
                say(progress.finish(trial, result))
        except SystemExit:
            say(f"interrupted; rerun the same command to continue the sweep in {folder.path}")
            raise
        finally:
            scheduler.stop()
        folder.write_table()
        results = [final_result(folder, trial, options.halving) for trial in choice.trials]
        if options.wandb:
            say(f"wrote {publish(folder, results)} runs of the W&B group {folder.path.name}")
    finally:
        folder.close()

    # 4. Summary
    for line in report.summary_lines(results, choice):
        say(line)
    if progress.done:
        say(report.overhead_line(progress, scheduler.measured_seconds))
    say(f"wrote {folder.path / 'sweep.csv'}")
    if options.json:
        print(json.dumps(report.as_json(results, choice, str(folder.path))))
    return 1 if report.has_faults(results) else 0


def final_result(folder: SweepFolder, trial: Trial, halving: bool) -> tuple[Trial, Result]:
    """Return a trial and its result; with halving, those of the trial's longest round."""
    result = folder.result(trial.key)
    assert result is not None
    while halving:
        longer = trial.with_steps(2 * trial.steps)
        if (next_result := folder.result(longer.key)) is None:
            break
        trial, result = longer, next_result
    return trial, result


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


def parse_command_line() -> argparse.Namespace:
    """Return the options of the command."""
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipes", nargs="*", type=Path, default=[DEFAULT_RECIPE], metavar="recipe",
        help="recipes to measure (default: recipes/tiny.toml)",
    )  # fmt: skip
    add_trial_options(parser.add_argument_group("trials"))
    add_measuring_options(parser.add_argument_group("measuring"))
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # set by our launchers
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    return parser.parse_args()


def add_trial_options(group: argparse._ArgumentGroup) -> None:
    """Add the options that choose the trials."""
    group.add_argument(
        "--top", type=count, default=10,
        help="number of layouts that the planner chooses for each recipe and size (default: 10)",
    )  # fmt: skip
    group.add_argument(
        "--layouts", choices=("best", "all", "own"),
        help="the planner's best layouts, all that fit, or the recipe's own (default: best; own if "
        "a --set has several values)",
    )  # fmt: skip
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE[,VALUE...]",
        help="change a key of the recipe; several values, and several options, make a grid. The "
        "planner leaves these keys as they are",
    )  # fmt: skip
    cluster = "(default: the recipe's [cluster], or 1 x 2 x cpu)"
    group.add_argument("--nodes", type=counts, help=f"numbers of nodes, such as 1,2,4 {cluster}")
    group.add_argument("--gpus-per-node", type=counts, help="numbers of GPUs in each node")
    group.add_argument("--gpu", help="name of a GPU in recipes/gpus/datasheets/, such as H100")


def add_measuring_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of the measurement."""
    group.add_argument("--steps", type=count, default=5, help="measured steps (default: 5)")
    group.add_argument(
        "--warm-up", type=count, default=2, help="steps before the measured ones (default: 2)"
    )
    group.add_argument(
        "--halving", action="store_true",
        help="measure all trials for 2 steps, the faster half for 4, and so on, instead of --steps",
    )  # fmt: skip
    group.add_argument(
        "--split", action="store_true",
        help="also measure the parts of a step: compute, communication, waiting and optimizer",
    )  # fmt: skip
    group.add_argument(
        "--seconds-per-trial", type=seconds, metavar="SECONDS",
        help="time limit of a trial (default: derived from the plan)",
    )  # fmt: skip
    group.add_argument(
        "--sweep-dir", type=Path, help="folder of the results (default: runs/sweeps/NAME)"
    )
    group.add_argument(
        "--launcher", choices=("local", "deepspeed", "srun"),
        help="default: deepspeed with --hostfile, srun in a Slurm allocation, otherwise local",
    )  # fmt: skip
    group.add_argument("--hostfile", type=Path, help="hosts for deepspeed: node1 slots=8 ...")
    group.add_argument(
        "--wandb", action="store_true",
        help="at the end, write each trial to Weights & Biases as a run of one group",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout")


if __name__ == "__main__":
    main()
