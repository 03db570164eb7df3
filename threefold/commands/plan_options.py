"""The command-line options of plan.py."""

import argparse
from pathlib import Path

from threefold.config.loading import DEFAULT_RECIPE
from threefold.plan.job import LinkOverrides
from threefold.plan.search import DEFAULT_HEADROOM
from threefold.plan.software import THREEFOLD
from threefold.runtime.command_line import (
    duration_in_days,
    failures_per_day,
    imbalance,
    latency_in_microseconds,
    link_rate,
    parser_with_examples,
    picture_file,
    seconds,
    share,
)

REQUIRED_OPTIONS = {
    "scatter": "table", "rank": "trace", "storage": "failures_per_day",
    "restart": "failures_per_day",
}  # fmt: skip
MODES = ("trace", "largest", "table", "catalogue")  # instead of a plan
SEARCHED = ("layout.", "batch.micro_sequences")  # keys that a search chooses
DEFAULTS = {
    "software": THREEFOLD.name, "headroom": DEFAULT_HEADROOM, "expert_imbalance": 1.0,
}  # fmt: skip
LINK_OPTIONS = ("node_link", "network", "network_latency")
PLAN_OPTIONS = (*DEFAULTS, "calibrate", *LINK_OPTIONS)
FAULT_OPTIONS = ("failures_per_day", "storage", "restart")
MACHINE_OPTIONS = ("nodes", "gpus_per_node", "gpu")
UNUSED_OPTIONS = {  # by mode
    "trace": (*PLAN_OPTIONS, *FAULT_OPTIONS, "top"),
    "largest": (*FAULT_OPTIONS, "top", "expert_imbalance"),
    "table": ("set", *MACHINE_OPTIONS, *DEFAULTS, *LINK_OPTIONS, *FAULT_OPTIONS, "top"),
    "catalogue": ("set", *MACHINE_OPTIONS, *PLAN_OPTIONS, *FAULT_OPTIONS, "top", "json"),
}


