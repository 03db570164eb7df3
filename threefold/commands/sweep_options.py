"""The command-line options of sweep.py."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from threefold.config.loading import DEFAULT_RECIPE
from threefold.runtime.command_line import (
    count,
    counts,
    number,
    parser_with_examples,
    seconds,
)

MAX_ROUNDS = 100
NOT_WITH_LINKS = {  # options of a sweep of recipes: name in the namespace -> on the command line
    "recipes": "the recipes",
    "set": "--set",
    "layouts": "--layouts",
    "top": "--top",
    "steps": "--steps",
    "warm_up": "--warm-up",
    "rounds": "--rounds",
    "halving": "--halving",
    "sweep_dir": "--sweep-dir",
    "retry": "--retry",
    "wandb": "--wandb",
    "split": "--split",
    "learning_rate": "--learning-rate",
    "coordinate_check": "--coordinate-check",
    "widths": "--widths",
    "seeds": "--seeds",
}
NOT_WITH_TRAINING = {  # options that choose or measure layouts
    "layouts": "--layouts",
    "top": "--top",
    "warm_up": "--warm-up",
    "rounds": "--rounds",
    "halving": "--halving",
    "wandb": "--wandb",
    "split": "--split",
}
ONLY_WITH_TRAINING = {"widths": "--widths", "seeds": "--seeds"}
DEFAULT_STEPS = 5


def parse_command_line(description: str) -> argparse.Namespace:
    """Return the options of the command.

    Args:
        description: the command's docstring: a summary and, after an empty line, examples
    """
    parser = parser_with_examples(description)
    parser.add_argument(
        "recipes", nargs="*", type=Path, default=[DEFAULT_RECIPE], metavar="recipe",
        help="recipes to measure (default: recipes/tiny.toml)",
    )  # fmt: skip
    add_trial_options(parser.add_argument_group("trials"))
    add_measuring_options(parser.add_argument_group("measuring"))
    add_transfer_options(parser.add_argument_group("transfer of learning rates"))
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)  # set by our launchers
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed passes it
    options = parser.parse_args()
    if options.links is not None and (others := given_options(parser, NOT_WITH_LINKS)):
        parser.error(f"--links measures no recipe; leave out {', '.join(others)}")
    if options.halving and options.rounds > 1:
        parser.error("--halving and --rounds exclude each other; leave out one of them")
    trains = options.learning_rate is not None or options.coordinate_check is not None
    if trains and (others := given_options(parser, NOT_WITH_TRAINING)):
        parser.error(
            f"--learning-rate and --coordinate-check train each recipe in its own layout; leave "
            f"out {', '.join(others)}"
        )
    if not trains and (others := given_options(parser, ONLY_WITH_TRAINING)):
        parser.error(
            f"{', '.join(others)}: no effect on a sweep of layouts; add --learning-rate auto or "
            f"--coordinate-check 4"
        )
    if options.steps is not None and trains and options.learning_rate is None:
        parser.error(
            f"--steps {options.steps} has no effect on --coordinate-check; leave it out, or use "
            f"--coordinate-check {options.steps}"
        )
    if options.steps is None and not trains:
        options.steps = DEFAULT_STEPS
    return options


def given_options(parser: argparse.ArgumentParser, names: Mapping[str, str]) -> list[str]:
    """Return the options among `names` that are on the command line, as a user writes them.

    Args:
        parser: parses the command line
        names: name of an option in the namespace -> as a user writes it
    """
    parser.set_defaults(**dict.fromkeys(names))  # a default of None shows what was not given
    found = vars(parser.parse_args())
    return [written for name, written in names.items() if found[name] not in (None, [])]


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
    group.add_argument("--gpu", help="name of a GPU in threefold/gpus/datasheets/, such as H100")


def add_measuring_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of the measurement."""
    group.add_argument(
        "--steps", type=count,
        help=f"measured steps (default: {DEFAULT_STEPS}); with --learning-rate, the steps of each "
        "training (default: the recipe's)",
    )  # fmt: skip
    group.add_argument(
        "--warm-up", type=count, default=2, help="steps before the measured ones (default: 2)"
    )
    group.add_argument(
        "--rounds", type=partial(count, most=MAX_ROUNDS), default=1,
        help="measure every trial this many times, in rounds over all trials; the fastest round "
        "counts. Useful on shared machines (default: 1)",
    )  # fmt: skip
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
        help="time limit of a trial (default: derived from the plan), or of --links (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--links", metavar="NAME",
        help="measure matmuls and links instead of recipes, and write the datasheet NAME for the "
        "planner, based on that of --gpu",
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
        "--retry", action="store_true",
        help="measure the trials again that hung, crashed or were rejected in an earlier command; "
        "with --learning-rate or --coordinate-check, also those that ran out of memory",
    )  # fmt: skip
    group.add_argument(
        "--wandb", action="store_true",
        help="at the end, write each trial to Weights & Biases as a run of one group",
    )  # fmt: skip
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def add_transfer_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of the learning-rate sweep and the coordinate check."""
    group.add_argument(
        "--learning-rate", type=learning_rates, metavar="auto|RATE[,RATE...]",
        help="train each recipe at several learning rates and compare the best ones; auto: factors "
        "of two around the recipe's, and more while the best one is at an end",
    )  # fmt: skip
    group.add_argument(
        "--coordinate-check", type=count, metavar="STEPS",
        help="coordinate check: measure the sizes of the activations at the start and after STEPS "
        "steps on synthetic data, and compare them over the widths",
    )  # fmt: skip
    group.add_argument(
        "--widths", type=counts, metavar="WIDTH[,WIDTH...]",
        help="hidden sizes to which each recipe is scaled, such as 64,128,256 (default: its own)",
    )  # fmt: skip
    group.add_argument(
        "--seeds", type=count, default=1,
        help="train each model with this many seeds, and average the results (default: 1)",
    )  # fmt: skip


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
