"""The command recipes/plan.py: predictions of memory, step time and the fastest layout."""

import argparse
import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from models.errors import UserError
from models.hugging_face.config import export_problem
from threefold.config.layout import Cluster
from threefold.config.loading import DEFAULT_RECIPE
from threefold.config.phases import StagePlan
from threefold.config.recipe import Recipe
from threefold.data.manifest import unused_rows
from threefold.plan import catalogue, recipe_edits, report
from threefold.plan.calibration.compare import compare
from threefold.plan.calibration.fit import Fit, fit_table
from threefold.plan.catalogue import recipe_table, zero_stage_lines
from threefold.plan.goodput import (
    GoodputCase,
    fault_costs,
    goodput_lines,
    goodput_table,
    snapshot_costs,
)
from threefold.plan.job import (
    Job,
    LinkOverrides,
    Machine,
    job_without_layout,
    own_job,
    recipe_on_cluster,
    zero3_in_pipeline,
)
from threefold.plan.memory.peak import fits
from threefold.plan.report import stage_rows, stages_lines, stages_table
from threefold.plan.search import DEFAULT_HEADROOM, SearchResult, largest, members, search
from threefold.plan.software import THREEFOLD, load_software
from threefold.plan.time.step import step_time
from threefold.runtime.command_line import (
    duration_in_days,
    failures_per_day,
    imbalance,
    latency_in_microseconds,
    link_rate,
    override,
    parser_with_examples,
    picture_file,
    seconds,
    share,
)
from threefold.runtime.output import escape_output, stdout_for_json


def main(description: str | None = None) -> None:
    """Run the command; errors of the recipe or the options are printed on stderr."""
    escape_output()
    options = parse_command_line(description or "")
    try:
        code = run(options)
        sys.stdout.flush()
    except UserError as problem:
        print(f"plan.py: {problem}", file=sys.stderr)
        code = 2
    except OSError as problem:  # the reader of a pipe has closed it, or a disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(problem, BrokenPipeError):
            print(f"plan.py: {problem}", file=sys.stderr)
        code = 2
    sys.exit(code)


def run(options: argparse.Namespace) -> int:
    """Run the requested mode and return its exit code."""
    if options.catalogue:
        lines, problems = recipe_table()
        print("\n".join([*lines, "", *zero_stage_lines()]))
        for problem in problems:
            leave_out(problem)
        return 2 if problems else 0
    if options.table:
        return compare_tables(options)
    recipe, cluster = recipe_on_cluster(
        options.recipe,
        options.set,
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        gpu=options.gpu,
    )
    whole = StagePlan(recipe)
    if options.stage:
        recipe = whole.recipe_of(options.stage)
    if options.trace:
        return trace(recipe, cluster, options)
    if options.largest:
        return print_family(cluster, options)
    return plan(recipe, cluster, options, whole=whole)