def parse_command_line(description: str) -> argparse.Namespace:
    """Return the options of the command line.

    Args:
        description: the command's docstring: a summary and, after an empty line, examples
    """
    parser = parser_with_examples(description)
    add_plan_options(parser)
    add_other_modes(parser)
    options = parser.parse_args()
    check_combinations(parser, options)
    return options


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan."""
    parser.add_argument(
        "recipe", nargs="?", type=Path, default=DEFAULT_RECIPE,
        help="recipe to plan (default: recipes/tiny.toml)",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a key of the recipe, such as layout.tensor=4; repeatable",
    )  # fmt: skip
    machine = parser.add_argument_group("machine (default: the recipe's [cluster])")
    machine.add_argument("--nodes", type=int, help="number of nodes")
    machine.add_argument("--gpus-per-node", type=int, help="number of GPUs in each node")
    machine.add_argument("--gpu", help="name of a GPU in threefold/gpus/datasheets/, such as H100")
    rate = "datasheet rate of a GPU's links {}, in one direction (default: the GPU's datasheet)"
    machine.add_argument(
        "--node-link", type=link_rate, metavar="GB/S", help=rate.format("within a node")
    )
    machine.add_argument(
        "--network", type=link_rate, metavar="GB/S", help=rate.format("between nodes")
    )
    machine.add_argument(
        "--network-latency", type=latency_in_microseconds, metavar="MICROSECONDS",
        help="latency between nodes (default: the GPU's datasheet)",
    )  # fmt: skip
    machine.add_argument(
        "--software", default=DEFAULTS["software"],
        help="training software whose kernels and overlap are assumed (default: threefold)",
    )  # fmt: skip
    parser.add_argument(
        "--headroom", type=share, default=DEFAULTS["headroom"], metavar="SHARE",
        help="share of the GPU memory that the searched layouts leave free (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--expert-imbalance", type=imbalance, default=DEFAULTS["expert_imbalance"],
        metavar="RATIO",
        help="tokens of the busiest expert rank, relative to the mean (default: 1, all equal)",
    )  # fmt: skip
    faults = parser.add_argument_group("goodput")
    faults.add_argument(
        "--failures-per-day", type=failures_per_day, metavar="NUMBER",
        help="predict the goodput (share of wall time spent on steps that are kept) and the best "
        "interval between saves",
    )  # fmt: skip
    faults.add_argument(
        "--storage", type=link_rate, metavar="GB/S",
        help="rate at which all nodes together write and read checkpoints (default: 1 per node)",
    )  # fmt: skip
    faults.add_argument(
        "--restart", type=seconds, metavar="SECONDS",
        help="time from a failure to the next step (default: supervision.node_seconds, 60 seconds "
        "and the time to read the checkpoint)",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--stage", metavar="NAME",
        help="plan this stage of the recipe in detail (default: the first one)",
    )  # fmt: skip
    output.add_argument(
        "--top", type=int, default=5, help="number of fastest layouts to print (default: 5)"
    )
    output.add_argument(
        "--write", type=Path, metavar="TOML", help="write the recipe with the fastest layout"
    )
    output.add_argument(
        "--timeline", type=picture_file, metavar="PICTURE",
        help="draw the pipeline schedule and the memory of each stage (.png, .svg or .pdf)",
    )  # fmt: skip
    output.add_argument(
        "--heatmap", type=picture_file, metavar="PICTURE",
        help="draw the fastest layouts of the recipe's family by number of nodes, or the fastest "
        "rows of --table",
    )  # fmt: skip
    output.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_other_modes(parser: argparse.ArgumentParser) -> None:
    """Add the options of the modes that run instead of a plan."""
    modes = parser.add_argument_group("other modes, instead of a plan")
    modes.add_argument(
        "--trace", action="store_true", help="count the memory and the communication of one rank"
    )
    modes.add_argument("--rank", type=int, default=0, help="rank for --trace (default: 0)")
    modes.add_argument(
        "--largest", type=duration_in_days, metavar="DAYS",
        help="plan the recipe's family, and name the largest model that fits and trains its "
        "tokens in this time",
    )  # fmt: skip
    modes.add_argument(
        "--table", type=Path, metavar="CSV", help="compare with measured runs: a .csv or a folder"
    )
    modes.add_argument(
        "--calibrate", type=Path, metavar="CSV",
        help="adjust the predictions to measured runs of the same cluster, such as sweep.csv",
    )  # fmt: skip
    modes.add_argument(
        "--scatter", type=picture_file, metavar="PICTURE",
        help="draw the predicted and measured times of --table",
    )  # fmt: skip
    modes.add_argument(
        "--catalogue",
        action="store_true",
        help="print Markdown tables of all shipped recipes, and of the ZeRO stages",
    )


def check_combinations(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if options exclude each other or require another one."""
    for name, required in REQUIRED_OPTIONS.items():
        if getattr(options, name) != parser.get_default(name) and not getattr(options, required):
            parser.error(f"--{name} requires --{required.replace('_', '-')}")
    modes = [name for name in MODES if getattr(options, name)]
    if len(modes) > 1:
        parser.error(f"--{modes[0]} and --{modes[1]} exclude each other; leave out one of them")
    if options.recipe != DEFAULT_RECIPE and (options.table or options.catalogue):
        parser.error("--table and --catalogue take no recipe; leave the recipe out")
    for name in ("write", "timeline", "heatmap"):
        if getattr(options, name) and modes and (name, modes[0]) != ("heatmap", "table"):
            parser.error(f"--{name} requires a plan; leave out --{modes[0]}")
    for name in UNUSED_OPTIONS.get(modes[0], ()) if modes else ():
        if getattr(options, name) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} has no effect with --{modes[0]}; leave out one of them")
    if options.largest:
        for each in options.set:
            key = each.partition("=")[0].replace(" ", "")
            if key.startswith(SEARCHED):
                parser.error(f"--largest chooses the layout; leave out --set {each}")
            if key == "name":
                parser.error(
                    f"--largest identifies the family by the recipe's name; leave out --set {each}"
                )
    if options.top < 0:
        parser.error(f"invalid --top {options.top}: expected 0 or more, for example 5")


def links_of(options: argparse.Namespace) -> LinkOverrides:
    """Return the links that the options name."""
    latency = options.network_latency
    return LinkOverrides(
        node_link_gigabytes_per_second=options.node_link,
        network_gigabytes_per_second=options.network,
        network_latency_seconds=None if latency is None else latency * 1e-6,
    )


def given_options(options: argparse.Namespace) -> list[str]:
    """Return the given options that change predictions, without those of the cluster."""
    given = [f"--set={each}" for each in options.set]
    for name in PLAN_OPTIONS:
        value = getattr(options, name)
        if value not in (None, DEFAULTS.get(name)):
            given.append(f"--{name.replace('_', '-')}={value}")
    return given