def plan(recipe: Recipe, cluster: Cluster, options: argparse.Namespace, *, whole: StagePlan) -> int:
    """Print a plan of the recipe's own layout and the fastest layouts; return the exit code.

    Args:
        recipe: the recipe of the first stage, or of the one that `--stage` names
        cluster: its cluster
        options: the options of the command
        whole: all stages, of which a table is printed if there are several
    """
    if options.write:  # before the search, which takes seconds
        recipe_edits.check_file(options.write)
    machine = Machine.of_cluster(cluster, links_of(options))
    software = load_software(options.software)
    fit = fit_table(options.calibrate, cluster.gpu)
    if options.expert_imbalance != 1 and recipe.model.experts is None:
        raise UserError(
            f"--expert-imbalance {options.expert_imbalance:g} has no effect on {recipe.name}, "
            f"which has no experts; leave it out"
        )
    adjust = partial(adjusted, fit=fit, imbalance=options.expert_imbalance)
    job = adjust(job_without_layout(recipe, machine, software))
    own, problem = own_job(recipe, machine, software)
    own = adjust(own) if own else None
    count = max(options.top, 1 if options.write else 0)
    result = search(job, count, headroom=options.headroom) if count else SearchResult()
    steps = len(whole.steps_of(options.stage or whole.names[0]))
    stages = stage_rows(whole, machine, software, adjust) if len(whole.spans) > 1 else []
    if options.json:
        table: dict[str, Any] = {"cluster": cluster.model_dump()}
        table |= {"links": report.links_table(machine)}
        table |= report.search_table(recipe, result)
        own_table = report.job_table(own, steps) if own else None
        table |= {"own": own_table, "own_rejected": problem, "calibration": fit.table()}
        if stages:
            table |= {"stage": options.stage or whole.names[0], "stages": stages_table(stages)}
        if own and options.failures_per_day:
            table["goodput"] = goodput_table(goodput_case(recipe, own, options))
        print(json.dumps(table))
    else:
        if fit.source:
            print(report.calibration_text(fit))
        print(report.heading(whole.recipe, own or job), end="\n\n")
        if stages:
            print(f'Stage "{options.stage or whole.names[0]}":')
        print_plan(recipe, own, problem, steps=steps)
        if stages:
            print("\n".join(["", *stages_lines(stages)]))
        if own and options.failures_per_day:
            print("\n".join(goodput_lines(goodput_case(recipe, own, options))))
        if zero3 := zero3_in_pipeline(recipe, machine, software):
            print(report.zero3_in_pipeline_text(*map(adjust, zero3)))
        if options.top:
            print()
            print_search(recipe, own, result)
    if options.write:
        recipe_edits.write_recipe(recipe, result, options.write)
        print(f"wrote {options.write}", file=sys.stderr)
    if own is None and result.plans and (options.timeline or options.heatmap):
        print(
            "plan.py: the recipe's own layout is not valid; the picture shows the fastest layout",
            file=sys.stderr,
        )
    draw(recipe, own or (result.plans[0].job if result.plans else None), options)
    return 0 if own and fits(own) and all(row.fits for row in stages) else 1


def adjusted(job: Job, *, fit: Fit, imbalance: float) -> Job:
    """Return a job with calibrated factors and the imbalance of its experts."""
    return replace(fit.factors.of(job), expert_imbalance=imbalance)


def goodput_case(recipe: Recipe, own: Job, options: argparse.Namespace) -> GoodputCase:
    """Return the recipe's job with the failures and costs that the options name."""
    detection, restart = recipe.supervision.node_seconds, options.restart
    costs = fault_costs(
        own,
        detection_seconds=detection,
        storage_bytes_per_second=options.storage * 1e9 if options.storage else None,
        restart_seconds=restart,
    )
    snapshots = snapshot_costs(own, detection_seconds=detection, restart_seconds=restart)
    return GoodputCase(recipe, step_time(own).total, costs, snapshots, options.failures_per_day)


def print_plan(recipe: Recipe, own: Job | None, problem: str, *, steps: int) -> None:
    """Print the predictions for the recipe's own layout, or the reason why it is not valid."""
    if own:
        print("\n".join(report.plan_text(own, steps)))
    else:
        print(f"The recipe's own layout is not valid: {problem}")
    if unexportable := export_problem(recipe.model):
        print(f"convert.py to-hf cannot export this model: {unexportable}")
    with suppress(UserError):  # of a damaged manifest; a plan needs no corpus
        if note := unused_rows(recipe):
            print(note)
    if recipe.data.separate_documents:
        print("data.separate_documents is ignored: attention is counted over whole sequences.")


def print_search(recipe: Recipe, own: Job | None, result: SearchResult) -> None:
    """Print the fastest layouts, and the options that select the first one."""
    time = step_time(own) if own else None
    print("\n".join(report.search_lines(result, time)))
    if result.plans and (changes := recipe_edits.changes(recipe, result.plans[0])):
        print(f"To use layout 1: {changes}")


def draw(recipe: Recipe, job: Job | None, options: argparse.Namespace) -> None:
    """Draw the requested pictures.

    Raises:
        UserError: there is no job to draw, or a file cannot be written.
    """
    if not (options.timeline or options.heatmap):
        return
    if job is None:
        raise UserError(
            "the recipe's own layout is not valid and no other was found, so there is nothing to "
            "draw; use a valid layout, --top 1 or more nodes"
        )
    # Imported only here: matplotlib takes a second to import, and most plans draw no picture.
    from threefold.plan import pictures as plan_picture

    if options.timeline:
        plan_picture.draw_timeline(job, title=recipe.name, file=options.timeline)
    if options.heatmap:
        plan_picture.draw_heatmap(recipe, job, file=options.heatmap, headroom=options.headroom)


def leave_out(problem: str) -> None:
    """Print one line about a recipe that a table does not have, because it is not valid."""
    print(f"plan.py: left out {problem}", file=sys.stderr)


def print_family(cluster: Cluster, options: argparse.Namespace) -> int:
    """Print the recipe's family on a cluster; return 0 if a model is trained in time."""
    fit = fit_table(options.calibrate, cluster.gpu)
    family = members(
        options.recipe, options.set, cluster=cluster, software=load_software(options.software),
        calibrate=fit.factors.of, headroom=options.headroom, links=links_of(options),
        warn=leave_out,
    )  # fmt: skip
    if options.json:
        table = catalogue.family_table(family, cluster, options.largest)
        links = report.links_table(Machine.of_cluster(cluster, links_of(options)))
        print(json.dumps(table | {"links": links, "calibration": fit.table()}))
    else:
        if fit.source:
            print(report.calibration_text(fit))
        lines = catalogue.family_lines(
            family,
            cluster,
            options.largest,
            links=links_of(options),
            options=given_options(options),
        )
        print("\n".join(lines))
    return 0 if largest(family, options.largest) else 1


def trace(recipe: Recipe, cluster: Cluster, options: argparse.Namespace) -> int:
    """Trace a rank on fake tensors, and print its allocated memory and communication."""
    # Only this mode needs torch, which takes seconds to import.
    from threefold.trace import trace as trace_report
    from threefold.trace.trace import trace as trace_rank

    machine = Machine.of_cluster(cluster)
    with stdout_for_json(options.json):
        traced = trace_rank(recipe, machine.gpus, machine.gpus_per_node, options.rank)
    if options.json:
        print(json.dumps(trace_report.table(traced)))
    else:
        print(trace_report.text(traced))
    return 0


def compare_tables(options: argparse.Namespace) -> int:
    """Print predictions next to measurements, for one table or all tables of a folder."""
    fit = fit_table(options.calibrate)
    results, left_out = compare(options.table, fit.factors)
    for path in left_out:
        print(f"plan.py: skipped {path}: not a table of runs", file=sys.stderr)
    if options.scatter or options.heatmap:
        # As in `draw`: matplotlib takes a second to import.
        from threefold.plan import pictures

        if options.scatter:
            pictures.draw_scatter(results, file=options.scatter)
        if options.heatmap:
            pictures.draw_heatmaps(results, file=options.heatmap)
    if options.json:
        tables = {name: result | {"calibration": fit.table()} for name, result in results.items()}
        print(json.dumps(tables if options.table.is_dir() else next(iter(tables.values()))))
        return 0
    if fit.source:
        print(report.calibration_text(fit))
    print(report.EVALUATION_HEADER)
    for name, result in results.items():
        print(report.evaluation_text(name, result["summary"]))
    for reason, count in report.skipped(results.values()):
        print(f"plan.py: skipped {count} row{'s' * (count > 1)}: {reason}", file=sys.stderr)
    return 0


# The command-line options of plan.py.

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
        "--set", type=override, action="append", default=[], metavar="KEY=VALUE",
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
